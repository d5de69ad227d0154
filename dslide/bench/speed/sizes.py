"""The sizes that the benchmarks run at, and points of that size."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dslide.data import Dataset, Points


@dataclass(frozen=True)
class Size:
    """A data set's shape, the network's, and the batches that are tried.

    nnz: features a point; labels_a_point: a mean, as points have the whole numbers around it.
    table_bytes: of the tables that stand for memory; several times the last cache.
    seconds: how long a figure may repeat.
    """

    features: int
    labels: int
    nnz: int
    labels_a_point: float
    points: int
    hidden: int
    batches: tuple[int, ...]
    shared_negatives: int
    uniform_extras: int
    table_bytes: int
    seconds: float


AMAZON = Size(
    features=135_909,
    labels=670_091,
    nnz=75,
    labels_a_point=5.4,
    points=20_000,
    hidden=128,
    batches=(128, 256, 1024),
    shared_negatives=4_000,
    uniform_extras=2_000,
    table_bytes=512 << 20,
    seconds=3.0,
)
QUICK = Size(
    features=2_000,
    labels=3_000,
    nnz=20,
    labels_a_point=5.4,
    points=1_000,
    hidden=32,
    batches=(64,),
    shared_negatives=100,
    uniform_extras=50,
    table_bytes=8 << 20,
    seconds=0.05,
)


def generated(size: Size, seed: int = 0) -> Dataset:
    """A data set of that shape; nothing can be learnt from it.

    Features fall off as 1/rank, as words do, labels as rank^-1/2: Amazon-670K has 4 points a label in the
    mean, so that a batch has almost as many distinct labels as draws, and so it is here.
    """
    random = np.random.default_rng(seed)
    return Dataset(
        name=f"generated {size.features:,} x {size.labels:,}",
        hash=f"generated-{size}-{seed}",
        num_features=size.features,
        num_labels=size.labels,
        train=_points(size, size.points, random),
        test=_points(size, max(1, size.points // 10), random),
    )


def _points(size: Size, count: int, random: np.random.Generator) -> Points:
    draws = round(1.07 * size.nnz)  # frequent features come twice; `nnz` or so are left
    strata = (np.tile(np.arange(draws), count) + random.random(count * draws)) / draws
    lengths = (random.random(count) < size.labels_a_point % 1).astype(np.int64) + int(size.labels_a_point)
    ranks = (size.labels * random.random(int(lengths.sum())) ** 2).astype(np.int64)
    x_indptr, x_indices = _rows(
        (size.features**strata).astype(np.int64) - 1, np.full(count, draws), size.features
    )
    y_indptr, y_indices = _rows(ranks, lengths, size.labels)
    return Points(
        x_indptr=x_indptr,
        x_indices=x_indices,
        x_values=np.repeat(np.diff(x_indptr) ** -0.5, np.diff(x_indptr)).astype(np.float32),
        y_indptr=y_indptr,
        y_indices=y_indices,
        num_features=size.features,
        num_labels=size.labels,
    )


def _rows(
    ranks: NDArray[np.int64], lengths: NDArray[np.int64], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """CSR borders and ids, ascending and distinct in a row. Frequent ids lie anywhere in the table."""
    ids = np.random.default_rng(total).permutation(total)[ranks]
    keys = np.unique(np.repeat(np.arange(len(lengths)), lengths) * total + ids)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(keys // total, minlength=len(lengths)))])
    return indptr.astype(np.int64), (keys % total).astype(np.int32)
