"""What a caption must say besides the picture: machine, data, links, seeds, revision, and what is missing.

All of it is read from the runs' meta data; a fact that no record holds is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from dslide.bench.records import Run
from dslide.reporting.race import Cluster, Race, speed

NO_LATENCY = "no latency emulated"


def runs(race: Race, cluster: Cluster | None = None) -> list[Run]:
    """All runs of the entries, or of those on one cluster shape."""
    return [run for e in race.entries if cluster is None or e.cluster.id == cluster.id for run in e.runs]


def dig(record: Any, *path: str) -> Any:
    """record[path0][path1]..., None where a step is missing."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def some(records: Iterable[Run], *path: str) -> list[Any]:
    """The different values at a path of the meta data, in order of appearance."""
    found: list[Any] = []
    for run in records:
        value = dig(run.meta, *path)
        if value is not None and value not in found:
            found.append(value)
    return found


def machine(race: Race) -> list[str]:
    """Processor, cores, instruction set, memory."""
    described = []
    shapes = some(runs(race), "cluster")
    used = max((int(s.get("nodes") or 1) * int(s.get("cores") or 1) for s in shapes), default=1)
    for facts in some(runs(race), "machine"):
        cpu = facts.get("cpu") or {}
        cores = f"{cpu['cores']} cores, {used} used" if cpu.get("cores") else ""
        isa = dig(facts, "core", "instruction_set")
        memory = facts.get("memory_bytes")
        parts = [
            cpu.get("model"),
            cores,
            f"dslide's kernels {isa}" if isa else "",
            f"{memory / 2**30:.0f} GB" if memory else "",
        ]
        text = ", ".join(str(part) for part in parts if part)
        if text and text not in described:
            described.append(text)
    # A system that doesn't load dslide's kernels says the same without them.
    best = [
        t for t in described if not any(t != o and set(t.split(", ")) < set(o.split(", ")) for o in described)
    ]
    return [f"Machine: {'; and '.join(best)}."] if best else []


def data(race: Race) -> list[str]:
    """Name and sizes of the data."""
    for facts in (f for f in some(runs(race), "data") if isinstance(f, dict)):
        return [
            f"Data: {facts['name']}, {facts['train_points']:,} training and {facts['test_points']:,} test "
            f"points, "
            f"{facts['num_features']:,} features, {facts['num_labels']:,} labels."
        ]
    return [f"Data: {race.spec.data}."] if race.spec.data else []


def marks(race: Race, cluster: Cluster) -> list[str]:
    """What the records hold against a cluster shape: "unthrottled", "link not faithful", "oversubscribed"."""
    here = [run for run in runs(race, cluster) if run.status not in ("skipped", "error")]
    asked = [run for run in here if cluster.bandwidth]
    loose = [run for run in asked if not throttled(run)]
    wrong = [run for run in asked if throttled(run) and dig(run.meta, "link", "faithful") is False]
    unknown = [run for run in asked if throttled(run) and dig(run.meta, "link", "faithful") is None]
    found = ["unthrottled"] if loose else []
    for runs_, word in ((wrong, "link not faithful"), (unknown, "link not checked")):
        if runs_:
            some_only = (
                "" if len(runs_) == len(asked) else " for " + ", ".join(sorted({_label(r) for r in runs_}))
            )
            found.append(word + some_only)
    if any(dig(run.meta, "cluster", "oversubscribed") for run in here):
        found.append("oversubscribed")
    return found


def _label(run: Run) -> str:
    return str(run.meta.get("label") or run.meta.get("system") or run.folder.parent.parent.name)


def throttled(run: Run) -> bool:
    """Whether the run's link was throttled as its cluster asked. A composed run speaks for the pace that
    it holds."""
    return dig(run.meta, "cluster", "throttled") is True or dig(run.meta, "cluster", "kind") in (
        "slurm",
        "hostfile",
    )


def links(race: Race) -> list[str]:
    """A sentence a throttled cluster shape: rate, how it was made, how faithful it measured, round trip,
    losses."""
    sentences = [s for cluster in race.drawn if cluster.nodes > 1 and (s := _link(race, cluster))]
    return [*sentences, f"Virtual nodes on one machine, {NO_LATENCY}."] if sentences else []


def _link(race: Race, cluster: Cluster) -> str:
    reports = [
        run.meta["link"] for run in runs(race, cluster) if throttled(run) and dig(run.meta, "link", "rate")
    ]
    if not reports or not cluster.bandwidth:
        return ""
    gaps = [
        line["ms"] / line["ideal_ms"] - 1
        for r in reports
        for line in r.get("sizes") or []
        if line.get("ideal_ms")
    ]
    trips = [r["rtt_ms"] for r in reports if r.get("rtt_ms") is not None]
    lost = sum(r.get("lost_packets") or 0 for r in reports)
    control = sorted({str(r["congestion_control"]) for r in reports if r.get("congestion_control")})
    parts = ["token buckets, calibrated"]
    if gaps:
        parts.append(f"messages of the systems' own sizes were off the ideal time by {_span(gaps)}")
    if trips:
        parts.append(f"round trip {median(trips):.2f} ms")
    parts.append(f"{lost} packets lost in the checks")
    parts += [f"congestion control {', '.join(control)}"] if control else []
    return f"Links of {speed(cluster.bandwidth)}: {'; '.join(parts)}."


def _span(gaps: list[float]) -> str:
    low, high = f"{min(gaps):+.0%}", f"{max(gaps):+.0%}"
    return low if low == high else f"{low} to {high}"


def seeds(race: Race) -> list[str]:
    """How many seeds every system has."""
    counts: dict[int, list[str]] = {}
    for system in race.systems:
        most = max((len(e.counted) for e in race.entries if e.system == system), default=0)
        if most:
            label = next(e.label for e in race.entries if e.system == system)
            counts.setdefault(most, []).append(label)
    if not counts:
        return []
    if len(counts) == 1:
        number = next(iter(counts))
        return [f"{number} seed{'s' if number > 1 else ''} a system."]
    usual = max(counts, key=lambda number: len(counts[number]))
    special = [
        f"{n} of {', '.join(labels)}" for n, labels in sorted(counts.items(), reverse=True) if n != usual
    ]
    return [f"Seeds: {'; '.join(special)}; {usual} of every other system."]


def revision(race: Race) -> list[str]:
    """The commits that the records were made at."""
    found = []
    for state in some(runs(race), "machine", "git"):
        text = state["commit"][:10] + (" with local changes" if state.get("dirty") else "")
        if text not in found:
            found.append(text)
    return [f"Revision {', '.join(found)}."] if found else []


def absent(race: Race) -> list[str]:
    """A sentence that names every entry without a line and why."""
    missing = [f"{e.label} on {e.cluster.title} ({e.reason})" for e in race.entries if e.reason]
    return [f"Not shown: {'; '.join(missing)}."] if missing else []


def warnings(race: Race) -> list[str]:
    """Sentences for the page's head where the records do not hold what the experiment asked for."""
    sentences = []
    for cluster in race.drawn:
        for mark in marks(race, cluster):
            sentences.append(f"{cluster.title}: {mark}.")
    notes = dict.fromkeys(str(note) for note in some(runs(race), "cluster", "note"))
    return sentences + [f"The launcher: {note}." for note in notes]


def context(race: Race) -> list[str]:
    """The sentences that end every caption."""
    return [*machine(race), *data(race), *links(race), *warnings(race), *seeds(race), *revision(race)]
