"""Starts one rank: pins it, sets its environment, and reports how it ended (standard library only, run by
path).

    rank.py JOB.json

JOB has `command`, `env`, `pins` (a list of cores for each rank, or null) and `reports`, the folder that gets
rank-<r>.json {rank, node, returncode, time} when the rank ends; a signal is a negative return code.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_PR_SET_PDEATHSIG = 1


def _first(names: tuple[str, ...], default: str) -> str:
    return next((os.environ[n] for n in names if n in os.environ), default)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Runs the rank; returns its exit status, 128 + n for signal n."""
    job = json.loads(Path(sys.argv[1]).read_text())
    launched = bool(job["mpi"])  # a single process may itself run inside somebody's MPI or Slurm job
    rank = int(_first(_RANK, "0")) if launched else 0
    size = int(_first(_SIZE, "1")) if launched else 1
    if job["pins"]:
        os.sched_setaffinity(0, job["pins"][rank])
    env = {**os.environ, **job["env"], "DSLIDE_RANK": str(rank), "DSLIDE_SIZE": str(size)}
    process = subprocess.Popen(job["command"], env=env, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: process.send_signal(n))
    code = process.wait()
    report = {"rank": rank, "node": socket.gethostname(), "returncode": code, "time": time.time()}
    path = Path(job["reports"]) / f"rank-{rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report))
    part.replace(path)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
