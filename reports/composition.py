"""How composed runs are made, and how far they are from runs on the real link: the same system, link and
seed."""

import pandas as pd

from dslide.bench.records import Run
from dslide.paths import content_root
from dslide.reporting import reference
from dslide.reporting.output import Table
from dslide.reporting.race import Race
from dslide.reporting.targets import number

TITLE = "Composed runs and their check"


def table(race: Race) -> Table:
    data, made, held = [], [], []
    for entry in race.entries:
        for run in entry.runs if entry.composed else ():
            data.append(
                {
                    "system": entry.system,
                    "cluster": entry.cluster.id,
                    "seed": run.meta.get("seed"),
                    **_numbers(run),
                }
            )
            made.append({"system": entry.label, "cluster": entry.cluster.title, **_made(run)})
            if run.meta.get("check"):
                held.append({"system": entry.label, "cluster": entry.cluster.title, **_held(run)})
    for run in reference.runs(content_root(), "composed"):
        if run.meta.get("check"):
            held.append(
                {
                    "system": f"{reference.label(run)} (reference)",
                    "cluster": reference.where(run),
                    **_held(run),
                }
            )
    notes = [
        "A composed run is the accuracy a step of a complete unthrottled run, placed at the median step "
        "time that was "
        "measured on the throttled link; both parts are kept. Bytes over rate: the time that the bytes of "
        "the busiest "
        "node's interface need on the link. Differences are composed against real, at the last step that "
        "both evaluated.",
    ]
    return Table(
        pd.DataFrame(data),
        [("Timed steps", pd.DataFrame(made)), ("Held against a real run", pd.DataFrame(held))],
        notes,
    )


def _numbers(run: Run) -> dict[str, object]:
    times, rate, check = (run.meta.get(key) or {} for key in ("step_seconds", "step_check", "check"))
    return {
        "steps": times.get("steps"),
        "step_seconds": times.get("median"),
        "step_seconds_low": times.get("low"),
        "step_seconds_high": times.get("high"),
        "wire_seconds": rate.get("ideal_seconds"),
        "check_step_error": check.get("step_error"),
        "check_p1_difference": check.get("p1_difference"),
    }


def _made(run: Run) -> dict[str, str]:
    times, rate = run.meta.get("step_seconds") or {}, run.meta.get("step_check") or {}
    if not times:
        return {
            "timed steps": "0",
            "seconds a step (95 %)": run.status,
            "bytes over rate": "",
            "step over it": "",
        }
    interval = f"{number(times['median'])} ({number(times['low'])}–{number(times['high'])})"
    ideal, ratio = rate.get("ideal_seconds"), rate.get("ratio")
    warning = "" if rate.get("plausible", True) else " (faster than its bytes allow)"
    return {
        "timed steps": str(times["steps"]),
        "seconds a step (95 %)": interval,
        "bytes over rate": number(ideal) if ideal else "",
        "step over it": f"{ratio:.2f}{warning}" if ratio else "",
    }


def _held(run: Run) -> dict[str, str]:
    check = run.meta["check"]
    if check.get("step") is None:
        return {"real run": str(check.get("reason") or "nothing to compare"), "step time": "", "P@1": ""}
    epoch = next((e.get("epoch") for e in run.of("eval") if e["step"] == check["step"]), None)
    inside = {True: "", False: " (beyond 10 %)"}[bool(check.get("step_within_10_percent", True))]
    close = {True: "", False: " (beyond a point)"}[bool(check.get("p1_within_1_point", True))]
    return {
        "real run": f"{check['step']:,} steps" + (f", {epoch:.2g} epochs" if epoch is not None else ""),
        "step time": f"{check['step_error']:+.1%}{inside}",
        "P@1": f"{check['p1_difference'] * 100:+.2f} points{close}",
    }
