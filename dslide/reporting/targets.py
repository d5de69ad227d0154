"""Time to target: seconds, samples and ratios, with their bounds and the mark of composed runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dslide.reporting.race import Entry, Race

COMPOSED = "†"  # stands behind every number that a composed run went into


@dataclass(frozen=True)
class Reach:
    """When an entry first stood at or above a target, over its seeds.

    `seconds` and `samples` are medians; with `bound` the truth is larger (or never). `low` and `high` are the
    seeds' range, `high` infinite if a seed missed. A miss counts as its last evaluation's time.
    """

    seconds: float
    samples: float
    bound: bool
    low: float
    high: float
    seeds: int
    misses: int
    composed: bool

    def __str__(self) -> str:
        return f"{'> ' if self.bound else ''}{number(self.seconds)}{COMPOSED if self.composed else ''}"

    @property
    def range(self) -> str:
        """The seeds' range, empty for one seed."""
        if self.seeds < 2:
            return ""
        high = number(self.high) if math.isfinite(self.high) else "missed"
        return f"{number(self.low)}–{high}"


@dataclass(frozen=True)
class Ratio:
    """How many times longer one takes than another; `sign` ">" or "<" where one of them is a bound."""

    value: float
    sign: str
    composed: bool

    def __str__(self) -> str:
        lead = f"{self.sign} " if self.sign else ""
        value = number(self.value) if self.value >= 0.1 else f"1/{number(1 / self.value)}"
        return f"{lead}{value}{COMPOSED if self.composed else ''}"


def number(value: float) -> str:
    """Three significant digits, without an exponent: 0.042, 1.23, 12.3, 123, 1,234."""
    if not math.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded number: 9.999 is 10.0
    return f"{value:,.{max(0, 2 - exponent)}f}"


def reach(entry: Entry | None, target: float) -> Reach | None:
    """Time to `target` (a fraction): the first evaluation at or above it; None if no run counts.

    With misses among the seeds the median lies between the median with every miss at its last evaluation
    and the
    one with every miss at infinity; where the two differ, the lower one is given as a bound.
    """
    if entry is None or not entry.counted:
        return None
    seconds, samples, missed = [], [], []
    for frame in entry.frames:
        there = frame[frame["p1"] >= target]
        missed.append(there.empty)
        row = frame.iloc[-1] if there.empty else there.iloc[0]
        seconds.append(float(row["seconds"]))
        samples.append(float(row["samples"]))
    upper = [math.inf if miss else value for value, miss in zip(seconds, missed, strict=True)]
    with np.errstate(invalid="ignore"):
        low, high = float(np.median(seconds)), float(np.median(upper))
    return Reach(
        seconds=low,
        samples=float(np.median(samples)),
        bound=low != high,
        low=min(seconds),
        high=max(upper),
        seeds=len(seconds),
        misses=sum(missed),
        composed=entry.composed,
    )


def ratio(reference: Reach | None, ours: Reach | None) -> Ratio | None:
    """How many times longer the reference takes; None where nothing can be said (one is absent, or both
    are bounds)."""
    if reference is None or ours is None or ours.seconds <= 0 or (reference.bound and ours.bound):
        return None
    sign = ">" if reference.bound else "<" if ours.bound else ""
    return Ratio(reference.seconds / ours.seconds, sign, reference.composed or ours.composed)


def fastest(entries: Iterable[Entry], target: float) -> tuple[Entry, Reach] | None:
    """The entry that reaches the target first, by its median; None if none does."""
    reached = [(entry, found) for entry in entries if (found := reach(entry, target)) and not found.bound]
    return min(reached, key=lambda pair: pair[1].seconds, default=None)


def best_common(race: Race) -> float | None:
    """The highest P@1, in whole hundredths, that every entry with a line reached; None if that is below
    0.01."""
    tops = [max(float(frame["p1"].max()) for frame in e.frames) for e in race.entries if e.counted]
    value = math.floor(min(tops, default=0.0) * 100 + 1e-9) / 100
    return value if value >= 0.01 else None


def all_targets(race: Race) -> list[float]:
    """The experiment's targets and the best common one, ascending."""
    common = best_common(race)
    return sorted({*race.targets, *([common] if common else [])})
