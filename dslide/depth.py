"""Hidden layers beyond the first: what they hold, and how activations and gradients pass through all of them.

Every layer's units are cut over the ranks, and every rank sees all activations of the layer before. So a
layer needs what the first one needs: its activations gathered going forward, and the sum of all ranks' parts
of their gradient, each unit's at its owner, going back (dslide.comm.Exchange, one a layer).

A layer with a sampler computes some units in training and none of the others, which are zero: one set for all
points of a batch (`uniform`), or a set a point (`lsh`: hash tables over the units, asked with the activations
that come in; Chen et al. 2020, section 3). Predictions use all units.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.comm import Exchange, Floats, LocalComm, Meanwhile, no_work
from dslide.config import HiddenLayerConfig, SamplerConfig, TrainConfig
from dslide.samplers import Sampler, TableSampler, make_sampler

IDS, COLUMNS, DENSE = 2, 1, 0  # how activations travel: ids a point, ids a batch, all units


def layer_seed(seed: int, layer: int) -> int:
    """The seed of the draws of further hidden layer `layer`, counted from 0."""
    return int(np.random.SeedSequence([seed, 0xD0, layer]).generate_state(1, np.uint64)[0] >> 1)


def inclusion_probability(units: int, draws: int) -> float:
    """That one of `units` is among so many uniform draws with replacement."""
    return float(-np.expm1(draws * np.log1p(-1 / units))) if units > 1 else 1.0


class HiddenLayer:
    """A rank's units of one further hidden layer.

    `rows` (a core OutputLayer) keeps weights [units, inputs], biases and optimiser state; `core` computes.
    First weights are N(0, 2 / ((1 + slope^2) inputs)), which keeps the activations' scale (He et al. 2015,
    Delving deep into rectifiers, section 2.2), biases 0.
    """

    def __init__(
        self, pool: Any, config: TrainConfig, layer: HiddenLayerConfig, number: int, inputs: int, own: slice
    ) -> None:
        """`own` are this rank's units of the layer's; `number` counts layers from 0."""
        net = config.network
        slope = net.slope if net.activation == "leaky-relu" else 0.0
        self.config, self.number, self.own, self.inputs = layer, number, own, inputs
        self._seed = layer_seed(config.seed, number)
        self.rows = _core.OutputLayer(
            pool,
            layer.units,
            own.start,
            own.stop,
            inputs,
            bias=net.bias,
            init_std=(2 / ((1 + slope**2) * inputs)) ** 0.5,
            seed=self._seed,
        )
        self.rows.bias[:] = 0
        uniform = layer.sampler == "uniform"
        self.core = _core.HiddenLayer(
            self.rows,
            slope=slope,
            dropout=net.dropout,
            scale=1 / inclusion_probability(layer.units, layer.draws) if uniform else 1.0,
            seed=self._seed,
        )

    def make_sampler(self) -> Sampler | None:
        """None if all units are active."""
        layer = self.config
        if layer.sampler == "full":
            return None
        kind = SamplerConfig(kind="lsh", lsh=layer.lsh)
        if layer.sampler == "uniform":
            kind = SamplerConfig(kind="uniform", uniform_extras=layer.draws, log_q=False)
        units = (layer.units, self.own.start, self.own.stop)
        return make_sampler(kind, self.rows, units, np.zeros(layer.units, np.int64), 1, 1, self._seed)


class SampledExchange(Exchange):
    """An Exchange of a sampled layer: a rank's message has the active values and their ids, or all values of
    its units, whichever is smaller; the gradient comes back in the same form, the ids left out.

    Before a message goes its form and the number of ids (HEADER_BYTES). Ids take 2 bytes, 4 where a rank has
    more than 2^16 units. A point's own ids come with their number; ids that all points share come once.
    """

    HEADER_BYTES = 16

    def __init__(self, comm: LocalComm, hidden_cuts: list[int], wire: str, max_rows: int) -> None:
        super().__init__(comm, hidden_cuts, wire, max_rows)
        self._id_types: list[np.dtype[Any]] = [
            np.dtype("<u2" if width <= 1 << 16 else "<u4") for width in self.widths
        ]
        self._values: np.dtype[Any] = np.dtype({"fp32": "<u4", "bf16": "<u2", "int8": "u1"}[wire])
        self._masks: list[NDArray[np.bool_] | None] = [None] * comm.size
        self._gradients: dict[int, NDArray[np.uint8]] = {}
        self.sent = {"ids": 0, "dense": 0, "points": 0, "values": 0, "id_bytes": 0, "bytes": 0}

    def gather_active(self, rows: int, active: Any, meanwhile: Meanwhile = no_work) -> Floats:
        """As `gather`; `active` as HiddenLayer.active_units of the core."""
        if self.comm.size == 1:
            return self._h[:rows]
        rank = self.comm.rank
        packed = self._packed[rank][: rows * self._sizes(self.wire)[rank]]
        _core.pack_rows(self.own(rows), 0, self.widths[rank], self.wire, packed)
        form, ids, mask = self._pattern(rows, active)
        message = packed
        if mask is not None:
            message = np.concatenate([ids, self._taken(packed, rows, rank, mask)])
        headers = np.zeros((self.comm.size, 2), np.int64)
        headers[rank] = form, len(message)
        self._swap(headers[rank], headers)
        arrived = {peer: np.empty(headers[peer, 1], np.uint8) for peer in self.peers}
        messages = self.comm.prepare([(p, message) for p in self.peers], list(arrived.items()), tag=1)
        self.comm.start(messages)
        h = self._h[:rows]
        _core.unpack_rows(packed, self.wire, h, self.cuts[rank], self.cuts[rank + 1])
        self._masks[rank] = mask
        self.comm.finish(messages, meanwhile)
        for peer in self.peers:
            rest, self._masks[peer] = self._read(int(headers[peer, 0]), arrived[peer], rows, peer)
            dense = self._spread(rest, rows, peer, self._masks[peer])
            _core.unpack_rows(dense, self.wire, h, self.cuts[peer], self.cuts[peer + 1])
        self._count(rows, len(ids), mask, len(message))
        return h

    def scatter(self, part: slice) -> None:
        if self.comm.size == 1:
            return
        rank, rows = self.comm.rank, part.stop  # always the whole batch
        sends = []
        for peer in self.peers:
            buffer = self._sent[peer][: rows * self._sizes(self.wire)[peer]]
            mask = self._masks[peer]
            if mask is not None:  # the others' gradients are not wanted, and would blur an int8 row's scale
                self._dh[:rows, self.cuts[peer] : self.cuts[peer + 1]][~mask] = 0
            _core.pack_rows(self._dh[:rows], self.cuts[peer], self.cuts[peer + 1], self.wire, buffer)
            sends.append((peer, buffer if mask is None else self._taken(buffer, rows, peer, mask)))
            self.sent["bytes"] += sends[-1][1].nbytes
        mine = self._masks[rank]
        size = rows * self._sizes(self.wire)[rank]
        if mine is not None:
            size = int(mine.sum()) * self._values.itemsize + self._scales(rows)
        self._gradients = {peer: np.empty(size, np.uint8) for peer in self.peers}
        messages = self.comm.prepare(sends, list(self._gradients.items()), tag=3)
        self.comm.start(messages)
        self._pending.append((part, messages))

    def _sum(self, part: slice, total: Floats) -> None:
        rank = self.comm.rank
        for peer, message in self._gradients.items():
            dense = self._spread(message, part.stop, rank, self._masks[rank])
            self._arrived[peer][: len(dense)] = dense
        super()._sum(part, total)

    # Messages

    def _swap(self, own: NDArray[np.int64], everyone: NDArray[np.int64]) -> None:
        messages = self.comm.prepare(
            [(peer, own) for peer in self.peers], [(peer, everyone[peer]) for peer in self.peers], tag=2
        )
        self.comm.start(messages)
        self.comm.finish(messages)

    def _scales(self, rows: int) -> int:
        return 4 * rows if self.wire == "int8" else 0

    def _pattern(self, rows: int, active: Any) -> tuple[int, NDArray[np.uint8], NDArray[np.bool_] | None]:
        """The form of this rank's message, its ids, and the active units [rows, units]; None: dense."""
        width, kind = self.widths[self.comm.rank], self._id_types[self.comm.rank]
        nothing = np.zeros(0, np.uint8)
        if active is None:
            return DENSE, nothing, None
        indptr, units = active
        shared = indptr is None
        values = rows * len(units) if shared else len(units)
        id_bytes = kind.itemsize * (len(units) + (1 if shared else rows))
        if id_bytes + values * self._values.itemsize >= rows * width * self._values.itemsize:
            return DENSE, nothing, None
        counts = np.array([len(units)]) if shared else np.diff(indptr)
        ids = np.concatenate([counts, units]).astype(kind).view(np.uint8)
        return (COLUMNS if shared else IDS), ids, _mask(rows, width, counts, units, shared)

    def _read(
        self, form: int, message: NDArray[np.uint8], rows: int, peer: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None]:
        """What follows the ids of a peer's message, and its active units."""
        if form == DENSE:
            return message, None
        kind = self._id_types[peer]
        lists = 1 if form == COLUMNS else rows
        counts = message[: lists * kind.itemsize].view(kind).astype(np.int64)
        end = (lists + int(counts.sum())) * kind.itemsize
        units = message[lists * kind.itemsize : end].view(kind).astype(np.int64)
        return message[end:], _mask(rows, self.widths[peer], counts, units, form == COLUMNS)

    def _taken(
        self, packed: NDArray[np.uint8], rows: int, rank: int, mask: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Of `rank`'s packed rows the masked values and, int8, the scales."""
        size = rows * self.widths[rank] * self._values.itemsize
        values = packed[:size].view(self._values).reshape(rows, -1)[mask]
        return np.concatenate([values.view(np.uint8), packed[size:]])

    def _spread(
        self, message: NDArray[np.uint8], rows: int, rank: int, mask: NDArray[np.bool_] | None
    ) -> NDArray[np.uint8]:
        """The reverse: packed rows with zeros where there is no mask."""
        if mask is None:
            return message
        end = int(mask.sum()) * self._values.itemsize
        whole = np.zeros((rows, self.widths[rank]), self._values)
        whole[mask] = message[:end].copy().view(self._values)
        return np.concatenate([whole.reshape(-1).view(np.uint8), message[end:]])

    def _count(self, rows: int, id_bytes: int, mask: NDArray[np.bool_] | None, message: int) -> None:
        """What went to each peer; gradients are counted where they are sent."""
        peers = len(self.peers)
        self.sent["dense" if mask is None else "ids"] += peers
        if mask is not None:
            self.sent["points"] += peers * rows
            self.sent["values"] += peers * int(mask.sum())
            self.sent["id_bytes"] += peers * id_bytes
        self.sent["bytes"] += peers * (self.HEADER_BYTES + message)


def _mask(
    rows: int, width: int, counts: NDArray[np.int64], units: NDArray[Any], shared: bool
) -> NDArray[np.bool_]:
    mask = np.zeros((rows, width), bool)
    if shared:
        mask[:, units] = True
    else:
        mask[np.repeat(np.arange(rows), counts), units] = True
    return mask


class HiddenStack:
    """All hidden layers of one rank's network in training or prediction, with their exchanges."""

    def __init__(
        self,
        network: Any,
        comm: LocalComm,
        pool: Any,
        wire: str,
        max_rows: int,
        points: int,
        *,
        second: bool = False,
    ) -> None:
        """`network` as dslide.network.Network. `points`: of the training set, whose row numbers key draws; 0
        for predictions alone. `second`: of two stacks of a network without further layers, whose batches are
        between forward and backward at the same time."""
        self._second = second
        self._input, self.layers = network.input, network.hidden_layers
        shape = network.shape
        self.exchanges = [Exchange(comm, shape.hidden_cuts, wire, max_rows)]
        for layer, own in zip(self.layers, shape.layer_cuts, strict=True):
            kind = Exchange if layer.config.sampler == "full" or not points else SampledExchange
            self.exchanges.append(kind(comm, own, wire, max_rows))
        self._samplers: list[Sampler | None] = [None] * len(self.layers)
        if self.layers and points:  # points without features and labels: samplers see units, not labels
            indptr, none = np.zeros(points + 1, np.int64), np.zeros(0, np.int32)
            x = _core.Csr(indptr, none, np.zeros(0, np.float32), 1)
            self._batch = _core.Batch(pool, x, _core.Csr(indptr, none, None, 1))

    def make_samplers(self, samples: int) -> bool:
        """Makes the layers' samplers from the weights as they are; whether any has hash tables."""
        self._samplers = [layer.make_sampler() for layer in self.layers]
        self.refresh(samples)
        return any(isinstance(sampler, TableSampler) for sampler in self._samplers)

    def refresh(self, samples: int) -> None:
        """As Sampler.refresh."""
        for sampler in self._samplers:
            if sampler is not None:
                sampler.refresh(samples)

    def start(self, batch: Any, part: slice) -> None:
        """Sends the first layer's activations of a part of a batch's points on their way to all ranks."""
        exchange = self.exchanges[0]
        own = exchange.own(batch.size)
        self._input.forward(batch, own, True, part.start, part.stop, second=self._second)
        exchange.start_gather(part)

    def finish(
        self, part: slice, rows: NDArray[np.int64], step: int, samples: int, meanwhile: Meanwhile = no_work
    ) -> Floats:
        """Collective, after `start`. The last layer's activations [n, units] of the batch's training points
        `rows`, of which those of the part and of the parts before are there. Further layers take whole
        batches."""
        size = len(rows)
        self.exchanges[0].finish_gather(part, meanwhile)
        h = self.exchanges[0].gathered(size)
        if self.layers:
            self._batch.select(rows, step)
        for layer, sampler, exchange in zip(self.layers, self._samplers, self.exchanges[1:], strict=True):
            if sampler is not None:
                sampler.prepare(samples)
            core = None if sampler is None else sampler.core
            layer.core.forward(self._batch, h, core, exchange.own(size))
            if isinstance(exchange, SampledExchange):
                h = exchange.gather_active(size, layer.core.active_units(), meanwhile)
            else:
                h = exchange.gather(size, meanwhile)
        return h

    def predict(self, batch: Any, size: int) -> Floats:
        """Collective. The last layer's activations [size, units] of `batch`, all units, nothing dropped."""
        self._input.forward(batch, self.exchanges[0].own(size), False)
        h = self.exchanges[0].gather(size)
        for layer, exchange in zip(self.layers, self.exchanges[1:], strict=True):
            layer.core.predict(h, exchange.own(size))
            h = exchange.gather(size)
        return h

    def start_normalise(self, lse: Floats, part: slice) -> None:
        """As Exchange.start_normalise."""
        self.exchanges[0].start_normalise(lse, part)

    def finish_normalise(self, part: slice, meanwhile: Meanwhile = no_work) -> Floats:
        """As Exchange.finish_normalise."""
        return self.exchanges[0].finish_normalise(part, meanwhile)

    def grad(self, size: int) -> Floats:
        """[size, units], to be filled with this rank's part of the last layer's gradient."""
        return self.exchanges[-1].grad(size)

    def scatter(self, part: slice) -> None:
        """Starts to send the part's rows of `grad` to the owners of the units."""
        self.exchanges[-1].scatter(part)

    def abandon(self) -> None:
        """As Exchange.abandon, in every layer."""
        for exchange in self.exchanges:
            exchange.abandon()

    def backward(self, batch: Any, size: int, rate: float, step: int, meanwhile: Meanwhile = no_work) -> None:
        """Takes the gradient through the layers and updates them; `step` counts from 1. Collective."""
        for number in range(len(self.layers) - 1, -1, -1):
            layer, below = self.layers[number].core, self.exchanges[number]
            layer.backward(self.exchanges[number + 1].collect(size, meanwhile), below.grad(size))
            below.scatter(slice(0, size))
            layer.update(rate, step)
        for part, dh in self.exchanges[0].collect_parts(size, meanwhile):
            self._input.backward(batch, dh, rate, step, part.start, part.stop, second=self._second)

    def record(self) -> list[dict[str, Any]]:
        """How this rank's activations of sampled layers travelled: messages as ids + values and dense, the
        points and values in the former, the ids' bytes, and the bytes of both directions."""
        return [
            {"layer": number, "units": exchange.cuts[-1], **exchange.sent}
            for number, exchange in enumerate(self.exchanges, start=1)
            if isinstance(exchange, SampledExchange)
        ]


def class_means(stack: HiddenStack, network: Any, batch: Any, y: Any, points: int, block: int) -> None:
    """OutputLayer.class_mean_init where there are several hidden layers: each output row becomes the
    unit-normalised sum over its label's points of (h - mean h), h of the last layer. Collective: the
    activations of all training points are gathered once, in blocks, in the wire's format.

    `y` (indptr, indices) are the training points' labels. Rows of labels without points keep their draws.
    """
    indptr, indices = y
    first, last = network.labels
    weights = kept = network.weights()["output.weights"]
    if kept.dtype != np.float32:  # sums of many points need more than bfloat16's eight bits
        weights = kept.astype(np.float32)
    counts = np.bincount(indices, minlength=network.shape.labels)[first:last]
    weights[counts > 0] = 0
    total = np.zeros(network.shape.width, np.float64)
    for begin in range(0, points, block):
        end = min(points, begin + block)
        batch.select(np.arange(begin, end, dtype=np.int64), 0)
        h = stack.predict(batch, end - begin)
        total += h.sum(axis=0, dtype=np.float64)
        labels = indices[indptr[begin] : indptr[end]]
        rows = np.repeat(np.arange(end - begin), np.diff(indptr[begin : end + 1]))
        own = (labels >= first) & (labels < last)
        labels, rows = labels[own] - first, rows[own]
        if len(labels):
            order = np.argsort(labels, kind="stable")
            found, starts = np.unique(labels[order], return_index=True)
            weights[found] += np.add.reduceat(h[rows[order]], starts, axis=0)
    mean = total / max(1, points)
    for begin in range(0, last - first, 4096):  # in parts: the rows may be most of the memory
        part = slice(begin, min(last - first, begin + 4096))
        there = counts[part] > 0
        sums = weights[part] - counts[part, None] * mean
        norms = np.sqrt((sums**2).sum(axis=1, keepdims=True))
        kept[part][there] = np.where(norms > 0, sums / np.where(norms > 0, norms, 1), sums)[there]
