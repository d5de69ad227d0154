"""The training step: the reference against finite differences, the core against the reference."""

import numpy as np
import pytest
from reference import Reference, in_batch_log_q
from synthetic import make_points

from dslide import _core
from dslide.comm import LocalComm
from dslide.config import TrainConfig
from dslide.evaluation import core_csr
from dslide.network import Network, Shape
from dslide.samplers import label_counts, make_sampler

FEATURES, HIDDEN, LABELS, POINTS = 23, 20, 17, 13


def setting(**network):
    """A config with weights large enough to tell right from wrong."""
    return TrainConfig.model_validate(
        {
            "network": {
                "hidden": HIDDEN,
                "dropout": 0.0,
                "input_init_std": 0.7,
                "output_init": "normal",
                "output_init_std": 0.7,
                **network,
            },
            "batch_size": POINTS,
        }
    )


class Case:
    """A core network on one batch, and the reference with the same weights."""

    def __init__(self, config, kind="in-batch", threads=2, labels=LABELS):
        self.config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"kind": kind})})
        self.points = make_points(POINTS, FEATURES, labels, 5)
        shape = Shape.of(FEATURES, HIDDEN, labels, 1)
        self.pool = _core.Pool(threads)
        self.network = Network(self.config, shape, LocalComm().rank, self.pool, training=True)
        self.batch = _core.Batch(self.pool, *core_csr(self.points, FEATURES, labels))
        self.rows = np.random.default_rng(3).permutation(POINTS)
        self.batch.select(self.rows.astype(np.int64), 0)
        counts = label_counts(self.points.y_indices, labels)
        self.sampler = make_sampler(
            self.config.sampler, self.network.output, (labels, 0, labels), counts, POINTS, POINTS, 0
        )
        self.x = np.asarray(self.points.x.todense(), np.float64)[self.rows]
        self.y = np.asarray(self.points.y.todense(), np.float64)[self.rows]
        present = self.y.any(axis=0) if kind == "in-batch" else np.ones(labels, bool)
        self.active = np.broadcast_to(present, (POINTS, labels))
        log_q = np.zeros(labels)
        if kind == "in-batch" and self.config.sampler.log_q:
            log_q[present] = in_batch_log_q(counts[present].astype(float), POINTS, POINTS, 0, labels)
        net, weights = self.config.network, self.weights()
        self.reference = Reference(
            **{key: weights[key].astype(np.float64) for key in "WbUc"},
            slope=net.slope if net.activation == "leaky-relu" else 0.0,
            weight_labels=self.config.point_weight == "sqrt-labels",
            bias=net.bias,
            log_q=log_q,
        )

    def weights(self):
        """Copies of the core's parameters by the reference's names."""
        network, bias = self.network, self.config.network.bias
        return {
            "W": network.weights()["input.weights"].astype(np.float32),
            "b": network.input.bias.copy() if bias else np.zeros(HIDDEN, np.float32),
            "U": network.weights()["output.weights"].astype(np.float32),
            "c": network.output.bias.copy() if bias else np.zeros(len(network.output.weights), np.float32),
        }

    def step(self, lr, step=1):
        """One step of the core; the mean loss before it."""
        network = self.network
        h, dh = np.empty((2, POINTS, HIDDEN), np.float32)
        lse = np.empty(POINTS, np.float32)
        network.input.forward(self.batch, h, True)
        network.output.forward(self.batch, h, self.sampler.core, lse)
        weighted = self.config.point_weight == "sqrt-labels"
        loss = network.output.backward(self.batch, lse, dh, weighted, POINTS)
        network.output.update(lr, step)
        network.input.backward(self.batch, dh, lr, step)
        return loss / POINTS


CASES = [
    ("in-batch", {"activation": "leaky-relu", "slope": 0.4}, "sqrt-labels"),
    ("in-batch", {"activation": "relu", "bias": True}, "none"),
    ("full", {"activation": "leaky-relu", "slope": 0.2, "bias": True}, "sqrt-labels"),
    ("full", {"activation": "relu"}, "none"),
]


def make_case(kind, network, point_weight, optimizer, threads=2, precision="float32"):
    config = setting(**network).model_copy(update={"point_weight": point_weight, "precision": precision})
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=optimizer)})
    return Case(config, kind, threads)


@pytest.mark.parametrize(("kind", "network", "point_weight"), CASES)
def test_reference_gradients_are_those_of_its_loss(kind, network, point_weight):
    case = make_case(kind, network, point_weight, {})
    reference = case.reference
    gradients = reference.gradients(case.x, case.y, case.active)
    random = np.random.default_rng(0)
    for name in reference.names():
        array = getattr(reference, name)
        for _ in range(12):
            spot = tuple(random.integers(0, size) for size in array.shape)
            keep, losses = array[spot], []
            for delta in (1e-6, -1e-6):
                array[spot] = keep + delta
                losses.append(reference.gradients(case.x, case.y, case.active).loss)
            array[spot] = keep
            slope = (losses[0] - losses[1]) / 2e-6
            assert getattr(gradients, name)[spot] == pytest.approx(slope, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize(("kind", "network", "point_weight"), CASES)
def test_core_gradients_against_finite_differences(kind, network, point_weight):
    """Adagrad with huge accumulators is plain gradient descent, so a step's change is the gradient."""
    huge = {"initial_accumulator_input": 1e6, "initial_accumulator_output": 1e6}
    case = make_case(kind, network, point_weight, huge)
    reference, before = case.reference, case.weights()
    loss = case.step(lr=1e3)
    assert loss == pytest.approx(reference.gradients(case.x, case.y, case.active).loss, rel=1e-5)
    after = case.weights()
    random = np.random.default_rng(1)
    for name in reference.names():
        array, change = getattr(reference, name), before[name].astype(float) - after[name]
        spots = [tuple(spot) for spot in np.argwhere(np.abs(change) > 1e-3)]
        assert len(spots) > 3
        for spot in random.permutation(len(spots))[:10]:
            spot = spots[spot]
            keep, losses = array[spot], []
            for delta in (1e-6, -1e-6):
                array[spot] = keep + delta
                losses.append(reference.gradients(case.x, case.y, case.active).loss)
            array[spot] = keep
            assert change[spot] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=2e-3, abs=2e-6)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adam-catch-up"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("kind", "network", "point_weight"), CASES)
def test_core_steps_equal_the_reference(kind, network, point_weight, optimizer, threads):
    initial = {"initial_accumulator_input": 1e-4, "initial_accumulator_output": 1e-3}
    case = make_case(kind, network, point_weight, {"kind": optimizer, "eps": 1e-5, **initial}, threads)
    reference, opt = case.reference, case.config.optimizer
    for step in (1, 2, 3):
        gradients = reference.gradients(case.x, case.y, case.active)
        assert case.step(lr=0.01, step=step) == pytest.approx(gradients.loss, rel=1e-4)
        if optimizer == "adagrad":
            start = {"W": 1e-4, "b": 1e-4, "U": 1e-3, "c": 1e-3}
            reference.adagrad(gradients, 0.01, opt.eps, start)
        else:
            reference.adam(gradients, 0.01, opt.eps, step)
    weights = case.weights()
    for name in reference.names():
        np.testing.assert_allclose(weights[name], getattr(reference, name), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(("labels", "spread"), [(LABELS, 0.7), (2_000, 20.0)])
def test_lsh_that_retrieves_everything_is_the_full_softmax(labels, spread):
    """Topped up to all labels, hash tables change nothing; nor do logits of which a later row's is by far the
    larger, so that what was summed up before has to be scaled down."""
    config = setting(activation="relu", output_init_std=spread)
    lsh = config.sampler.lsh.model_copy(update={"min_active": labels, "top_up": labels, "K": 3, "L": 4})
    config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"lsh": lsh})})
    full, hashed = (Case(config, kind, labels=labels) for kind in ("full", "lsh"))
    hashed.sampler.refresh(0)
    assert hashed.step(0.05) == pytest.approx(full.step(0.05), rel=1e-5)
    assert hashed.network.output.active_pairs == POINTS * labels
    for name, weights in full.weights().items():
        np.testing.assert_allclose(hashed.weights()[name], weights, rtol=1e-3, atol=1e-5 * spread)


def test_dropout_drops_its_share_and_keeps_the_mean():
    config = setting(activation="leaky-relu", dropout=0.25)
    case = Case(config)
    plain, dropped = np.empty((2, POINTS, HIDDEN), np.float32)
    case.network.input.forward(case.batch, plain, False)
    shares, keyed = [], []
    for step in range(200):
        case.batch.select(case.rows.astype(np.int64), step)
        case.network.input.forward(case.batch, dropped, True)
        there = plain != 0
        shares.append((dropped[there] == 0).mean())
        kept = there & (dropped != 0)
        np.testing.assert_allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-5)
        keyed.append(dropped.copy())
    assert np.mean(shares) == pytest.approx(0.25, abs=0.01)
    assert any((keyed[0] != other).any() for other in keyed[1:])
