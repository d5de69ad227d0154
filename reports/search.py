"""What was tuned: the recorded searches of results/reference/search/, one JSON file a system.

A file has `system`, `label`, `space` (values by setting), `target` (P@1 on a validation part of the training
set), `trials` (objects with settings, batch_size, status, p1 and cost in seconds) and `chosen` (the same of
the best trial).
"""

import json
from typing import Any

import pandas as pd

from dslide.files import read_json_object
from dslide.paths import content_root
from dslide.reporting.output import Table
from dslide.reporting.race import Race
from dslide.reporting.targets import number

TITLE = "What was tuned"


def searches() -> list[dict[str, Any]]:
    """The recorded searches, by file name. UserError names a broken file."""
    found = []
    for path in sorted((content_root() / "results" / "reference" / "search").glob("*.json")):
        record = read_json_object(path, "a search's record")
        if isinstance(record.get("trials"), list):
            found.append({"file": path.stem, **record})
    return found


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {_words(value) if isinstance(value, dict) else value}" for key, value in settings.items()
    )


def _space(space: Any) -> str:
    """Each setting with its values: "lr 0.05 … 0.2 (5)"."""
    if not isinstance(space, dict):
        return str(space or "")
    parts = []
    for key, values in space.items():
        if isinstance(values, list) and len(values) > 2:
            parts.append(f"{key} {values[0]} … {values[-1]} ({len(values)})")
        else:
            parts.append(f"{key} {' or '.join(map(str, values)) if isinstance(values, list) else values}")
    return "; ".join(parts)


def _transports(record: dict[str, Any]) -> list[str]:
    """A sentence for each bandwidth at which the record timed transports."""
    steps: dict[str, list[str]] = {}
    for entry in record.get("transports", []):
        seconds = entry["step_seconds"]
        interval = f"{number(seconds['low'])} – {number(seconds['high'])}"
        steps.setdefault(entry["bandwidth"], []).append(
            f"{entry['transport']} {number(seconds['median'])} s ({interval})"
        )
    name = record.get("label") or record["file"]
    return [f"{name}, a step at {rate}: {', '.join(times)}." for rate, times in steps.items()]


def table(race: Race) -> Table:
    data, rows = [], []
    for record in searches():
        chosen = record.get("chosen") or {}
        settings = {
            **chosen.get("settings", {}),
            **({"batch_size": chosen.get("batch_size")} if "batch_size" in record.get("space", {}) else {}),
        }
        cost, target = chosen.get("cost"), record.get("target")
        failed = sum(trial.get("status") in ("error", "diverged", "skipped") for trial in record["trials"])
        data.append(
            {
                "search": record["file"],
                "data": record.get("data"),
                "trials": len(record["trials"]),
                "failed": failed,
                "target": target,
                "cost_seconds": cost,
                "validation_p1": chosen.get("p1"),
                "chosen": json.dumps(settings, sort_keys=True),
            }
        )
        rows.append(
            {
                "system": str(record.get("label") or record.get("system") or record["file"]),
                "tried": _space(record.get("space")),
                "trials": f"{len(record['trials'])}" + (f" ({failed} failed)" if failed else ""),
                "chosen": _words(settings),
                "best s": number(cost) if isinstance(cost, int | float) else "",
                "to validation P@1": f"{target:.2f}" if target else "",
            }
        )
    notes = [
        "Searched on a validation part of the training set, never on the test split. Every trial is in the "
        "record, with what its cost counts.",
    ]
    transports = [line for record in searches() for line in _transports(record)]
    if transports:
        notes.append(
            "Transports were timed on the throttled nodes with the chosen settings (median of the steps, 95 "
            "% interval); the faster at the bandwidth that the search is for was taken. "
            + " ".join(transports)
        )
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)
