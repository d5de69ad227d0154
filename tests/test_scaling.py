"""`dslide bench scaling`: its cases, the projection's formula, the figure that is drawn from its record."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import reports_records as records

from dslide.bench import commands
from dslide.bench.speed.scaling import step_seconds
from dslide.comm import payload_per_point
from dslide.errors import UserError
from dslide.reporting import output
from dslide.reporting.race import Race

BENCH = [sys.executable, "-m", "dslide", "bench", "scaling", "--quick", "--json"]


@pytest.fixture(scope="module")
def record() -> str:
    """What the benchmark prints."""
    run = subprocess.run([*BENCH, "--threads", "1"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_axis_is_measured_and_ranks_are_projected(record: str) -> None:
    rows = {row["case"]: row for row in json.loads(record)["rows"]}
    assert {"threads 1", "batch 64", "batch 512", "hidden 64", "hidden 128"} <= rows.keys()
    assert all(0 < row["low"] <= row["value"] <= row["high"] for row in rows.values() if row["repeats"])
    if commands.program("mpirun") is None:
        assert "mpirun is missing" in rows["not measured"]["note"]
        return
    shard = rows["ranks 2, a shard's computation alone"]["value"]
    message = rows["seconds a message"]["value"]
    for link, bandwidth in (("no limit", math.inf), ("100mbit", 12.5e6), ("1gbit", 125e6)):
        sent = 256 * payload_per_point(32, 2, "int8") / 2
        expected = 256 / (256 / shard + sent / bandwidth + 3 * message)
        assert rows[f"ranks 2, projected, {link}"]["value"] == pytest.approx(expected)
    assert rows["ranks 1, projected, 1gbit"]["value"] == rows["ranks 1, a shard's computation alone"]["value"]


def test_one_axis_can_be_measured_by_itself() -> None:
    run = subprocess.run([*BENCH, "--only", "hidden"], capture_output=True, text=True, timeout=120)
    assert {row["case"] for row in json.loads(run.stdout)["rows"]} == {"hidden 64", "hidden 128"}
    run = subprocess.run([*BENCH, "--only", "depth"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "threads, ranks, batch, hidden" in run.stderr


def test_a_projected_step_is_its_three_terms() -> None:
    assert step_seconds(0.004, 25_000, 12.5e6, 4, 5e-5) == pytest.approx(0.004 + 0.002 + 9 * 5e-5)
    assert step_seconds(0.004, 0, math.inf, 1, 5e-5) == 0.004  # alone, nothing travels


def test_the_figure_is_drawn_from_the_record_alone(tmp_path: Path, record: str) -> None:
    race = Race.load(*records.write_experiment(tmp_path))
    (race.results / "scaling.json").write_text(record)
    output.write_figure("scaling", race, tmp_path / "scaling.svg")
    sidecar = json.loads((tmp_path / "scaling.json").read_text())
    assert not sidecar["empty"] and "scaling/scaling.json" in sidecar["inputs"]
    assert json.loads(record)["machine"]["cpu"] in sidecar["caption"]
    cases = [row["case"] for row in json.loads(record)["rows"]]
    table = output.load("scaling").table(race)
    assert len(table.data) == sum(
        case.split(" ")[0] in ("threads", "ranks", "batch", "hidden") for case in cases
    )


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    race = Race.load(*records.write_experiment(tmp_path))
    (race.results / "scaling.json").write_text("{}")
    with pytest.raises(UserError, match=r"scaling\.json: not what `dslide bench scaling --json` prints"):
        output.load("scaling").figure(race)
