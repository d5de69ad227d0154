"""What accuracy costs in CPU seconds: every system's end, and its training's share of the baseline's."""

import pandas as pd

from dslide.reporting.output import Table
from dslide.reporting.race import Entry, Race
from dslide.reporting.targets import number

TITLE = "Accuracy for CPU time"


def ends(entry: Entry) -> pd.DataFrame:
    """One row a counted run: members (1 unless an ensemble), p1, p3, p5 and the training's CPU seconds, all
    ranks and threads together; an ensemble on one rank also has a row for each of its first members."""
    rows = []
    for run in entry.counted:
        events = [event for event in run.of("eval") if event["step"] > 0]
        end, last = run.end or {}, events[-1]
        for event in events:
            alone = event is not last and event.get("members") is not None and len(end.get("ranks", [])) == 1
            if event is last or alone:
                seconds = event.get("cpu_seconds") if alone else end.get("cpu_seconds")
                rows.append(
                    {
                        "members": event.get("members", 1),
                        **{key: event[key] for key in ("p1", "p3", "p5")},
                        "cpu_seconds": seconds,
                    }
                )
    return pd.DataFrame(rows, columns=["members", "p1", "p3", "p5", "cpu_seconds"])


def table(race: Race) -> Table:
    data, rows = [], []
    # A composed curve has no CPU time of its own.
    found = {entry: ends(entry) for entry in race.entries if not entry.composed and entry.counted}
    found = {entry: runs for entry, runs in found.items() if runs["cpu_seconds"].notna().all()}
    base = next((runs for entry, runs in found.items() if entry.system == race.spec.baseline), None)
    whole = None if base is None else base["cpu_seconds"].median()
    for entry, runs in found.items():
        for members, part in runs.groupby("members"):
            p1, seconds = part["p1"], part["cpu_seconds"].median()
            data.append(
                {
                    "system": entry.system,
                    "cluster": entry.cluster.id,
                    "members": members,
                    "seeds": len(part),
                    **{key: part[key].mean() for key in ("p1", "p3", "p5")},
                    "p1_low": p1.min(),
                    "p1_high": p1.max(),
                    "cpu_seconds": seconds,
                    "of_baseline": seconds / whole if whole else None,
                }
            )
            several = runs["members"].max() > 1
            spread = f" ({p1.min():.2%}–{p1.max():.2%})" if len(part) > 1 else ""
            rows.append(
                {
                    "system": entry.label + (f", {members} averaged" if several and members > 1 else ""),
                    "cluster": entry.cluster.shape,
                    "P@1": f"{p1.mean():.2%}{spread}",
                    "P@3": f"{part['p3'].mean():.2%}",
                    "P@5": f"{part['p5'].mean():.2%}",
                    "CPU s": number(seconds),
                    "of the baseline's": f"{seconds / whole:.2f}" if whole else "",
                    "seeds": len(part),
                }
            )
    notes = [
        "CPU seconds of the training clock, all threads and ranks together, without loading and evaluation "
        "(median over seeds). P@k: mean over seeds, P@1 with its range.",
    ]
    if base is not None:
        notes.append(f"The baseline is {race.systems[str(race.spec.baseline)].label}.")
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)
