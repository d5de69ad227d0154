"""Time to target: when every system first stood at or above a P@1, and how many times longer its rivals
take."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dslide.reporting import facts, look, roles
from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import COMPOSED, Ratio, Reach, all_targets, fastest, number, ratio, reach

TITLE = "Time to target"

# What every row is compared with; a ratio above 1 says that the other takes longer.
_AGAINST = {
    "dense_published": "dense Horovod published ×",
    "dense_tuned": "dense Horovod tuned ×",
    "fastest_horovod": "fastest Horovod ×",
    "own_one_node": "itself on one node ×",
    "best_one_node": "best on one node ×",
}


def references(race: Race, entry: Entry, target: float) -> dict[str, Reach | None]:
    """What an entry is compared with at a target: rivals at the same link, and one-node systems."""
    cluster = entry.cluster
    same = [e for e in race.entries if e.cluster == cluster and roles.role(race, e.system) in roles.HOROVOD]
    one = [e for e in race.entries if e.cluster.nodes == 1]
    found: dict[str, Reach | None] = dict.fromkeys(_AGAINST)
    if cluster.nodes > 1:
        for key, part in (("dense_published", roles.DENSE_PUBLISHED), ("dense_tuned", roles.DENSE_TUNED)):
            found[key] = reach(race.find(roles.first(race, part), cluster.id), target)
        best = fastest(same, target)
        found["fastest_horovod"] = best[1] if best else None
        found["own_one_node"] = next((reach(e, target) for e in one if e.system == entry.system), None)
    best = fastest(one, target)
    found["best_one_node"] = best[1] if best else None
    return found


def ratios(race: Race, entry: Entry, target: float) -> dict[str, Ratio | None]:
    """Seconds of every reference over the entry's own."""
    ours = reach(entry, target)
    return {key: ratio(other, ours) for key, other in references(race, entry, target).items()}


def table(race: Race) -> Table:
    data, parts = [], []
    for target in all_targets(race):
        rows = []
        for entry in race.entries:
            found = reach(entry, target)
            compared = ratios(race, entry, target) if found else dict.fromkeys(_AGAINST)
            data.append(_record(target, entry, found, compared))
            rows.append(
                ((found.seconds, found.bound) if found else (math.inf, True), _row(entry, found, compared))
            )
        rows.sort(key=lambda row: (row[0][1], row[0][0]))
        kind = "" if target in race.targets else " (the highest that every line reached)"
        parts.append((f"P@1 {target:.2f}{kind}", pd.DataFrame([row for _, row in rows])))
    return Table(pd.DataFrame(data), parts, _notes(race))


def _record(
    target: float, entry: Entry, found: Reach | None, compared: dict[str, Ratio | None]
) -> dict[str, object]:
    record: dict[str, object] = {
        "target": target,
        "system": entry.system,
        "cluster": entry.cluster.id,
        "kind": "composed" if entry.composed else "measured",
        "status": entry.statuses,
        "reason": entry.reason or "",
        "best_p1": float(entry.curve["p1"].max()) if entry.counted else None,
    }
    for key in ("seconds", "low", "high", "samples", "bound", "seeds", "misses"):
        record[key if key not in ("low", "high") else f"seconds_{key}"] = (
            getattr(found, key) if found else None
        )
    for key, value in compared.items():
        record[f"ratio_{key}"] = value.value if value else None
        record[f"ratio_{key}_sign"] = value.sign if value else ""
    return record


def _row(entry: Entry, found: Reach | None, compared: dict[str, Ratio | None]) -> dict[str, str]:
    row = {"system": entry.label, "cluster": entry.cluster.title}
    if found is None:
        return (
            row
            | {"seconds": entry.reason or "", "seeds' range": "", "samples": ""}
            | dict.fromkeys(_AGAINST.values(), "")
        )
    samples = f"{'> ' if found.bound else ''}{found.samples:,.0f}"
    row |= {"seconds": str(found), "seeds' range": found.range, "samples": samples}
    return row | {_AGAINST[key]: str(value) if value else "–" for key, value in compared.items()}


def _notes(race: Race) -> list[str]:
    notes = [
        "Seconds of the training clock until the first evaluation at or above the target; medians over "
        "seeds. "
        "\u201c> x\u201d: not reached by the last evaluation, at x.",
        "A column with × says how many times as long the named one takes, at the same link (the last two "
        "columns: on one "
        "node); below 1 it is faster than the row. No ratio where both sides are bounds.",
    ]
    if any(e.composed and e.counted for e in race.entries):
        notes.append(
            f"{COMPOSED} composed: accuracy a step from a complete unthrottled run, step times measured "
            f"on the throttled link."
        )
    return notes


def figure(race: Race) -> Figure:
    """A panel a target, a row a system and cluster shape; the number stands beside its mark."""
    targets = all_targets(race)
    entries = [e for e in race.entries if e.counted]
    if not entries or not targets:
        return look.nothing("No evaluated run yet.")
    order = _order(entries, race.targets or targets)
    colours, shapes = look.colours(race), look.markers(race)
    figure, grid = plt.subplots(
        1,
        len(targets),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
        figsize=(
            2.3 + (2.5 if len(targets) < 4 else 2.05) * len(targets),
            0.9 + 0.2 * len(order) + 0.1 * len({e.system for e in order}),
        ),
    )
    heights = _heights(order)
    for panel, target in zip(grid[0], targets, strict=True):
        for entry, height in zip(order, heights, strict=True):
            _mark(panel, reach(entry, target), height, colours[entry.system], shapes[entry.cluster.id])
        note = "" if target in race.targets else "\nhighest all reached"
        panel.set_title(f"P@1 {target:.2f}{note}")
        panel.set_xscale("log")
        panel.set_xlabel("training seconds (log)")
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
    first = grid[0][0]
    first.set_yticks(heights, [f"{e.label} · {e.cluster.title}" for e in order])
    first.set_ylim(max(heights) + 0.8, -0.8)
    low, high = first.get_xlim()
    first.set_xlim(low / 1.3, high * (high / low) ** 0.28)
    # Narrow panels: a label at every second decade, where labels of every decade would touch.
    decades = math.log10(first.get_xlim()[1] / first.get_xlim()[0])
    first.xaxis.set_major_locator(LogLocator(base=100 if decades > 4 else 10, numticks=6))
    first.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}" if v < 1 else f"{v:,.0f}"))
    first.xaxis.set_minor_formatter(NullFormatter())
    handles = _handles(order, race)
    columns = len(handles) if len(handles) <= 6 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _order(entries: list[Entry], targets: list[float]) -> list[Entry]:
    """Systems by their best time to the highest target, their cluster shapes together."""

    def key(entry: Entry) -> tuple[bool, float]:
        found = reach(entry, max(targets))
        return (True, math.inf) if found is None else (found.bound, found.seconds)

    best = {s: min(key(e) for e in entries if e.system == s) for s in {e.system for e in entries}}
    place = {e.system: i for i, e in enumerate(entries)}
    return sorted(entries, key=lambda e: (best[e.system], place[e.system]))


def _heights(order: list[Entry]) -> list[float]:
    heights, height = [], 0.0
    for i, entry in enumerate(order):
        height += 0 if i == 0 else 1.0 if entry.system == order[i - 1].system else 1.5
        heights.append(height)
    return heights


def _mark(panel: plt.Axes, found: Reach | None, height: float, colour: str, shape: str) -> None:
    if found is None:
        return
    if found.bound:
        panel.plot(found.seconds, height, marker=shape, color="white", markeredgecolor=colour, markersize=5)
        panel.annotate(
            "",
            (found.seconds, height),
            xytext=(13, 0),
            textcoords="offset points",
            arrowprops={"arrowstyle": "<-", "color": colour, "lw": 1, "shrinkA": 0, "shrinkB": 3},
        )
    else:
        face = "white" if found.composed else colour
        panel.plot(found.seconds, height, marker=shape, color=face, markeredgecolor=colour, markersize=5)
        if found.seeds > 1:
            panel.plot(
                [found.low, min(found.high, 1e9)], [height, height], color=colour, linewidth=1, zorder=1
            )
    panel.annotate(
        str(found),
        (found.seconds if found.bound else max(found.seconds, min(found.high, 1e9)), height),
        xytext=(15 if found.bound else 6, -0.5),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )


def _handles(order: list[Entry], race: Race) -> list[Line2D]:
    shapes = look.markers(race)
    shown = {e.cluster.id: e.cluster for e in order}
    handles = [
        Line2D(
            [],
            [],
            marker=shapes[i],
            linestyle="",
            color=look.GREY,
            label=c.title + "".join(f", {m}" for m in facts.marks(race, c)),
        )
        for i, c in shown.items()
    ]
    if any(e.composed for e in order):
        handles.append(
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                markerfacecolor="white",
                markeredgecolor=look.GREY,
                label=f"{COMPOSED} composed",
            )
        )
    if any((found := reach(e, t)) and found.bound for e in order for t in all_targets(race)):
        handles.append(
            Line2D([], [], marker="$\u2192$", linestyle="", color=look.GREY, label="not reached by then")
        )
    return handles


def caption(race: Race) -> str:
    lead = (
        "Training seconds until the first evaluation at or above a target; medians over seeds, bars the "
        "seeds' range."
    )
    extra = (
        ["Open marks are composed or bounds."] if any(e.composed and e.counted for e in race.entries) else []
    )
    return " ".join([lead, *extra, *facts.absent(race), *facts.context(race)])


__all__ = ["TITLE", "caption", "figure", "number", "ratios", "references", "table"]
