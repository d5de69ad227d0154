"""What this machine can run, and a remedy for what it cannot."""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Check:
    """One finding. `required`: training on one machine needs it; the rest is for clusters and races."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer", required=True)


def _core() -> Check:
    try:
        core = importlib.import_module("dslide._core")
        found = f"{core.instruction_set()} (this CPU can: {', '.join(core.supported_instruction_sets())})"
        return Check("C++ core", True, found, required=True)
    except Exception as error:  # whatever is wrong with the extension is the finding
        return Check("C++ core", False, str(error), "make build (needs a C++17 compiler)", required=True)


def _cores() -> Check:
    allotted, there = len(os.sched_getaffinity(0)), os.cpu_count()
    return Check("cores", True, f"{allotted} of {there} for this process", required=True)


def _memory() -> Check:
    from dslide.memory import available_bytes, gib

    free = available_bytes()
    found = f"{gib(free)} free of {gib(psutil.virtual_memory().total)}"
    return Check(
        "memory", free > 2**30, found, "close other programs: debian-deps wants about 1 GiB", required=True
    )


def _mpi() -> Check:
    remedy = "pip install 'dslide[mpi]'"
    launcher = shutil.which("mpiexec") or shutil.which("mpirun")
    try:
        found = f"mpi4py {version('mpi4py')}"
    except PackageNotFoundError:
        return Check("MPI", False, "mpi4py is not installed", remedy)
    if launcher is None:
        return Check("MPI", False, f"{found}, but no mpiexec on PATH", f"{remedy}; put its bin on PATH")
    # In a process of its own: starting MPI here could end this one.
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["?"])[-1]
        return Check("MPI", False, f"{found} does not start: {reason}", remedy)
    library = done.stdout.strip().split(",")[0]
    return Check("MPI", True, f"{found}, {library}")


def _package(name: str, package: str, module: str, remedy: str) -> Callable[[], Check]:
    def check() -> Check:
        try:
            found = version(package)
        except PackageNotFoundError:
            return Check(name, False, "not installed", remedy)
        there = importlib.util.find_spec(module) is not None
        return Check(name, there, found, remedy)

    return check


def _namespaces() -> Check:
    remedy = "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"
    flags = "-nm" if os.geteuid() == 0 else "-Urnm"
    if shutil.which("unshare") is None:
        return Check("virtual nodes", False, "unshare is missing", "install util-linux")
    done = subprocess.run(
        ["unshare", flags, "--fork", "true"], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode != 0:
        return Check("virtual nodes", False, done.stderr.strip()[:80] or "refused", remedy)
    try:
        version("pyroute2")
    except PackageNotFoundError:
        return Check("virtual nodes", False, "pyroute2 is not installed", "pip install 'dslide[harness]'")
    return Check("virtual nodes", True, "network namespaces can be made")


CHECKS: list[Callable[[], Check]] = [
    _python,
    _core,
    _cores,
    _memory,
    _mpi,
    _namespaces,
    _package("TensorFlow", "tensorflow-cpu", "tensorflow", "make (installs the rivals)"),
    _package("Horovod", "horovod", "horovod", "make (builds Horovod against TensorFlow and Open MPI)"),
    _package("napkinXC", "napkinxc", "napkinxc", "pip install 'dslide[rivals]'"),
]


def run() -> list[Check]:
    """All checks, in order. Takes a few seconds."""
    return [check() for check in CHECKS]


def show(checks: list[Check]) -> None:
    """A table on stdout."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = "ok" if check.ok else "MISSING" if check.required else "absent"
        table.add_row(mark, check.name, check.found, "" if check.ok else check.remedy)
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(table)
