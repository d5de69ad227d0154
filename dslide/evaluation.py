"""Exact predictions over all labels, by all ranks together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.comm import Exchange, LocalComm
from dslide.data import Points
from dslide.metrics import merge_topk
from dslide.network import Network
from dslide.progress import Progress

ROWS = 512  # points scored together
_LOGITS = 1 << 25  # numbers held when the exact normaliser is asked for


def core_csr(points: Points, features: int, labels: int) -> tuple[Any, Any]:
    """The core's views of the points' features and labels; they keep the arrays and check every index."""
    return (
        _core.Csr(points.x_indptr, points.x_indices, points.x_values, features),
        _core.Csr(points.y_indptr, points.y_indices, None, labels),
    )


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
    ) -> None:
        """`normaliser` also computes the log-sum-exp over all labels, for probabilities."""
        self._network, self._comm, self._pool = network, comm, pool
        self._progress = progress or Progress(None)
        own = network.labels[1] - network.labels[0]
        self._rows = max(1, min(ROWS, _LOGITS // max(1, own))) if normaliser else ROWS
        self._rows = int(-comm.agree(-self._rows))  # the smallest of all ranks
        self._exchange = Exchange(comm, network.shape.hidden_cuts, "fp32", self._rows)
        self._full = _core.FullSampler(network.shape.labels, *network.labels) if normaliser else None

    def topk(
        self, points: Points, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32] | None]:
        """Collective. Ids [n, k] (-1 where there are fewer labels), scores [n, k] (logits), and the
        log-sum-exp [n].

        Equal scores go to the lower id. The merged lists are on rank 0; elsewhere they are this rank's own.
        """
        network, n = self._network, len(points)
        batch = _core.Batch(self._pool, *core_csr(points, network.shape.features, network.shape.labels))
        ids = np.full((n, k), -1, np.int32)
        scores = np.full((n, k), -np.inf, np.float32)
        normaliser = np.zeros(n, np.float32) if self._full is not None else None
        self._comm.paused = True
        try:
            for begin in range(0, n, self._rows):
                end = min(n, begin + self._rows)
                size = end - begin
                batch.select(np.arange(begin, end, dtype=np.int64), 0)
                network.input.forward(batch, self._exchange.own(size), False)
                h = self._exchange.gather(size)
                network.output.topk(h, k, ids[begin:end], scores[begin:end])
                if normaliser is not None:
                    lse = np.empty(size, np.float32)
                    network.output.forward(batch, h, self._full, lse)
                    normaliser[begin:end] = self._exchange.normalise(lse)
                self._progress.scored(end, n)
        finally:
            self._comm.paused = False
        everyone = self._comm.gather((ids, scores))
        if everyone is not None and self._comm.size > 1:
            ids, scores = merge_topk([part[0] for part in everyone], [part[1] for part in everyone], k)
        return ids, scores, normaliser
