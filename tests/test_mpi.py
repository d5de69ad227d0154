"""Real ranks, started by mpirun as a user would: equality, payloads, failures."""

import json
import os
import signal
import time

import ml_dtypes
import numpy as np
import psutil
import pytest
from mpirun import needs_mpi, run, start
from synthetic import make_dataset, write_prepared

from dslide.comm import payload_per_point
from dslide.network import Manifest

pytestmark = needs_mpi
DSLIDE = ("-m", "dslide")
# Odd on purpose: 2 blocks of hidden units (so that the third rank has none), 37 labels, 300 points in batches
# of 33.
SIZES = ["--set", "network.hidden=24", "--set", "batch_size=33", "--set", "epochs=3", "--threads", "1"]
HIDDEN = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("data") / "set", make_dataset())


def train(ranks, data, out, *more):
    done = run(ranks, *DSLIDE, "train", "--data", data, "--out", out, "--json", *SIZES, *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tensors(out):
    """The whole model's tensors, shards joined."""
    from safetensors.numpy import load_file

    member = Manifest.read(out / "model").content["members"][0]
    shards = [load_file(out / "model" / member["folder"] / file) for file in member["files"]]
    return {
        name: np.concatenate(
            [s[name] for s in shards], axis=0 if name.startswith("output") else shards[0][name].ndim - 1
        )
        for name in shards[0]
    }


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Runs by (ranks, wire, more arguments), each made once: the result and its folder."""
    made = {}

    def get(ranks, wire="fp32", *more):
        key = (ranks, wire, *more)
        if key not in made:
            out = tmp_path_factory.mktemp("run") / "run"
            made[key] = train(ranks, data, out, "--set", f"wire={wire}", *more), out
        return made[key]

    return get


DRAWS = ("--set", "sampler.uniform_extras=5", "--set", "sampler.log_uniform_extras=5")


@pytest.mark.parametrize(("ranks", "more"), [(2, ()), (3, ()), (2, DRAWS)], ids=["2", "3", "2-draws"])
def test_ranks_equal_one_rank(ranks, more, trained):
    """Up to the order of sums, dropout and the sampler's draws included."""
    (alone, one), (together, several) = trained(1, "fp32", *more), trained(ranks, "fp32", *more)
    assert together["ranks"] == ranks and together["steps"] == alone["steps"]
    weights = tensors(one)
    for name, array in tensors(several).items():
        np.testing.assert_allclose(array, weights[name], rtol=0, atol=2e-3 * np.abs(weights[name]).max())
    assert abs(together["p1"] - alone["p1"]) <= 1.5 / 60
    assert together["bytes_sent"] == together["samples"] * payload_per_point(HIDDEN, ranks, "fp32")
    assert alone["bytes_sent"] == 0


def test_ranks_with_hash_tables_equal_one_rank(data, tmp_path):
    """Without caps and top-up, which hold per shard; the first steps, before a rounding can change a code."""
    more = ["--preset", "slide", "--set", "wire=fp32", "--set", "epochs=0.4", "--set", "optimizer.eps=1e-3",
            "--set", "sampler.lsh.K=2", "--set", "sampler.lsh.bucket_cap=1000",
            "--set", "sampler.lsh.min_active=0"]  # fmt: skip
    results = {ranks: train(ranks, data, tmp_path / str(ranks), *more) for ranks in (1, 2, 3)}
    weights = tensors(tmp_path / "1")
    for ranks in (2, 3):
        assert results[ranks]["steps"] == results[1]["steps"] > 2
        assert results[ranks]["active_pairs"] == pytest.approx(results[1]["active_pairs"], rel=1e-2)
        for name, array in tensors(tmp_path / str(ranks)).items():
            np.testing.assert_allclose(array, weights[name], rtol=0, atol=5e-3 * np.abs(weights[name]).max())


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_rounded_rows_and_their_exact_payload(wire, trained):
    result, out = trained(2, wire)
    assert result["bytes_sent"] == result["samples"] * payload_per_point(HIDDEN, 2, wire)
    assert abs(result["p1"] - trained(1)[0]["p1"]) < 0.15
    end = json.loads((out / "events.jsonl").read_text().splitlines()[-1])
    assert end["payload_bytes"] == result["bytes_sent"] and end["wait_seconds"] > 0
    assert result["evaluation_bytes_sent"] > 0


BFLOAT16 = ("--set", "precision=bfloat16")


def test_ranks_in_bfloat16(trained, data, tmp_path):
    """Rounding is drawn by global ids, but sums in another order may round to other neighbours: not the same
    bits, but close. Other wires, evaluation and resuming work as in float32."""
    (alone, one), (together, several) = trained(1, "fp32", *BFLOAT16), trained(2, "fp32", *BFLOAT16)
    assert together["bytes_sent"] == trained(2, "fp32")[0]["bytes_sent"]
    weights = tensors(one)
    for name, array in tensors(several).items():
        assert array.dtype == weights[name].dtype == ml_dtypes.bfloat16
        difference = np.abs(array.astype(np.float32) - weights[name].astype(np.float32))
        assert difference.mean() <= 2**-8 * np.abs(weights[name].astype(np.float32)).max()
    rounded, _ = trained(2, "int8", *BFLOAT16)
    for result in (alone, together, rounded):
        assert abs(result["p1"] - trained(1)[0]["p1"]) < 0.15
    done = run(2, *DSLIDE, "evaluate", one, "--data", data, "--json")  # one shard's file, cut for two
    assert done.returncode == 0, done.stderr
    assert abs(json.loads(done.stdout)["p1"] - alone["p1"]) <= 1.5 / 60
    whole = train(2, data, tmp_path / "cut", *BFLOAT16, "--set", "checkpoint_every=10")
    resumed = train(2, data, tmp_path / "cut", *BFLOAT16, "--set", "checkpoint_every=10", "--resume")
    assert resumed["p1"] == whole["p1"]


def test_ranks_with_hash_tables_in_bfloat16(data, tmp_path):
    """As in float32, up to the neighbours that other sums are rounded to."""
    more = ["--preset", "slide", *BFLOAT16, "--set", "wire=fp32", "--set", "epochs=0.4",
            "--set", "optimizer.eps=1e-3", "--set", "sampler.lsh.K=2", "--set", "sampler.lsh.bucket_cap=1000",
            "--set", "sampler.lsh.min_active=0"]  # fmt: skip
    alone, together = (train(ranks, data, tmp_path / str(ranks), *more) for ranks in (1, 2))
    assert together["active_pairs"] == pytest.approx(alone["active_pairs"], rel=2e-2)
    weights = tensors(tmp_path / "1")
    for name, array in tensors(tmp_path / "2").items():
        one, two = weights[name].astype(np.float32), array.astype(np.float32)
        assert np.abs(one - two).mean() <= 2**-8 * np.abs(one).max()


def test_payload_depends_neither_on_labels_nor_on_features(trained, tmp_path):
    """Even with one label, which leaves a rank without any."""
    folder = write_prepared(tmp_path / "set", make_dataset(labels=1, features=3000))
    assert train(2, folder, tmp_path / "run")["bytes_sent"] == trained(2, "int8")[0]["bytes_sent"]


def test_ranks_resume_bit_by_bit(data, tmp_path):
    more = ["--preset", "slide", "--set", "checkpoint_every=7", "--set", "sampler.lsh.rebuild_points=100"]
    train(2, data, tmp_path / "straight", *more)
    folder = tmp_path / "resumed"
    with start(2, *DSLIDE, "train", "--data", data, "--out", folder, *SIZES, *more) as process:
        wait_for(process, lambda: (folder / "checkpoint").exists())
        for child in ranks_of(process):
            child.kill()
        process.communicate(timeout=20)
    result = train(2, data, folder, *more, "--resume")
    assert result["steps"] == 30
    for file in ("manifest.json", "member-0/shard-0.safetensors", "member-0/shard-1.safetensors"):
        assert (folder / "model" / file).read_bytes() == (tmp_path / "straight" / "model" / file).read_bytes()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1)])
def test_a_model_loads_into_another_number_of_ranks(before, after, data, trained):
    result, out = trained(before)
    done = run(after, *DSLIDE, "evaluate", out, "--data", data, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert {k: measured[k] for k in ("p1", "p3", "p5")} == {k: result[k] for k in ("p1", "p3", "p5")}


def ranks_of(process):
    """The ranks' processes, below mpirun, once they train."""
    found = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "OMPI_COMM_WORLD_RANK" in child.environ()
    ]
    return sorted(found, key=lambda child: int(child.environ()["OMPI_COMM_WORLD_RANK"]))


LONG = ["--set", "epochs=1e7", "--set", "eval_epochs=[]", "--set", "optimizer.decay=constant"]


def wait_for(process, condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came to train"
        time.sleep(0.05)


HIDDEN_EXCHANGES = {
    "whole": ("exchange.parts=1",),
    "parts": ("exchange.parts=2", "batch_size=64"),
    "stale": ("exchange.stale_after=0",),
}


@pytest.mark.parametrize("way", HIDDEN_EXCHANGES)
def test_a_killed_rank_ends_the_job_and_is_named(way, data, tmp_path):
    more = [argument for setting in HIDDEN_EXCHANGES[way] for argument in ("--set", setting)]
    command = [*DSLIDE, "train", "--data", data, "--out", tmp_path / "run", *SIZES, *LONG, *more]
    with start(2, *command) as process:
        wait_for(process, lambda: "eval" in _events(tmp_path / "run") and len(ranks_of(process)) == 2)
        victims = ranks_of(process)
        victims[1].kill()
        _, stderr = process.communicate(timeout=10)
        assert process.returncode not in (0, None)
        assert "rank 1" in stderr
        _, alive = psutil.wait_procs(victims, timeout=5)
        assert not alive
    assert not (tmp_path / "run" / "model").exists()


def _events(out):
    path = out / "events.jsonl"
    return path.read_text() if path.exists() else ""


def test_ctrl_c_ends_all_ranks_and_is_recorded(data, tmp_path):
    with start(2, *DSLIDE, "train", "--data", data, "--out", tmp_path / "run", *SIZES, *LONG) as process:
        wait_for(process, lambda: "eval" in _events(tmp_path / "run") and len(ranks_of(process)) == 2)
        victims = ranks_of(process)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode != 0
        assert not psutil.wait_procs(victims, timeout=5)[1]
    assert '"interrupted"' in _events(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    assert not [f for f in (tmp_path / "run").iterdir() if f.name.startswith(".")]


def test_an_exception_on_one_rank_ends_the_job_and_names_it(data, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys\n"
        "from dslide import comm, trainer\n"
        "from dslide.cli import main\n"
        "step = trainer.Trainer._one_step\n"
        "def broken(self):\n"
        "    if comm.world().rank == 1 and self.step == 5:\n"
        "        raise RuntimeError('the roof is on fire')\n"
        "    return step(self)\n"
        "trainer.Trainer._one_step = broken\n"
        "main(sys.argv[1:])\n"
    )
    done = run(2, program, "train", "--data", data, "--out", tmp_path / "run", *SIZES, *LONG, timeout=30)
    assert done.returncode == 1
    assert "rank 1 of 2" in done.stderr and "the roof is on fire" in done.stderr


def test_a_mistake_is_told_once_with_status_2(data, tmp_path):
    done = run(2, *DSLIDE, "train", "--data", tmp_path / "nothing", "--out", tmp_path / "run", timeout=30)
    assert done.returncode == 2
    assert done.stderr.count("no meta.json") == 1 and "Traceback" not in done.stderr


def test_ranks_with_other_settings_refuse_to_train(data, tmp_path):
    program = tmp_path / "differs.py"
    program.write_text(
        "import os, sys\n"
        "from dslide.cli import main\n"
        "main([*sys.argv[1:], '--seed', os.environ['OMPI_COMM_WORLD_RANK']])\n"
    )
    done = run(2, program, "train", "--data", data, "--out", tmp_path / "run", timeout=30)
    assert done.returncode == 2 and "rank 1 has another config" in done.stderr


WORKING_WAIT = """
import time
import numpy as np
from dslide import comm

world, pieces, worked = comm.world(), [], 0.0
buffer = np.full(4, world.rank, np.float32)
def meanwhile():
    global worked
    if len(pieces) == 5:
        return False
    begin = time.perf_counter()
    time.sleep(0.1)
    pieces.append(0)
    worked += time.perf_counter() - begin
    return True

peer = 1 - world.rank
if world.rank == 0:
    messages = world.prepare([], [(peer, buffer)], 1)
    world.start(messages)
    begin = time.perf_counter()
    world.finish(messages, meanwhile)
    print(len(pieces), buffer[0], world.wait_seconds, time.perf_counter() - begin - worked)
else:
    time.sleep(1.5)
    messages = world.prepare([(peer, buffer)], [], 1)
    world.start(messages)
    world.finish(messages)
world.barrier()
"""


def test_a_wait_does_work_that_does_not_count_as_waiting():
    done = run(2, "-c", WORKING_WAIT)
    assert done.returncode == 0, done.stderr
    pieces, value, waited, most = map(float, done.stdout.split())
    assert pieces == 5 and value == 1
    assert 0 < waited <= most
