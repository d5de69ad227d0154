"""Starts ranks as a user would, in a process group that never outlives its time-out."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LAUNCHER = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or _LAUNCHER is None,
    reason="mpi4py or mpirun is missing: pip install 'dslide[mpi]'",
)

# As root, with more ranks than cores, unbound, and quiet.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PMIX_MCA_psec": "native",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def environment() -> dict[str, str]:
    """The environment with this Python's folder first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "PATH": path}


@contextmanager
def start(ranks: int, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Starts `python ARGUMENTS` on so many ranks (1: without mpirun); what is left is killed at the end."""
    command = [sys.executable, *map(str, arguments)]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def run(ranks: int, *arguments: str | Path, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` on so many ranks to its end."""
    with start(ranks, *arguments) as process:
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
