"""A measured figure, and how it is measured: the median of repetitions with their range."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One figure: the median of `repeats` runs and its range, in `unit` a second or as `unit` says.

    bound: the most that the machine's measured rates allow, in the same unit (dslide.bench.speed.bounds).
    gbytes, gflops: what the median achieves of them, a second.
    rival: a competitor's figure in the same run, same unit; `rival_name` says whose.
    note: what else a reader must know.
    """

    bench: str
    case: str
    value: float
    low: float
    high: float
    unit: str
    repeats: int
    bound: float | None = None
    gbytes: float | None = None
    gflops: float | None = None
    rival: float | None = None
    rival_name: str | None = None
    note: str | None = None

    @property
    def of_bound(self) -> float | None:
        """The part of the bound that is reached."""
        return None if self.bound is None else self.value / self.bound

    @property
    def ratio(self) -> float | None:
        """How many times the rival's speed."""
        return None if self.rival is None else self.value / self.rival

    def with_(self, **fields: Any) -> "Row":
        """A copy with other fields."""
        return replace(self, **fields)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields that there are, `of_bound` and `ratio` with them."""
        fields = asdict(self) | {"of_bound": self.of_bound, "ratio": self.ratio}
        return {key: value for key, value in fields.items() if value is not None}


def absent(bench: str, unit: str, why: str) -> Row:
    """What stands in the place of a figure that could not be measured."""
    return Row(bench, "not measured", 0.0, 0.0, 0.0, unit, 0, note=why)


def last_line(messages: str) -> str:
    """Of what a failed command wrote."""
    return (messages.strip().splitlines() or ["no message"])[-1]


def measure(
    bench: str,
    case: str,
    unit: str,
    amount: float,
    work: Callable[[], object],
    *,
    repeats: int = 7,
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """`amount` units of work a call, as units a second.

    After one call that doesn't count, `repeats` calls, or as many as fit in `seconds`, at least three.
    `clock` is read before and after a call.
    """
    work()
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while len(rates) < 3 or (len(rates) < repeats and time.perf_counter() < until):
        begin = clock()
        work()
        rates.append(amount / (clock() - begin))
    return Row(bench, case, float(np.median(rates)), min(rates), max(rates), unit, len(rates))
