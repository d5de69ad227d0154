"""The command line: results, files, exit statuses, and what is said about mistakes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from mpirun import environment, start
from synthetic import make_dataset, make_points, write_prepared, write_xc

from dslide import MOST_THREADS, _core, cli

SMALL = ["--epochs", "2", "--threads", "2", "--set", "network.hidden=24", "--set", "batch_size=32"]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Converted files go to the test's folder, and signal handlers are put back."""
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "cache"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def files(tmp_path):
    dataset = make_dataset()
    return write_xc(tmp_path / "train.txt", dataset.train), write_xc(tmp_path / "test.txt", dataset.test)


@pytest.fixture
def call(capfd):
    """Runs a command line: (status, stdout, stderr)."""

    def run(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def train(call, files, out, *more):
    status, stdout, stderr = call(
        "train", "--train", files[0], "--test", files[1], "--out", out, "--json", *SMALL, *more
    )
    assert status == 0, stderr
    return json.loads(stdout)


def test_train_evaluate_predict(call, files, tmp_path):
    out = tmp_path / "run"
    result = train(call, files, out)
    for key in ("status", "epochs", "steps", "train_seconds", "samples_per_second", "p1", "p3", "p5",
                "peak_rss_bytes", "parameters", "bytes_per_parameter",
                "table_bytes", "bytes_sent", "model"):  # fmt: skip
        assert key in result
    assert result["status"] == "done" and 0.1 < result["p1"] <= 1 and result["bytes_sent"] == 0
    assert (
        result["model"] == str(out / "model")
        and (out / "model" / "member-0" / "shard-0.safetensors").exists()
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    for event in events:
        assert {"event", "step", "train_seconds"} <= event.keys()
        if event["event"] == "eval":
            assert {"epoch", "p1", "p3", "p5"} <= event.keys()

    status, stdout, _ = call("evaluate", out, "--test", files[1], "--json")
    measured = json.loads(stdout)
    assert status == 0 and {k: measured[k] for k in ("p1", "p3", "p5")} == {
        k: result[k] for k in ("p1", "p3", "p5")
    }

    table = tmp_path / "top.tsv"
    status, stdout, _ = call("predict", out, "--input", files[1], "--k", 3, "--out", table)
    assert status == 0 and stdout == ""
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    assert [(int(r), int(p)) for r, p, _, _ in rows] == [(r, p) for r in range(60) for p in (1, 2, 3)]
    values = np.array([float(v) for *_, v in rows]).reshape(60, 3)
    assert (values > 0).all() and (np.diff(values, axis=1) <= 0).all()
    assert (values.sum(axis=1) <= 1 + 1e-5).all()
    test = make_dataset().test
    own = [set(test.y_indices[test.y_indptr[i] : test.y_indptr[i + 1]].tolist()) for i in range(60)]
    assert np.mean([int(rows[3 * i][2]) in own[i] for i in range(60)]) == pytest.approx(result["p1"])


def test_predicting_points_without_labels(call, files, tmp_path):
    train(call, files, tmp_path / "run")
    points = make_points(9, 90, 37, 3)
    bare = tmp_path / "bare.txt"
    labelled = write_xc(tmp_path / "labelled.txt", points).read_text().splitlines()
    bare.write_text("\n".join([labelled[0], *(" " + line.partition(" ")[2] for line in labelled[1:])]) + "\n")
    tables = []
    for source in (tmp_path / "labelled.txt", bare):
        status, _, stderr = call("predict", tmp_path / "run", "--input", source, "--out", tmp_path / "t.tsv")
        assert status == 0, stderr
        tables.append((tmp_path / "t.tsv").read_text())
    assert tables[0] == tables[1] and len(tables[0].splitlines()) == 45


def test_training_on_the_same_seed_writes_the_same_model(call, files, tmp_path):
    shards = []
    for number, threads in enumerate(("1", "3")):
        train(call, files, tmp_path / str(number), "--threads", threads, "--seed", "5")
        folder = tmp_path / str(number) / "model"
        shards.append([(folder / f).read_bytes() for f in ("member-0/shard-0.safetensors", "manifest.json")])
    assert shards[0] == shards[1]


def test_names_of_labels_are_predicted(call, tmp_path):
    folder = write_prepared(tmp_path / "set", make_dataset())
    (folder / "labels.txt").write_text("".join(f"label number {i}\n" for i in range(37)))
    status, _, stderr = call("train", "--data", folder, "--out", tmp_path / "run", *SMALL)
    assert status == 0, stderr
    test = write_xc(tmp_path / "test.txt", make_dataset().test)
    status, _, stderr = call("predict", tmp_path / "run", "--input", test, "--out", tmp_path / "t.tsv")
    assert status == 0, stderr
    assert all("\tlabel number " in line for line in (tmp_path / "t.tsv").read_text().splitlines())


def test_a_config_file_a_preset_and_settings(call, files, tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 1\nsampler: {kind: full}\n")
    done = (
        "train",
        "--train",
        files[0],
        "--out",
        tmp_path / "run",
        "--config",
        tmp_path / "c.yaml",
        "--preset",
        "slide",
    )
    status, _, stderr = call(*done, "--set", "network.hidden=17", "--json")
    assert status == 0, stderr
    config = json.loads((tmp_path / "run" / "meta.json").read_text())["config"]
    assert config["sampler"]["kind"] == "full" and config["optimizer"]["kind"] == "adam-catch-up"
    assert config["network"]["hidden"] == 17 and config["epochs"] == 1


def test_a_run_without_test_points_has_no_precision(call, files, tmp_path):
    status, stdout, _ = call("train", "--train", files[0], "--out", tmp_path / "run", "--json", *SMALL)
    assert status == 0 and json.loads(stdout)["p1"] is None


MISTAKES = [
    (["train", "--out", "OUT"], ["--data", "--train"]),
    (["train", "--data", "x", "--train", "TRAIN", "--out", "OUT"], ["either"]),
    (["train", "--data", "no-such-set", "--out", "OUT"], ["no-such-set"]),
    (["train", "--train", "TMP/absent.txt", "--out", "OUT"], ["absent.txt", "no such file"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--set", "network.hiden=3"], ["'network.hidden'"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--config", "TMP/c.yaml"], ["c.yaml"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--preset", "fast"], ["fast", "slide"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--epochs", "many"], ["--epochs"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--epochs", "-1"], ["epochs"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--resume"], ["OUT", "resume"]),
    (["train", "--train", "TRAIN", "--out", "TRAIN"], ["not a folder"]),
    (["train", "--train", "TRAIN", "--out", "TMP"], ["no run"]),
    (["train", "--train", "TRAIN", "--out", "OUT", "--threads", "1025"], ["threads", "1024"]),
    (["evaluate", "TMP", "--test", "TRAIN", "--threads", "1025"], ["--threads", "1024"]),
    (["bench", "kernels", "--quick", "--threads", "1025"], ["--threads", "1024"]),
    (["data", "convert", "--train", "TRAIN", "--threads", "1025"], ["--threads", "1024"]),
    (["train", "--train", "TRAIN"], ["--out"]),
    (["train", "--nonsense"], ["--nonsense"]),
    (["nonsense"], ["nonsense"]),
    (["evaluate", "TMP", "--test", "TRAIN"], ["no trained model"]),
    (["evaluate", "TMP"], ["--data"]),
    (["predict", "TMP", "--input", "TRAIN", "--out", "OUT"], ["no trained model"]),
    (["predict", "TMP", "--input", "TRAIN", "--out", "OUT", "--k", "0"], ["--k"]),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda value: " ".join(value))
def test_mistakes_are_told_with_status_2(arguments, parts, call, files, tmp_path):
    places = {"OUT": tmp_path / "out", "TRAIN": files[0], "TMP": tmp_path}

    def put(text):
        for name, place in places.items():
            if text == name or text.startswith(name + "/"):
                return text.replace(name, str(place), 1)
        return text

    status, stdout, stderr = call(*map(put, arguments))
    assert status == 2
    assert "Traceback" not in stderr and stdout == ""
    for part in parts:
        assert put(part) in stderr
    assert not (tmp_path / "out").exists()


def test_the_most_threads_are_the_core_s():
    with pytest.raises(ValueError, match=f"between 1 and {MOST_THREADS}"):
        _core.Pool(MOST_THREADS + 1)


def test_a_broken_line_is_named(call, files, tmp_path):
    lines = files[0].read_text().splitlines()
    lines[17] = lines[17].replace(":", ";", 1)
    files[0].write_text("\n".join(lines) + "\n")
    status, _, stderr = call("train", "--train", files[0], "--out", tmp_path / "out")
    assert status == 2 and "train.txt" in stderr and "18" in stderr and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_points_that_the_model_cannot_know(call, files, tmp_path):
    train(call, files, tmp_path / "run")
    wide = write_xc(tmp_path / "wide.txt", make_points(5, 500, 37, 3))
    status, _, stderr = call("evaluate", tmp_path / "run", "--test", wide)
    assert status == 2 and "wide.txt" in stderr and "feature" in stderr


def test_a_broken_model_is_told(call, files, tmp_path):
    train(call, files, tmp_path / "run")
    shard = tmp_path / "run" / "model" / "member-0" / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    status, _, stderr = call("evaluate", tmp_path / "run", "--test", files[1])
    assert status == 2 and "shard-0.safetensors" in stderr
    (tmp_path / "run" / "model" / "manifest.json").write_text("{")
    status, _, stderr = call("evaluate", tmp_path / "run", "--test", files[1])
    assert status == 2 and "manifest.json" in stderr


def test_a_run_may_be_repeated_but_an_unfinished_one_is_not_thrown_away(call, files, tmp_path):
    out = tmp_path / "run"
    first = train(call, files, out, "--set", "checkpoint_every=5")
    assert train(call, files, out, "--set", "checkpoint_every=5")["p1"] == first["p1"]
    (out / "model").rename(tmp_path / "elsewhere")  # as if it had been stopped
    arguments = (
        "train",
        "--train",
        files[0],
        "--test",
        files[1],
        "--out",
        out,
        *SMALL,
        "--set",
        "checkpoint_every=5",
    )
    status, _, stderr = call(*arguments)
    assert status == 2 and "--resume" in stderr
    status, _, _ = call(*arguments, "--resume")
    assert status == 0
    shard = "member-0/shard-0.safetensors"
    assert (out / "model" / shard).read_bytes() == (tmp_path / "elsewhere" / shard).read_bytes()


def test_divergence_is_a_failure(call, files, tmp_path):
    wild = ["--set", "optimizer.kind=adam", "--set", "optimizer.learning_rate=1e30", "--epochs", "20"]
    arguments = ("train", "--train", files[0], "--out", tmp_path / "run", "--json", *SMALL, *wild)
    status, stdout, _ = call(*arguments)
    assert status == 1 and json.loads(stdout)["status"] == "diverged"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_nothing_half_written(number, expected, files, tmp_path):
    out = tmp_path / "run"
    endless = ["--set", "epochs=1e7", "--set", "eval_epochs=[]", "--set", "checkpoint_every=3", *SMALL[2:]]
    arguments = ["train", "--train", files[0], "--test", files[1], "--out", out, *endless]
    with start(1, "-m", "dslide", *arguments) as process:
        deadline = time.monotonic() + 60
        while not (out / "checkpoint").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == expected and "Traceback" not in stderr
    assert {f.name for f in out.iterdir()} <= {"meta.json", "events.jsonl", "predictions", "checkpoint"}
    assert json.loads((out / "events.jsonl").read_text().splitlines()[-1])["status"] == "interrupted"


def test_ctrl_c_while_it_is_imported_is_no_traceback():
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from dslide.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_help_version_and_doctor(call):
    assert call("--help")[0] == 0 and call("train", "--help")[0] == 0
    assert call("--version")[1].strip()
    status, stdout, _ = call("doctor", "--json")
    checks = json.loads(stdout)
    assert {"Python", "C++ core", "cores", "memory", "MPI", "virtual nodes", "Horovod"} <= {
        c["name"] for c in checks
    }
    assert status == (1 if any(c["required"] and not c["ok"] for c in checks) else 0)
    assert all(check["ok"] or check["remedy"] for check in checks)
    status, stdout, _ = call("doctor")
    assert "C++ core" in stdout


def test_it_trains_without_what_the_base_install_lacks(files, tmp_path):
    """mpi4py, TensorFlow, Horovod, Snakemake, pandas and the like cannot be imported here."""
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'mpi4py', 'tensorflow', 'horovod', 'snakemake', 'pandas',\n"
        "                                  'matplotlib', 'altair', 'jinja2', 'pyroute2', 'napkinxc'}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from dslide.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = [
        "train",
        "--train",
        files[0],
        "--test",
        files[1],
        "--out",
        tmp_path / "run",
        "--json",
        *SMALL,
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
