"""Exact predictions over all labels, by all ranks together: of one network, or of an ensemble's average."""

import contextlib
from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.comm import LocalComm, combine_lse
from dslide.data import Points
from dslide.depth import HiddenStack
from dslide.metrics import merge_topk
from dslide.network import Network
from dslide.progress import Progress

ROWS = 512  # points scored together
_GATHERED = 1 << 22  # weights gathered together for candidates
_POINTS = 4096  # points whose candidates are exchanged together


def core_csr(points: Points, features: int, labels: int, power: float = 1.0) -> tuple[Any, Any]:
    """The core's views of the points' features and labels; they keep the arrays and check every index.

    With a `power` other than 1, values are raised to it, signs kept, and every point's scaled to unit norm.
    """
    values = points.x_values if power == 1 else _powered(points, power)
    return (
        _core.Csr(points.x_indptr, points.x_indices, values, features),
        _core.Csr(points.y_indptr, points.y_indices, None, labels),
    )


def _powered(points: Points, power: float) -> NDArray[np.float32]:
    values = np.sign(points.x_values) * np.abs(points.x_values) ** np.float32(power)
    sums = np.concatenate([[0.0], np.cumsum(np.square(values, dtype=np.float64))])[points.x_indptr]
    norms = np.sqrt(np.diff(sums))
    norms[norms == 0] = 1
    return np.asarray(values / np.repeat(norms, np.diff(points.x_indptr)), np.float32)


class Predictor:
    """Scores points with a network whose shards lie on the ranks of `comm`; activations travel as float32."""

    def __init__(
        self,
        network: Network,
        comm: LocalComm,
        pool: Any,
        *,
        normaliser: bool = False,
        progress: Progress | None = None,
        tables: Any = None,
    ) -> None:
        """`normaliser` also computes the log-sum-exp over all labels, for probabilities. With `tables` (a
        _core.ApproximateTopK of the output layer) only their candidates are labels. Holds no state: several
        threads may use it at once if there is one rank."""
        self._network, self._comm, self._pool = network, comm, pool
        self._progress = progress or Progress(None)
        self._normaliser = normaliser
        self._scorer = network.output if tables is None else tables

    def _batch(self, points: Points) -> Any:
        shape, power = self._network.shape, self._network.config.network.input_power
        return _core.Batch(self._pool, *core_csr(points, shape.features, shape.labels, power))

    def topk(
        self, points: Points, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64] | None]:
        """Collective. Ids [n, k] (-1 where there are fewer labels), scores [n, k] (logits), and the
        log-sum-exp [n].

        Equal scores go to the lower id. The merged lists are on rank 0; elsewhere they are this rank's own.
        The log-sum-exp is that of all labels everywhere.
        """
        n = len(points)
        ids = np.full((n, k), -1, np.int32)
        scores = np.full((n, k), -np.inf, np.float32)
        lse = np.empty(n, np.float64) if self._normaliser else None
        with contextlib.closing(self._hidden(points)) as blocks:
            for begin, end, h in blocks:
                sums = None if lse is None else lse[begin:end]
                self._scorer.topk(h, k, ids[begin:end], scores[begin:end], sums)
                self._progress.scored(end, n)
        if self._comm.size > 1:
            everyone = self._comm.gather((ids, scores, lse))
            if everyone is not None:
                ids, scores = merge_topk([part[0] for part in everyone], [part[1] for part in everyone], k)
                lse = None if lse is None else combine_lse(np.stack([part[2] for part in everyone]))
            lse = self._comm.bcast(lse)
        return ids, scores, lse

    def _hidden(self, points: Points) -> Generator[tuple[int, int, NDArray[np.float32]], None, None]:
        """Collective. Blocks of at most ROWS points: begin, end, and their activations, float32
        [end - begin, H], valid until the next block. Until it is closed, what is sent counts as
        evaluation."""
        network, n = self._network, len(points)
        batch = self._batch(points)
        hidden = HiddenStack(network, self._comm, self._pool, "fp32", min(ROWS, max(1, n)), points=0)
        self._comm.paused = True
        try:
            for begin in range(0, n, ROWS):
                end = min(n, begin + ROWS)
                batch.select(np.arange(begin, end, dtype=np.int64), 0)
                yield begin, end, hidden.predict(batch, end - begin)
        finally:
            self._comm.paused = False

    def probabilities(
        self, points: Points, ids: NDArray[np.int32], normaliser: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        """Collective. exp(logit - normaliser) float32 [n, c] of the labels `ids` [n, c] that this rank holds;
        0 for the others and for negative ids."""
        network, (n, width) = self._network, ids.shape
        first, last = network.labels
        found = np.zeros((n, width), np.float32)
        weights = network.weights()["output.weights"]
        bias = network.output.bias if network.config.network.bias else None
        few = max(1, _GATHERED // max(1, width * network.shape.width))
        with contextlib.closing(self._hidden(points)) as blocks:
            for begin, end, h in blocks:
                for low in range(begin, end, few):
                    rows = slice(low, min(end, low + few))
                    own = (ids[rows] >= first) & (ids[rows] < last)
                    if not own.any():
                        continue
                    local = np.where(own, ids[rows] - first, 0)
                    candidates = weights[local].astype(np.float32, copy=False)
                    logits = np.einsum("ph,pch->pc", h[low - begin : rows.stop - begin], candidates)
                    if bias is not None:
                        logits += bias[local]
                    found[rows] = np.where(own, np.exp(logits - normaliser[rows, None]), 0)
        return found


class EnsemblePredictor:
    """Ranks labels by the mean of the members' softmax probabilities.

    The members lie on one or several groups of ranks. Every member lists its best labels; only their
    probabilities under all members are computed. A label on no list has at most the mean of the lists' last
    probabilities, so the ranking is exact once its k-th is above that (the threshold algorithm: Fagin, Lotem,
    Naor 2003, Optimal aggregation algorithms for middleware, section 4); until then the lists get longer.
    """

    def __init__(self, comm: LocalComm, group: LocalComm, predictors: list[Predictor], members: int) -> None:
        """`predictors` are of the members that this rank's `group` holds, of `members` in all; each has a
        normaliser."""
        self._comm, self._group, self._predictors, self._members = comm, group, predictors, members

    def topk(
        self, points: Points, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64]]:
        """Collective. As Predictor.topk: ids [n, k], log mean probabilities [n, k] and, their log-sum-exp,
        zeros [n]. Ranks other than 0 get lists without entries."""
        n = len(points)
        ids, scores = np.full((n, k), -1, np.int32), np.full((n, k), -np.inf, np.float32)
        for begin in range(0, n, _POINTS):
            rows = np.arange(begin, min(n, begin + _POINTS), dtype=np.int64)
            width = max(16, 4 * k)
            while len(rows):
                best, score, sure = self._ranked(points.take(rows), k, min(width, points.num_labels))
                ids[rows[sure], : best.shape[1]] = best[sure]
                scores[rows[sure], : best.shape[1]] = score[sure]
                rows, width = rows[~sure], 4 * width
        return ids, scores, np.zeros(n, np.float64)

    def _ranked(
        self, points: Points, k: int, width: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
        """The best by lists of `width`, and which points are sure of them (the same on all ranks)."""
        lists, normalisers, last = [], [], np.zeros(len(points), np.float32)
        for predictor in self._predictors:
            top, score, normaliser = predictor.topk(points, width)
            assert normaliser is not None
            lists.append(top)
            normalisers.append(normaliser)
            last += np.exp(score[:, -1] - normaliser).astype(np.float32)
        mine = (lists, last) if self._group.rank == 0 else ([], 0)
        everyone = self._comm.gather(mine)
        candidates = None
        if everyone is not None:
            candidates = np.sort(
                np.concatenate([top for part, _ in everyone for top in part], axis=1), axis=1
            )
            candidates[:, 1:][candidates[:, 1:] == candidates[:, :-1]] = -1  # listed twice
        candidates = self._comm.bcast(candidates)
        own = np.zeros(candidates.shape, np.float32)
        for predictor, normaliser in zip(self._predictors, normalisers, strict=True):
            own += predictor.probabilities(points, candidates, normaliser)
        parts = self._comm.gather(own)
        best = np.zeros((len(points), 0), np.int32)
        score = np.zeros((len(points), 0), np.float32)
        sure: NDArray[np.bool_] | None = None
        if parts is not None:
            assert everyone is not None
            total = np.add.reduce(parts)
            total[candidates < 0] = -1
            order = np.argsort(-total, axis=1, kind="stable")[:, :k]  # ids ascend: ties to the lower one
            best, sums = np.take_along_axis(candidates, order, 1), np.take_along_axis(total, order, 1)
            with np.errstate(divide="ignore"):
                score = np.log(np.maximum(sums, 0) / self._members, dtype=np.float32)
            bound = sum(part for _, part in everyone) * np.float32(1.0001)  # two kernels round differently
            sure = (width == points.num_labels) | ~(sums[:, -1] <= bound)
        return best, score, self._comm.bcast(sure)
