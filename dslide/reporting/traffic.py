"""Bytes on the wire: what a run sent a sample, by its own count and by the interface's, and what
formulas say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslide.bench.records import Run
from dslide.reporting import facts
from dslide.reporting.race import Entry, Race, later

_WIRES = {"fp32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}  # bytes a value, bytes of a row's scale


@dataclass(frozen=True)
class Sent:
    """Bytes a training sample, summed over ranks; None where a record does not hold it."""

    payload: float | None
    interface: float | None
    formula: float | None


def parameters(race: Race, run: Run) -> int | None:
    """The model's parameters as the run says; else those of dslide's run on the same data (the same
    network)."""
    own = run.meta.get("parameters")
    if own:
        return int(own)
    same = [other for other in facts.runs(race) if other.meta.get("parameters")]
    return int(same[0].meta["parameters"]) if same else None


def nodes(run: Run) -> int:
    """Ranks of a run."""
    return int(facts.dig(run.meta, "cluster", "nodes") or len(run.meta.get("ranks") or [0]))


def batch_size(run: Run) -> int | None:
    """Global batch size of a run."""
    value = run.meta.get("batch_size")
    return int(value) if value else None


def sharded(hidden: int, ranks: int, wire: str) -> int:
    """dslide's payload bytes a sample over all ranks (README, "What crosses the network")."""
    value, scale = _WIRES[wire]
    return 2 * (ranks - 1) * hidden * value + ranks * (ranks - 1) * (2 * scale + 4)


def dense(weights: float, ranks: int, batch: int) -> float:
    """Bytes a sample over all ranks of a ring all-reduce of float32 gradients: each rank sends 2 (P - 1)
    / P of them."""
    return 2 * (ranks - 1) * 4 * weights / batch


def samples(run: Run) -> int | None:
    """Training samples that a run's byte counters cover."""
    end = run.end or {}
    steps, batch = run.of("step"), batch_size(run)
    if steps and batch:
        return len(steps) * batch
    if end.get("samples"):
        return int(end["samples"])
    frame = later(run)
    return int(frame["samples"].iloc[-1]) if len(frame) else None


def formula(run: Run) -> int | None:
    """What dslide's formula says for a run, None for other systems."""
    hidden = facts.dig(run.meta, "config", "network", "hidden")
    wire = _find(run.meta.get("config"), "wire")
    return sharded(int(hidden), nodes(run), wire) if hidden and wire in _WIRES else None


def _find(record: Any, key: str) -> Any:
    """The value of a key at any depth, None if it is nowhere."""
    if isinstance(record, dict):
        if key in record:
            return record[key]
        return next((found for value in record.values() if (found := _find(value, key)) is not None), None)
    return None


def sent(run: Run) -> Sent | None:
    """Bytes a sample of a run, None for a run on one node or without samples."""
    number, end = samples(run), run.end
    if not number or not end or nodes(run) < 2:
        return None
    timed = bool(run.of("step"))  # its own count covers the warm-up as well
    payload = end.get("payload_bytes") if not timed else None
    interface = end.get("tx_bytes")
    return Sent(
        payload / number if payload else None, interface / number if interface else None, formula(run)
    )


def measured(race: Race) -> list[tuple[Entry, Run, Sent]]:
    """A run for every system and cluster shape of several nodes: complete where there is one, else the
    timed steps."""
    found = []
    for entry in race.entries:
        candidates = [*entry.counted] if not entry.composed else []
        candidates += race.seeds("paces", entry.system, entry.cluster.id)
        for run in candidates:
            bytes_ = sent(run)
            if bytes_ and (bytes_.payload or bytes_.interface):
                found.append((entry, run, bytes_))
                break
    return found
