"""Systems of a race: one file each, loaded by path.

A file in baselines/ (or in a folder of the environment's DSLIDE_SYSTEMS, searched first) has

    NAME, TITLE                  how it is called, in one word and in one line
    class Settings(pydantic.BaseModel, extra="forbid")
                                 its own settings with the defaults that a user would find
    skip(spec) -> str | None     why it cannot run here, or None; called by the launcher, so import nothing
    heavy launcher(spec) -> str        "local" (one process), "mpi" (mpirun) or "gloo" (horovodrun --gloo)
    message_sizes(spec) -> list[int]
                                 bytes of the messages that it puts on the link each step; by the launcher too
    run(spec, recorder) -> None  called on every rank: recorder.meta, .start, .evaluation, .end
    connect(spec) -> Connection  optional: how its ranks meet (see below)
    environment(spec) -> dict[str, str]
                                 optional: variables that its ranks need from their start (allocator, ...)

`Connection(rank, size, barrier, gather, agree)` is how the records' collectives work. Without `connect`, a
"local" system gets a connection of one rank and an "mpi" system one over mpi4py's COMM_WORLD (Horovod over
MPI may call hvd.init() after it: both share the MPI). A "gloo" system has no MPI and must bring its own: call
hvd.init() in `connect` and build the functions from hvd.allreduce / hvd.allgather_object. `gather` takes any
picklable object and returns the list of all ranks' objects on rank 0 (on the others too, or None); `agree`
returns the maximum of a float over the ranks, the same everywhere.

A run ends its records itself through recorder.end(status). An exception is reported by the worker and ends
the job on every rank; a `dslide.errors.UserError` does so without a traceback.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from dslide.bench.spec import RunSpec
from dslide.errors import UserError
from dslide.paths import content_root

_REQUIRED = ("NAME", "TITLE", "Settings", "skip", "launcher", "message_sizes", "run")
LAUNCHERS = ("local", "mpi", "gloo")


@dataclass(frozen=True)
class Connection:
    """How the ranks of a run meet; the defaults are a run of one rank."""

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] | None = None
    gather: Callable[[Any], list[Any] | None] | None = None
    agree: Callable[[float], float] | None = None


def mpi_connection() -> Connection:
    """The connection over mpi4py's COMM_WORLD."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()  # of our own: a system's messages never mix with the records'
    return Connection(
        rank=world.rank,
        size=world.size,
        barrier=world.Barrier,
        gather=lambda value: world.gather(value, root=0),
        agree=lambda value: float(world.allreduce(value, op=MPI.MAX)),
    )


def connect(system: ModuleType, spec: RunSpec) -> Connection:
    """The connection of a system's ranks: its own `connect`, or the one that belongs to its launcher."""
    if hasattr(system, "connect"):
        return system.connect(spec)
    how = system.launcher(spec)
    if how == "local":
        return Connection()
    if how == "mpi":
        return mpi_connection()
    raise UserError(f"{system.__file__}: a system launched by {how!r} must define connect(spec)")


def folders() -> list[Path]:
    """Where systems are looked for, in order."""
    extra = [Path(p) for p in os.environ.get("DSLIDE_SYSTEMS", "").split(os.pathsep) if p]
    return [*extra, content_root() / "baselines"]


def names() -> list[str]:
    """Names of the systems that there are."""
    return sorted({f.stem for folder in folders() for f in folder.glob("*.py") if not f.stem.startswith("_")})


def load(name: str) -> ModuleType:
    """Loads a system by its file's name (hyphens may stand for underscores) or by a path ending in .py.

    UserError if there is no such file, or it lacks a part of the interface.
    """
    stem = name.replace("-", "_")
    candidates = [Path(name)] if name.endswith(".py") else [folder / f"{stem}.py" for folder in folders()]
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise UserError(
            f"system {name!r}: no such file in {', '.join(map(str, folders()))}; there are: {names()}"
        )
    module_name = f"dslide_systems.{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # pydantic resolves the annotations of Settings through it
    here = str(path.parent.resolve())
    if here not in sys.path:
        sys.path.append(here)  # systems may share a file whose name begins with an underscore
    module_spec.loader.exec_module(module)
    missing = [part for part in _REQUIRED if not hasattr(module, part)]
    if missing:
        raise UserError(f"{path}: a system must define {', '.join(missing)} (see dslide/bench/systems.py)")
    return module


def settings(system: ModuleType, spec: RunSpec) -> Any:
    """The system's Settings from the run's spec. UserError names the key."""
    try:
        return system.Settings.model_validate(spec.settings)
    except ValidationError as error:
        lines = [f"settings.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UserError(f"run {spec.run_id}, system {spec.system}: " + "; ".join(lines)) from error
