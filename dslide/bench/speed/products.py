"""The three products of an output layer of which every point sees every row, each by itself, beside numpy's.

Logits W h^T, the hidden gradient g^T W and the weight gradient g h, for weights W [rows, hidden],
activations h [batch, hidden] and the logits' gradient g [rows, batch], which lies in memory as in training.
What a product must pack or round counts as part of it. numpy's products are in float32.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from dslide import _core
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.sizes import Size

PRODUCTS = ("logits", "hidden gradient", "weight gradient")
PRECISIONS = {"float32": 1, "bfloat16": 2}  # and how many times numpy's rate in float32 each is held against
REST = 0.2  # seconds until the threads of numpy's product no longer look for work on the cores that ours want
FEW, BLOCK = 1_040, 43_200  # rows that a batch of 256 makes active; labels of a shard


def openblas_kernel() -> str:
    """The instruction set that numpy's OpenBLAS chose."""
    from threadpoolctl import threadpool_info

    return next((p["architecture"] for p in threadpool_info() if p.get("architecture")), "unknown")


def numpys(rows: int, hidden: int, batch: int) -> dict[str, Callable[[], object]]:
    """The products by numpy."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((rows, hidden), np.float32)
    h, dh = random.standard_normal((batch, hidden), np.float32), np.empty((batch, hidden), np.float32)
    g, gradient = np.ones((rows, batch), np.float32), np.empty((rows, hidden), np.float32)
    calls = ((weights, h.T, g), (g.T, weights, dh), (g, h, gradient))
    return {
        product: partial(np.matmul, a, b, out=c) for product, (a, b, c) in zip(PRODUCTS, calls, strict=True)
    }


def ours(pool: _core.Pool, rows: int, hidden: int, batch: int, half: bool) -> dict[str, Callable[[], object]]:
    """The same by the core, from weights in bfloat16 if `half`; to be called in this order the first time."""
    probe = _core.ProductProbe(pool, rows, hidden, batch, half=half)
    return dict(zip(PRODUCTS, (probe.logits, probe.hidden_gradient, probe.weight_gradient), strict=True))


def product_rates(bench: str, size: Size, threads: int) -> list[Row]:
    """GFLOP/s in both precisions, of few rows, of a shard's and of all, at every batch size."""
    from threadpoolctl import threadpool_limits

    rows, pool, kernel = [], _core.Pool(threads), openblas_kernel()
    counts = sorted({min(count, size.labels) for count in (FEW, BLOCK, size.labels)})
    for count, batch in itertools.product(counts, size.batches):
        shape = f"{count:,} rows, hidden {size.hidden}, batch {batch}"
        timed = partial(measure, bench, unit="GFLOP/s", seconds=size.seconds / 6)
        amount = 2 * count * size.hidden * batch / 1e9
        with threadpool_limits(limits=threads, user_api="blas"):
            calls = numpys(count, size.hidden, batch)
            rival = {name: timed(name, amount=amount, work=calls[name]).value for name in PRODUCTS}
        del calls  # as large as ours
        time.sleep(REST)
        for precision, times in PRECISIONS.items():
            work = ours(pool, count, size.hidden, batch, half=precision == "bfloat16")
            rows += [
                timed(f"{name}, {precision}, {shape}", amount=amount, work=work[name]).with_(
                    rival=times * rival[name],
                    rival_name=f"{'twice ' if times == 2 else ''}numpy's float32, OpenBLAS {kernel}",
                )
                for name in PRODUCTS
            ]
            del work
    return rows
