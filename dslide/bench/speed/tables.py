"""Hash tables: hashing every neuron, building the tables, looking a batch up."""

from functools import partial
from typing import Any

import numpy as np

from dslide import _core
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.sizes import Size
from dslide.data import Dataset
from dslide.evaluation import core_csr

# (family, K, L, packing): the default's, the papers' as published, and what exact packing needs instead.
FAMILIES = (("simhash", 9, 50, "exact"), ("dwta", 6, 50, "published"), ("dwta", 4, 50, "exact"))


def _case(family: str, k: int, tables: int, packing: str) -> str:
    return f"{family} K={k} L={tables}" + (", packed as published" if packing == "published" else "")


def _probe(size: Size, threads: int, family: tuple[str, int, int, str]) -> tuple[Any, Any]:
    layer = _core.OutputLayer(_core.Pool(threads), size.labels, 0, size.labels, size.hidden)
    name, k, tables, packing = family
    return layer, _core.HashProbe(
        _core.Pool(threads), size.hidden, family=name, k=k, l=tables, packing=packing
    )


def hashing(size: Size, threads: int, **_: Any) -> list[Row]:
    """Bucket numbers of every neuron."""
    rows = []
    for family in FAMILIES:
        layer, probe = _probe(size, threads, family)
        weights, million = layer.weights, size.labels / 1e6
        rows.append(
            measure(
                "hashing",
                _case(*family),
                "million neurons/s",
                million,
                partial(probe.hash, weights),
                seconds=size.seconds,
            )
        )
    return rows


def table_build(size: Size, threads: int, **_: Any) -> list[Row]:
    """The tables from the bucket numbers."""
    rows = []
    for family in FAMILIES:
        layer, probe = _probe(size, threads, family)
        probe.hash(layer.weights)
        rows.append(
            measure(
                "table-build",
                _case(*family),
                "million neurons/s",
                size.labels / 1e6,
                probe.build,
                seconds=size.seconds,
            )
        )
    return rows


def look_up(size: Size, threads: int, *, dataset: Dataset, **_: Any) -> list[Row]:
    """Active rows of a batch from the tables: hashing the points, the buckets' union, the inverted lists."""
    rows = []
    batch_size = max(size.batches)
    random = np.random.default_rng(2)
    h = np.maximum(random.standard_normal((batch_size, size.hidden)), 0).astype(np.float32)
    for family, k, tables, packing in FAMILIES:
        layer = _core.OutputLayer(_core.Pool(threads), size.labels, 0, size.labels, size.hidden)
        sampler = _core.LshSampler(layer, family=family, k=k, l=tables, packing=packing)
        pool = _core.Pool(threads)
        batch = _core.Batch(pool, *core_csr(dataset.train, dataset.num_features, dataset.num_labels))
        batch.select(np.arange(batch_size, dtype=np.int64) % len(dataset.train), 0)
        active = _core.select(sampler, batch, h)
        row = measure(
            "look-up",
            f"{_case(family, k, tables, packing)}, batch {batch_size}",
            "points/s",
            batch_size,
            partial(_core.select, sampler, batch, h),
            seconds=size.seconds,
        )
        rows.append(row.with_(note=f"{active:,} rows a batch; weights and activations random"))
    return rows
