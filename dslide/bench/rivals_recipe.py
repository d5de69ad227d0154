"""dslide's own training recipe in TensorFlow, on one node or with an exchange of sparse gradients between
ranks.

In-batch labels and uniform extras, log-Q with a point's own labels exempt, row-wise Adagrad with duplicates
summed, class-mean start of the output rows, leaky ReLU, dropout, points weighted by the root of their labels,
linear decay. What remains between this and dslide is the system, not the recipe.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import sparse

from dslide.bench import rivals_tf as rt
from dslide.bench.rivals_data import ActiveLabels, Floats, InputMaker, Inputs, LabelMaker, Triplets, own_part
from dslide.bench.rivals_setup import RecipeSettings
from dslide.data import Dataset


class Shared(NamedTuple):
    """A batch's inputs and the input rows that it updates.

    inputs: of this rank's points. features: int32 [f], the distinct features of the whole batch. places: for
    each row that arrives from the ranks, its position in `features`.
    """

    inputs: Inputs
    features: NDArray[np.int32]
    places: NDArray[np.int32]


class Exchange(Protocol):
    """How the ranks' gradients meet. Every rank knows the whole batch, so no ids need to be sent."""

    rank: int
    size: int

    def share(self, maker: InputMaker, batch: NDArray[np.int64]) -> Shared:
        """This rank's part of a global batch."""

    def output(self, gradient: tf.Tensor) -> tf.Tensor:
        """The sum over ranks of gradients [a, H] of the same active labels on all ranks; traced."""

    def inputs(self, gradient: tf.Tensor, places: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The sum over ranks of the input rows' gradients, [count, H] for the batch's `count` features;
        traced."""


class Alone:
    """One rank: nothing is exchanged."""

    rank = 0
    size = 1

    def share(self, maker: InputMaker, batch: NDArray[np.int64]) -> Shared:
        """The whole batch."""
        inputs = maker.make(batch)
        return Shared(inputs, inputs.features, np.empty(0, np.int32))

    def output(self, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient itself."""
        return gradient

    def inputs(self, gradient: tf.Tensor, places: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The gradient itself."""
        return gradient


class Feed(NamedTuple):
    """A batch as a rank sees it."""

    shared: Shared
    labels: ActiveLabels
    batch_size: int


class RecipeTrainer:
    """The recipe's network and its step.

    Args:
        dataset: what it will be trained on.
        settings, seed, batch_size: of the run; the batch is the global one.
        exchange: how the ranks meet.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: RecipeSettings,
        *,
        seed: int,
        batch_size: int,
        exchange: Exchange | None = None,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._batch_size = batch_size
        self._exchange = exchange or Alone()
        self._x, self._y = dataset.train.x, dataset.train.y
        self._input_maker = InputMaker(self._x)
        self._label_maker: LabelMaker | None = None
        d, h, labels = dataset.num_features, settings.hidden, dataset.num_labels
        self.w1, self.w2 = tf.Variable(tf.zeros([d, h])), tf.Variable(tf.zeros([labels, h]))
        self.v1, self.v2 = tf.Variable(tf.zeros([d])), tf.Variable(tf.zeros([labels]))
        self._trace()
        self._reset()

    def _reset(self) -> None:
        """The initial weights: only the input rows are random, the same on all ranks."""
        random = np.random.Generator(np.random.Philox(key=[self._seed, 1]))
        self.w1.assign(
            random.standard_normal(self.w1.shape, np.float32) * np.float32(self._settings.init_std)
        )
        self.w2.assign(tf.zeros_like(self.w2))
        self.v1.assign(tf.fill(self.v1.shape, self._settings.initial_accumulator_input))
        self.v2.assign(tf.fill(self.v2.shape, self._settings.initial_accumulator))

    def _trace(self) -> None:
        """Traces every function and runs it on weights that are thrown away: none of it is training."""
        s, ids = rt.spec, rt.spec(None, dtype=rt.I32)
        count = s(dtype=rt.I32)
        inputs = [*rt.TRIPLETS, *rt.TRIPLETS, ids, ids, ids]
        labels = [ids, s(None, None), s(None, None), s(None)]
        self._step = tf.function(self._step_graph, [*inputs, *labels, count, s(), s(2, dtype=rt.I32)])
        hidden = tf.function(self._hidden, [*rt.TRIPLETS, count])
        self._scorer = rt.Scorer(hidden, *self.w2.shape, bias=False)
        self._start_outputs = tf.function(self._start_outputs_graph, [*rt.TRIPLETS, count, *rt.TRIPLETS])
        self._label_maker = self._make_label_maker()
        batch = np.arange(min(self._batch_size, self._x.shape[0]))
        for step in range(2):
            self.step(self.feed(batch, step), step, 1.0)
        self.predict(self._x[:2])
        self._start_at_means(2)
        self._label_maker = None

    def _make_label_maker(self) -> LabelMaker:
        s = self._settings
        return LabelMaker(
            *(self._y, self._batch_size),
            extras=s.extras,
            logq=s.logq,
            weight_labels=s.weight_labels,
            seed=self._seed,
        )

    def prepare(self) -> None:
        """Counts the labels for log-Q and starts the output rows at their class means."""
        self._label_maker = self._make_label_maker()
        if self._settings.class_mean_init:
            self._start_at_means(self._x.shape[0])

    def _start_at_means(self, points: int) -> None:
        x, y = Triplets.of(self._x[:points]), Triplets.of(self._y[:points].T)
        self._start_outputs(*x, np.int32(points), *y)

    def feed(self, batch: NDArray[np.int64], step: int) -> Feed:
        """A rank's part of the batch, over the whole batch's active labels."""
        assert self._label_maker is not None
        own, stand_in = own_part(batch, self._exchange.rank, self._exchange.size)
        labels = self._label_maker.make(batch, own, step)
        if stand_in:
            labels = replace(labels, weight=np.zeros_like(labels.weight))
        return Feed(self._exchange.share(self._input_maker, batch), labels, len(batch))

    def step(self, feed: Feed, step: int, progress: float) -> None:
        """One step with the learning rate of `progress`."""
        rate = self._settings.lr * ((1 - progress) if self._settings.schedule == "linear" else 1)
        (inputs, features, places), labels = feed.shared, feed.labels
        self._step(
            *(*inputs.x, *inputs.x_t, inputs.features, features, places),
            *(labels.labels, labels.shift, labels.target, labels.weight),
            *(np.int32(feed.batch_size), np.float32(rate), np.array([self._seed, step], np.int32)),
        )

    def predict(self, x: sparse.csr_matrix) -> tuple[NDArray[np.int32], Floats]:
        """Exact top-5 of the points x."""
        return self._scorer.top5(x, self.w2.numpy())

    def _step_graph(
        self,
        x_index: tf.Tensor,
        x_values: tf.Tensor,
        xt_index: tf.Tensor,
        xt_values: tf.Tensor,
        own_features: tf.Tensor,
        features: tf.Tensor,
        places: tf.Tensor,
        labels: tf.Tensor,
        shift: tf.Tensor,
        target: tf.Tensor,
        weight: tf.Tensor,
        batch_size: tf.Tensor,
        rate: tf.Tensor,
        draw: tf.Tensor,
    ) -> None:
        settings, exchange, points = self._settings, self._exchange, tf.shape(weight)[0]
        z = rt.sparse_product(x_index, x_values, points, rt.rows_of(self.w1, own_features))
        slope = tf.where(z > 0, 1.0, settings.slope)
        if settings.dropout:
            # Drawn for the global batch, so that a point's mask is the same for every number of ranks.
            chance = tf.random.stateless_uniform([batch_size, settings.hidden], draw)
            chance = tf.gather(chance, (tf.range(points) * exchange.size + exchange.rank) % batch_size)
            slope *= tf.cast(chance >= settings.dropout, rt.F32) / (1 - settings.dropout)
        a = z * slope
        w2 = tf.gather(self.w2, labels)
        error = tf.nn.softmax(tf.matmul(a, w2, transpose_b=True) + shift) - target
        d_w2 = exchange.output(tf.matmul(error, a * weight[:, None], transpose_a=True))
        d_z = tf.matmul(error, w2) * slope * weight[:, None]
        d_w1 = rt.sparse_product(xt_index, xt_values, tf.shape(own_features)[0], d_z)
        d_w1 = exchange.inputs(d_w1, places, tf.shape(features)[0])
        rt.row_adagrad(self.w2, self.v2, labels, d_w2, rate, settings.eps)
        rt.row_adagrad(self.w1, self.v1, features, d_w1, rate, settings.eps)

    def _hidden(self, index: tf.Tensor, values: tf.Tensor, points: tf.Tensor) -> tf.Tensor:
        return tf.nn.leaky_relu(rt.sparse_product(index, values, points, self.w1), self._settings.slope)

    def _start_outputs_graph(
        self,
        x_index: tf.Tensor,
        x_values: tf.Tensor,
        points: tf.Tensor,
        yt_index: tf.Tensor,
        yt_values: tf.Tensor,
    ) -> None:
        """Output rows = the unit-normalised sums over a label's points of (h - mean h)."""
        h = self._hidden(x_index, x_values, points)
        h -= tf.reduce_mean(h, axis=0)
        sums = rt.sparse_product(yt_index, yt_values, self.w2.shape[0], h)
        self.w2.assign(tf.math.l2_normalize(sums, axis=1, epsilon=1e-30))
