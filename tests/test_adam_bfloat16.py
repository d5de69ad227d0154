"""Adam with weights and moments in bfloat16: what is rounded, that nothing stands still, that it learns."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from synthetic import make_dataset, make_points
from test_adam import FEATURES, LABELS, Run

from dslide import _core
from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import build_config
from dslide.evaluation import core_csr
from dslide.inference import Model, Tables
from dslide.metrics import precision_at
from dslide.trainer import train

SLIDE = {
    "network": {"hidden": 32},
    "batch_size": 16,
    "epochs": 6,
    "threads": 2,
    "eval_epochs": [6.0],
    "precision": "bfloat16",
    "sampler": {"lsh": {"K": 3, "L": 10, "min_active": 5, "top_up": 8, "rebuild_points": 100}},
    "optimizer": {"learning_rate": 0.01, "eps": 1e-5},
}


def settings(preset="slide", **changes):
    return build_config(preset, None, {**SLIDE, **changes})


def run(config, out=None, resume=False):
    return train(config, make_dataset(), LocalComm(), Recorder(out), out, resume=resume)


def floats(array):
    return array.astype(np.float32)


@pytest.mark.parametrize("kind", ["in-batch", "full", "lsh"])
@pytest.mark.parametrize("optimizer", ["adam", "adam-catch-up"])
def test_steps_are_float32s_up_to_rounding(kind, optimizer):
    """From the same weights and on the same rows; what bfloat16 cannot hold is off by a place or a few."""
    points = make_points(200, FEATURES, LABELS, 6)
    half, whole = (
        Run({"kind": optimizer, "eps": 1e-3}, kind, points, precision=precision)
        for precision in ("bfloat16", "float32")
    )
    for name, array in half.network.weights().items():
        whole.network.weights()[name][:] = floats(array)
    if kind == "lsh":  # the tables of both are then of the same rows
        half.sampler.refresh(0)
        whole.sampler.refresh(0)
    start = {name: floats(array) for name, array in half.network.weights().items()}
    for step in range(1, 6):
        for one in (half, whole):
            one.step(np.arange(step, step + 5), 0.01, step)
    got, want = half.all(), whole.all()
    for name in ("input.weights", "output.weights"):
        assert got[name].dtype == got[f"{name}.m"].dtype == got[f"{name}.v"].dtype == ml_dtypes.bfloat16
        moved, exact = floats(got[name]) - start[name], want[name] - start[name]
        assert np.corrcoef(moved.ravel(), exact.ravel())[0, 1] > 0.98
        for moment in ("m", "v"):
            array, size = floats(got[f"{name}.{moment}"]), np.abs(want[f"{name}.{moment}"])
            assert np.abs(array - want[f"{name}.{moment}"]).max() <= 0.05 * size.max()
            assert np.abs(array).mean() == pytest.approx(size.mean(), rel=0.02)
    assert got["output.bias"].dtype == got["output.bias.v"].dtype == np.float32


@pytest.mark.parametrize("optimizer", ["adam", "adam-catch-up"])
def test_v_reaches_its_fixed_point(optimizer):
    """A constant gradient g (a rate of 0) brings v to g^2 (1 - b2^t). Rounding to the nearest would end at a
    fraction of it: where a step, (1 - b2) (g^2 - v), is below half a unit in the last place of v."""
    points, steps = make_points(8, FEATURES, LABELS, 5, gaps=False), 4000
    half = Run({"kind": optimizer}, "full", points, threads=1, precision="bfloat16")
    start = half.network.output.weights.copy()
    for step in range(1, steps + 1):
        half.step(np.arange(8), 0.0, step)
    state = half.all()
    np.testing.assert_array_equal(half.network.output.weights, start)
    exact = Run({"kind": optimizer}, "full", points, threads=1)
    for name, array in half.network.weights().items():
        exact.network.weights()[name][:] = floats(array)
    exact.step(np.arange(8), 0.0, 1)
    gradient = exact.all()["output.weights.m"] / 0.1
    large = np.abs(gradient) > 1e-4
    goal = gradient[large] ** 2 * (1 - 0.999**steps)
    ratio = floats(state["output.weights.v"])[large] / goal
    assert large.sum() > 500 and ratio.mean() == pytest.approx(1, abs=0.03) and ratio.std() < 0.12
    m = floats(state["output.weights.m"])[large] / gradient[large]
    assert m.mean() == pytest.approx(1, abs=0.02)
    stuck = np.zeros_like(goal).astype(ml_dtypes.bfloat16)
    for _ in range(steps):
        stuck = (0.999 * floats(stuck) + 0.001 * gradient[large] ** 2).astype(ml_dtypes.bfloat16)
    assert np.median(floats(stuck) / goal) < 0.6


@pytest.mark.parametrize("optimizer", ["adam", "adam-catch-up"])
def test_shards_draw_as_the_whole_does(optimizer):
    """Two shards of the hidden units end with the bits that one has."""
    points, hidden, pool = make_points(60, FEATURES, LABELS, 5), 64, _core.Pool(2)
    batch = _core.Batch(pool, *core_csr(points, FEATURES, LABELS))
    parts = []
    for begin, end in ((0, hidden), (0, 16), (16, hidden)):
        layer = _core.InputLayer(
            pool, _core.InputConfig(FEATURES, hidden, begin, end, half=True, bias=True, seed=5)
        )
        layer.set_optimizer(_core.Optimizer(optimizer))
        random = np.random.default_rng(1)
        for step in range(1, 20):
            batch.select(random.choice(60, 3, replace=False), step)
            gradient = random.standard_normal((3, hidden)).astype(np.float32)
            layer.forward(batch, np.empty((3, end - begin), np.float32), True)
            layer.backward(batch, np.ascontiguousarray(gradient[:, begin:end]), 0.01, step)
        layer.settle()
        parts.append([layer.weights.copy(), *(layer.state()[name].copy() for name in "mv")])
    for whole, *shards in zip(*parts, strict=True):
        assert whole.dtype == np.uint16
        np.testing.assert_array_equal(whole, np.concatenate(shards, axis=1))


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("slide", {}),
        ("slide", {"optimizer": {"kind": "adam", "learning_rate": 0.01, "eps": 1e-5}}),
        ("slide", {"optimizer": {"kind": "adagrad", "learning_rate": 0.1}}),
        ("default", {"optimizer": {"kind": "adam-catch-up", "learning_rate": 0.01},
                     "sampler": {"lsh_extras": 3}}),
    ],
    ids=["slide", "dense-adam", "lsh-adagrad", "extras"],
)  # fmt: skip
def test_it_learns_and_threads_and_a_resumed_run_keep_the_bits(tmp_path, preset, changes):
    whole = run(settings(preset, **changes, precision="float32"))
    assert whole["p1"] > 0.2
    file = "model/member-0/shard-0.safetensors"
    often = {**changes, "checkpoint_every": 25}
    for threads in (1, 3):
        half = run(settings(preset, **often, threads=threads), tmp_path / str(threads))
        assert half["p1"] == pytest.approx(whole["p1"], abs=0.13)
    run(settings(preset, **often, threads=3), tmp_path / "3", resume=True)  # from the last checkpoint
    assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "3" / file).read_bytes()


def test_files_hold_bfloat16_and_hash_tables_find_what_they_hold(tmp_path):
    result = run(settings(checkpoint_every=25), tmp_path)
    stored = load_file(tmp_path / "checkpoint" / "member-0" / "shard-0.safetensors")
    halves = {name for name, array in stored.items() if array.dtype == ml_dtypes.bfloat16}
    assert halves == {f"{side}.weights{part}" for side in ("input", "output") for part in ("", ".m", ".v")}
    test = make_dataset().test
    ids, _, _ = Model.load(tmp_path, LocalComm(), 1).topk(test, 5, "test")
    assert precision_at(ids, test.y_indptr, test.y_indices)[1] == result["p1"]
    loose = Model.load(tmp_path, LocalComm(), 1, approximate=Tables(K=1, L=40, candidates=10_000))
    near, _, _ = loose.topk(test, 5, "test")
    assert (near == ids).mean() > 0.95
