"""When does a second node pay: speed of two nodes over one, against active rows a batch and bandwidth."""

import math
from dataclasses import dataclass
from statistics import fmean

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dslide.bench.records import Run
from dslide.reporting import facts, look, traffic
from dslide.reporting.output import Table
from dslide.reporting.race import Cluster, Race
from dslide.reporting.targets import number

TITLE = "When a second node pays"


@dataclass(frozen=True)
class Point:
    """A timed run: rows of the output layer that a batch touches, all ranks together, and samples a
    second."""

    rows: float
    speed: float


def rows_of(run: Run) -> float | None:
    """Active rows a batch over all ranks."""
    end = run.end or {}
    if end.get("active_rows_per_batch"):
        return float(end["active_rows_per_batch"])
    each = [rank.get("active_rows") for rank in end.get("ranks") or []]
    return float(sum(each)) if each and all(each) else None


def speed_of(run: Run) -> float | None:
    """Samples a second over the timed steps."""
    steps, batch = run.of("step"), traffic.batch_size(run)
    if steps and batch:
        return batch / fmean(step["seconds"] for step in steps)
    value = (run.end or {}).get("samples_per_second")
    return float(value) if value else None


def sweep(race: Race) -> dict[str, list[Point]]:
    """The sweep's points by cluster shape, by ascending rows; runs that did not end well are left out."""
    spec = race.spec.sweep
    found: dict[str, list[Point]] = {}
    for cluster in spec.clusters if spec else []:
        points = []
        for extras in spec.uniform_extras:
            for run in race.seeds("sweep", f"extras-{extras}", cluster):
                rows, speed = rows_of(run), speed_of(run)
                if run.status == "done" and rows and speed:
                    points.append(Point(rows, speed))
        if points:
            found[cluster] = sorted(points, key=lambda point: point.rows)
    return found


def gains(race: Race) -> dict[str, list[tuple[float, float]]]:
    """(rows, speed of several nodes over one node's at as many rows) by cluster shape.

    The one node has as many cores as each of the several where the sweep has such a shape, else what it has
    (see `alone`). Its speed is interpolated between its measured points, on logarithms of both, and never
    beyond them (5 % of slack: the rows of two runs with the same setting differ a little).
    """
    points = sweep(race)
    found: dict[str, list[tuple[float, float]]] = {}
    for cluster, several in points.items():
        one = alone(race, race.clusters[cluster])
        if one is not None:
            pairs = [(p.rows, p.speed / speed) for p in several if (speed := _at(points[one.id], p.rows))]
            if pairs:
                found[cluster] = pairs
    return found


def alone(race: Race, several: Cluster) -> Cluster | None:
    """The one-node shape of the sweep to compare with: the one with as many cores a node, else the first."""
    one = [race.clusters[c] for c in sweep(race) if race.clusters[c].nodes == 1]
    equal = [c for c in one if c.cores == several.cores]
    return next(iter([*equal, *one]), None) if several.nodes > 1 else None


def _at(points: list[Point], rows: float) -> float | None:
    if not points or not points[0].rows / 1.05 <= rows <= points[-1].rows * 1.05:
        return None
    return math.exp(
        _line([math.log(p.rows) for p in points], [math.log(p.speed) for p in points], math.log(rows))
    )


def _line(x: list[float], y: list[float], at: float) -> float:
    if at <= x[0] or len(x) == 1:
        return y[0]
    for i in range(1, len(x)):
        if at <= x[i]:
            return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])
    return y[-1]


def crossing(pairs: list[tuple[float, float]]) -> float | None:
    """Rows from which on several nodes are faster than one; 0 if at all measured points, None if not at
    the last.

    The last crossing counts; between two points it is interpolated on logarithms.
    """
    if pairs[-1][1] < 1:
        return None
    below = [i for i, (_, gain) in enumerate(pairs) if gain < 1]
    if not below:
        return 0.0
    (x0, y0), (x1, y1) = pairs[below[-1]], pairs[below[-1] + 1]
    share = -math.log(y0) / (math.log(y1) - math.log(y0))
    return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))


def sentences(race: Race) -> list[str]:
    """A sentence a cluster shape: from how many active rows a batch on a second node pays."""
    said = []
    for cluster, pairs in gains(race).items():
        one = alone(race, race.clusters[cluster])
        assert one is not None
        said.append(_sentence(race.clusters[cluster], one, pairs, crossing(pairs)))
    return said


def _sentence(cluster: Cluster, one: Cluster, pairs: list[tuple[float, float]], cross: float | None) -> str:
    where = f"At {cluster.title.split(', ')[-1]}" if cluster.bandwidth else "Without a throttle"
    what = "a second node" if cluster.nodes == 2 else f"spreading over {cluster.nodes} nodes"
    if cluster.cores != one.cores:  # not a second node but the same cores cut in two: say so
        what = f"cutting {one.shape} into {cluster.shape.split(',')[0]}"
    (low, first), (high, last) = pairs[0], pairs[-1]
    ends = f"{number(first)} times one node's speed at {low:,.0f} rows, {number(last)} times at {high:,.0f}"
    if cross is None:
        return f"{where} {what} does not pay at any number of active rows measured ({ends})."
    if cross == 0:
        return f"{where} {what} pays at every number of active rows measured ({ends})."
    return (
        f"{where} {what} pays from about {float(f'{cross:.2g}'):,.0f} active output rows a batch on ({ends})."
    )


def table(race: Race) -> Table:
    gained = gains(race)
    data, rows = [], []
    for cluster, points in sweep(race).items():
        over = dict(gained.get(cluster, []))
        for point in points:
            gain = over.get(point.rows)
            data.append(
                {
                    "cluster": cluster,
                    "nodes": race.clusters[cluster].nodes,
                    "cores": race.clusters[cluster].cores,
                    "active_rows_per_batch": point.rows,
                    "samples_per_second": point.speed,
                    "over_one_node": gain,
                }
            )
            rows.append(
                {
                    "cluster": race.clusters[cluster].shape,
                    "active rows a batch": f"{point.rows:,.0f}",
                    "samples/s": number(point.speed),
                    "times one node": number(gain) if gain else "",
                }
            )
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], sentences(race))


def figure(race: Race) -> Figure:
    """Left: samples a second; right: the same over one node's, with the crossing."""
    points, gained = sweep(race), gains(race)
    if not points:
        return look.nothing("The experiment has no sweep, or none of its runs ended well.")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
    shades = {
        c: colour
        for c, colour in zip(points, ("#667080", "#d1462f", "#0b4f9e", "#1d7a46", "#8a4fa3"), strict=False)
    }
    marks = dict(zip(points, "os^Dv", strict=False))
    for cluster, several in points.items():
        left.plot(
            [p.rows for p in several],
            [p.speed for p in several],
            color=shades.get(cluster, look.GREY),
            marker=marks.get(cluster, "o"),
            label=race.clusters[cluster].shape,
        )
    left.set_yscale("log")
    left.set_ylabel("training samples/s (log)")
    left.legend(loc="lower left")
    right.axhline(1, color=look.GREY, linewidth=0.9)
    right.annotate(
        "one node",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
        color=look.GREY,
    )
    for line, (cluster, pairs) in enumerate(gained.items()):
        colour, mark = shades.get(cluster, look.GREY), marks.get(cluster, "o")
        _gain(right, pairs, colour, mark, 4 + 10 * line)
    right.set_ylabel("speed over one node's")
    right.set_ylim(0, max([1.2, *(g for pairs in gained.values() for _, g in pairs)]) * 1.12)
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_xlabel("active output rows a batch (log)")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    left.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    return figure


def _gain(panel: Axes, pairs: list[tuple[float, float]], colour: str, mark: str, height: float) -> None:
    """`height`: points between the axis and the crossing's label, so that near labels don't meet."""
    panel.plot([x for x, _ in pairs], [y for _, y in pairs], color=colour, marker=mark)
    cross = crossing(pairs)
    if cross:
        panel.plot([cross, cross], [0, 1], color=colour, linewidth=0.9, linestyle=(0, (2, 2)))
        panel.plot(cross, 1, marker="o", markersize=8, markerfacecolor="none", markeredgecolor=colour)
        panel.annotate(
            f"{float(f'{cross:.2g}'):,.0f} rows",
            (cross, 0),
            xytext=(3, height),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
        )


def caption(race: Race) -> str:
    return " ".join(
        [
            "Speed of training steps on one node and on several, against the output rows that a batch "
            "touches (more uniform "
            "extra labels, more rows). All points are measured; circles mark where the interpolated line "
            "crosses one node's "
            "speed.",
            *sentences(race),
            *facts.context(race),
        ]
    )
