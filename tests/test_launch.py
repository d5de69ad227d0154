"""The launcher: a record comes out whatever happens, and nothing else is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_cluster import _networks, _with_mark

from dslide.bench import cluster, commands, launch, systems
from dslide.bench.records import read_run
from dslide.bench.spec import Cluster, RunSpec, allotted_cores
from dslide.errors import UserError

FOLDER = Path(__file__).parent / "systems"
TWO = Cluster(nodes=2, oversubscribed=True)


@pytest.fixture(autouse=True)
def _find_the_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLIDE_SYSTEMS", str(FOLDER))


def make(out: Path, **fields: Any) -> RunSpec:
    """A spec of the dummy system; `exclusive` is off, since nothing is measured here."""
    return RunSpec(run_id="test", system="dummy", data="none", out=out, exclusive=False, **fields)


def test_specs_name_the_key(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(make(tmp_path / "out").dump())
    assert RunSpec.read(file, {"cluster.nodes": 3}).cluster.nodes == 3
    with pytest.raises(UserError, match=r"spec\.json: cluster\.bandwidth: .*write it like"):
        RunSpec.read(file, {"cluster.bandwidth": "fast"})
    with pytest.raises(UserError, match="nonsense"):
        RunSpec.read(file, {"nonsense": 1})
    file.write_text("{")
    with pytest.raises(UserError, match=r"spec\.json:1:"):
        RunSpec.read(file)


def test_systems_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert systems.load("dummy").NAME == "dummy" and "dummy" in systems.names()
    with pytest.raises(UserError, match="no such file"):
        systems.load("absent")
    (tmp_path / "half.py").write_text("NAME = 'half'\n")
    monkeypatch.setenv("DSLIDE_SYSTEMS", str(tmp_path))
    with pytest.raises(UserError, match="must define TITLE"):
        systems.load("half")


def test_every_system_of_the_project_has_the_interface() -> None:
    for name in systems.names():
        module = systems.load(name)
        assert module.Settings.model_config["extra"] == "forbid", name


def test_a_local_run(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "seed-0"
    (out / "stale").mkdir(parents=True)
    assert launch.launch(make(out, cluster=Cluster(cores=1))) == 0
    run = read_run(out)
    assert run.status == "done" and len(run.evals()) == 2
    assert (
        run.meta["system"] == "dummy"
        and run.meta["title"] == "A dummy"
        and run.meta["settings"]["steps"] == 3
    )
    assert run.meta["cluster"]["namespaces"] is False and run.meta["cluster"]["throttled"] is False
    assert run.meta["dummy"]["affinity"] == allotted_cores()[:1]
    assert set(run.meta["dummy"]["threads"].values()) == {"1"}
    assert {f.name for f in out.iterdir()} == {
        "events.jsonl",
        "log.txt",
        "meta.json",
        "predictions",
        "spec.json",
    }
    assert [f.name for f in out.parent.iterdir()] == ["seed-0"]


def test_a_skipped_run_is_a_record(tmp_path: Path) -> None:
    assert launch.launch(make(tmp_path / "out", settings={"bad": "skip"})) == 0
    run = read_run(tmp_path / "out")
    assert (run.status, run.reason) == ("skipped", "told to skip")
    assert run.meta["system"] == "dummy" and run.meta["machine"]["cpu"]["model"]


@pytest.mark.parametrize(
    ("bad", "code", "reason"),
    [
        ("raise", 0, "rank 0 failed: ValueError: told to raise"),
        ("user", 2, "data.txt:3: told to complain"),
        ("kill", 0, "rank 0 was killed by SIGKILL"),
        ("noend", 0, "returned without ending its records"),
        ("hang", 0, "no event, heartbeat or output for 2 s"),
    ],
)
def test_a_failed_run_is_a_record(tmp_path: Path, bad: str, code: int, reason: str) -> None:
    spec = make(tmp_path / "out", settings={"bad": bad}, stall_seconds=2 if bad == "hang" else 60)
    assert launch.launch(spec) == code
    run = read_run(tmp_path / "out")
    assert run.status == "error" and run.reason is not None and reason in run.reason
    assert len(run.events) >= 3 and run.meta["dummy"]  # what was recorded before stays
    assert run.end is not None and "log_tail" in run.end
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_run_has_a_wall_clock_too(tmp_path: Path) -> None:
    spec = make(tmp_path / "out", settings={"bad": "hang"}, budget_seconds=1, grace_seconds=2)
    assert launch.launch(spec) == 0
    assert "longer than its budget and grace" in str(read_run(tmp_path / "out").reason)


def test_bad_settings_and_too_many_cores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"settings\.nonsense"):
        launch.launch(make(tmp_path / "out", settings={"nonsense": 1}))
    many = Cluster(nodes=len(allotted_cores()) + 1)
    with pytest.raises(UserError, match="oversubscribed"):
        launch.launch(make(tmp_path / "out", cluster=many))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_two_nodes_and_a_throttled_link(tmp_path: Path) -> None:
    size, steps, rate = 50_000, 8, 2e7
    spec = make(
        tmp_path / "out",
        cluster=Cluster(nodes=2, bandwidth="20mbit", oversubscribed=True),
        settings={"bytes": size},
        pace_steps=steps,
    )
    assert launch.launch(spec) == 0
    run = read_run(tmp_path / "out")
    assert run.status == "done", run.reason
    assert [rank["host"] for rank in run.meta["ranks"]] == ["hv0", "hv1"]
    cores = allotted_cores()
    assert [rank["affinity"] for rank in run.meta["ranks"]] == cluster.core_sets(cores, 2, 1)
    assert run.meta["cluster"]["throttled"] and run.meta["link"]["sizes"][0]["bytes"] == size
    assert run.meta["link"]["faithful"] in (True, False)
    assert run.end is not None
    for rank in run.end["ranks"]:  # the traffic crossed the link: payload, headers, and little else
        assert size * steps < rank["tx_bytes"] < 1.3 * size * steps, run.end["ranks"]
        # A peer that leaves the barrier first may send before this rank has read its counters.
        assert 0.5 * size * steps < rank["rx_bytes"] < 1.3 * size * steps, run.end["ranks"]
    assert run.of("link")[0]["lost_packets"] == 0
    for step in run.of("step"):  # and it took its time; a token bucket's burst comes free
        assert step["seconds"] > 0.85 * size * 8 / rate


@pytest.mark.root
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("kill", "rank 1 on hv1 was killed by SIGKILL"),
        ("raise", "rank 1 on hv1 failed: ValueError: told to raise"),
    ],
)
def test_a_failed_rank_ends_the_job_and_is_named(tmp_path: Path, bad: str, reason: str) -> None:
    spec = make(
        tmp_path / "out", cluster=TWO, settings={"bad": bad, "bytes": 1000, "step_seconds": 0.2, "steps": 400}
    )
    assert launch.launch(spec) == 0
    run = read_run(tmp_path / "out")
    assert run.status == "error" and str(run.reason).startswith(reason)
    assert run.end is not None and (run.end["rank"], run.end["node"]) == (1, "hv1")
    assert len(run.of("eval")) == 1  # the others did not go on to the end


def test_without_namespaces_the_ranks_are_unthrottled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py")
    if commands.program("mpirun") is None:
        pytest.skip("no mpirun")
    monkeypatch.setattr(cluster, "unavailable", lambda network=True: "not allowed")
    spec = make(
        tmp_path / "out",
        cluster=Cluster(nodes=2, bandwidth="1gbit", oversubscribed=True),
        settings={"bytes": 99},
    )
    assert launch.launch(spec) == 0
    run = read_run(tmp_path / "out")
    assert run.status == "done", run.reason
    assert run.meta["cluster"]["throttled"] is False and "not allowed" in run.meta["cluster"]["note"]
    assert len(run.meta["ranks"]) == 2 and run.meta["link"] is None


def _start(tmp_path: Path, nodes: int) -> tuple["subprocess.Popen[str]", str]:
    """`dslide race run` of a hanging job, in a process of its own that ignores SIGINT at first, as after a
    shell's `&`; returns once all ranks hang."""
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    spec = make(
        tmp_path / "out",
        cluster=Cluster(nodes=nodes, oversubscribed=True),
        settings={"bad": "hang", "bytes": 8},
    )
    (tmp_path / "spec.json").write_text(spec.dump())
    code = "import sys; from dslide.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "race", "run", str(tmp_path / "spec.json")]
    environment = {**os.environ, "MARK": mark}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    events = tmp_path / ".out.running" / "record" / "events.jsonl"
    deadline = time.monotonic() + 60
    while not (events.exists() and '"eval"' in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process, mark


def _gone(mark: str) -> bool:
    deadline = time.monotonic() + 20
    while _with_mark(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _with_mark(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_its_record_alone(tmp_path: Path, number: signal.Signals) -> None:
    process, mark = _start(tmp_path, 1)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert _gone(mark)
    run = read_run(tmp_path / "out")
    assert run.status == "interrupted" and len(run.of("eval")) == 1
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "spec.json"]


@pytest.mark.root
def test_sigkill_of_the_launcher_leaves_nothing_running(tmp_path: Path) -> None:
    process, mark = _start(tmp_path, 2)
    pids = _with_mark(mark)
    spaces = _networks(pids)
    assert len(pids) > 4 and len(spaces) == 3
    process.kill()
    process.communicate(timeout=30)
    assert _gone(mark)
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not any(space in mounts for space in spaces)
    assert not (tmp_path / "out").exists()  # a half-written record is never published


def test_the_command_prints_a_summary(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(make(tmp_path / "out").dump())
    command = [
        sys.executable,
        "-m",
        "dslide",
        "race",
        "run",
        str(tmp_path / "spec.json"),
        "--set",
        "settings.steps=2",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    summary = json.loads(result.stdout)
    assert summary["status"] == "done" and summary["step"] == 2 and summary["p1"] == 1.0
    failing = subprocess.run(
        [*command, "--set", "settings.bad=raise", "--strict"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert failing.returncode == 1 and json.loads(failing.stdout)["status"] == "error"
    wrong = subprocess.run([*command, "--set", "x"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2 and "key=value" in wrong.stderr and "Traceback" not in wrong.stderr


def test_a_repeated_run_keeps_the_record_that_it_replaces(tmp_path: Path) -> None:
    spec = make(tmp_path / "seed-0")
    assert launch.launch(spec) == 0
    assert launch.launch(spec.model_copy(update={"settings": {"bad": "raise"}})) == 0
    assert launch.launch(spec.model_copy(update={"settings": {"steps": 5}})) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".seed-0.replaced-1", "seed-0"]
    assert read_run(tmp_path / ".seed-0.replaced-1").of("eval")[-1]["step"] == 3
    assert read_run(tmp_path / "seed-0").of("eval")[-1]["step"] == 5


def test_mpirun_on_real_nodes() -> None:
    if commands.program("mpirun") is None:
        pytest.skip("no mpirun")
    job: dict[str, Any] = {
        "ranks": 3,
        "sets": [],
        "kind": "hostfile",
        "hostfile": "hosts",
    }
    text = " ".join(commands.mpirun_command(job, ["x"]))
    assert "--hostfile hosts" in text and "-np 3" in text and "btl_tcp_if_include" not in text
    text = " ".join(commands.mpirun_command({**job, "kind": "slurm"}, ["x"]))
    assert "--hostfile" not in text and "--map-by node" in text and text.endswith(" x")
    with pytest.raises(UserError, match="use MPI on real nodes"):
        commands.gloo_command({**job, "kind": "slurm"}, ["x"])


def test_the_environment_of_another_job_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_JOB_ID", "KEPT"):
        monkeypatch.setenv(name, "1")
    virtual = launch._environment(make(tmp_path / "out"))
    assert "KEPT" in virtual and not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_JOB_ID"} & set(virtual)
    real = launch._environment(make(tmp_path / "out", cluster=Cluster(kind="slurm", nodes=2)))
    assert "SLURM_JOB_ID" in real and "PMIX_RANK" not in real
