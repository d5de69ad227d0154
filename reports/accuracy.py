"""What every system ends with, and how much of the lead the recipe gives and how much the system."""

import pandas as pd

from dslide.reporting import roles
from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import COMPOSED, number, ratio, reach

TITLE = "Accuracy at the end, and where the lead comes from"


def _percent(values: pd.Series) -> str:
    """The median as a percentage, with the range where there are several seeds that differ."""
    middle, low, high = values.median(), values.min(), values.max()
    return f"{middle:.2%}" + (f" ({low:.2%}–{high:.2%})" if high > low else "")


def last(entry: Entry) -> pd.DataFrame:
    """The last evaluation of every counted run."""
    return pd.DataFrame([run.evals().sort_values("step").iloc[-1] for run in entry.counted])


def decomposition(race: Race) -> list[dict[str, object]]:
    """On one node: the recipe's part (TensorFlow with it over TensorFlow's full softmax) and the
    system's part.

    Each row compares two entries: end P@1 of both, and how many times longer the first takes to each target.
    """
    pairs = [
        ("the recipe", roles.TF_FULL, roles.TF_RECIPE),
        ("the system", roles.TF_RECIPE, roles.DSLIDE),
        ("both", roles.TF_FULL, roles.DSLIDE),
    ]
    found: list[dict[str, object]] = []
    for what, before, after in pairs:
        one, two = (_on_one_node(race, part) for part in (before, after))
        if one is None or two is None:
            continue
        row: dict[str, object] = {"what": what, "from": one, "to": two}
        row["ratios"] = {t: ratio(reach(one, t), reach(two, t)) for t in race.targets}
        found.append(row)
    return found


def _on_one_node(race: Race, part: str) -> Entry | None:
    entries = [
        e for e in race.entries if e.cluster.nodes == 1 and e.counted and roles.role(race, e.system) == part
    ]
    return next(iter(entries), None)


def table(race: Race) -> Table:
    data, rows = [], []
    for entry in race.entries:
        row = {"system": entry.label, "cluster": entry.cluster.title}
        record: dict[str, object] = {
            "system": entry.system,
            "cluster": entry.cluster.id,
            "status": entry.statuses,
            "kind": "composed" if entry.composed else "measured",
            "reason": entry.reason or "",
        }
        if not entry.counted:
            rows.append(
                row
                | {"P@1": entry.reason or "", "P@3": "", "P@5": "", "epochs": "", "seconds": "", "ended": ""}
            )
            data.append(record)
            continue
        ends = last(entry)
        for k in ("p1", "p3", "p5"):
            record[k], record[f"{k}_low"], record[f"{k}_high"] = (
                ends[k].median(),
                ends[k].min(),
                ends[k].max(),
            )
        record |= {
            "epochs": ends["epoch"].median(),
            "seconds": ends["train_seconds"].median(),
            "seeds": len(ends),
        }
        data.append(record)
        mark = COMPOSED if entry.composed else ""
        rows.append(
            row
            | {
                "P@1": _percent(ends["p1"]),
                "P@3": f"{ends['p3'].median():.2%}",
                "P@5": f"{ends['p5'].median():.2%}",
                "epochs": f"{ends['epoch'].median():.2g}",
                "seconds": number(ends["train_seconds"].median()) + mark,
                "ended": entry.statuses,
            }
        )
    parts = [("", pd.DataFrame(rows))]
    shares = []
    for part in decomposition(race):
        before, after = part["from"], part["to"]
        assert isinstance(before, Entry) and isinstance(after, Entry) and isinstance(part["ratios"], dict)
        p1 = [last(entry)["p1"].median() for entry in (before, after)]
        share = {
            "what": part["what"],
            "compared": f"{before.label} → {after.label}",
            "end P@1": f"{p1[0]:.2%} → {p1[1]:.2%}",
        }
        shares.append(
            share | {f"times faster to {t:.2f}": str(r) if r else "–" for t, r in part["ratios"].items()}
        )
    parts.append(("Where the lead comes from (one node)", pd.DataFrame(shares)))
    notes = [
        "P@k of the last evaluation on the whole test split; medians over seeds, the seeds' range of P@1 "
        "in brackets."
    ]
    if any(e.composed and e.counted for e in race.entries):
        notes.append(f"{COMPOSED} composed seconds.")
    return Table(pd.DataFrame(data), parts, notes)
