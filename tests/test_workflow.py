"""The workflow with systems that do nothing: what is planned, repeated, refused, and left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workflow import ROOT, SYSTEMS, command, environment, snakemake

from dslide.bench.records import read_run

EXPERIMENT = """\
name: trial
data: debian-deps
slice: {train: 200, test: 100}
batch_size: 64
eval_epochs: [1]
targets: [0.5]
clusters:
  one: {nodes: 1, cores: 1}
  free: {nodes: 2, cores: 1, oversubscribed: true}
systems:
  good: {system: dummy, label: good, clusters: [one], seeds: [0, 1], epochs: 1, budget_seconds: 30}
  bad: {system: dummy, label: bad, settings: {bad: raise}, clusters: [one], epochs: 1, budget_seconds: 30}
  away: {system: dummy, label: away, settings: {bad: skip}, clusters: [one], epochs: 1, budget_seconds: 30}
reports: [p1-time]
"""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """A finished workflow: its folder, its experiment file and what Snakemake printed."""
    folder = tmp_path_factory.mktemp("trial")
    experiment = folder / "trial.yaml"
    experiment.write_text(EXPERIMENT)
    shutil.copytree(SYSTEMS, folder / "systems", ignore=shutil.ignore_patterns("__pycache__"))
    done = snakemake(folder, experiment, env={"DSLIDE_SYSTEMS": str(folder / "systems")})
    assert done.returncode == 0, done.stdout
    yield folder, experiment, done.stdout


def again(trial: tuple[Path, Path, str], *arguments: str) -> str:
    folder, experiment, _ = trial
    done = snakemake(folder, experiment, *arguments, env={"DSLIDE_SYSTEMS": str(folder / "systems")})
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_lint_finds_nothing() -> None:
    done = subprocess.run(
        ["snakemake", "--lint"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_plan_of_the_default_experiment_is_readable(tmp_path: Path) -> None:
    done = snakemake(tmp_path, ROOT / "config" / "default.yaml", "-n")
    assert done.returncode == 0, done.stdout
    for line in (
        "dslide | 2 nodes, 100mbit | 6 epochs | seed 3",
        "Horovod dense, as published | composed for 2 nodes, 1gbit | seed 0",
        "Figure p1-time",
        "Page reports/default/index.html",
    ):
        assert line in done.stdout
    assert not (tmp_path / "results").exists()


def test_a_failed_run_is_a_record_and_the_page_is_made(trial: tuple[Path, Path, str]) -> None:
    folder, _, _ = trial
    runs = folder / "results" / "trial" / "runs"
    statuses = {
        run.parents[2].name: read_run(run.parent).status for run in sorted(runs.glob("*/one/*/meta.json"))
    }
    assert statuses == {"good": "done", "bad": "error", "away": "skipped"}
    assert read_run(runs / "bad" / "one" / "seed-0").reason
    page = folder / "reports" / "trial" / "index.html"
    assert "told to skip" in page.read_text()
    assert (folder / "reports" / "trial" / "p1-time.svg").is_file()


def test_progress_is_shown_and_logged(trial: tuple[Path, Path, str]) -> None:
    folder, _, printed = trial
    assert "good | 1 node | 1 epochs | seed 1" in printed
    log = (folder / "results/trial/logs/runs/bad/one/seed-0.log").read_text()
    assert "error: rank 0 failed" in log
    assert "error: rank 0 failed" in printed


def test_a_second_run_does_nothing(trial: tuple[Path, Path, str]) -> None:
    assert "Nothing to be done" in again(trial)


def test_only_what_changed_is_repeated(trial: tuple[Path, Path, str]) -> None:
    folder, experiment, _ = trial
    system = folder / "systems" / "dummy.py"
    text = system.read_text()
    try:
        system.write_text("# A comment repeats nothing.\n" + text)
        assert "Nothing to be done" in again(trial, "-n")
        system.write_text(text.replace('TITLE = "', 'TITLE = "Changed: '))
        planned = again(trial, "-n")
        assert "good | 1 node" in planned and "bad | 1 node" in planned
        system.write_text(text)
        experiment.write_text(EXPERIMENT.replace("{bad: raise}", "{bad: raise, steps: 9}"))
        planned = again(trial, "-n")
        assert "bad | 1 node" in planned and "good | 1 node" not in planned and "away | 1 node" not in planned
    finally:
        system.write_text(text)
        experiment.write_text(EXPERIMENT)


def test_a_run_with_fewer_cores_than_it_needs_is_refused(tmp_path: Path) -> None:
    experiment = tmp_path / "trial.yaml"
    text = EXPERIMENT.replace("clusters: [one], seeds: [0, 1]", "clusters: [free]")
    experiment.write_text(text)
    done = snakemake(tmp_path, experiment, "results/trial/runs/good/free/seed-0.done", cores="1")
    assert done.returncode != 0
    assert "needs 2 cores and was granted 1" in done.stdout
    assert not (tmp_path / "results/trial/runs/good/free/seed-0.done").exists()


def test_a_mistake_in_the_experiment_is_told_without_a_traceback(tmp_path: Path) -> None:
    experiment = tmp_path / "trial.yaml"
    experiment.write_text(EXPERIMENT.replace("label: good", "lable: good"))
    done = snakemake(tmp_path, experiment, "-n")
    assert done.returncode != 0
    assert "trial.yaml:11: systems.good.lable" in done.stdout
    assert "Traceback" not in done.stdout


def test_interrupt_leaves_nothing_half_done(tmp_path: Path) -> None:
    experiment = tmp_path / "trial.yaml"
    mark = f"{time.time_ns()}"
    slow = "{steps: 1000, step_seconds: 0.1}"
    experiment.write_text(
        EXPERIMENT.replace("label: good, clusters", f"label: good, settings: {slow}, clusters")
    )
    process = subprocess.Popen(
        command(tmp_path, experiment, "results/trial/runs/good/one/seed-0.done"),
        env=environment(DSLIDE_TEST_MARK=mark),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        events = tmp_path / "results/trial/runs/good/one/.seed-0.running/record/events.jsonl"
        deadline = time.monotonic() + 120
        while not events.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert events.exists()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        printed, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode not in (0, -signal.SIGKILL), printed
    runs = tmp_path / "results/trial/runs/good/one"
    assert [path.name for path in runs.iterdir()] == ["seed-0"]
    assert read_run(runs / "seed-0").status == "interrupted"
    assert _marked(mark) == []


def _marked(mark: str) -> list[str]:
    """Processes that carry the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
