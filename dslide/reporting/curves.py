"""The two learning-curve figures: P@1 against seconds and against epochs, a panel a cluster shape."""

from __future__ import annotations

import math
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

from dslide.reporting import facts, look
from dslide.reporting.race import Cluster, Entry, Race

Axis = Literal["seconds", "epoch"]
_KNOWS = 0.005  # P@1 from which a step 0 is worth drawing
_LABELS = {"seconds": "training seconds (log)", "epoch": "epochs"}


def draw(race: Race, axis: Axis) -> Figure:
    """A panel a cluster shape, a line a system; shared axes and one legend below."""
    clusters = [c for c in race.drawn if any(e.counted for e in race.entries if e.cluster == c)]
    if not clusters:
        return look.nothing("No evaluated run yet.")
    columns = min(3, len(clusters))
    rows = math.ceil(len(clusters) / columns)
    width = {1: 5.2, 2: 7.4, 3: 9.2}[columns]
    systems = list(dict.fromkeys(e.system for e in race.entries if e.counted))
    figure, grid = plt.subplots(
        rows,
        columns,
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(width, 3.1 * rows),
        layout="constrained",
    )
    panels = list(grid.flat)[: len(clusters)]
    for unused in list(grid.flat)[len(clusters) :]:
        unused.set_visible(False)
    for place, (panel, cluster) in enumerate(zip(panels, clusters, strict=True)):
        _panel(panel, race, cluster, axis)
        if place + columns >= len(panels):  # the last of its column
            panel.set_xlabel(_LABELS[axis])
            panel.tick_params(labelbottom=True)
    for row in grid:
        row[0].set_ylabel("P@1 on the test split")
    _limits(panels[0], race, clusters, axis)
    for place, (panel, cluster) in enumerate(zip(panels, clusters, strict=True)):
        _targets(panel, race, label=place % columns == columns - 1 or panel is panels[-1])
        if axis == "seconds":
            _starts(panel, race, cluster)
    figure.legend(
        handles=_handles(race, systems, axis),
        loc="outside lower center",
        ncols=min(3, max(1, len(systems))) if columns > 1 else 2,
        columnspacing=1.6,
    )
    return figure


def _panel(panel: Axes, race: Race, cluster: Cluster, axis: Axis) -> None:
    colours = look.colours(race)
    panel.set_title(look.panel_title(cluster, facts.marks(race, cluster)))
    for entry in race.entries:
        if entry.cluster != cluster or not entry.counted:
            continue
        curve = entry.curve
        if axis == "seconds":
            curve = timed(curve)
        x, y, colour = curve[axis], curve["p1"], colours[entry.system]
        if entry.point:
            last = curve.iloc[-1]
            panel.plot(
                last[axis], last["p1"], "*", color=colour, markersize=9, markeredgecolor="white", zorder=4
            )
            continue
        panel.plot(x, y, color=colour, linestyle=look.dashes(entry), zorder=3)
        panel.plot(x, y, ".", color=colour, markersize=3.5, zorder=3)
        if len(entry.counted) > 1:
            panel.fill_between(
                x, curve["p1_low"], curve["p1_high"], color=colour, alpha=0.2, linewidth=0, zorder=2
            )
        if entry.cut:
            panel.plot(
                x.iloc[-1], y.iloc[-1], ">", color=colour, markersize=6.5, markeredgecolor="white", zorder=4
            )


def timed(curve: pd.DataFrame) -> pd.DataFrame:
    """The part of a curve that a log time axis can show; a blank step 0 would only stretch it."""
    start = (curve["step"] > 0) | (curve["p1"] >= _KNOWS)
    return curve[start & (curve["seconds"] > 0)]


def _limits(panel: Axes, race: Race, clusters: list[Cluster], axis: Axis) -> None:
    curves = [e.curve for e in race.entries if e.counted and e.cluster in clusters]
    top = max(max(float(c["p1"].max()) for c in curves), *race.targets, 0.05)
    panel.set_ylim(0, top * 1.08)
    panel.yaxis.set_major_locator(MultipleLocator(0.05 if top > 0.12 else 0.01))
    if axis == "epoch":
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    seconds = np.concatenate([timed(c)["seconds"] for c in curves])
    panel.set_xscale("log")
    panel.set_xlim(seconds.min() / 1.5, seconds.max() * 1.7)
    panel.xaxis.set_major_locator(LogLocator(numticks=12))
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,g}" if value < 1 else f"{value:,.0f}")
    )
    panel.xaxis.set_minor_formatter(NullFormatter())


def _targets(panel: Axes, race: Race, label: bool) -> None:
    for target in race.targets:
        panel.axhline(target, color=look.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        if label:
            panel.annotate(
                f"{target:.2f}",
                (1, target),
                xycoords=("axes fraction", "data"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=7,
                color=look.GREY,
                va="center",
                annotation_clip=False,
            )


def _starts(panel: Axes, race: Race, cluster: Cluster) -> None:
    """Second 0 has no place on a log axis: a tick on the left edge where its P@1 is not next to nothing."""
    colours = look.colours(race)
    for entry in race.entries:
        if entry.cluster == cluster and len(entry.curve):
            first = entry.curve.iloc[0]
            if _visible_start(entry):
                panel.plot(
                    [0, 0.03],
                    [first["p1"]] * 2,
                    color=colours[entry.system],
                    linewidth=2.2,
                    transform=panel.get_yaxis_transform(),
                    zorder=4,
                    solid_capstyle="butt",
                )


def _handles(race: Race, systems: list[str], axis: Axis) -> list[Any]:
    colours = look.colours(race)
    handles: list[Any] = []
    shown = [e for e in race.entries if e.counted]
    for system in systems:
        entries = [e for e in shown if e.system == system]
        if all(e.point for e in entries):
            handles.append(
                Line2D(
                    [],
                    [],
                    marker="*",
                    linestyle="",
                    color=colours[system],
                    markersize=9,
                    markeredgecolor="white",
                    label=f"{entries[0].label} (one point)",
                )
            )
            continue
        composed = [e for e in entries if e.composed]
        label = entries[0].label
        if composed:
            where = "" if len(composed) == len(entries) else " where dashed"
            label += f" (composed{where})"
        line: Any = look.dashes(composed[0]) if len(composed) == len(entries) else "solid"
        handles.append(Line2D([], [], color=colours[system], linestyle=line, label=label))
    if race.targets:
        handles.append(Line2D([], [], color=look.GREY, linewidth=0.8, linestyle=(0, (1, 2)), label="target"))
    if any(e.cut for e in shown):
        handles.append(
            Line2D([], [], marker=">", linestyle="", color=look.GREY, label="stopped at its time budget")
        )
    if axis == "seconds" and any(len(e.curve) and _visible_start(e) for e in shown):
        handles.append(
            Line2D([], [], color=look.GREY, linewidth=2.2, label="on the left edge: before training")
        )
    return handles


def _visible_start(entry: Entry) -> bool:
    first = entry.curve.iloc[0]
    return bool(first["seconds"] <= 0 and first["p1"] >= _KNOWS)


def caption(race: Race, axis: Axis) -> str:
    """What the figure shows and the context that its numbers hold in."""
    what = {
        "seconds": "Exact P@1 over all labels of the whole test split against training seconds "
        "(initialisation from the data included; evaluation, loading and compilation excluded).",
        "epoch": "The same runs against epochs: what a step teaches, whatever it costs.",
    }[axis]
    sentences = [what]
    if any(len(e.counted) > 1 for e in race.entries):
        sentences.append("Lines are medians over seeds at every evaluation, shades the seeds' range of P@1.")
    if any(e.composed and e.counted for e in race.entries):
        sentences.append(
            "Dashed lines are composed: the run's own accuracy a step, from a complete unthrottled run, "
            "placed at step "
            "times measured on the throttled link."
        )
    if any(e.point for e in race.entries):
        sentences.append("A star is a system without batches, evaluated once.")
    return " ".join([*sentences, *facts.absent(race), *facts.context(race)])
