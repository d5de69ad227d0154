"""How composed runs are made, and how far they are from runs on the real link: the same system, link and seed."""

import math
from statistics import fmean, median, stdev

import pandas as pd

from dslide.bench.records import Run
from dslide.paths import content_root
from dslide.reporting import facts, traffic
from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race, evaluations, later
from dslide.reporting.targets import number

TITLE = "Composed runs and their check"


def step_seconds(run: Run) -> float | None:
    """Mean seconds a step: of timed steps, else of the complete run between its first and last evaluation."""
    steps = run.of("step")
    if steps:
        return fmean(step["seconds"] for step in steps)
    frame = evaluations(run)
    if len(frame) < 2:
        return None
    first, last = frame.iloc[0], frame.iloc[-1]
    return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))


def interval(run: Run) -> tuple[float, float] | None:
    """The mean step's 95 % interval, by the normal approximation over the timed steps."""
    seconds = [step["seconds"] for step in run.of("step")]
    if len(seconds) < 2:
        return None
    half = 1.96 * stdev(seconds) / math.sqrt(len(seconds))
    return fmean(seconds) - half, fmean(seconds) + half


def wire_seconds(entry: Entry, run: Run) -> float | None:
    """Bytes over rate: the seconds that a step's bytes, as the busiest interface counted them, need on the link."""
    end, steps = run.end or {}, run.of("step")
    sent = end.get("tx_bytes")
    if not sent or not steps or not math.isfinite(entry.cluster.bits):
        return None
    busiest = max([rank.get("tx_bytes") or 0 for rank in end.get("ranks") or []], default=0)
    return (busiest or sent / traffic.nodes(run)) * 8 / len(steps) / entry.cluster.bits


def compare(real: Run, composed: Run) -> dict[str, float] | None:
    """Real over composed: `step_time` (a ratio less 1) and `p1` (largest difference at the evaluations both made)."""
    a, b = later(real).set_index("step"), later(composed).set_index("step")
    both = a.index.intersection(b.index)
    if both.empty:
        return None
    p1 = (a.loc[both, "p1"] - b.loc[both, "p1"]).abs().max()
    return {"step_time": float(a.loc[both[-1], "seconds"] / b.loc[both[-1], "seconds"] - 1), "p1": float(p1)}


def table(race: Race) -> Table:
    data, rows, checks = [], [], []
    for entry in race.entries:
        if not entry.composed:
            continue
        paces = {run.folder.name: run for run in race.seeds("paces", entry.system, entry.cluster.id)}
        for run in entry.runs:
            pace = paces.get(run.folder.name)
            if pace is not None:
                record, row = _made(entry, pace)
                data.append(record)
                rows.append(row)
        for check in race.seeds("checks", entry.system, entry.cluster.id):
            composed = next((run for run in entry.runs if run.folder.name == check.folder.name), None)
            checks += _check(entry.label, entry.cluster.title, check, composed)
    checks += _reference()
    notes = [
        "A composed run is the accuracy a step of a complete unthrottled run, placed at step times measured on the "
        "throttled link; both parts are kept. Bytes over rate is what the busiest node's counted bytes need on the link.",
    ]
    parts = [("Timed steps", pd.DataFrame(rows)), ("Held against real runs", pd.DataFrame(checks))]
    return Table(pd.DataFrame(data), parts, notes)


def _made(entry: Entry, pace: Run) -> tuple[dict[str, object], dict[str, str]]:
    mean, around, wire = step_seconds(pace), interval(pace), wire_seconds(entry, pace)
    steps = [step["seconds"] for step in pace.of("step")]
    record: dict[str, object] = {
        "system": entry.system, "cluster": entry.cluster.id, "status": pace.status, "steps": len(steps),
        "step_seconds": mean, "step_seconds_low": around[0] if around else None,
        "step_seconds_high": around[1] if around else None, "step_seconds_median": median(steps) if steps else None,
        "wire_seconds": wire,
    }  # fmt: skip
    row = {
        "system": entry.label,
        "cluster": entry.cluster.title,
        "timed steps": str(len(steps)),
        "seconds a step (95 %)": f"{number(mean)} ({number(around[0])}–{number(around[1])})" if mean and around else pace.status,
        "bytes over rate": number(wire) if wire else "",
        "step over it": f"{mean / wire:.2f}" if wire and mean else "",
    }
    return record, row


def _check(label: str, cluster: str, real: Run, composed: Run | None) -> list[dict[str, str]]:
    found = compare(real, composed) if composed is not None else None
    last = later(real)
    row = {
        "system": label,
        "cluster": cluster,
        "real run": f"{last['epoch'].iloc[-1]:.2g} epochs, {number(last['seconds'].iloc[-1])} s" if len(last) else real.status,
        "its time over the composed": f"{found['step_time']:+.1%}" if found else "–",
        "largest P@1 difference": f"{found['p1'] * 100:.2f} points" if found else "–",
    }
    return [row]


def _reference() -> list[dict[str, str]]:
    """Complete throttled runs kept in results/reference/ with the composed run beside them."""
    root = content_root() / "results" / "reference"
    rows = []
    for file in sorted(root.glob("**/runs/*/*/seed-*/meta.json")):
        folder = file.parent
        twin = folder.parents[3] / "composed" / folder.relative_to(folder.parents[2])
        if (twin / "meta.json").is_file():
            from dslide.bench.records import read_run

            real = read_run(folder)
            label = str(facts.dig(real.meta, "spec", "label") or folder.parents[1].name)
            rows += _check(f"{label} (reference)", folder.parent.name, real, read_run(twin))
    return rows
