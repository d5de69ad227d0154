"""Ensembles: members, exact averaged predictions, checkpoints, and the same on ranks side by side."""

import json

import numpy as np
import pytest
from mpirun import needs_mpi
from mpirun import run as mpi
from synthetic import make_dataset, write_prepared
from test_trainer import Stop

from dslide import _core
from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import build_config
from dslide.ensemble import member_seed
from dslide.errors import UserError
from dslide.evaluation import EnsemblePredictor, Predictor, core_csr
from dslide.inference import Model
from dslide.metrics import precision_at
from dslide.network import Manifest
from dslide.trainer import Trainer, train


def settings(preset="default", **overrides):
    base = {"batch_size": 32, "epochs": 2, "threads": 2, "ensemble": 3, "network": {"hidden": 24}}
    return build_config(preset, None, {**base, **overrides})


def run(config, dataset, out=None, resume_step=None):
    recorder = Recorder(out, resume_step=resume_step)
    result = train(config, dataset, LocalComm(), recorder, out, resume=resume_step is not None)
    return result, recorder


def shard(out, member):
    return (out / "model" / f"member-{member}" / "shard-0.safetensors").read_bytes()


def mean_probabilities(model, points):
    """Slow reference [n, labels]: float64 softmax of every member over all labels, averaged."""
    total = 0
    for network in model.networks:
        size = len(points)
        batch = _core.Batch(model.pool, *core_csr(points, points.num_features, points.num_labels))
        batch.select(np.arange(size, dtype=np.int64), 0)
        h = np.zeros((size, network.shape.hidden), np.float32)
        network.input.forward(batch, h, False)
        logits = h.astype(np.float64) @ network.output.weights.T.astype(np.float64)
        if network.config.network.bias:
            logits += network.output.bias
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += p / p.sum(axis=1, keepdims=True)
    return total / len(model.networks)


def test_members_are_the_networks_that_their_seeds_train_alone(tmp_path):
    dataset = make_dataset()
    result, _ = run(settings(), dataset, tmp_path / "all")
    assert result["steps"] == 3 * 20 and result["epochs"] == 6
    for member in range(3):
        alone = tmp_path / str(member)
        run(settings(ensemble=1, seed=member_seed(0, member)), dataset, alone)
        assert shard(alone, 0) == shard(tmp_path / "all", member)
    assert shard(tmp_path / "all", 0) != shard(tmp_path / "all", 1)


@pytest.mark.parametrize("preset", ["default", "slide"])
@pytest.mark.parametrize(("labels", "k"), [(37, 5), (300, 5), (7, 9)])
def test_predictions_are_the_exact_ranking_by_mean_probability(preset, labels, k, tmp_path):
    """Saved and loaded; the first lists are shorter than the labels where there are 300."""
    dataset = make_dataset(labels=labels, test=200)
    result, _ = run(settings(preset), dataset, tmp_path)
    model = Model.load(tmp_path, LocalComm(), 1)
    ids, scores, lse = model.topk(dataset.test, k, "test")
    wanted = mean_probabilities(model, dataset.test)
    order = np.argsort(-wanted, axis=1, kind="stable")[:, :k]
    width = order.shape[1]
    best = np.take_along_axis(wanted, order, axis=1)
    np.testing.assert_allclose(np.exp(scores[:, :width]), best, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(np.take_along_axis(wanted, ids[:, :width], axis=1), best, rtol=1e-3, atol=1e-7)
    assert (ids[:, width:] == -1).all() and (lse == 0).all()
    precision = precision_at(ids[:, :5], dataset.test.y_indptr, dataset.test.y_indices)
    assert precision == {n: result[f"p{n}"] for n in (1, 3, 5)}


def test_lists_get_longer_until_the_ranking_is_sure(tmp_path):
    """Members that agree on nothing: the first lists of 16 labels can't decide."""
    dataset = make_dataset(labels=200, test=20)
    config = settings(epochs=0, network={"hidden": 24, "output_init": "normal"})
    run(config, dataset, tmp_path)
    model = Model.load(tmp_path, LocalComm(), 1)
    for network in model.networks:
        network.output.weights[:] *= 0.01
    widths = []
    ranked = EnsemblePredictor._ranked

    class Watched(EnsemblePredictor):
        def _ranked(self, points, k, width):
            widths.append(width)
            return ranked(self, points, k, width)

    comm = LocalComm()
    predictors = [Predictor(network, comm, model.pool, normaliser=True) for network in model.networks]
    ids, _, _ = Watched(comm, comm, predictors, 3).topk(dataset.test, 3)
    assert widths == [16, 64, 200]
    wanted = mean_probabilities(model, dataset.test)
    best = np.sort(wanted, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(np.take_along_axis(wanted, ids, axis=1), best, rtol=1e-4)


def test_the_members_so_far_are_evaluated_and_time_adds_up(tmp_path):
    result, recorder = run(settings(), make_dataset(), tmp_path)
    evals = [e for e in recorder.events if e["event"] == "eval"]
    assert [e["members"] for e in evals] == [1, 2, 3] and [e["step"] for e in evals] == [20, 40, 60]
    seconds = [e["train_seconds"] for e in evals]
    assert 0 < seconds[0] < seconds[1] < seconds[2] == result["train_seconds"]
    assert result["p1"] == evals[-1]["p1"]
    alone, _ = run(settings(ensemble=1), make_dataset())
    assert evals[0]["p1"] == alone["p1"]


def test_a_target_ends_the_run_between_members(tmp_path):
    dataset = make_dataset()
    first = run(settings(), dataset)[1].events[1]["p1"]
    result, _ = run(settings(target=first), dataset, tmp_path)
    assert result["status"] == "target"
    assert len(Model.load(tmp_path, LocalComm()).networks) == 1


def test_a_budget_keeps_the_members_that_are_complete(tmp_path):
    result, recorder = run(settings(epochs=1e6, budget_seconds=0.05), make_dataset(), tmp_path)
    assert result["status"] == "timeout" and result["steps"] > 0
    assert Manifest.read(tmp_path / "model").content["ensemble"] == 1
    assert [e["members"] for e in recorder.events if e["event"] == "eval"] == [1]


@pytest.mark.parametrize("after", [13, 33])
def test_a_resumed_ensemble_equals_the_uninterrupted_one(after, tmp_path, monkeypatch):
    """Dies within the first member, and within the second, after a checkpoint of it."""
    dataset, config = make_dataset(), settings(checkpoint_every=4)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    result, _ = run(config, dataset, straight)
    assert not list(straight.glob("checkpoint-member-*"))

    taken, one_step = [0], Trainer._one_step

    def dies(self):
        taken[0] += 1
        if taken[0] > after:
            raise Stop
        return one_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", dies)
        with pytest.raises(Stop):
            run(config, dataset, resumed)
    progress = json.loads((resumed / "checkpoint" / "progress.json").read_text())
    assert progress["step"] == after // 20 * 20
    counted = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", lambda self: counted.append(1) or one_step(self))
        again, _ = run(config, dataset, resumed, resume_step=progress["step"])
    assert len(counted) == 60 - after // 4 * 4
    assert [shard(resumed, m) for m in range(3)] == [shard(straight, m) for m in range(3)]
    assert (resumed / "model/manifest.json").read_bytes() == (straight / "model/manifest.json").read_bytes()
    assert {k: again[k] for k in ("p1", "p5", "steps", "samples")} == {
        k: result[k] for k in ("p1", "p5", "steps", "samples")
    }


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ({"groups": 2}, r"groups 2 of ranks.shards 1 need 2 ranks, .* has 1: start it under mpiexec -n 2"),
        ({"shards": 3}, r"groups 1 of ranks.shards 3 need 3 ranks, and the job has 1"),
        ({"groups": 9}, r"ranks.groups 9: must be at most ensemble, 3"),
    ],
)
def test_groups_that_do_not_fit_the_ranks_are_a_mistake(ranks, told):
    with pytest.raises(UserError, match=told):
        run(settings(ensemble=3, ranks=ranks), make_dataset())


MORE = [
    "--set",
    "network.hidden=24",
    "--set",
    "batch_size=33",
    "--set",
    "epochs=2",
    "--threads",
    "1",
    "--json",
]


@needs_mpi
def test_ranks_side_by_side_equal_one_after_another(tmp_path):
    """Bit by bit, since a group is one rank; and a model of two groups loads into one or two ranks."""
    folder = write_prepared(tmp_path / "data", make_dataset())
    results = {}
    for ranks, width in ((1, 1), (2, 2), (2, 1)):
        sets = ["--set", "ensemble=3", "--set", f"ranks.groups={width}", "--set", "wire=fp32", *MORE]
        out = tmp_path / f"{ranks}-{width}"
        done = mpi(ranks, "-m", "dslide", "train", "--data", folder, "--out", out, *sets)
        assert done.returncode == 0, done.stderr
        results[ranks, width] = json.loads(done.stdout)
    for member in range(3):
        assert shard(tmp_path / "2-2", member) == shard(tmp_path / "1-1", member)
    one, apart, sharded = (results[key] for key in ((1, 1), (2, 2), (2, 1)))
    assert [apart[k] for k in ("p1", "p3", "p5", "steps", "samples")] == [
        one[k] for k in ("p1", "p3", "p5", "steps", "samples")
    ]
    assert apart["bytes_sent"] == 0 < sharded["bytes_sent"]
    assert abs(sharded["p1"] - one["p1"]) <= 1.5 / 60
    evaluated = mpi(2, "-m", "dslide", "evaluate", tmp_path / "2-2", "--data", folder, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["p1"] == one["p1"]
