"""Bytes on the wire a training sample against the model's parameters: measured here, projected to larger
models."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from dslide.reporting import facts, look, roles, traffic
from dslide.reporting.output import Table
from dslide.reporting.race import Race
from dslide.reporting.targets import number

TITLE = "Bytes sent a sample"

# Networks that the papers train, hidden x (features + labels): where a projection would matter.
_MODELS = {
    "Amazon-670K, 128 hidden": 128 * (135_909 + 670_091),
    "Amazon-670K, 1,024 hidden": 1024 * (135_909 + 670_091),
}


def table(race: Race) -> Table:
    data, rows = [], []
    for entry, run, sent in traffic.measured(race):
        weights = traffic.parameters(race, run)
        exact = None if sent.formula is None or sent.payload is None else sent.payload == sent.formula
        gap = sent.interface / sent.payload - 1 if sent.interface and sent.payload else None
        data.append(
            {
                "system": entry.system,
                "cluster": entry.cluster.id,
                "parameters": weights,
                "ranks": traffic.nodes(run),
                "payload_bytes_per_sample": sent.payload,
                "formula_bytes_per_sample": sent.formula,
                "equals_formula": exact,
                "interface_bytes_per_sample": sent.interface,
                "interface_over_payload": gap,
            }
        )
        rows.append(
            {
                "system": entry.label,
                "cluster": entry.cluster.title,
                "parameters": f"{weights:,}" if weights else "",
                "payload": number(sent.payload) if sent.payload else "not counted",
                "formula": ""
                if sent.formula is None
                else f"{sent.formula:,}" + (" (equal)" if exact else " (differs)"),
                "interface counters": number(sent.interface) if sent.interface else "not counted",
                "counters − payload": f"{gap:+.1%}" if gap is not None else "",
            }
        )
    notes = [
        "Bytes a training sample, summed over ranks. Payload is what a system counts itself, the counters "
        "are those of the "
        "nodes' network interfaces while the training clock runs (protocol headers included). dslide's "
        "formula is "
        "2(P−1)·H·b + P(P−1)·(2s+4) for P ranks, H hidden units, b bytes a value and s bytes of a row's "
        "scale.",
    ]
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)


def figure(race: Race) -> Figure:
    found = traffic.measured(race)
    points = [(e, r, s, w) for e, r, s in found if (w := traffic.parameters(race, r))]
    if not points:
        return look.nothing("No run on several nodes with counted bytes yet.")
    colours, shapes = look.colours(race), look.markers(race)
    figure, panel = plt.subplots(figsize=(6.6, 3.9), layout="constrained")
    low = min(w for *_, w in points)
    weights = np.geomspace(low / 2, 1.25e9, 50)
    order = list(dict.fromkeys(entry.system for entry, *_ in points))
    handles = []
    first: dict[str, bool] = {}
    for entry, _, sent, own in points:
        colour = colours[entry.system]
        value = sent.interface or sent.payload
        aside = 1.07 ** (order.index(entry.system) - (len(order) - 1) / 2)
        panel.plot(
            own * aside,
            value,
            shapes[entry.cluster.id],
            color=colour,
            markeredgecolor="white",
            markersize=7,
            zorder=4,
        )
        if first.setdefault(entry.system, True):
            first[entry.system] = False
            handles.append(
                Line2D([], [], marker="o", linestyle="", color=colour, label=f"{entry.label}, measured")
            )
    drawn: set[tuple[str, float]] = set()
    for entry, run, sent, _ in points:
        batch, part = traffic.batch_size(run), roles.role(race, entry.system)
        if sent.formula:
            if ("dslide", sent.formula) not in drawn:
                drawn.add(("dslide", sent.formula))
                panel.plot(
                    weights,
                    np.full_like(weights, sent.formula),
                    color=colours[entry.system],
                    linewidth=1.2,
                    zorder=2,
                )
                panel.annotate(
                    f"dslide's formula: {sent.formula:,} B whatever the labels",
                    (weights[-1], sent.formula),
                    xytext=(0, 4),
                    textcoords="offset points",
                    ha="right",
                    fontsize=7.5,
                )
        elif part in (roles.DENSE_PUBLISHED, roles.DENSE_TUNED) and batch:
            line = traffic.dense(weights, traffic.nodes(run), batch)
            if ("dense", batch) not in drawn:
                drawn.add(("dense", batch))
                panel.plot(
                    weights,
                    line,
                    color=colours[entry.system],
                    linewidth=1.2,
                    linestyle=(0, (1, 1.5)),
                    zorder=2,
                )
                handles.append(
                    Line2D(
                        [],
                        [],
                        color=colours[entry.system],
                        linestyle=(0, (1, 1.5)),
                        label=f"projected: dense all-reduce, batch {batch}",
                    )
                )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(weights[0], weights[-1])
    panel.set_xlabel("parameters of the model (log)")
    panel.set_ylabel("bytes sent a sample, all nodes (log)")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _si(v, ("", " K", " M", " G"))))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _si(v, (" B", " KB", " MB", " GB"))))
    for name, value in _MODELS.items():
        if weights[0] < value < weights[-1]:
            panel.axvline(value, color="#c5cad1", linewidth=0.8, zorder=1)
            panel.annotate(
                name,
                (value, 0.45),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=7,
                color=look.GREY,
                xytext=(-9, 0),
                textcoords="offset points",
                va="center",
            )
    shown = {e.cluster.id: e.cluster for e, *_ in points}
    if len(shown) > 1:
        handles += [
            Line2D([], [], marker=shapes[i], linestyle="", color=look.GREY, label=c.title)
            for i, c in shown.items()
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _si(value: float, units: tuple[str, ...]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:g}{units[power]}"


def caption(race: Race) -> str:
    return " ".join(
        [
            "Bytes sent a training sample, summed over the nodes, against the model's parameters. Marks "
            "are measured "
            "by the interfaces' counters (payload where there are none) on this data, all of one model, "
            "moved apart sideways "
            "to be seen. dslide's line is its formula, which "
            "holds no term for features or labels. The dotted line is projected, not measured: 2(P−1)·4 "
            "bytes a "
            "parameter and batch, a ring all-reduce of float32 gradients.",
            *facts.context(race),
        ]
    )
