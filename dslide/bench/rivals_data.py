"""Batches of sparse points for the rivals: what their host-side input pipeline does, in numpy and scipy."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.integer]
Floats = NDArray[np.float32]


class Triplets(NamedTuple):
    """A sparse matrix as TensorFlow wants it: places int64 [nnz, 2] in row order, values float32 [nnz]."""

    places: NDArray[np.int64]
    values: Floats

    @staticmethod
    def of(matrix: sparse.spmatrix) -> "Triplets":
        """The triplets of a scipy matrix."""
        matrix = matrix.tocsr()
        places = np.empty((matrix.nnz, 2), np.int64)
        places[:, 0] = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        places[:, 1] = matrix.indices
        return Triplets(places, np.asarray(matrix.data, np.float32))


class Distinct:
    """Finds the distinct ids of a batch, without sorting: one pass over a table of `count` entries.

    Args:
        count: ids are below it.
    """

    def __init__(self, count: int) -> None:
        self._present = np.zeros(count, np.bool_)
        self._place = np.zeros(count, np.int32)

    def of(self, ids: Ints) -> NDArray[np.int32]:
        """The distinct ids, ascending; `places` then maps each of them to its position."""
        self._present[ids] = True
        found = np.flatnonzero(self._present).astype(np.int32)
        self._present[found] = False
        self._place[found] = np.arange(len(found), dtype=np.int32)
        return found

    def places(self, ids: Ints) -> NDArray[np.int32]:
        """Positions of `ids` in the last result of `of`, which must hold all of them."""
        return self._place[ids]


@dataclass(frozen=True)
class Inputs:
    """The inputs of some points over the distinct features int32 [u] that they touch.

    x [points, u] serves the forward product, x_t [u, points], its transpose in row order, the one that sums a
    feature's gradient over its points: a row a thread, without atomic additions.
    """

    features: NDArray[np.int32]
    x: Triplets
    x_t: Triplets


class InputMaker:
    """Cuts batches out of a training set's inputs, CSR [N, D]."""

    def __init__(self, x: sparse.csr_matrix) -> None:
        self._x = x
        self._distinct = Distinct(x.shape[1])

    def make(self, rows: Ints, features: NDArray[np.int32] | None = None) -> Inputs:
        """The inputs of `rows`; over `features` (ascending, a superset of theirs) where those are given."""
        x = self._x[rows]
        found = self._distinct.of(x.indices if features is None else features)
        local = sparse.csr_matrix(
            (x.data, self._distinct.places(x.indices), x.indptr), shape=(len(rows), len(found))
        )
        return Inputs(found, Triplets.of(local), Triplets.of(local.T))

    def features(self, rows: Ints) -> NDArray[np.int32]:
        """The distinct features of `rows`, ascending."""
        return self._distinct.of(self._x[rows].indices)

    def union(self, lists: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Distinct features of several lists, ascending, and the positions in it of the lists' entries, one
        list after the other."""
        ids = np.concatenate(lists)
        return self._distinct.of(ids), self._distinct.places(ids)


def log_inclusion(counts: Ints, num_points: int, batch_size: int, extras: int) -> Floats:
    """log q: the logarithm of the chance that a label is in the batch's active set for another point's sake.

    q = 1 - (1 - count / N)^(B - 1) (1 - 1 / L)^S: the label is among those of the other B - 1 points, or
    among S uniform draws from all L.

    Args:
        counts: [L] training points of each label.
        num_points, batch_size, extras: N, the global B, and S.

    Returns:
        float32 [L]; a label that can never be drawn gets a finite, very small value.
    """
    rate = np.minimum(counts / num_points, 1 - 1e-12)
    missed = (batch_size - 1) * np.log1p(-rate)
    if extras:
        missed = missed + extras * np.log1p(-min(1 / len(counts), 1 - 1e-12))
    return np.log(np.maximum(-np.expm1(missed), 1e-30)).astype(np.float32)


@dataclass(frozen=True)
class ActiveLabels:
    """The output layer's work of one batch: labels int32 [a], shift and target float32 [points, a], weight
    [points]."""

    labels: NDArray[np.int32]
    shift: Floats
    target: Floats
    weight: Floats


class LabelMaker:
    """Chooses the active labels of a batch: the labels of all its points, and uniform extras.

    Args:
        y: training labels, CSR [N, L].
        batch_size: global batch size.
        extras: uniform draws a batch.
        logq: subtract log q from every logit but those of a point's own labels.
        weight_labels: weigh a point by the square root of its number of labels.
        seed: of the uniform draws.
    """

    def __init__(
        self,
        y: sparse.csr_matrix,
        batch_size: int,
        *,
        extras: int,
        logq: bool,
        weight_labels: bool,
        seed: int,
    ) -> None:
        self._y = y
        self._extras = extras
        self._weight_labels = weight_labels
        self._seed = seed
        self._distinct = Distinct(y.shape[1])
        self._minus_logq = np.zeros(y.shape[1], np.float32)
        if logq:
            counts = np.bincount(y.indices, minlength=y.shape[1])
            self._minus_logq = -log_inclusion(counts, y.shape[0], batch_size, extras)

    def make(self, batch: Ints, own: Ints, step: int) -> ActiveLabels:
        """The active set of the global `batch`, seen by the points `own` (this rank's part of it)."""
        ids = self._y[batch].indices
        if self._extras:
            random = np.random.Generator(np.random.Philox(key=[self._seed, step]))
            ids = np.concatenate([ids, random.integers(0, self._y.shape[1], self._extras, dtype=ids.dtype)])
        labels = self._distinct.of(ids)
        y = self._y[own]
        counts = np.diff(y.indptr)
        rows = np.repeat(np.arange(len(own)), counts)
        places = self._distinct.places(y.indices)
        shift = np.repeat(self._minus_logq[labels][None], len(own), axis=0)
        shift[rows, places] = 0
        target = np.zeros_like(shift)
        target[rows, places] = np.repeat(1 / np.maximum(counts, 1), counts)
        return ActiveLabels(labels, shift, target, point_weights(counts, len(batch), self._weight_labels))


def point_weights(counts: Ints, batch: int, weight_labels: bool) -> Floats:
    """What a point's loss counts in the batch's mean: 1 / B, times the root of its number of labels if asked.

    A point without labels has nothing to learn from and counts 0.
    """
    weight = np.sqrt(counts) if weight_labels else (counts > 0).astype(np.float64)
    return (weight / batch).astype(np.float32)


def own_part(batch: Ints, rank: int, size: int) -> tuple[Ints, bool]:
    """This rank's points of a global batch, and whether they are only a stand-in.

    A last batch smaller than the number of ranks leaves some of them without a point; such a rank works on
    the first one with weight 0, so that all ranks take part in every exchange.
    """
    own = batch[rank::size]
    return (own, False) if len(own) else (batch[:1], True)
