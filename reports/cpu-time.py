"""What accuracy costs in CPU seconds: every system's end, and its training's share of the baseline's."""

import pandas as pd

from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import number

TITLE = "Accuracy for CPU time"


def cpu_seconds(entry: Entry) -> pd.Series:
    """CPU seconds of training of every counted run, all ranks and threads together."""
    ends = [run.end or {} for run in entry.counted]
    return pd.Series([end.get("cpu_seconds") for end in ends], dtype=float)


def _timed(entry: Entry) -> bool:
    """A composed curve has no CPU time of its own."""
    return not entry.composed and len(entry.counted) > 0 and cpu_seconds(entry).notna().all()


def table(race: Race) -> Table:
    data, rows = [], []
    base = next((e for e in race.entries if e.system == race.spec.baseline and _timed(e)), None)
    whole = cpu_seconds(base).median() if base is not None else None
    for entry in race.entries:
        if not _timed(entry):
            continue
        ends = pd.DataFrame([run.evals().sort_values("step").iloc[-1] for run in entry.counted])
        seconds = cpu_seconds(entry)
        record = {
            "system": entry.system,
            "cluster": entry.cluster.id,
            "seeds": len(ends),
            **{key: ends[key].mean() for key in ("p1", "p3", "p5")},
            "p1_low": ends["p1"].min(),
            "p1_high": ends["p1"].max(),
            "cpu_seconds": seconds.median(),
            "of_baseline": seconds.median() / whole if whole else None,
        }
        data.append(record)
        spread = f" ({ends['p1'].min():.2%}–{ends['p1'].max():.2%})" if len(ends) > 1 else ""
        rows.append(
            {
                "system": entry.label,
                "cluster": entry.cluster.shape,
                "P@1": f"{record['p1']:.2%}{spread}",
                "P@3": f"{record['p3']:.2%}",
                "P@5": f"{record['p5']:.2%}",
                "CPU s": number(record["cpu_seconds"]),
                "of the baseline's": f"{record['of_baseline']:.2f}" if whole else "",
                "seeds": len(ends),
            }
        )
    notes = [
        "CPU seconds of the training clock, all threads and ranks together, without loading and evaluation "
        "(median over seeds). P@k: mean over seeds, P@1 with its range.",
    ]
    if base is not None:
        notes.append(f"The baseline is {base.label}.")
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)
