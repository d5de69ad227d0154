"""One rank of a run: `python -m dslide.bench.worker SPEC.json`, started by the launcher on every rank.

The environment's DSLIDE_CONTEXT names a JSON file with what the launcher knows for the meta data,
DSLIDE_REPORTS the folder that gets failure-<rank>.json {rank, reason, user_error} if the rank fails. Exit
status: 0, 1, or 2 for bad input.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from dslide.bench import systems
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.errors import UserError


def run(spec: RunSpec) -> None:
    """Runs the spec's system on this rank, records included."""
    context_file = os.environ.get("DSLIDE_CONTEXT")
    context = json.loads(Path(context_file).read_text()) if context_file else {}
    system = systems.load(spec.system)
    context["settings"] = json.loads(systems.settings(system, spec).model_dump_json())
    connection = systems.connect(system, spec)
    expected = int(os.environ.get("DSLIDE_SIZE", connection.size))
    if connection.size != expected:
        raise RuntimeError(f"the launcher started {expected} ranks, the system sees {connection.size}")
    recorder = Recorder.of(connection, spec.out, context=context)
    system.run(spec, recorder)
    if not recorder.ended:
        raise RuntimeError(f"system {spec.system} returned without ending its records")


def _report(error: BaseException) -> None:
    rank = int(os.environ.get("DSLIDE_RANK", "0"))
    folder = os.environ.get("DSLIDE_REPORTS")
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if folder:
        report = {"rank": rank, "reason": text, "user_error": isinstance(error, UserError)}
        (Path(folder) / f"failure-{rank}.json").write_text(json.dumps(report))
    print(f"rank {rank}: {text}", file=sys.stderr, flush=True)


def _abort_other_ranks(status: int) -> None:
    """Ends the MPI job when this process exits: without it the other ranks would wait for ever."""
    if "mpi4py.MPI" in sys.modules:
        import mpi4py.run

        mpi4py.run.set_abort_status(status)


def main() -> int:
    """The command; returns its exit status."""
    status = 0
    try:
        run(RunSpec.read(Path(sys.argv[1])))
    except UserError as error:
        status = 2
        _report(error)
    except Exception as error:
        status = 1
        traceback.print_exc()
        _report(error)
    if status:
        _abort_other_ranks(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
