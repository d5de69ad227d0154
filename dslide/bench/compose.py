"""Composed runs: a curve that was not run for real, and says so.

A run that cannot finish inside its budget on a slow link is put together from two real ones: accuracy per
step from a complete run of the same system and seed on a faster link, and seconds per step timed on the slow
link. The record has kind "composed", names both parts, and holds the interval of the step time and what
checks it.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dslide.bench import records
from dslide.bench.records import Run, read_run
from dslide.bench.spec import bits_per_second
from dslide.errors import UserError
from dslide.files import atomic_dir, write_atomic

_RESAMPLES = 2000
_MUST_AGREE = ("system", "data", "split", "seed", "batch_size", "settings")
_STEP_TOLERANCE = 0.10
_P1_TOLERANCE = 0.01


def folder_of(path: Path) -> Path:
    """A run's folder, from itself or from the stamp `<folder>.done` beside it."""
    return path.with_suffix("") if path.suffix == ".done" else path


def step_seconds(run: Run) -> dict[str, Any]:
    """Median of a paced run's step times with its 95 % interval (bootstrap). UserError if it timed no
    steps."""
    seconds = np.array([event["seconds"] for event in run.of("step")], np.float64)
    if len(seconds) == 0:
        raise UserError(
            f"{run.folder}: no timed steps (status {run.status}: {run.reason or 'no reason given'})"
        )
    draws = np.random.Generator(np.random.Philox(0)).choice(seconds, (_RESAMPLES, len(seconds)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(seconds)),
        "low": float(low),
        "high": float(high),
        "steps": len(seconds),
        "method": "median, 95 % bootstrap interval",
    }


def against_rate(run: Run, seconds: float) -> dict[str, Any] | None:
    """A step's time against the bytes that the busiest interface moved over the link's rate; None without a
    rate.

    `plausible` is false if a step was faster than its bytes allow: then the traffic did not cross the link.
    """
    bandwidth = run.meta.get("cluster", {}).get("bandwidth")
    end = run.end
    steps = len(run.of("step"))
    if bandwidth is None or end is None or not end.get("ranks"):
        return None
    rate = bits_per_second(bandwidth)
    moved = max(max(rank.get("tx_bytes", 0), rank.get("rx_bytes", 0)) for rank in end["ranks"]) / steps
    ideal = moved * 8 / rate
    return {
        "bytes_a_step": moved,
        "rate": rate,
        "ideal_seconds": ideal,
        "ratio": seconds / ideal if ideal > 0 else None,
        "plausible": 0 < 0.9 * ideal <= seconds,
    }


def against_real(real: Run, evals: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """A composed curve against a real run on the same link, at the last step that both evaluated."""
    common = {e["step"] for e in evals if e["step"] > 0} & {e["step"] for e in real.of("eval")}
    if not common:
        return {
            "run": None,
            "reason": f"no evaluation in common (status {real.status}: {real.reason or '-'})",
        }
    step = max(common)
    ours, theirs = (next(e for e in events if e["step"] == step) for events in (evals, real.of("eval")))
    first = next((e for e in real.of("eval") if e["step"] == 0), None)
    measured = (theirs["train_seconds"] - (first["train_seconds"] if first else 0.0)) / step
    step_error = seconds / measured - 1
    difference = ours["p1"] - theirs["p1"]
    return {
        "step": step,
        "step_seconds_real": measured,
        "step_seconds_composed": seconds,
        "step_error": step_error,
        "step_within_10_percent": abs(step_error) <= _STEP_TOLERANCE,
        "p1_real": theirs["p1"],
        "p1_composed": ours["p1"],
        "p1_difference": difference,
        "p1_within_1_point": abs(difference) <= _P1_TOLERANCE,
    }


def _agree(curve: Run, other: Run, keys: tuple[str, ...] = _MUST_AGREE) -> None:
    for key in keys:
        if curve.meta.get(key) != other.meta.get(key):
            raise UserError(
                f"{curve.folder} and {other.folder} are not of the same run: {key} is "
                f"{curve.meta.get(key)!r} and {other.meta.get(key)!r}"
            )


def _part(run: Run, out: Path) -> dict[str, Any]:
    git = (run.meta.get("machine") or {}).get("git") or {}
    return {
        "folder": os.path.relpath(run.folder, out),
        "run_id": run.meta.get("run_id"),
        "status": run.status,
        "commit": git.get("commit"),
    }


def compose(
    curve_folder: Path, pace_folder: Path, out: Path, check_folder: Path | None = None
) -> dict[str, Any]:
    """Writes a composed run's record to `out`; returns its meta data.

    The evaluations of the curve are placed at step times the pace's median, after what came before step 0 on
    the clock. The end has the curve's status: one that ended before a target is a bound, as far as it was
    composed.

    Args:
        curve_folder: complete run of the same system, settings, seed, data and batch size.
        pace_folder: run with timed steps on the link in question (`pace_steps`).
        out: the new record's folder; replaced if there.
        check_folder: a real run on the same link, to compare with.
    """
    curve, pace = read_run(curve_folder), read_run(pace_folder)
    if curve.meta["kind"] != "measured" or pace.meta["kind"] != "measured":
        raise UserError(f"{out}: only measured runs can be composed")
    _agree(curve, pace)
    if not curve.of("eval"):
        raise UserError(f"{curve.folder}: no evaluations (status {curve.status}: {curve.reason or '-'})")
    times = step_seconds(pace)
    evals = [_placed(event, curve.of("eval")[0], times) for event in curve.of("eval")]
    meta = {
        **pace.meta,
        "kind": "composed",
        "created": time.time(),
        "run_id": out.name
        if pace.meta.get("run_id") is None
        else str(pace.meta["run_id"]).replace("paces/", "composed/"),
        "epochs": curve.meta.get("epochs"),
        "eval_epochs": curve.meta.get("eval_epochs"),
        "budget_seconds": curve.meta.get("budget_seconds"),
        "target": curve.meta.get("target"),
        "pace_steps": None,
        "parts": {"curve": _part(curve, out), "pace": _part(pace, out)},
        "step_seconds": times,
        "step_check": against_rate(pace, times["median"]),
    }
    if check_folder is not None:
        real = read_run(check_folder)
        _agree(curve, real)
        meta["parts"]["check"] = _part(real, out)
        meta["check"] = against_real(real, evals, times["median"])
    events = [{"event": "start", "step": 0, "train_seconds": 0.0}, *evals, _end(curve, pace, evals[-1])]
    with atomic_dir(out) as folder:
        write_atomic(folder / "meta.json", json.dumps(meta, indent=1, default=records.plain) + "\n")
        for event in events:
            records.append_event(folder, event)
    return meta


def compose_failure(curve_folder: Path, pace_folder: Path, out: Path) -> str | None:
    """If a part failed: writes a record of status `error` to `out` that says so, and returns the reason."""
    runs = {"curve": read_run(curve_folder), "pace": read_run(pace_folder)}
    lame = {"curve": not runs["curve"].of("eval"), "pace": not runs["pace"].of("step")}
    reasons = [f"{part} {run.status}: {run.reason or '-'}" for part, run in runs.items() if lame[part]]
    if not reasons:
        return None
    parts = {part: _part(run, out) for part, run in runs.items()}
    run_id = str(runs["pace"].meta.get("run_id")).replace("paces/", "composed/")
    meta = {**runs["pace"].meta, "kind": "composed", "run_id": run_id, "pace_steps": None, "parts": parts}
    reason = "; ".join(reasons)
    end = {"event": "end", "status": "error", "reason": reason, "train_seconds": 0.0, "step": 0}
    with atomic_dir(out) as folder:
        write_atomic(folder / "meta.json", json.dumps(meta, indent=1, default=records.plain) + "\n")
        records.append_event(folder, end)
    return reason


def _placed(event: dict[str, Any], first: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
    before = first["train_seconds"] if first["step"] == 0 else 0.0
    kept: dict[str, Any] = {
        k: event[k] for k in ("event", "step", "epoch", "samples", "p1", "p3", "p5") if k in event
    }
    at = {k: before + event["step"] * times[k] for k in ("median", "low", "high")}
    return {
        **kept,
        "train_seconds": at["median"],
        "train_seconds_low": at["low"],
        "train_seconds_high": at["high"],
    }


def _end(curve: Run, pace: Run, last: dict[str, Any]) -> dict[str, Any]:
    """The composed run's end: the curve's, with the traffic that the paced steps would add up to."""
    end = dict(curve.end or {"event": "end", "status": "interrupted"})
    for key in ("time", "cpu_seconds", "wait_seconds", "compute_seconds", "ranks", "tx_bytes", "rx_bytes"):
        end.pop(key, None)
    steps = len(pace.of("step"))
    for key in ("tx_bytes", "rx_bytes"):
        if pace.end is not None and key in pace.end:
            end[key] = round(pace.end[key] / steps * last["step"])
    return {**end, "step": last["step"], "train_seconds": last["train_seconds"]}
