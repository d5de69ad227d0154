"""The training clock: it runs while the system trains and stands still for everything else.

Start and stop are barriers, so the slowest rank counts. What must not be counted (evaluation, checkpoints,
logging, compilation, loading) happens while the clock stands still.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

Barrier = Callable[[], None]
Agree = Callable[[float], float]


def interface_bytes(interface: str | None) -> tuple[int, int]:
    """Bytes (sent, received) by a network interface of this process's network namespace; (0, 0) if there is
    none."""
    if interface is None:
        return 0, 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            fields = counters.split()
            return int(fields[8]), int(fields[0])
    return 0, 0


class TrainClock:
    """Counts training seconds, and with them the interface's bytes and the process's CPU seconds.

    Args:
        barrier: returns on every rank when all ranks have called it; None for one rank.
        agree: the maximum of a float over the ranks, the same on all of them. With it all ranks read the same
            `seconds` while the clock stands still; without it they differ by the barrier's skew and rank 0's
            is the one that is recorded.
        interface: whose counters to read; default: the environment's DSLIDE_INTERFACE.
    """

    def __init__(
        self, barrier: Barrier | None = None, agree: Agree | None = None, interface: str | None = None
    ) -> None:
        self._barrier = barrier
        self._agree = agree
        self._interface = interface or os.environ.get("DSLIDE_INTERFACE") or None
        self._began: tuple[float, float, int, int] | None = None
        self._seconds = 0.0
        self._cpu_seconds = 0.0
        self._tx_bytes = 0
        self._rx_bytes = 0

    def _now(self) -> tuple[float, float, int, int]:
        return time.perf_counter(), time.process_time(), *interface_bytes(self._interface)

    def start(self) -> None:
        """Waits for all ranks and starts. RuntimeError if it runs."""
        if self._began is not None:
            raise RuntimeError("the training clock already runs")
        if self._barrier is not None:
            self._barrier()
        self._began = self._now()

    def stop(self) -> None:
        """Waits for all ranks and stops. RuntimeError if it does not run."""
        if self._began is None:
            raise RuntimeError("the training clock does not run")
        if self._barrier is not None:
            self._barrier()
        seconds, cpu_seconds, sent, received = self._now()
        began, self._began = self._began, None
        self._seconds += seconds - began[0]
        self._cpu_seconds += cpu_seconds - began[1]
        self._tx_bytes += sent - began[2]
        self._rx_bytes += received - began[3]
        if self._agree is not None:
            self._seconds = self._agree(self._seconds)

    def restore(self, seconds: float, cpu_seconds: float = 0.0, tx_bytes: int = 0, rx_bytes: int = 0) -> None:
        """Sets the totals, for a resumed run."""
        if self._began is not None:
            raise RuntimeError("the training clock runs")
        self._seconds, self._cpu_seconds, self._tx_bytes, self._rx_bytes = (
            seconds,
            cpu_seconds,
            tx_bytes,
            rx_bytes,
        )

    @property
    def running(self) -> bool:
        """Whether the clock runs."""
        return self._began is not None

    @property
    def seconds(self) -> float:
        """Training seconds so far; while the clock runs this rank's own reading."""
        return self._seconds if self._began is None else self._seconds + time.perf_counter() - self._began[0]

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of this process (all its threads) until the last stop."""
        return self._cpu_seconds

    @property
    def tx_bytes(self) -> int:
        """Bytes that the interface sent, headers included, until the last stop."""
        return self._tx_bytes

    @property
    def rx_bytes(self) -> int:
        """Bytes that the interface received, headers included, until the last stop."""
        return self._rx_bytes

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()  # after an exception the other ranks may never reach the barrier
