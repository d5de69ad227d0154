"""The slow runs that were made once and are kept: when they reach the experiment's targets."""

import pandas as pd

from dslide.paths import content_root
from dslide.reporting import facts, reference
from dslide.reporting.output import Table
from dslide.reporting.race import Race, evaluations
from dslide.reporting.targets import COMPOSED, number

TITLE = "Reference records"


def table(race: Race) -> Table:
    data, rows = [], []
    for run in reference.runs(content_root(), "runs", "composed"):
        frame, composed = evaluations(run), run.meta.get("kind") == "composed"
        if frame.empty or run.meta.get("data") != race.spec.data:
            continue
        row = {
            "system": reference.label(run),
            "cluster": reference.where(run),
            "kind": str(run.meta.get("kind")),
        }
        record: dict[str, object] = {**row, "status": run.status, "best_p1": frame["p1"].max()}
        for target in race.targets:
            there = frame[frame["p1"] >= target]
            seconds = float((frame.iloc[-1] if there.empty else there.iloc[0])["seconds"])
            record[f"seconds_to_{target:.2f}"], record[f"bound_{target:.2f}"] = seconds, there.empty
            row[f"s to P@1 {target:.2f}"] = (
                ("> " if there.empty else "") + number(seconds) + (COMPOSED if composed else "")
            )
        row |= {
            "ended": f"{run.status}, P@1 {frame['p1'].iloc[-1]:.2%}",
            "machine": str(facts.dig(run.meta, "machine", "cpu", "model")),
        }
        data.append(record)
        rows.append(row)
    notes = [
        "Runs of the rivals that take too long for every race; made once, on the machine named, and kept "
        "with the project."
    ]
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes if rows else [])
