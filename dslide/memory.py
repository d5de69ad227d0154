"""How much memory a run will need and how much there is, before anything is allocated."""

import socket
from pathlib import Path

import psutil

from dslide.comm import LocalComm
from dslide.errors import UserError

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


def check_memory(comm: LocalComm, need: int) -> str:
    """Collective. A line that says need and supply; UserError if a host's ranks want more than it has."""
    hosts = comm.bcast(comm.gather((socket.gethostname(), need, available_bytes())))
    for host in dict.fromkeys(name for name, _, _ in hosts):
        wanted = sum(size for name, size, _ in hosts if name == host)
        free = min(size for name, _, size in hosts if name == host)
        if wanted > free:
            raise UserError(
                f"the model needs about {gib(wanted)} on {host}, where {gib(free)} are free; take "
                "fewer hidden units (--set network.hidden=...), optimizer.kind=adagrad, a smaller "
                "batch, or more nodes"
            )
    most = max(hosts, key=lambda host: host[1])
    return f"memory: about {gib(most[1])} a rank for the model and its training, {gib(most[2])} free"
