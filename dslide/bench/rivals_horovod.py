"""Horovod parts: how its ranks meet for the records, and how gradients meet in a step.

Gradients are summed, not averaged: every rank weighs its points by the global batch, so that the sum is one
node's gradient, for parts of unequal size too. Plain reductions are used, no Keras optimiser wrapper.
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dslide.bench import rivals_tf as rt
from dslide.bench.rivals_data import InputMaker, own_part
from dslide.bench.rivals_recipe import Shared
from dslide.bench.systems import Connection

# float16 holds what lies between 6e-8 and 65504; a mean gradient lies far below 1.
_FP16_SCALE = 2.0**12


def connect(threads: int) -> Connection:
    """Starts Horovod and TensorFlow's threads on this rank; returns how the ranks meet."""
    rt.use_threads(threads)
    hvd.init()

    def agree(value: float) -> float:
        return float(hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Max, name="agree"))

    def barrier() -> None:
        hvd.allreduce(tf.constant(0.0), op=hvd.Sum, name="barrier")

    return Connection(hvd.rank(), hvd.size(), barrier, hvd.allgather_object, agree)


def dense_sum(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The gradients' sums over ranks, each sent whole."""
    return [hvd.allreduce(g, op=hvd.Sum, name=f"gradient{i}") for i, g in enumerate(gradients)]


class SparseExchange:
    """The recipe's gradients over Horovod: rows of the batch only, a row's points summed before it is sent.

    All ranks know the whole batch and with it the active labels and everyone's features: no ids are sent. The
    active labels' gradient rows are the same rows on all ranks and are all-reduced. Input rows: each rank
    either sends the rows that its own points touch ("allgather"), or all-reduces the rows of the whole batch
    ("allreduce").

    Args:
        inputs: "allgather" or "allreduce".
        fp16: halve what is sent.
    """

    def __init__(self, *, inputs: str, fp16: bool) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self._gather_inputs = inputs == "allgather"
        self._fp16 = fp16

    def share(self, maker: InputMaker, batch: NDArray[np.int64]) -> Shared:
        """This rank's part of a global batch."""
        own, _ = own_part(batch, self.rank, self.size)
        if not self._gather_inputs:
            features = maker.features(batch)
            return Shared(maker.make(own, features), features, np.empty(0, np.int32))
        arriving = [maker.features(own_part(batch, rank, self.size)[0]) for rank in range(self.size)]
        return Shared(maker.make(own), *maker.union(arriving))

    def output(self, gradient: tf.Tensor) -> tf.Tensor:
        """The sum over ranks of [a, H] gradients of the same labels."""
        return self._wide(hvd.allreduce(self._narrow(gradient), op=hvd.Sum, name="output"))

    def inputs(self, gradient: tf.Tensor, places: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The sum over ranks of the input rows' gradients, [count, H]."""
        if not self._gather_inputs:
            return self._wide(hvd.allreduce(self._narrow(gradient), op=hvd.Sum, name="inputs"))
        arrived = self._wide(hvd.allgather(self._narrow(gradient), name="inputs"))
        return tf.math.unsorted_segment_sum(arrived, places, count)

    def _narrow(self, gradient: tf.Tensor) -> tf.Tensor:
        return tf.cast(gradient * _FP16_SCALE, tf.float16) if self._fp16 else gradient

    def _wide(self, gradient: tf.Tensor) -> tf.Tensor:
        return tf.cast(gradient, rt.F32) * (1 / _FP16_SCALE) if self._fp16 else gradient


class NoExchange:
    """The same work without the exchange, for timing what is left of a step: ranks drift apart."""

    def __init__(self, exchange: SparseExchange) -> None:
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange = exchange

    def share(self, maker: InputMaker, batch: NDArray[np.int64]) -> Shared:
        """This rank's part, updating its own rows alone."""
        inputs = self._exchange.share(maker, batch).inputs
        return Shared(inputs, inputs.features, np.empty(0, np.int32))

    def output(self, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient itself."""
        return gradient

    def inputs(self, gradient: tf.Tensor, places: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The gradient itself."""
        return gradient
