"""The exchange without MPI: cuts, formulas, and P ranks' arithmetic in one process."""

import threading
from itertools import pairwise
from queue import Queue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslide import _core
from dslide.comm import (
    MESSAGE_BYTES,
    Exchange,
    LocalComm,
    Messages,
    combine_lse,
    cuts,
    no_work,
    payload_per_point,
)
from dslide.comm import _parts as parts


@given(st.integers(0, 400), st.integers(1, 9), st.sampled_from([1, 16]))
def test_cuts_cover_everything_once(total, ranks, block):
    offsets = cuts(total, ranks, block)
    assert offsets[0] == 0 and offsets[-1] == total and len(offsets) == ranks + 1
    widths = np.diff(offsets)
    assert (widths >= 0).all() and widths.max() - widths.min() <= 2 * block
    assert all(offset % block == 0 or offset == total for offset in offsets)


@pytest.mark.parametrize("size", [0, 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES])
def test_messages_are_cut_below_the_eager_limit(size):
    buffer = np.arange(size, dtype=np.uint8)
    pieces = parts(buffer)
    assert sum(len(p) for p in pieces) == size and all(
        0 < len(p) <= MESSAGE_BYTES < 64 * 1024 for p in pieces
    )
    assert b"".join(p.tobytes() for p in pieces) == buffer.tobytes()
    if pieces:
        pieces[0][0] = 7
        assert buffer[0] == 7  # views: nothing is copied


def test_log_sum_exp_over_ranks():
    random = np.random.default_rng(0)
    lses = random.normal(0, 30, (3, 50)).astype(np.float32)
    lses[1, :10] = -np.inf
    lses[:, 0] = -np.inf
    combined = combine_lse(lses)
    assert combined.dtype == np.float32 and combined[0] == -np.inf
    np.testing.assert_allclose(
        combined[1:], np.logaddexp.reduce(lses[:, 1:].astype(float), axis=0), rtol=1e-6
    )
    for bad in (np.nan, np.inf):
        lses[2, 3] = bad
        assert not combine_lse(lses)[3] < np.inf


class Postman:
    """Delivers between ranks that are threads."""

    def __init__(self, size):
        self.boxes = {(a, b, tag): Queue() for a in range(size) for b in range(size) for tag in (1, 2, 3)}


class ThreadComm(LocalComm):
    """A rank that is a thread: what MpiComm does, without MPI."""

    def __init__(self, rank, size, postman):
        super().__init__()
        self.rank, self.size, self.postman = rank, size, postman

    def prepare(self, sends, receives, tag):
        boxes = self.postman.boxes
        requests = (
            [(boxes[self.rank, peer, tag], buffer) for peer, buffer in sends],
            [(boxes[peer, self.rank, tag], buffer) for peer, buffer in receives],
        )
        return Messages(requests, sum(buffer.nbytes for _, buffer in sends))

    def start(self, messages):
        self.payload_bytes += messages.sent_bytes
        for box, buffer in messages.requests[0]:
            box.put(buffer.copy())

    def finish(self, messages, meanwhile=no_work):
        while meanwhile():
            pass
        for box, buffer in messages.requests[1]:
            buffer[:] = box.get(timeout=20)


def run_threads(work, ranks):
    """Calls work(rank) on a thread each."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("hidden", "ranks"), [(128, 2), (128, 3), (40, 3), (16, 3), (7, 2)])
def test_ranks_exchange_what_one_rank_computes(wire, hidden, ranks):
    rows, most, step = 11, 13, 2
    random = np.random.default_rng(1)
    h = random.normal(size=(rows, hidden)).astype(np.float32)
    h[2] = 0
    grads = random.normal(size=(ranks, rows, hidden)).astype(np.float32)
    lses = random.normal(size=(ranks, rows)).astype(np.float32)
    borders = cuts(hidden, ranks, 16)
    postman, results, sent = Postman(ranks), {}, {}

    def work(rank):
        comm = ThreadComm(rank, ranks, postman)
        exchange = Exchange(comm, borders, wire, most)
        for _ in range(step):
            exchange.own(rows)[:] = h[:, borders[rank] : borders[rank + 1]]
            whole = slice(0, rows)
            full = exchange.gather(rows).copy()
            exchange.start_normalise(lses[rank], whole)
            lse = exchange.finish_normalise(whole)
            exchange.grad(rows)[:] = grads[rank]
            exchange.scatter(whole)
            results[rank] = full, lse.copy(), exchange.collect(rows).copy()
        sent[rank] = comm.payload_bytes

    run_threads(work, ranks)
    assert len(results) == ranks
    assert sum(sent.values()) == step * rows * payload_per_point(hidden, ranks, wire)

    tolerance = {"fp32": 0, "bf16": 2**-8, "int8": 0.5 / 127}[wire]
    scale = np.abs(h).max() if wire == "int8" else np.abs(h)
    for rank, (full, lse, own) in results.items():
        assert (full == results[0][0]).all()  # the very same bits on every rank, the own rows too
        assert (lse == results[0][1]).all()
        assert (np.abs(full - h) <= tolerance * scale + 1e-7 * tolerance).all()
        want = grads.sum(axis=0)[:, borders[rank] : borders[rank + 1]]
        assert own.shape == want.shape
        np.testing.assert_allclose(own, want, atol=1e-5 + tolerance * ranks * np.abs(grads).max())


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("rows", "borders"), [(11, (0, 4, 11)), (11, (0, 10, 11)), (12, (0, 3, 7, 8, 12)), (1, (0, 1))]
)
def test_parts_that_are_under_way_together_give_the_same_bits(wire, rows, borders):
    """With ranks of which one has no units."""
    ranks, hidden = 3, 24
    random = np.random.default_rng(2)
    h = random.normal(size=(rows, hidden)).astype(np.float32)
    grads = random.normal(size=(ranks, rows, hidden)).astype(np.float32)
    lses = random.normal(size=(ranks, rows)).astype(np.float32)
    units = cuts(hidden, ranks, 16)
    whole, parts = [slice(0, rows)], [slice(*pair) for pair in pairwise(borders)]
    postman, results, sent = Postman(ranks), {}, {}

    def step(exchange, rank, parts):
        exchange.own(rows)[:] = h[:, units[rank] : units[rank + 1]]
        for part in parts:
            exchange.start_gather(part)
        for part in parts:
            exchange.finish_gather(part)
            exchange.start_normalise(lses[rank, part], part)
        exchange.grad(rows)[:] = grads[rank]
        lse = []
        for part in parts:
            lse.append(exchange.finish_normalise(part).copy())
            exchange.scatter(part)
        return exchange.gathered(rows).copy(), np.concatenate(lse), exchange.collect(rows).copy()

    def work(rank):
        comm = ThreadComm(rank, ranks, postman)
        exchange = Exchange(comm, units, wire, rows)
        results[rank] = [step(exchange, rank, each) for each in (whole, parts, parts, whole)]
        sent[rank] = comm.payload_bytes

    run_threads(work, ranks)
    assert sum(sent.values()) == 4 * rows * payload_per_point(hidden, ranks, wire)
    for first, *others in results.values():
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert a.tobytes() == b.tobytes()


def test_what_is_abandoned_does_not_disturb_what_follows():
    ranks, rows, part = 2, 5, slice(0, 5)
    postman, results = Postman(ranks), {}

    def work(rank):
        exchange = Exchange(ThreadComm(rank, ranks, postman), [0, 3, 6], "fp32", rows)
        exchange.start_gather(part)
        exchange.start_normalise(np.zeros(rows, np.float32), part)
        exchange.scatter(part)
        exchange.abandon()
        exchange.own(rows)[:] = rank + 1
        exchange.grad(rows)[:] = rank + 1
        h = exchange.gather(rows).copy()
        exchange.scatter(part)
        results[rank] = h, exchange.collect(rows).copy()

    run_threads(work, ranks)
    for h, total in results.values():
        assert (h == np.repeat([1, 2], 3)).all() and (total == 3).all()


def test_one_rank_exchanges_nothing_and_rounds_nothing():
    comm = LocalComm()
    exchange = Exchange(comm, [0, 5], "int8", 4)
    own = exchange.own(3)
    own[:] = 1 / 3
    assert exchange.gather(3) is not None and (exchange.gather(3) == np.float32(1 / 3)).all()
    exchange.grad(3)[:] = 1 / 7
    exchange.scatter(slice(0, 3))
    assert (exchange.collect(3) == np.float32(1 / 7)).all()
    assert comm.payload_bytes == 0


@pytest.mark.parametrize(("wire", "row"), [("fp32", 4 * 128), ("bf16", 2 * 128), ("int8", 128 + 4)])
def test_payload_of_two_ranks(wire, row):
    """A point's halves of activations and gradient each way, and two normalisers: int8 280 bytes."""
    scale = 4 if wire == "int8" else 0
    assert _core.row_bytes(wire, 128) == row
    assert payload_per_point(128, 2, wire) == 2 * (row - scale) + 4 * scale + 2 * 4
