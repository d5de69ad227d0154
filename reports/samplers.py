"""Samplers compared, and what each choice of the recipe is worth, in an experiment with `change_of`."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dslide.reporting import curves, facts, look
from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import number, reach

TITLE = "Samplers, and what each choice is worth"

# A colour a line while they last, then the same colours dashed.
_COLOURS = ("#0b4f9e", "#d1462f", "#1d7a46", "#f0962e", "#8a4fa3", "#00798c", "#b05f8f", "#555555")


def _is_ablation(race: Race) -> bool:
    return any(system.change_of for system in race.systems.values())


def _lines(race: Race) -> list[Entry]:
    """The systems that are not changes of another one, best at the end first."""
    found = [e for e in race.entries if e.counted and race.systems[e.system].change_of is None]
    return sorted(found, key=lambda entry: -_end(entry))


def _end(entry: Entry) -> float:
    """P@1 at the end, the median over seeds."""
    return float(entry.curve["p1"].iloc[-1])


def figure(race: Race) -> Figure:
    """P@1 against training seconds, a line a sampler."""
    lines = _lines(race) if _is_ablation(race) else []
    if not lines:
        return look.nothing("The experiment has no `change_of`, or none of its runs is evaluated yet.")
    figure, panel = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
    for place, entry in enumerate(lines):
        curve = curves.timed(entry.curve)
        colour, dashed = _COLOURS[place % len(_COLOURS)], place >= len(_COLOURS)
        panel.plot(
            curve["seconds"],
            curve["p1"],
            color=colour,
            linestyle=(0, (4, 2)) if dashed else "solid",
            marker=">" if entry.cut else ".",
            markevery=[len(curve) - 1] if entry.cut else None,
            markersize=5,
            label=f"{entry.label}  {_end(entry):.1%}",
        )
    for target in race.targets:
        panel.axhline(target, color=look.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("training seconds (log)")
    panel.set_ylabel("P@1 on the test split")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside right center", title="sampler and P@1 at the end", alignment="left")
    return figure


def caption(race: Race) -> str:
    said = (
        "Exact P@1 over all labels of the whole test split against training seconds, one line a sampler, the "
        "best at the end first. Each run has its own schedule to its end; dotted lines are the targets."
    )
    cut = (
        " A triangle is a run that was stopped at its time budget."
        if any(e.cut for e in race.entries)
        else ""
    )
    return " ".join([said + cut, *facts.absent(race), *facts.context(race)])


def table(race: Race) -> Table:
    """The samplers with their times to target, and each change with what it costs."""
    if not _is_ablation(race):
        return Table(pd.DataFrame(), [])
    data, samplers, changes = [], [], []
    for entry in race.entries:
        parent = race.systems[entry.system].change_of
        row = {"system": entry.label}
        if not entry.counted:
            row["end P@1"] = entry.reason or ""
            (samplers if parent is None else changes).append(row)
            continue
        before = race.find(parent, entry.cluster.id) if parent else None
        end, seconds = _end(entry), float(entry.curve["seconds"].iloc[-1])
        epochs = float(entry.curve["epoch"].iloc[-1])
        lost = end - _end(before) if before and before.counted else None
        record = {
            "system": entry.system,
            "change_of": parent,
            "p1": end,
            "seconds": seconds,
            "epochs": epochs,
        }
        record |= {"p1_change": lost, "seeds": len(entry.counted), "status": entry.statuses}
        reached = {target: reach(entry, target) for target in race.targets}
        record |= {f"seconds_to_{t:g}": r.seconds if r and not r.bound else None for t, r in reached.items()}
        data.append(record)
        row |= {"end P@1": f"{end:.2%}", "epochs": f"{epochs:g}", "seconds": number(seconds)}
        if parent is None:
            row |= {f"s to {t:.2f}": str(r) if r else "" for t, r in reached.items()}
            samplers.append(row)
        else:
            row["against"] = before.label if before else parent
            row["points of P@1"] = f"{100 * lost:+.1f}" if lost is not None else ""
            changes.append(row)
    samplers.sort(key=lambda row: row["end P@1"], reverse=True)
    notes = [
        "Samplers: a schedule of their own each, ordered by P@1 at the end; \u201c> x\u201d: the target was "
        "not reached by x seconds.",
        "Changes: one choice of the system they are held against is another, the rest is the same. One seed "
        "each, so differences below half a point mean nothing.",
    ]
    return Table(
        pd.DataFrame(data),
        [("Samplers", pd.DataFrame(samplers)), ("What each choice is worth", pd.DataFrame(changes))],
        notes,
    )
