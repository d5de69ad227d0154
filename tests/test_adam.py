"""Adam with catch-up: rows that make their missed steps together end where dense Adam takes them."""

import numpy as np
import pytest
from pydantic import ValidationError
from reference import Reference
from synthetic import make_dataset, make_points

from dslide import _core
from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import OptimizerConfig, TrainConfig, build_config
from dslide.evaluation import core_csr
from dslide.inference import Model
from dslide.network import Network, Shape
from dslide.samplers import label_counts, make_sampler
from dslide.trainer import train

FEATURES, HIDDEN, LABELS = 61, 20, 47


class Run:
    """A core network that is trained on any points of a fixed set, without dropout."""

    def __init__(self, optimizer, kind, points, threads=2, precision="float32"):
        config = TrainConfig.model_validate(
            {
                "network": {"hidden": HIDDEN, "dropout": 0, "input_init_std": 0.5, "output_init": "normal",
                            "output_init_std": 0.5, "bias": True},
                "sampler": {"kind": kind, "log_q": False, "lsh": {"K": 3, "L": 3, "min_active": 0}},
                "optimizer": optimizer,
                "precision": precision,
            }
        )  # fmt: skip
        self.pool = _core.Pool(threads)
        self.network = Network(config, Shape.of(FEATURES, HIDDEN, LABELS, 1), 0, self.pool, training=True)
        self.points = points
        self.batch = _core.Batch(self.pool, *core_csr(points, FEATURES, LABELS))
        counts = label_counts(points.y_indices, LABELS)
        self.sampler = make_sampler(
            config.sampler, self.network.output, (LABELS, 0, LABELS), counts, len(points), 4, 0
        )

    def forward(self, rows, step):
        rows = np.asarray(rows, np.int64)
        self.batch.select(rows, step)
        h, lse = np.empty((len(rows), HIDDEN), np.float32), np.empty(len(rows), np.float32)
        self.network.input.forward(self.batch, h, True)
        self.network.output.forward(self.batch, h, self.sampler.core, lse)
        return h, lse

    def step(self, rows, lr, step, may_wait=False):
        h, lse = self.forward(rows, step)
        dh, network = np.empty_like(h), self.network
        network.output.backward(self.batch, lse, dh, True, len(rows))
        network.output.update(lr, step, may_wait)
        network.input.backward(self.batch, dh, lr, step)

    def all(self):
        """Weights and state, settled."""
        self.network.settle()
        return {name: a.copy() for name, a in (self.network.weights() | self.network.state()).items()}


def reference_of(run):
    """The float64 reference with the same start."""
    weights = {name: array.astype(np.float64) for name, array in run.network.weights().items()}
    config = run.network.config
    return Reference(
        weights["input.weights"],
        weights["input.bias"].ravel(),
        weights["output.weights"],
        weights["output.bias"].ravel(),
        slope=config.network.slope,
        weight_labels=True,
    )


# A step of 0.5, so that the missed ones matter; eps from negligible to dominant; other betas.
@pytest.mark.parametrize(
    ("eps", "betas"),
    [(1e-8, (0.9, 0.999)), (1e-3, (0.9, 0.999)), (1e-6, (0.9, 0.98)), (1e-6, (0.0, 0.9))],
)
def test_thousands_of_missed_steps_are_dense_adams(eps, betas):
    """After two steps on all points only two points are left; the rest of the rows wait for 3,000 steps."""
    points = make_points(40, FEATURES, LABELS, 5, gaps=False)
    optimizer = {"kind": "adam-catch-up", "eps": eps, "beta1": betas[0], "beta2": betas[1]}
    run = Run(optimizer, "in-batch", points, threads=1)
    x, y = (np.asarray(part.todense(), np.float64) for part in (points.x, points.y))
    reference, start = reference_of(run), run.network.output.weights.copy()
    last = reference.U
    for step in range(1, 3001):
        rows = np.arange(40) if step <= 2 else np.array([0, 1])
        # A long way in the first steps, then a slow decay, which the waiting rows must follow too.
        rate = 0.05 if step < 200 else 1e-4 * (1 - step / 6000)
        run.step(rows, rate, step)
        active = np.broadcast_to(y[rows].any(axis=0), y[rows].shape)
        reference.adam(reference.gradients(x[rows], y[rows], active), rate, eps, step, *betas)
        if step == 2:
            last = reference.U
    got = run.all()
    touched = np.unique(points.y_indices[: points.y_indptr[2]])
    waiting = np.setdiff1d(points.y_indices, touched)
    moved = np.abs(reference.U - last)[waiting]
    if betas[0] > 0:
        assert np.median(moved) > 0.05  # the steps that were missed are no trifle
    np.testing.assert_allclose(got["output.weights"][waiting], reference.U[waiting], rtol=2e-4, atol=2e-5)
    assert np.abs(got["output.weights"] - start).max() > 0.1
    features = np.unique(points.x_indices[: points.x_indptr[2]])
    waiting_features = np.setdiff1d(points.x_indices, features)
    np.testing.assert_allclose(
        got["input.weights"][waiting_features], reference.W[waiting_features], rtol=2e-4, atol=2e-5
    )
    np.testing.assert_allclose(
        got["output.weights.v"][waiting], reference.moments["U"][1][waiting], rtol=1e-3, atol=1e-12
    )
    np.testing.assert_allclose(got["output.weights.m"][waiting], 0, atol=1e-12)


@pytest.mark.parametrize("kind", ["in-batch", "lsh", "full"])
def test_it_is_dense_adam_on_random_batches(kind):
    """Both side by side; settled at odd moments, which changes nothing but roundings."""
    points = make_points(200, FEATURES, LABELS, 6)
    random = np.random.default_rng(4)
    dense = Run({"kind": "adam", "eps": 1e-4}, kind, points)
    lazy = Run({"kind": "adam-catch-up", "eps": 1e-4}, kind, points)
    for step in range(1, 151):
        rows = random.choice(200, 3, replace=False)
        for run in (dense, lazy):
            run.step(rows, 2e-3, step)
        if kind == "lsh" and step % 40 == 0:
            for run in (dense, lazy):
                run.sampler.refresh(step)
        if step in (7, 77):
            lazy.network.settle()
    expected = dense.all()
    for name, array in lazy.all().items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["in-batch", "lsh"])
def test_any_number_of_threads_gives_the_same_bits(kind, precision):
    points = make_points(200, FEATURES, LABELS, 6)
    results = []
    for threads in (1, 2, 5):
        run = Run({"kind": "adam-catch-up"}, kind, points, threads, precision)
        for step in range(1, 60):
            run.step(np.arange(step, step + 5) % 200, 0.01, step)
            if kind == "lsh" and step % 20 == 0:
                run.sampler.refresh(step)
        results.append(run.all())
    for name, array in results[0].items():
        for other in results[1:]:
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_what_is_saved_and_evaluated_is_settled(tmp_path):
    """The saved model equals dense Adam's, and predicts what was measured."""
    dataset, weights = make_dataset(), []
    for kind in ("adam", "adam-catch-up"):
        optimizer = {"kind": kind, "learning_rate": 2e-3, "eps": 1e-4, "decay": "constant"}
        config = build_config(
            overrides={"optimizer": optimizer, "network": {"hidden": 24}, "batch_size": 4, "epochs": 2}
        )
        out = tmp_path / kind
        train(config, dataset, LocalComm(), Recorder(out), out)
        weights.append(Model.load(out, LocalComm()).networks[0].weights())
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=5e-3, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["in-batch", "lsh"])
def test_a_step_that_is_given_up_leaves_no_trace(kind, precision):
    """Weights that were read for it have moved, their moments have not; settling brings both to the end."""
    points = make_points(200, FEATURES, LABELS, 6)
    results = []
    for given_up in (False, True):
        run = Run({"kind": "adam-catch-up"}, kind, points, precision=precision)
        for step in range(1, 30):
            run.step(np.arange(step, step + 5), 0.01, step)
        if given_up:
            run.forward(np.arange(60, 90), 30)
            run.forward(np.arange(70, 100), 30)
        results.append(run.all())
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name], err_msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adam-catch-up", "adam", "adagrad"])
@pytest.mark.parametrize("kind", ["in-batch", "lsh"])
def test_rows_that_wait_to_be_read_make_the_same_steps(kind, optimizer, precision):
    """Not a bit differs, whatever comes between: other rows, a rebuild, settling, a step given up."""
    points = make_points(200, FEATURES, LABELS, 6)
    results = []
    for may_wait in (lambda _: False, lambda _: True, lambda step: step % 3 > 0):
        run = Run({"kind": optimizer, "eps": 1e-6}, kind, points, precision=precision)
        for step in range(1, 80):
            run.step(np.arange(step, step + 4) % 200, 0.01, step, may_wait(step))
            if kind == "lsh" and step % 25 == 0:
                run.sampler.refresh(step)
            if step in (7, 51):
                run.network.settle()
            if step in (12, 40):
                run.forward(np.arange(90, 95), step + 1)
        assert run.network.output.active_rows > 0 and run.network.output.active_pairs > 0
        results.append(run.all())
    for name, array in results[0].items():
        for other in results[1:]:
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_rows_that_wait_are_moved_before_another_sampler_shares_them():
    points = make_points(200, FEATURES, LABELS, 6)
    results = []
    for may_wait in (False, True):
        run = Run({"kind": "adam-catch-up"}, "lsh", points)
        shared = Run({"kind": "adam-catch-up"}, "in-batch", points).sampler
        own = run.sampler
        for step in range(1, 20):
            run.sampler = shared if step % 2 == 0 else own
            run.step(np.arange(step, step + 4), 0.01, step, may_wait)
        results.append(run.all())
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name], err_msg=name)


def test_betas_that_would_need_too_many_terms_are_refused():
    with pytest.raises(ValidationError, match="beta1 <= beta2"):
        OptimizerConfig(kind="adam-catch-up", beta1=0.9, beta2=0.95)
    OptimizerConfig(kind="adam", beta1=0.9, beta2=0.95)
    pool = _core.Pool(1)
    layer = _core.OutputLayer(pool, 5, 0, 5, 4)
    with pytest.raises(ValueError, match="beta1 <= beta2"):
        layer.set_optimizer(_core.Optimizer("adam-catch-up", beta1=0.9, beta2=0.95))
