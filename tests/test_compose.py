"""Composed runs: arithmetic, provenance, and what may not be composed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dslide.bench.compose import compose, compose_failure, folder_of
from dslide.bench.records import read_run
from dslide.errors import UserError

SPEC = {"system": "s", "data": "d", "split": "test", "seed": 0, "batch_size": 8, "settings": {"lr": 0.1}}


def write(folder: Path, events: list[dict[str, Any]], **meta: Any) -> Path:
    """A run's record from its events."""
    folder.mkdir(parents=True)
    cluster = {"nodes": 2, "cores": 1, "bandwidth": None, "throttled": False}
    whole = {
        "schema_version": 1,
        "kind": "measured",
        "run_id": folder.name,
        **SPEC,
        "cluster": cluster,
        **meta,
    }
    (folder / "meta.json").write_text(json.dumps(whole))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def evaluation(step: int, seconds: float, p1: float) -> dict[str, Any]:
    """An `eval` event."""
    return {"event": "eval", "step": step, "epoch": step / 10, "samples": 8 * step, "train_seconds": seconds,
            "p1": p1, "p3": p1 / 2, "p5": p1 / 3}  # fmt: skip


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    events = [evaluation(0, 0.5, 0.0), evaluation(10, 1.5, 0.2), evaluation(20, 2.5, 0.4)]
    return write(tmp_path / "curve", [*events, {"event": "end", "status": "target", "train_seconds": 2.5}])


@pytest.fixture
def pace(tmp_path: Path) -> Path:
    steps = [{"event": "step", "step": i, "seconds": s} for i, s in enumerate([2.0, 3.0, 2.5, 2.5, 2.0, 9.0])]
    ranks = [{"tx_bytes": 6_000_000, "rx_bytes": 1}, {"tx_bytes": 1, "rx_bytes": 6_000_000}]
    end = {"event": "end", "status": "done", "tx_bytes": 6_000_001, "rx_bytes": 6_000_001, "ranks": ranks}
    cluster = {"nodes": 2, "cores": 1, "bandwidth": "8mbit", "throttled": True}
    return write(tmp_path / "pace", [*steps, end], cluster=cluster, link={"faithful": True})


def test_evaluations_stand_at_step_times_the_pace(curve: Path, pace: Path, tmp_path: Path) -> None:
    compose(curve, pace, tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert run.meta["kind"] == "composed" and run.status == "target"
    assert run.meta["cluster"]["bandwidth"] == "8mbit" and run.meta["link"] == {"faithful": True}
    # 2.5 s a step after half a second before step 0, that outlier notwithstanding
    assert list(run.evals().train_seconds) == [0.5, 25.5, 50.5]
    assert list(run.evals().p1) == [0.0, 0.2, 0.4]
    assert run.meta["parts"]["curve"]["folder"] == "../curve"
    assert run.meta["parts"]["pace"]["folder"] == "../pace"
    times = run.meta["step_seconds"]
    assert times["steps"] == 6 and times["low"] <= times["median"] <= times["high"]
    last = run.of("eval")[-1]
    assert last["train_seconds_low"] <= last["train_seconds"] <= last["train_seconds_high"]
    assert run.end is not None and run.end["tx_bytes"] == round(6_000_001 / 6 * 20)


def test_the_pace_is_held_against_its_bytes(curve: Path, pace: Path, tmp_path: Path) -> None:
    check = compose(curve, pace, tmp_path / "out")["step_check"]
    assert check["bytes_a_step"] == 1_000_000 and check["ideal_seconds"] == 1.0
    assert check["ratio"] == 2.5 and check["plausible"]
    events = (pace / "events.jsonl").read_text().replace("6000000", "60000000")
    (pace / "events.jsonl").write_text(events)
    assert not compose(curve, pace, tmp_path / "out")["step_check"]["plausible"]


def test_a_real_run_checks_it(curve: Path, pace: Path, tmp_path: Path) -> None:
    real = write(tmp_path / "real", [evaluation(0, 1.0, 0.0), evaluation(10, 24.0, 0.215)])
    check = compose(curve, pace, tmp_path / "out", real)["check"]
    assert check["step"] == 10 and check["step_seconds_real"] == pytest.approx(2.3)
    assert check["step_within_10_percent"] and not check["p1_within_1_point"]
    assert check["p1_difference"] == pytest.approx(-0.015)
    nothing = write(tmp_path / "nothing", [evaluation(3, 1.0, 0.0)])
    assert "no evaluation in common" in compose(curve, pace, tmp_path / "out", nothing)["check"]["reason"]


def test_a_run_that_was_cut_stays_a_bound(curve: Path, pace: Path, tmp_path: Path) -> None:
    text = (curve / "events.jsonl").read_text().replace('"target"', '"timeout"')
    (curve / "events.jsonl").write_text(text)
    compose(curve, pace, tmp_path / "out")
    assert read_run(tmp_path / "out").status == "timeout"


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 1), ("batch_size", 4), ("settings", {"lr": 1}), ("system", "other")]
)
def test_parts_of_different_runs_are_refused(
    curve: Path, pace: Path, tmp_path: Path, key: str, value: Any
) -> None:
    meta = json.loads((pace / "meta.json").read_text())
    (pace / "meta.json").write_text(json.dumps({**meta, key: value}))
    with pytest.raises(UserError, match=key):
        compose(curve, pace, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_without_evaluations_or_steps_are_refused(curve: Path, pace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no evaluations"):
        compose(pace, pace, tmp_path / "out")
    with pytest.raises(UserError, match="no timed steps"):
        compose(curve, curve, tmp_path / "out")


def test_a_failed_part_makes_a_record_that_says_why(curve: Path, pace: Path, tmp_path: Path) -> None:
    events = pace / "events.jsonl"
    end = {"event": "end", "status": "skipped", "reason": "no link", "train_seconds": 0.0}
    assert compose_failure(curve, pace, tmp_path / "out") is None
    assert not (tmp_path / "out").exists()
    events.write_text(json.dumps(end) + "\n")
    assert compose_failure(curve, pace, tmp_path / "out") == "pace skipped: no link"
    run = read_run(tmp_path / "out")
    assert (run.status, run.reason, run.meta["kind"]) == ("error", "pace skipped: no link", "composed")


def test_nothing_is_composed_of_composed_runs(curve: Path, pace: Path, tmp_path: Path) -> None:
    compose(curve, pace, tmp_path / "out")
    with pytest.raises(UserError, match="only measured"):
        compose(tmp_path / "out", pace, tmp_path / "again")


def test_stamps_stand_for_their_folders() -> None:
    assert folder_of(Path("a/seed-0.done")) == Path("a/seed-0") == folder_of(Path("a/seed-0"))
