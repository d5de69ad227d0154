"""Weights in bfloat16: what they are, that they learn, and that files, ranks and threads keep their bits."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.sparse import csr_matrix
from synthetic import make_dataset
from test_reference import POINTS, make_case

import dslide
from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import TrainConfig, build_config
from dslide.errors import UserError
from dslide.inference import Model, Tables
from dslide.metrics import precision_at
from dslide.trainer import train


def run(out=None, resume=False, **changes):
    config = TrainConfig.model_validate(
        {"network": {"hidden": 32}, "batch_size": 32, "epochs": 3, "threads": 2, "precision": "bfloat16"}
        | changes
    )
    dataset = make_dataset()
    return dataset, train(config, dataset, LocalComm(), Recorder(out), out, resume=resume)


@pytest.mark.parametrize("kind", ["in-batch", "full"])
def test_a_step_is_the_reference_s_up_to_rounding(kind):
    """bfloat16 has eight bits: products of rounded numbers are good to about a hundredth of their size."""
    huge = {"initial_accumulator_input": 1e6, "initial_accumulator_output": 1e6}
    case = make_case(kind, {"activation": "leaky-relu", "slope": 0.4}, "none", huge, precision="bfloat16")
    assert case.network.weights()["output.weights"].dtype == ml_dtypes.bfloat16
    before, gradients = case.weights(), case.reference.gradients(case.x, case.y, case.active)
    assert case.step(lr=1e3) == pytest.approx(gradients.loss, rel=0.02)
    after = case.weights()
    for name, tolerance in (("W", 0.03), ("U", 0.03)):  # a step in float32, rounded to a neighbour
        change = before[name].astype(float) - after[name]
        grid = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(before[name]), 1e-30))) - 6)
        want = getattr(gradients, name)
        assert (np.abs(change - want) <= grid + tolerance * np.abs(want).max()).all()


def test_steps_below_the_last_place_are_not_lost():
    """Steps far below the spacing of neighbours add up, where rounding to the nearest would stand still."""
    huge = {"initial_accumulator_input": 1e6, "initial_accumulator_output": 1e6}
    case = make_case("full", {"activation": "relu"}, "none", huge, precision="bfloat16")
    exact = make_case("full", {"activation": "relu"}, "none", huge)
    start = case.weights()["U"].astype(float)
    for step in range(1, 101):
        case.step(lr=5.0, step=step)
        exact.step(lr=5.0, step=step)
    moved, want = case.weights()["U"] - start, exact.weights()["U"] - start
    assert np.corrcoef(moved.ravel(), want.ravel())[0, 1] > 0.9
    assert np.abs(moved).sum() > 0.5 * np.abs(want).sum()


def test_it_learns_as_float32_does_and_its_files_hold_bfloat16(tmp_path):
    dataset, half = run(tmp_path / "half", epochs=8)
    _, whole = run(epochs=8, precision="float32")
    assert half["p1"] == pytest.approx(whole["p1"], abs=0.12) and half["p1"] > 0.2
    tensors = load_file(tmp_path / "half" / "model" / "member-0" / "shard-0.safetensors")
    assert all(array.dtype == ml_dtypes.bfloat16 for array in tensors.values()) and len(tensors) == 2
    ids, _, _ = Model.load(tmp_path / "half", LocalComm(), 1).topk(dataset.test, 5, "test")
    precision = precision_at(ids, dataset.test.y_indptr, dataset.test.y_indices)
    assert precision == {k: half[f"p{k}"] for k in (1, 3, 5)}


def test_predictions_are_numpy_s_from_the_file_up_to_rounding(tmp_path):
    """Exact, of an ensemble, and among candidates from hash tables: activations are rounded to eight bits."""
    dataset, _ = run(tmp_path, epochs=2, ensemble=2)
    x = csr_matrix((dataset.test.x_values, dataset.test.x_indices, dataset.test.x_indptr)).toarray()
    wanted = []
    for member in ("member-0", "member-1"):
        tensors = load_file(tmp_path / "model" / member / "shard-0.safetensors")
        a = x.astype(float) @ tensors["input.weights"].astype(float)[: x.shape[1]]
        z = np.where(a > 0, a, build_config().network.slope * a) @ tensors["output.weights"].astype(float).T
        wanted.append(np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True)))
    ids, probabilities = dslide.load_model(tmp_path, threads=2).predict(x, k=5)
    of_both = np.mean(wanted, axis=0)
    np.testing.assert_allclose(np.take_along_axis(of_both, ids.astype(int), axis=1), probabilities, rtol=0.05)
    assert (np.abs(-np.sort(-of_both, axis=1)[:, :5] - probabilities) <= 0.05 * probabilities).all()

    run(tmp_path / "one", epochs=2)
    loose = Tables(K=1, L=40, candidates=10_000)
    near, close = dslide.load_model(tmp_path / "one", threads=2, approximate=loose).predict(x, k=5)
    np.testing.assert_allclose(np.take_along_axis(wanted[0], near.astype(int), axis=1), close, rtol=0.05)


def test_a_checkpoint_of_the_other_precision_is_refused(tmp_path):
    run(tmp_path, epochs=1, precision="float32", checkpoint_every=3)
    with pytest.raises(UserError, match="another precision"):
        run(tmp_path, epochs=1, checkpoint_every=3, resume=True)


def test_threads_and_a_resumed_run_keep_the_bits(tmp_path):
    run(tmp_path / "one", threads=1, checkpoint_every=7)
    run(tmp_path / "three", threads=3, checkpoint_every=7)
    run(tmp_path / "three", threads=3, checkpoint_every=7, resume=True)  # from its last checkpoint
    file = "model/member-0/shard-0.safetensors"
    assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "three" / file).read_bytes()


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        (None, {"network": {"hidden": 7}}, "even network.hidden"),
        ("slide", {"network": {"hidden": 7}}, "even network.hidden"),
    ],
)
def test_what_bfloat16_cannot_do_is_said(preset, changes, message):
    with pytest.raises(UserError, match=message):
        build_config(preset, None, {"precision": "bfloat16", **changes})


def test_points_of_the_reference_are_an_odd_number():
    """So that pairs of points are padded above."""
    assert POINTS % 2 == 1
