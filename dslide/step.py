"""A training step: batch -> forward -> exchange -> backward -> update.

On P ranks that all see the same batch:

1. every rank computes its hidden units of the batch, and all gather all of them (on the wire: int8 rows);
   so they do for every further hidden layer (dslide.depth);
2. every rank finds its active output rows, their logits, and each point's local log-sum-exp; all exchange it;
3. every rank computes the gradient of its rows and its part of the hidden gradient, whose sum over ranks goes
   to the owners of the hidden units;
4. every rank takes the gradient through further hidden layers and updates them, and then its input rows.

While a rank waits for others' rows it updates output rows, some at a time, and indexes the next batch: from
the end of 3 till the next step's activations are there. What is left of the update is done then.

With more than one part (`exchange.parts`) the batch's points go through 1 to 4 one part behind the other: a
part is computed while others' rows travel. All parts see the same weights and active rows, and a weight's
gradient is summed over all its points at once (in 4 when the last part that has the feature is there), so
that nothing changes but the time: not a bit of the model.

From step `exchange.stale_after` on the hidden units of a step are computed before the last step's gradient is
applied to the input layer, and no other gradient is late. Then all exchanges are hidden, their latency too:
while the log-sum-exps of step t travel, the gradient of t - 1 is applied and the hidden units of t + 1 are
computed; these travel during the rest of step t, and the hidden gradients of t during its update and the
output layer of t + 1. `finish` empties the pipeline before anybody looks at the weights.
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
TRIED = (1, 2, 3)  # parts
# Of the first steps: four in a row, since a step leaves work to the next, three times; the fastest is kept.
TRIALS = [parts for _ in range(3) for parts in TRIED for _ in range(4)]
TRIAL_STEPS = len(TRIALS)


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
        self._stale_after, slots = config.exchange.stale_after, 2
        if self._stale_after is not None:
            second = HiddenStack(network, comm, pool, config.wire, batch_size, points=points, second=True)
            self._stacks, slots = (self.hidden, second), 3
        self.batches = [_core.Batch(pool, *data) for _ in range(slots)]
        self._rows: list[Rows] = [np.zeros(0, np.int64)] * slots
        self._late: tuple[HiddenStack, Any, int, float, int] | None = None  # a gradient to be applied
        self._begun = False  # the hidden units of the step to come are on their way
        self._lse = np.empty(batch_size, np.float32)
        self._parts = config.exchange.parts  # None: still to be found
        if comm.size == 1 or self.hidden.layers:
            self._parts = 1  # there is nothing to hide; further layers take whole batches
        self._seconds: list[float] = []  # of TRIALS
        self._ahead = 0  # the step up to whose batch there is something to index

    def begin(self, step: int, order: Iterator[Rows], sampler: Sampler) -> None:
        """Makes ready for `step`, whose points are the next of `order`; `sampler` is the output layer's."""
        self._order, self._sampler, self._indexed = order, sampler, step
        if sampler.asks_activations:
            self._parts = 1  # all of them must be there first
        self._batch(step)

    def _batch(self, step: int) -> tuple[Any, Rows]:
        """The indexed batch of the step at hand or of one soon to come, and its points."""
        slots = len(self.batches)
        while self._indexed <= step:
            self._rows[self._indexed % slots] = next(self._order)
            self.batches[self._indexed % slots].select(self._rows[self._indexed % slots], self._indexed)
            self._indexed += 1
        return self.batches[step % slots], self._rows[step % slots]

    def take(
        self, step: int, samples: int, rate: float, *, until: int, total: int
    ) -> tuple[float, int] | None:
        """Collective. One step after `samples` points of a run of `total` steps; `finish` is called before
        step `until` or earlier.

        Returns:
            This rank's part of the summed loss before the step, and the batch's points; None if the loss is
            no longer a number, on every rank, and nothing was updated.
        """
        self._sampler.prepare(samples)
        if self._stale_after is not None and step >= self._stale_after:
            return self._take_stale(step, samples, rate, until, total)
        begin, count = time.perf_counter(), self._parts or self._try()
        batch, rows = self._batch(step)
        size = len(rows)
        parts = _cut(size, count)
        for part in parts[:2]:
            self.hidden.start(batch, part)
        self._ahead = min(step + 1, total - 1)
        loss = self._passes(batch, rows, step, samples, parts)
        if loss is None:
            self.hidden.abandon()
            return None
        if self._comm.size > 1:
            self._network.output.begin_update(rate, step + 1)  # Adam counts from 1
        else:
            self._network.output.update(rate, step + 1, may_wait=True)
        self.hidden.backward(batch, size, rate, step + 1, self._meanwhile)
        if self._parts is None:
            self._seconds.append(time.perf_counter() - begin)
        return loss, size

    def _meanwhile(self) -> bool:
        """A piece of what is to be done anyway, as dslide.comm.Meanwhile."""
        if self._network.output.update_some():
            return True
        if self._indexed > self._ahead:
            return False
        self._batch(self._indexed)
        return True

    def _passes(self, batch: Any, rows: Rows, step: int, samples: int, parts: list[slice]) -> float | None:
        """Forward and backward to the hidden gradients, which are then on their way; the loss, or None. The
        first two parts are started.

        At most two parts' activations are sent ahead of a part's log-sum-exps, which would wait for them on
        the link; and a part's gradients are sent as soon as can be, to follow the last activations.
        """
        hidden, losses = self.hidden, list[float | None]()
        for number, part in enumerate(parts):
            h, lse = hidden.finish(part, rows, step, samples, self._meanwhile), self._lse[part]
            self._network.output.forward(batch, h, self._sampler.core, lse, part.start, part.stop)
            hidden.start_normalise(lse, part)
            if number + 2 < len(parts):
                hidden.start(batch, parts[number + 2])
            if number > 0:
                losses.append(self._gradients(hidden, batch, parts[number - 1]))
        losses.append(self._gradients(hidden, batch, parts[-1]))
        return None if None in losses else sum(loss for loss in losses if loss is not None)

    def _gradients(self, hidden: HiddenStack, batch: Any, part: slice) -> float | None:
        """The part's loss, and its hidden gradients, which are sent; None where the loss is not a number."""
        lse = hidden.finish_normalise(part, self._meanwhile)
        if not lse.max() < np.inf:  # nan or +inf, on every rank; -inf is a point without active labels
            return None
        dh, output = hidden.grad(batch.size)[part], self._network.output
        loss = output.backward(batch, lse, dh, self._weighted, batch.size, part.start, part.stop)
        hidden.scatter(part)
        return float(loss)

    def _take_stale(
        self, step: int, samples: int, rate: float, until: int, total: int
    ) -> tuple[float, int] | None:
        """As `take`, of whole batches; this step's input gradient is left to the next step or `finish`."""
        hidden, output = self._stacks[step % 2], self._network.output
        batch, rows = self._batch(step)
        size, whole = len(rows), slice(0, len(rows))
        if not self._begun:
            hidden.start(batch, whole)
        h, lse = hidden.finish(whole, rows, step, samples), self._lse[whole]
        output.forward(batch, h, self._sampler.core, lse)
        hidden.start_normalise(lse, whole)
        self._apply_late()
        self._begun = step + 1 < until
        if self._begun:
            following, points = self._batch(step + 1)
            self._stacks[(step + 1) % 2].start(following, slice(0, len(points)))
        loss = self._gradients(hidden, batch, whole)
        if loss is None:
            self.finish()
            return None
        output.update(rate, step + 1)
        self._late = hidden, batch, size, rate, step + 1
        if step + 2 < total:
            self._batch(step + 2)
        return loss, size

    def _apply_late(self) -> None:
        if self._late is not None:
            hidden, batch, size, rate, number = self._late
            hidden.backward(batch, size, rate, number)
            self._late = None

    def finish(self) -> None:
        """Collective. The weights are then those of all steps taken; what was begun of the step to come
        begins anew."""
        self._apply_late()
        if self._begun:
            for stack in self._stacks:
                stack.abandon()
            self._begun = False

    def _try(self) -> int:
        """The next number of parts to be timed; the last time rank 0's fastest, for good."""
        if len(self._seconds) < len(TRIALS):
            return TRIALS[len(self._seconds)]

        def seconds(parts: int) -> float:
            trials = zip(TRIALS, self._seconds, strict=True)
            return median(taken for tried, taken in trials if tried == parts)

        self._parts = self._comm.bcast(min(TRIED, key=seconds))
        return self._parts


def _cut(size: int, parts: int) -> list[slice]:
    """So many parts of a batch of `size` points, or fewer of a small one."""
    borders = cuts(size, parts, _core.OutputLayer.part_points)
    return [slice(begin, end) for begin, end in itertools.pairwise(borders) if begin < end]
