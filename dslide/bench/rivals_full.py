"""Full softmax in TensorFlow with dense gradients, on one node or averaged over ranks.

The network of the SLIDE papers' TensorFlow baseline: sparse input, ReLU, softmax over all labels with the
target spread evenly over a point's labels, biases in both layers. A bias is the weight of a constant input,
so that it costs no pass of its own over the [batch, labels] errors.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import sparse

from dslide.bench import rivals_tf as rt
from dslide.bench.rivals_data import Floats, InputMaker, Inputs, own_part, point_weights
from dslide.bench.rivals_setup import FullSettings
from dslide.data import Dataset

Reduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class Feed(NamedTuple):
    """A batch as a rank sees it: inputs; places int64 [m, 2] (point, label) and values of the target; weight
    [points]."""

    inputs: Inputs
    places: NDArray[np.int64]
    target: Floats
    weight: Floats


class FullTrainer:
    """The full-softmax network and its step.

    Args:
        dataset: what it will be trained on.
        settings, seed, batch_size: of the run; the batch is the global one.
        rank, size: this rank takes points rank, rank + size, ... of every batch.
        reduce: sums a list of dense gradients over the ranks, in a traced function; None for one rank.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: FullSettings,
        *,
        seed: int,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        reduce: Reduce | None = None,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rank, self._size, self._reduce = rank, size, reduce
        self._x, self._y = dataset.train.x, dataset.train.y
        self._maker = InputMaker(self._x)
        d, h, labels = dataset.num_features, settings.hidden, dataset.num_labels
        # [D, H] and bias [H] of the hidden layer; [L, H + 1] of the output layer, its last column the bias.
        self.weights = [tf.Variable(tf.zeros(shape)) for shape in ([d, h], [h], [labels, h + 1])]
        slots = 2 if settings.optimizer == "adam" else 1
        self.state = [[tf.Variable(tf.zeros_like(w)) for _ in range(slots)] for w in self.weights]
        self.steps_done = 0
        self._trace(batch_size)
        self._reset()

    def _reset(self) -> None:
        """The initial weights, the same on all ranks."""
        w1, b1, w2 = self.weights
        random = np.random.Generator(np.random.Philox(key=[self._seed, 1]))
        for weights in (w1, w2):
            std = self._settings.init_std or 2 / np.sqrt(sum(weights.shape))
            weights.assign(random.standard_normal(weights.shape, np.float32) * np.float32(std))
        b1.assign(tf.zeros_like(b1))
        w2[:, -1].assign(tf.zeros(w2.shape[0]))
        first, out = self._settings.initial_accumulator_input, self._settings.initial_accumulator
        for slots, value in zip(self.state, (first, first, out), strict=True):
            for slot in slots:
                slot.assign(tf.fill(slot.shape, value if self._settings.optimizer == "adagrad" else 0.0))
        self.steps_done = 0

    def _trace(self, batch_size: int) -> None:
        """Traces every function and runs it on weights that are thrown away: none of it is training."""
        s, ids = rt.spec, rt.spec(None, dtype=rt.I32)
        count = s(dtype=rt.I32)
        target = [s(None, 2, dtype=rt.I64), s(None), s(None)]
        self._step = tf.function(self._step_graph, [*rt.TRIPLETS, *rt.TRIPLETS, ids, *target, s(), s(), s()])
        labels, width = self.weights[2].shape
        hidden = tf.function(self._hidden_graph, [*rt.TRIPLETS, count])
        self._scorer = rt.Scorer(hidden, labels, width - 1, bias=True)
        self._gradients = tf.function(self._gradients_graph, [*rt.TRIPLETS, *rt.TRIPLETS, ids, *target])
        batch = np.arange(min(batch_size, self._x.shape[0]))
        for step in range(2):
            self.step(self.feed(batch, step), step, 1.0)
        self.predict(self._x[:2])

    def prepare(self) -> None:
        """Nothing depends on the data."""

    def feed(self, batch: NDArray[np.int64], step: int) -> Feed:
        """A rank's part of the batch."""
        own, stand_in = own_part(batch, self._rank, self._size)
        y = self._y[own]
        counts = np.diff(y.indptr)
        places = np.empty((y.nnz, 2), np.int64)
        places[:, 0] = np.repeat(np.arange(len(own)), counts)
        places[:, 1] = y.indices
        target = np.repeat(1 / np.maximum(counts, 1), counts).astype(np.float32)
        weight = point_weights(counts, len(batch), False)
        return Feed(self._maker.make(own), places, target, np.zeros_like(weight) if stand_in else weight)

    def step(self, feed: Feed, step: int, progress: float) -> None:
        """One step with the learning rate of `progress`."""
        self.steps_done += 1
        s = self._settings
        rate = s.lr * ((1 - progress) if s.schedule == "linear" else 1)
        powers = np.float32(s.beta1**self.steps_done), np.float32(s.beta2**self.steps_done)
        self._step(*_arguments(feed), np.float32(rate), *powers)

    def gradients(self, feed: Feed) -> list[NDArray[np.float32]]:
        """This rank's gradients, dense: what the tests hold against numpy."""
        d_w1, d_b1, d_w2 = self._gradients(*_arguments(feed))
        dense = np.zeros(self.weights[0].shape, np.float32)
        dense[feed.inputs.features] = d_w1.numpy()
        return [dense, d_b1.numpy(), d_w2.numpy()]

    def predict(self, x: sparse.csr_matrix) -> tuple[NDArray[np.int32], Floats]:
        """Exact top-5 of the points x."""
        w2 = self.weights[2].numpy()
        return self._scorer.top5(x, w2[:, :-1], w2[:, -1])

    def _hidden(self, index: tf.Tensor, values: tf.Tensor, points: tf.Tensor, w1: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(rt.sparse_product(index, values, points, w1) + self.weights[1])

    def _hidden_graph(self, index: tf.Tensor, values: tf.Tensor, points: tf.Tensor) -> tf.Tensor:
        return self._hidden(index, values, points, self.weights[0])

    def _gradients_graph(
        self,
        x_index: tf.Tensor,
        x_values: tf.Tensor,
        xt_index: tf.Tensor,
        xt_values: tf.Tensor,
        features: tf.Tensor,
        places: tf.Tensor,
        target: tf.Tensor,
        weight: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Gradients of the weighted sum of the points' losses: rows `features` of w1, b1, w2."""
        w1, _, w2 = self.weights
        h = self._hidden(x_index, x_values, tf.shape(weight)[0], rt.rows_of(w1, features))
        h = tf.pad(h, [[0, 0], [0, 1]], constant_values=1.0)  # what the output biases, w2's last column, see
        error = tf.nn.softmax(tf.matmul(h, w2, transpose_b=True))
        error = tf.tensor_scatter_nd_sub(error, places, target)
        d_w2 = tf.matmul(error, h * weight[:, None], transpose_a=True)
        d_z = tf.where(h > 0, tf.matmul(error, w2) * weight[:, None], 0.0)[:, :-1]
        d_w1 = rt.sparse_product(xt_index, xt_values, tf.shape(features)[0], d_z)
        return d_w1, tf.reduce_sum(d_z, axis=0), d_w2

    def _step_graph(self, *arguments: tf.Tensor) -> None:
        *batch, rate, beta1_power, beta2_power = arguments
        features = batch[4]
        d_w1, d_b1, d_w2 = self._gradients_graph(*batch)
        s = self._settings
        sparse_rows = s.optimizer == "adagrad" and self._reduce is None
        if not sparse_rows:
            d_w1 = tf.math.unsorted_segment_sum(d_w1, features, self.weights[0].shape[0])
        gradients = [d_w1, d_b1, d_w2]
        if self._reduce is not None:
            gradients = self._reduce(gradients)
        for place, (weights, slots, gradient) in enumerate(
            zip(self.weights, self.state, gradients, strict=True)
        ):
            if s.optimizer == "adam":
                tf.raw_ops.ResourceApplyAdam(
                    **{"var": weights.handle, "m": slots[0].handle, "v": slots[1].handle, "grad": gradient},
                    **{"beta1": s.beta1, "beta2": s.beta2, "epsilon": s.eps, "lr": rate},
                    **{"beta1_power": beta1_power, "beta2_power": beta2_power},
                )
                continue
            adagrad = {
                "var": weights.handle,
                "accum": slots[0].handle,
                "lr": rate,
                "epsilon": s.eps,
                "grad": gradient,
            }
            if (
                place == 0 and sparse_rows
            ):  # Adagrad leaves a row without a gradient as it is: the same result
                tf.raw_ops.ResourceSparseApplyAdagradV2(indices=features, **adagrad)
            else:
                tf.raw_ops.ResourceApplyAdagradV2(**adagrad)


def _arguments(feed: Feed) -> tuple[NDArray, ...]:
    inputs = feed.inputs
    return (*inputs.x, *inputs.x_t, inputs.features, feed.places, feed.target, feed.weight)
