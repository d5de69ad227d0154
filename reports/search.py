"""What was tuned: the recorded searches of results/reference/search/, one JSON file a system.

A file is an object with `system`, `trials` (a list of objects with `settings` and `p1`, P@1 on a validation part
of the training set, and perhaps `error`), `chosen` (settings), and optionally `label` and `space` (what was
searched).
"""

import json
from typing import Any

import pandas as pd

from dslide.errors import UserError
from dslide.paths import content_root
from dslide.reporting.output import Table
from dslide.reporting.race import Race

TITLE = "What was tuned"


def searches() -> list[dict[str, Any]]:
    """The recorded searches, by file name. UserError names a broken file."""
    found = []
    for path in sorted((content_root() / "results" / "reference" / "search").glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
        if isinstance(record, dict) and isinstance(record.get("trials"), list):
            found.append({"system": path.stem, **record})
    return found


def _score(trial: dict[str, Any]) -> float | None:
    value = trial.get("p1", trial.get("score"))
    return float(value) if isinstance(value, int | float) else None


def _settings(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value or "")
    return ", ".join(f"{key} {_settings(v) if isinstance(v, dict) else v}" for key, v in value.items())


def table(race: Race) -> Table:
    data, rows = [], []
    for record in searches():
        trials = [t for t in record["trials"] if isinstance(t, dict)]
        scores = [s for t in trials if (s := _score(t)) is not None]
        best = max(trials, key=lambda t: _score(t) or -1.0, default={})
        chosen = record.get("chosen") or record.get("best") or best
        chosen = chosen.get("settings", chosen) if isinstance(chosen, dict) else chosen
        varied = sorted({key for t in trials for key in (t.get("settings") or {})})
        tuned = _settings(record["space"]) if record.get("space") else ", ".join(varied)
        data.append(
            {
                "system": record["system"],
                "trials": len(trials),
                "best_validation_p1": max(scores, default=None),
                "chosen": json.dumps(chosen, sort_keys=True),
            }
        )
        rows.append(
            {
                "system": str(record.get("label") or record["system"]),
                "tuned": tuned,
                "trials": str(len(trials)),
                "best P@1 on validation": f"{max(scores):.2%}" if scores else "",
                "chosen": _settings(chosen),
            }
        )
    notes = [
        "Searched on a validation part of the training set, never on the test split; every trial is in "
        "the record."
    ]
    return Table(pd.DataFrame(data), [("", pd.DataFrame(rows))], notes)
