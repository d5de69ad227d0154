"""How the speed of a training step moves with threads, ranks, batch and hidden units, one at a time.

The records are what `dslide bench scaling --json` printed, a part of it a file or all of it (`--only`):
scaling*.json beside the experiment's records, else results/reference/scaling/.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from dslide.bench.speed.scaling import AXES, BATCH, OVERSUBSCRIBED, PROJECTION
from dslide.errors import UserError
from dslide.files import read_json_object
from dslide.paths import content_root
from dslide.reporting import look
from dslide.reporting.output import Table
from dslide.reporting.race import Race, speed

TITLE = "Scaling of a training step"
_COLOUR = "#0b4f9e"
_LINKS = {"no limit": "#667080", "1gbit": "#d1462f", "100mbit": "#f0962e"}
_LABELS = {"batch": "points a batch", "hidden": "hidden units"}


def records(race: Race) -> list[dict[str, Any]]:
    """The benchmark's reports. UserError names a broken file."""
    files = sorted(race.results.glob("scaling*.json")) or sorted(
        (content_root() / "results" / "reference" / "scaling").glob("*.json")
    )
    found = []
    for path in files:
        record = read_json_object(path, "a benchmark's report")
        if not {"rows", "machine", "size"} <= record.keys():
            raise UserError(f"{path}: not what `dslide bench scaling --json` prints")
        race.inputs[f"scaling/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        found.append(record)
    return found


def points(found: list[dict[str, Any]], axis: str) -> Iterator[tuple[int, list[str], dict[str, Any]]]:
    """(number, marks, row) of an axis: "ranks 4, projected, 1gbit" is (4, ["projected", "1gbit"], row)."""
    for record in found:
        for row in record["rows"]:
            first, *marks = str(row["case"]).split(", ")
            if row["bench"] == "scaling" and first.startswith(f"{axis} "):
                yield int(first.split()[1]), marks, row


def figure(race: Race) -> Figure:
    """A panel an axis, samples a second on logarithms."""
    found = records(race)
    if not found:
        return look.nothing("There is no record of `dslide bench scaling --json`.")
    figure, panels = plt.subplots(2, 2, figsize=(8.4, 6.0), layout="constrained")
    for axis, panel in zip(AXES, panels.flat, strict=True):
        all_points = list(points(found, axis))
        measured = [(number, row) for number, marks, row in all_points if marks in ([], [OVERSUBSCRIBED])]
        over = {number for number, marks, _ in all_points if marks == [OVERSUBSCRIBED]}
        _line(panel, [p for p in measured if p[0] not in over], "measured", color=_COLOUR, marker="o")
        _line(
            panel,
            [p for p in measured if p[0] in over],
            OVERSUBSCRIBED,
            color=_COLOUR,
            marker="o",
            markerfacecolor="white",
            linestyle="none",
        )
        if axis == "ranks":
            for link, colour in _LINKS.items():
                projected = [(n, row) for n, marks, row in all_points if marks == ["projected", link]]
                label = "projected, " + (speed(link) if link[0].isdigit() else link)
                _line(
                    panel,
                    projected,
                    label,
                    color=colour,
                    marker="s",
                    markerfacecolor="white",
                    linestyle=(0, (4, 2)),
                )
            figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncol=5)
        if axis == "threads" and measured:
            first = measured[0][1]["value"]
            ideal = [n for n, _ in measured]
            (line,) = panel.plot(
                ideal,
                [first * n for n in ideal],
                color=look.GREY,
                linewidth=0.9,
                linestyle=(0, (1, 2)),
                label="as many times one thread",
            )
            panel.legend(handles=[line], loc="lower right", frameon=False)
        _axes(panel, axis, sorted({number for number, _, _ in all_points}))
    return figure


def _line(panel: Axes, line: list[tuple[int, dict[str, Any]]], label: str, **style: Any) -> None:
    if not line:
        return
    line = sorted(line, key=lambda point: point[0])
    values = [row["value"] for _, row in line]
    ranges = [[v - row["low"] for v, (_, row) in zip(values, line, strict=True)]]
    ranges.append([row["high"] - v for v, (_, row) in zip(values, line, strict=True)])
    panel.errorbar([n for n, _ in line], values, yerr=ranges, label=label, capsize=2, elinewidth=0.8, **style)


def _axes(panel: Axes, axis: str, numbers: list[int]) -> None:
    panel.set_xscale("log")
    if axis == "threads":
        panel.set_ylim(bottom=0)
    else:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.set_xlabel(_LABELS.get(axis, axis))
    panel.set_ylabel("samples/s")
    panel.set_xticks(numbers, [f"{n:,}" for n in numbers])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def caption(race: Race) -> str:
    found = records(race)
    if not found:
        return "There is no record of `dslide bench scaling --json`."
    machine, size = found[0]["machine"], found[0]["size"]
    marks = {json.dumps(record["machine"], sort_keys=True) for record in found}
    return " ".join(
        [
            f"Samples a second of the default recipe, {machine['data']} features and labels; batch {BATCH} "
            f"and {size['hidden']} hidden units where they are not the axis. Medians; bars from the slowest "
            "to the fastest group of steps. Solid: measured. Ranks have one thread each and exchange over "
            "loopback; open circles are more ranks than cores. Dashed: projected for nodes with a core each, "
            f"{PROJECTION.removeprefix('projected ranks: ')}.",
            f"Machine: {machine['cpu']}, {machine['threads']} threads, kernels {machine['instruction_set']}.",
            *(["The records are from several machines."] if len(marks) > 1 else []),
        ]
    )


def table(race: Race) -> Table:
    found, data, rows = records(race), [], []
    for axis in AXES:
        for number, marks, row in points(found, axis):
            data.append({"axis": axis, "number": number, "kind": ", ".join(marks) or "measured"}
                        | {key: row[key] for key in ("value", "low", "high")})  # fmt: skip
            rows.append(
                {
                    "case": row["case"],
                    "samples/s": f"{row['value']:,.0f}",
                    "range": f"{row['low']:,.0f} - {row['high']:,.0f}",
                }
            )
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], [PROJECTION] if rows else [])
