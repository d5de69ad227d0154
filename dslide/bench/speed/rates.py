"""What the machine can do at best: products, and rows of a table read, updated and gathered.

A training step's bound is computed from these rates (dslide.bench.speed.bounds). Each is the best that we
know how to get on this machine: all threads, large pages, rows prefetched, the instruction set in use; for
products the faster of the core's, with few rows and with many, and numpy's.
"""

from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from dslide import _core
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.products import FEW, openblas_kernel, ours, product_rates
from dslide.bench.speed.sizes import Size

BENCH = "kernels"
HALF = ", bfloat16"
CACHED_BYTES = 128 << 10  # a batch's activations: what a sparse product reads again and again
GROUP = 64  # rows of a weighted sum


@dataclass(frozen=True)
class Rates:
    """Best rates for rows of one width: GB/s (10^9 bytes, read and written each counted) and GFLOP/s.

    random_update: random rows read and written; random_read: read; stream_update, stream_read: the same in
    the order of memory; product: dense products; gather: weighted sums of rows that lie in the cache.
    """

    random_update: float
    random_read: float
    stream_update: float
    stream_read: float
    product: float
    gather: float

    def as_dict(self) -> dict[str, float]:
        """For JSON and for people."""
        return asdict(self)


def row_rates(size: Size, threads: int, row_bytes: int) -> list[Row]:
    """GB/s of rows of `row_bytes`: random and in order, read and updated; and of gathered ones in GFLOP/s."""
    pool, width = _core.Pool(threads), max(16, row_bytes // 4)
    count = max(64, size.table_bytes // (4 * width))
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    straight = np.arange(count, dtype=np.int32)
    probe = _core.RowProbe(pool, count, width)
    gbytes, rows = 4 * width * count / 1e9, []
    for case, touch, passes in (
        ("random rows, read", partial(probe.gather, order, GROUP), 1),
        ("random rows, read + write", partial(probe.update, order), 2),
        ("in order, read", partial(probe.gather, straight, GROUP), 1),
        ("in order, read + write", partial(probe.update, straight), 2),
    ):
        rows.append(
            measure(
                BENCH,
                f"{case}, {4 * width} B",
                "GB/s",
                passes * gbytes,
                touch,
                seconds=size.seconds,
            )
        )
    cached = _core.RowProbe(pool, max(1, CACHED_BYTES // (4 * width)), width)
    ids = np.random.default_rng(1).integers(0, CACHED_BYTES // (4 * width), count // 4).astype(np.int32)
    rows.append(
        measure(
            BENCH,
            f"rows in the cache, weighted sums, {4 * width} B",
            "GFLOP/s",
            2 * width * len(ids) / 1e9,
            partial(cached.gather, ids, GROUP),
            seconds=size.seconds,
        )
    )
    return rows


@cache
def _products(size: Size, threads: int) -> tuple[Row, ...]:
    """Exact top-5 over a block of labels, logits of few rows, numpy's product of the first shape and of a
    square one."""
    from threadpoolctl import threadpool_limits

    random = np.random.default_rng(1)
    labels, batch = min(size.labels, 43_200), max(size.batches)
    pool = _core.Pool(threads)
    layer = _core.OutputLayer(pool, labels, 0, labels, size.hidden)
    halves = _core.OutputLayer(pool, labels, 0, labels, size.hidden, half=True)
    queries = random.standard_normal((batch, size.hidden)).astype(np.float32)
    ids, scores = np.empty((batch, 5), np.int32), np.empty((batch, 5), np.float32)
    flops = 2 * batch * size.hidden * labels / 1e9
    shape = f"{batch} x {size.hidden} x {labels:,}"
    timed = partial(measure, BENCH, unit="GFLOP/s", seconds=size.seconds)
    top, top_half = (
        timed(
            f"product with top-5{name}, {shape}",
            amount=flops,
            work=partial(core.topk, queries, 5, ids, scores),
        )
        for core, name in ((layer, ""), (halves, HALF))
    )
    few = min(FEW, size.labels)
    logits = [
        timed(
            f"logits{name}, {batch} x {size.hidden} x {few:,}",
            amount=2 * batch * size.hidden * few / 1e9,
            work=ours(pool, few, size.hidden, batch, half)["logits"],
        )
        for name, half in (("", False), (HALF, True))
    ]
    side = 2048 if size.labels > 10_000 else 256
    square = random.standard_normal((side, side)).astype(np.float32)
    weights, out = layer.weights, np.empty((batch, labels), np.float32)
    with threadpool_limits(limits=threads, user_api="blas"):
        numpys = f"numpy, OpenBLAS {openblas_kernel()},"
        same = timed(f"{numpys} {shape}", amount=flops, work=lambda: np.matmul(queries, weights.T, out=out))
        large = timed(
            f"{numpys} {side} x {side} x {side}", amount=2 * side**3 / 1e9, work=lambda: square @ square
        )
    top_half = top_half.with_(rival=2 * same.value, rival_name="twice numpy's float32")
    return top, top_half, *logits, same, large


@cache
def measured(size: Size, threads: int, row_bytes: int, half: bool = False) -> tuple[Rates, tuple[Row, ...]]:
    """The rates for rows of `row_bytes`, measured once a process, and the figures that they are from. With
    `half` products in bfloat16 count, too.

    A bound takes the best run of each, not the median: what was reached once is possible.
    """
    rows = row_rates(size, threads, row_bytes)
    products = _products(size, threads)
    read, update, stream_read, stream_update, gather = (row.high for row in rows)
    rates = Rates(
        random_update=update,
        random_read=read,
        stream_update=max(stream_update, update),
        stream_read=max(stream_read, read),
        product=max(row.high for row in products if half or HALF not in row.case),
        gather=gather,
    )
    return rates, (*rows, *products)


def to_and_fro(size: Size, threads: int) -> list[Row]:
    """Nanoseconds that a cache line takes from one core to another and back; nothing with one thread.

    A virtual machine's host may move its cores between such that share a cache and such that don't, within
    seconds: figures with several threads change with it.
    """
    if threads < 2:
        return []
    pool, count = _core.Pool(threads), 100_000
    trips = measure(
        BENCH,
        "a cache line between two cores, to and fro",
        "ns",
        count,
        lambda: _core.pass_to_and_fro(pool, count),
        repeats=20,
        seconds=size.seconds,
    )
    return [trips.with_(value=1e9 / trips.value, low=1e9 / trips.high, high=1e9 / trips.low)]


def kernels(size: Size, threads: int, **_: Any) -> list[Row]:
    """The rates of this machine, for float32 rows of the hidden width, and the output layer's products."""
    return [
        *measured(size, threads, 4 * size.hidden)[1],
        *to_and_fro(size, threads),
        *product_rates(BENCH, size, threads),
    ]
