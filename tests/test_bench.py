"""`dslide bench`: figures, their machine, bounds, and refusal of unknown names."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dslide import _core
from dslide.bench import commands
from dslide.bench.link import ideal_seconds
from dslide.bench.speed import BENCHES, exchange_steps
from dslide.bench.speed.bounds import Work
from dslide.bench.speed.rates import Rates, to_and_fro
from dslide.bench.speed.sizes import QUICK, generated
from dslide.bench.speed.training import ready, settings, work_of
from dslide.comm import payload_per_point

DSLIDE = [sys.executable, "-m", "dslide", "bench"]


def test_every_benchmark_gives_figures_and_the_machine() -> None:
    run = subprocess.run(
        [*DSLIDE, "--quick", "--no-rivals", "--threads", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    machine = report["machine"]
    assert machine["threads"] == 1 and machine["cpu"] and machine["instruction_set"]
    assert {row["bench"] for row in report["rows"]} == set(BENCHES)
    for row in report["rows"]:
        if row["case"] != "not measured":  # an exchange where there is no MPI
            assert 0 < row["low"] <= row["value"] <= row["high"], row
    steps = [row for row in report["rows"] if row["bench"] == "train-step"]
    assert all(row["of_bound"] == pytest.approx(row["value"] / row["bound"]) for row in steps)
    assert any(row["case"].startswith("numpy, OpenBLAS") for row in report["rows"])
    if commands.program("mpirun") is not None:
        of_exchange([row for row in report["rows"] if row["bench"] == "exchange"])


def of_exchange(rows: list[dict[str, Any]]) -> None:
    """The exchange alone on a loopback, and steps without a limit: every way of hiding it beside one rank."""
    cases = {row["case"]: row for row in rows}
    for wire in ("fp32", "int8"):
        assert any("loopback" in case and wire in case for case in cases), cases.keys()
    sent = payload_per_point(QUICK.hidden, exchange_steps.NODES, "int8") / exchange_steps.NODES
    alone = cases["one rank, batch 64"]["value"]
    for way in exchange_steps.WAYS:
        row = cases[f"2 ranks, no limit, int8, batch 64, {way}"]
        assert row["rival"] == alone and f"{sent:,.1f} B of payload" in row["note"]


def test_the_bound_of_steps_on_a_link_is_the_link_s_or_the_speed_without_one() -> None:
    speeds = {
        ("no limit", "halves"): 9e4,
        ("no limit", "whole batches"): 8e4,
        ("no limit", "one rank"): 5e4,
        ("10mbit", "halves"): 5e3,
        ("1gbit", "halves"): 6e4,
    }
    found = [
        {"link": link, "way": way, "rates": [rate, rate / 2, 2 * rate], "bytes": 0, "payload": 140}
        for (link, way), rate in speeds.items()
    ]
    rows = {row.case: row for row in exchange_steps.rows(found, 256, 128, "int8")}
    slow, fast = (rows[f"2 ranks, {link}, int8, batch 256, halves"] for link in ("10mbit", "1gbit"))
    assert slow.bound == pytest.approx(256 / ideal_seconds(256 * 140, 1e7)) and fast.bound == 9e4
    assert slow.value == 5e3 and slow.low == 2.5e3 and slow.high == 1e4 and slow.ratio == 0.1
    assert rows["one rank, batch 256"].bound is None and rows["one rank, batch 256"].rival is None


def test_an_unknown_benchmark_is_refused_with_the_names() -> None:
    run = subprocess.run([*DSLIDE, "nope"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "train-step" in run.stderr and "Traceback" not in run.stderr


def test_generated_points_have_the_shape_that_was_asked_for() -> None:
    points = generated(QUICK).train
    assert len(points) == QUICK.points
    assert np.diff(points.x_indptr).mean() == pytest.approx(QUICK.nnz, rel=0.15)
    assert np.diff(points.y_indptr).mean() == pytest.approx(QUICK.labels_a_point, rel=0.05)
    for indptr, ids in ((points.x_indptr, points.x_indices), (points.y_indptr, points.y_indices)):
        rows = np.repeat(np.arange(len(points)), np.diff(indptr))
        assert np.all(np.diff(ids)[np.diff(rows) == 0] > 0)  # ascending and distinct in a row


def test_the_bound_counts_each_row_and_each_product_once() -> None:
    rates = Rates(
        random_update=1.0, random_read=9.0, stream_update=2.0, stream_read=4.0, product=100.0, gather=10.0
    )
    work = Work(batch=10, hidden=4, features=20, entries=50, rows=30, input_state=4, output_state=4)
    assert work.bytes == 2 * 20 * (16 + 4) + 2 * 30 * (16 + 4)
    assert work.flops == 4 * 50 * 4 + 6 * 30 * 10 * 4
    assert work.seconds(rates) == pytest.approx(1e-9 * (800 / 1 + 1200 / 1))  # memory decides in both layers
    pairs = Work(
        batch=10, hidden=4, features=0, entries=0, rows=30, pairs=6000, dense_bytes=8, rebuild_bytes=8
    )
    assert pairs.seconds(rates) == pytest.approx(1e-9 * (6 * 6000 * 4 / 10 + 8 / 2 + 8 / 4))


@pytest.mark.parametrize("index", range(5))
def test_a_step_s_work_is_what_the_trainer_touched(index: int) -> None:
    dataset, setting = generated(QUICK), settings(QUICK)[index]
    trainer = ready(dataset, setting, 64, 1, QUICK.hidden, {})
    trainer._one_step()
    work = work_of(trainer)
    assert work.hidden == QUICK.hidden and 0 < work.features <= work.entries
    assert work.rows <= QUICK.labels and (work.pairs > 0) == (setting.name == "slide")
    assert work.every_row == (work.rows == QUICK.labels)
    assert work.output_state == (8 * QUICK.hidden if setting.preset == "slide" else 4)


def test_the_way_between_two_cores_is_measured_with_two_threads_only() -> None:
    (row,) = to_and_fro(QUICK, 2)
    assert 0 < row.low <= row.value <= row.high and row.unit == "ns"
    assert to_and_fro(QUICK, 1) == []
    with pytest.raises(ValueError, match="two threads"):
        _core.pass_to_and_fro(_core.Pool(1), 1)


def test_the_row_probe_refuses_ids_outside_of_its_table() -> None:
    probe = _core.RowProbe(_core.Pool(2), 10, 16)
    good = np.arange(10, dtype=np.int32)
    for touch in (probe.update, lambda ids: probe.gather(ids, 3)):
        touch(good)
        with pytest.raises(ValueError, match="outside"):
            touch(good + 1)
