"""A training step: batch -> forward -> exchange -> backward -> update.

On P ranks that all see the same batch:

1. every rank computes its hidden units of the batch, and all gather all of them (on the wire: int8 rows);
   so they do for every further hidden layer (dslide.depth);
2. every rank finds its active output rows, their logits, and each point's local log-sum-exp; all exchange it;
3. every rank computes the gradient of its rows and its part of the hidden gradient, whose sum over ranks goes
   to the owners of the hidden units; meanwhile the output rows are updated and the next batch is indexed;
4. every rank takes the gradient through further hidden layers and updates them, and then its input rows.

With more than one part (`exchange.parts`) the batch's points go through 1 to 3 one part behind the other: a
part is computed while others' rows travel. All parts see the same weights and active rows, and a weight's
gradient is summed over the whole batch at once, so that nothing changes but the time: not a bit of the model.
"""

import itertools
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.comm import LocalComm, cuts
from dslide.config import TrainConfig
from dslide.depth import HiddenStack
from dslide.network import Network
from dslide.samplers import Sampler

Rows = NDArray[np.int64]
TRIED = (1, 2, 4)  # parts
TRIALS = 6  # steps of each, then the fastest is kept


class Steps:
    """A rank's training steps, one after another; they are numbered from 0."""

    def __init__(
        self,
        config: TrainConfig,
        network: Network,
        comm: LocalComm,
        pool: Any,
        data: tuple[Any, Any],
        points: int,
        batch_size: int,
    ) -> None:
        """`data`: features and labels of the training `points`, core CSR views."""
        self._config, self._network, self._comm = config, network, comm
        self._weighted = config.point_weight == "sqrt-labels"
        self.hidden = HiddenStack(network, comm, pool, config.wire, batch_size, points=points)
        self.batches = [_core.Batch(pool, *data) for _ in range(2)]
        self._lse = np.empty(batch_size, np.float32)
        self._parts = config.exchange.parts  # None: still to be found
        if comm.size == 1 or self.hidden.layers:
            self._parts = 1  # there is nothing to hide; further layers take whole batches
        self._seconds: dict[int, list[float]] = {parts: [] for parts in TRIED}

    def begin(self, step: int, order: Iterator[Rows], sampler: Sampler) -> None:
        """Makes ready for `step`, whose points are the next of `order`; `sampler` is the output layer's."""
        self._order, self._sampler = order, sampler
        if sampler.asks_activations:
            self._parts = 1  # all of them must be there first
        self._select(step)

    def _select(self, step: int) -> None:
        self._rows = next(self._order)
        self.batches[step % 2].select(self._rows, step)

    def take(self, step: int, samples: int, rate: float, *, last: bool) -> tuple[float, int] | None:
        """Collective. One step after `samples` points; with `last` no other follows.

        Returns:
            This rank's part of the summed loss before the step, and the batch's points; None if the loss is
            no longer a number, on every rank, and nothing was updated.
        """
        begin, count = time.perf_counter(), self._parts or self._try()
        hidden, output, sampler, rows = self.hidden, self._network.output, self._sampler, self._rows
        batch, size = self.batches[step % 2], len(rows)
        sampler.prepare(samples)
        loss = self._passes(batch, rows, step, samples, _cut(size, count))
        if loss is None:
            hidden.abandon()
            return None
        output.update(rate, step + 1)  # Adam counts from 1
        if not last:
            self._select(step + 1)
        hidden.backward(batch, size, rate, step + 1)
        if self._parts is None:
            self._seconds[count].append(time.perf_counter() - begin)
        return loss, size

    def _passes(self, batch: Any, rows: Rows, step: int, samples: int, parts: list[slice]) -> float | None:
        """Forward and backward to the hidden gradients, which are then on their way; the loss, or None.

        At most two parts' activations are sent ahead of a part's log-sum-exps, which would wait for them on
        the link; and a part's gradients are sent as soon as can be, to follow the last activations.
        """
        hidden, losses = self.hidden, list[float | None]()
        for part in parts[:2]:
            hidden.start(batch, part)
        for number, part in enumerate(parts):
            h, lse = hidden.finish(part, rows, step, samples), self._lse[part]
            self._network.output.forward(batch, h, self._sampler.core, lse, part.start, part.stop)
            hidden.start_normalise(lse, part)
            if number + 2 < len(parts):
                hidden.start(batch, parts[number + 2])
            if number > 0:
                losses.append(self._gradients(batch, parts[number - 1]))
        losses.append(self._gradients(batch, parts[-1]))
        return None if None in losses else sum(loss for loss in losses if loss is not None)

    def _gradients(self, batch: Any, part: slice) -> float | None:
        """The part's loss, and its hidden gradients, which are sent; None where the loss is not a number."""
        lse = self.hidden.finish_normalise(part)
        if not lse.max() < np.inf:  # nan or +inf, on every rank; -inf is a point without active labels
            return None
        dh, output = self.hidden.grad(batch.size)[part], self._network.output
        loss = output.backward(batch, lse, dh, self._weighted, batch.size, part.start, part.stop)
        self.hidden.scatter(part)
        return float(loss)

    def _try(self) -> int:
        """The next number of parts to be timed; the last time rank 0's fastest, for good."""
        fewest = min(TRIED, key=lambda parts: len(self._seconds[parts]))
        if len(self._seconds[fewest]) < TRIALS:
            return fewest
        self._parts = self._comm.bcast(min(TRIED, key=lambda parts: median(self._seconds[parts])))
        return self._parts


def _cut(size: int, parts: int) -> list[slice]:
    """So many parts of a batch of `size` points, or fewer of a small one."""
    borders = cuts(size, parts, _core.OutputLayer.part_points)
    return [slice(begin, end) for begin, end in itertools.pairwise(borders) if begin < end]
