"""TensorFlow parts that the rivals share: threads, the sparse first layer, row-wise Adagrad, exact top-5.

Gradients are written out: a step of a few milliseconds has no time for a tape, and the tests hold them
against numpy. Import this module only in a process that is to run TensorFlow (`find_spec` says whether it is
there).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import sparse

from dslide import _core
from dslide.bench.rivals_data import Floats, Triplets

F32, I32, I64 = tf.float32, tf.int32, tf.int64
TRIPLETS = (tf.TensorSpec([None, 2], I64), tf.TensorSpec([None], F32))


def spec(*shape: int | None, dtype: tf.DType = F32) -> tf.TensorSpec:
    """An argument of a traced function; None is a dimension that varies."""
    return tf.TensorSpec(shape, dtype)


def use_threads(threads: int) -> None:
    """TensorFlow's two pools: `threads` for work inside an operation, one less for independent operations.

    Call before the first operation; without effect afterwards if the numbers are the same.
    """
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(1, threads // 2))


def csr(places: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """TensorFlow's CSR matrix from triplets in row order. Its product runs a row a thread, several times
    faster than `tf.sparse.sparse_dense_matmul` on the triplets."""
    shape = tf.cast(tf.stack([rows, columns]), I64)
    return tf.raw_ops.SparseTensorToCSRSparseMatrix(indices=places, values=values, dense_shape=shape)


def sparse_product(places: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
    """[rows, n] product of a sparse matrix with `dense` [columns, n]."""
    return tf.raw_ops.SparseMatrixMatMul(a=csr(places, values, rows, tf.shape(dense)[0]), b=dense)


def rows_of(weights: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    """Rows of a variable without touching the others: reading a variable that has had a sparse update copies
    the whole of it, tens of megabytes in a step that needs two."""
    return tf.gather(weights, rows)


def row_adagrad(
    weights: tf.Variable,
    state: tf.Variable,
    rows: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    eps: float,
) -> None:
    """Row-wise Adagrad: v += mean(g^2), w -= rate g / (sqrt(v) + eps), on `rows` (distinct) of `weights`.

    Gathered, changed and written back: a quarter of the time of a scattered subtraction.
    """
    v = tf.gather(state, rows) + tf.reduce_mean(tf.square(gradient), axis=1)
    scale = rate / (tf.sqrt(v) + eps)
    changed = rows_of(weights, rows) - gradient * scale[:, None]
    tf.raw_ops.ResourceScatterUpdate(resource=state.handle, indices=rows, updates=v)
    tf.raw_ops.ResourceScatterUpdate(resource=weights.handle, indices=rows, updates=changed)


class Scorer:
    """Exact top-5 of a network's points: TensorFlow computes the hidden activations, dslide's evaluation the
    scores and their order, so that all systems are judged by one piece of code, and soon.

    Args:
        hidden: traced; takes (places, values, rows) of some points, returns their activations [rows, H].
        labels, width: L and H.
        bias: whether the output layer has biases.
    """

    def __init__(
        self, hidden: "tf.types.experimental.PolymorphicFunction", labels: int, width: int, *, bias: bool
    ) -> None:
        self._hidden = hidden
        pool = _core.Pool(len(os.sched_getaffinity(0)))
        self._output = _core.OutputLayer(pool, labels, 0, labels, width, bias=bias, init_std=0.0)

    def top5(
        self, x: sparse.csr_matrix, weights: Floats, bias: Floats | None = None, chunk: int = 512
    ) -> tuple[NDArray[np.int32], Floats]:
        """Top-5 of the points `x`, CSR [n, D], with output rows [L, H], `chunk` points at a time; equal
        scores go to the lower id.

        Returns:
            ids int32 [n, 5] and scores float32 [n, 5], not finite where the weights are not; with fewer than
            five labels the missing ids are -1 and their scores 0.
        """
        self._output.weights[:] = weights
        if bias is not None:
            self._output.bias[:] = bias
        ids = np.empty((x.shape[0], 5), np.int32)
        scores = np.empty((x.shape[0], 5), np.float32)
        for begin in range(0, x.shape[0], chunk):
            part = x[begin : begin + chunk]
            h = self._hidden(*Triplets.of(part), np.int32(part.shape[0])).numpy()
            self._output.topk(h, 5, ids[begin : begin + chunk], scores[begin : begin + chunk])
        scores[:, len(weights) :] = 0
        return ids, scores
