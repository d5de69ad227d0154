"""Micro-benchmarks of the core: products, hashing, training steps, evaluation.

Each is a function `(threads) -> list[Row]`; times are medians over repetitions with the range beside them.
Absolute times move with the machine: compare rows of one run.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dslide import _core

HIDDEN = 128
FEATURES, LABELS, NNZ, POINT_LABELS = 51_200, 43_200, 45, 5  # about the shape of debian-deps
POINTS = 8_192


@dataclass(frozen=True)
class Row:
    """One measured figure: the median of `repeats` runs, and its range."""

    bench: str
    case: str
    value: float
    low: float
    high: float
    unit: str
    repeats: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _measure(
    bench: str, case: str, unit: str, amount: float, work: Callable[[], object], repeats: int = 7
) -> Row:
    """`amount` units of work a call, as units a second."""
    work()
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - begin))
    return Row(bench, case, float(np.median(rates)), min(rates), max(rates), unit, repeats)


class _Setting:
    """A network on generated points, ready to step."""

    def __init__(self, threads: int, sampler: str, optimizer: str = "adagrad", batch: int = 256) -> None:
        random = np.random.default_rng(0)
        self.pool, self.batch_size = _core.Pool(threads), batch
        x_indptr = np.arange(POINTS + 1, dtype=np.int64) * NNZ
        features = np.minimum(random.pareto(0.6, POINTS * NNZ) * 40, FEATURES - 1).astype(np.int32)
        y_indptr = np.arange(POINTS + 1, dtype=np.int64) * POINT_LABELS
        labels = np.minimum(random.pareto(0.7, POINTS * POINT_LABELS) * 80, LABELS - 1).astype(np.int32)
        labels = np.sort(labels.reshape(POINTS, POINT_LABELS), axis=1).reshape(-1)
        self.x = _core.Csr(x_indptr, features, np.full(POINTS * NNZ, NNZ**-0.5, np.float32), FEATURES)
        self.y = _core.Csr(y_indptr, labels, None, LABELS)
        config = _core.InputConfig(
            FEATURES, HIDDEN, 0, HIDDEN, activation="leaky-relu", slope=0.4, dropout=0.1
        )
        self.input = _core.InputLayer(self.pool, config)
        self.output = _core.OutputLayer(self.pool, LABELS, 0, LABELS, HIDDEN)
        for layer in (self.input, self.output):
            layer.set_optimizer(_core.Optimizer(optimizer, initial_accumulator=1e-7))
        counts = np.bincount(labels, minlength=LABELS).astype(np.int64)
        if sampler == "full":
            self.sampler: Any = _core.FullSampler(LABELS, 0, LABELS)
        elif sampler == "lsh":
            self.sampler = _core.LshSampler(self.output, k=9, l=50, min_active=1500, top_up=1000)
        else:
            extras = int(sampler.partition("+")[2] or 0)
            self.sampler = _core.InBatchSampler(
                LABELS, 0, LABELS, counts, num_points=POINTS, batch_size=batch, extras=extras
            )
        self.batch = _core.Batch(self.pool, self.x, self.y)
        self.step = 0
        self.h = np.empty((batch, HIDDEN), np.float32)
        self.dh = np.empty((batch, HIDDEN), np.float32)
        self.lse = np.empty(batch, np.float32)

    def train_step(self) -> None:
        """One batch, forward to update."""
        first = self.step * self.batch_size % (POINTS - self.batch_size + 1)
        self.batch.select(np.arange(first, first + self.batch_size), self.step)
        self.step += 1
        self.input.forward(self.batch, self.h, True)
        self.output.forward(self.batch, self.h, self.sampler, self.lse)
        self.output.backward(self.batch, self.lse, self.dh, True, self.batch_size)
        self.output.update(0.01, self.step)
        self.input.backward(self.batch, self.dh, 0.01, self.step)


def product(threads: int) -> list[Row]:
    """Exact logits of a block of points over all labels, beside numpy's product of the same shape."""
    from threadpoolctl import threadpool_info, threadpool_limits

    setting = _Setting(threads, "in-batch")
    queries = np.random.default_rng(1).standard_normal((256, HIDDEN)).astype(np.float32)
    ids, scores = np.empty((256, 5), np.int32), np.empty((256, 5), np.float32)
    flops = 2 * 256 * HIDDEN * LABELS / 1e9
    ours = _measure(
        "product",
        "top-5 over all labels",
        "GFLOP/s",
        flops,
        lambda: setting.output.topk(queries, 5, ids, scores),
    )
    weights = setting.output.weights
    with threadpool_limits(limits=threads, user_api="blas"):
        kernel = next((p["architecture"] for p in threadpool_info() if p.get("architecture")), "?")
        theirs = _measure(
            "product",
            f"numpy's product alone (OpenBLAS {kernel})",
            "GFLOP/s",
            flops,
            lambda: queries @ weights.T,
        )
    return [ours, theirs]


def hashing(threads: int) -> list[Row]:
    """A full rebuild of the tables: hashing every neuron and sorting the buckets."""
    setting = _Setting(threads, "in-batch")
    rows = []
    for family, k in (("simhash", 9), ("dwta", 4)):
        sampler = _core.LshSampler(setting.output, family=family, k=k, l=50)
        rows.append(
            _measure("hashing", f"{family} K={k} L=50", "million neurons/s", LABELS / 1e6, sampler.rebuild)
        )
    return rows


def train_step(threads: int) -> list[Row]:
    """Training steps of the samplers and optimisers, batch 256."""
    rows = []
    for sampler, optimizer, steps in (
        ("in-batch", "adagrad", 30),
        ("in-batch+1000", "adagrad", 30),
        ("full", "adagrad", 2),
        ("lsh", "adam", 3),
    ):
        setting = _Setting(threads, sampler, optimizer)

        def work(setting: _Setting = setting, steps: int = steps) -> None:
            for _ in range(steps):
                setting.train_step()

        rows.append(
            _measure("train-step", f"{sampler}, {optimizer}", "samples/s", steps * 256, work, repeats=5)
        )
    return rows


BENCHES: dict[str, Callable[[int], list[Row]]] = {
    "product": product,
    "hashing": hashing,
    "train-step": train_step,
}
