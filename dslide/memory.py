"""How much memory a run will need and how much there is, before anything is allocated; then what it took."""

import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dslide.errors import UserError

if TYPE_CHECKING:  # records are written where there is no core, too
    from dslide.comm import LocalComm

_CGROUP = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int:
    """What may still be allocated on this host: by the kernel's estimate and the container's limit."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _CGROUP:
        try:
            left = int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        free = min(free, max(0, left))
    return free


def gib(size: float) -> str:
    """`size` bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Need:
    """Bytes that a rank will allocate: weights, optimiser state, hash tables, and a batch's buffers."""

    weights: int
    state: int
    tables: int
    batch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.state + self.tables + self.batch

    def __str__(self) -> str:
        parts = [f"weights {gib(self.weights)}", f"optimiser {gib(self.state)}", f"batches {gib(self.batch)}"]
        return ", ".join([*parts, *([f"hash tables {gib(self.tables)}"] if self.tables else [])])


def _status(field: str) -> int:
    """A size of /proc/self/status in bytes, 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), "0")
    return 1024 * int(found)


def private_bytes() -> int:
    """This process's resident memory that no file backs."""
    return _status("RssAnon")


def peak_bytes() -> int:
    """The most that was resident, mapped files too. Not ru_maxrss, which a process has from its parent."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_private_bytes() -> int:
    """The most that was resident without the mapped files' pages, which the kernel may take back."""
    return max(0, peak_bytes() - _status("RssFile") - _status("RssShmem"))


def check_memory(comm: "LocalComm", need: Need) -> str:
    """Collective. A line that says need and supply; UserError if a host's ranks want more than it has."""
    hosts = comm.bcast(comm.gather((socket.gethostname(), need.total, available_bytes())))
    for host in dict.fromkeys(name for name, _, _ in hosts):
        wanted = sum(size for name, size, _ in hosts if name == host)
        free = min(size for name, _, size in hosts if name == host)
        if wanted > free:
            raise UserError(
                f"the model needs about {gib(wanted)} on {host}, where {gib(free)} are free ({need}); "
                "take fewer hidden units (--set network.hidden=...), optimizer.kind=adagrad, "
                "precision=bfloat16, a smaller batch, or more nodes"
            )
    return f"memory: about {gib(need.total)} a rank ({need}), {gib(hosts[0][2])} free"
