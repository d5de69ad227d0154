"""`dslide bench`: figures, their machine, and refusal of unknown names."""

import json
import subprocess
import sys

DSLIDE = [sys.executable, "-m", "dslide", "bench"]


def test_bench_prints_the_machine_and_its_figures() -> None:
    run = subprocess.run(
        [*DSLIDE, "hashing", "--threads", "1", "--json"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (
        report["machine"]["threads"] == 1
        and report["machine"]["cpu"]
        and report["machine"]["instruction_set"]
    )
    assert {row["case"] for row in report["rows"]} == {"simhash K=9 L=50", "dwta K=4 L=50"}
    assert all(0 < row["low"] <= row["value"] <= row["high"] for row in report["rows"])


def test_an_unknown_benchmark_is_refused_with_the_names() -> None:
    run = subprocess.run([*DSLIDE, "nope"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "train-step" in run.stderr and "Traceback" not in run.stderr
