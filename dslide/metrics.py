"""Measures of ranked predictions: pure functions of ids and true labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def hits(
    ids: NDArray[np.int32], y_indptr: NDArray[np.int64], y_indices: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Which predictions are true labels.

    `ids` [n, k] are label ids, best first, negative where there is no prediction; the true labels of n points
    are CSR parts (indptr [n + 1], ascending indices a row). Returns bool [n, k]. Raises ValueError for other
    shapes.
    """
    n = len(y_indptr) - 1
    if ids.ndim != 2 or len(ids) != n:
        raise ValueError(f"predictions of shape {ids.shape} for {n} points")
    start, end = int(y_indptr[0]), int(y_indptr[-1])
    if n == 0 or end == start or ids.shape[1] == 0:
        return np.zeros(ids.shape, bool)
    labels = np.asarray(y_indices[start:end], np.int64)
    width = int(max(labels.max(), ids.max())) + 1
    rows = np.repeat(np.arange(n, dtype=np.int64), np.diff(y_indptr))
    truth = rows * width + labels  # ascending, since rows are and labels are within a row
    asked = np.arange(n, dtype=np.int64)[:, None] * width + ids
    spot = np.minimum(np.searchsorted(truth, asked), len(truth) - 1)
    return (truth[spot] == asked) & (ids >= 0)


def precision_at(
    ids: NDArray[np.int32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[np.int32],
    ks: Sequence[int] = (1, 3, 5),
) -> dict[int, float]:
    """P@k as fractions: the mean over all points of (true labels among the first k) / k.

    A point without labels counts as 0, and so does a missing prediction (fewer than k columns, or a negative
    id). Without points every value is 0.
    """
    found = hits(ids, y_indptr, y_indices)
    if len(found) == 0:
        return dict.fromkeys(ks, 0.0)
    return {k: float(found[:, :k].sum(axis=1).mean() / k) for k in ks}


def merge_topk(
    ids: Sequence[NDArray[np.int32]], scores: Sequence[NDArray[np.float32]], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The best k of several shards' lists ([n, k_i], global ids, negative: none); ties to the lower id."""
    all_ids, all_scores = np.concatenate(ids, axis=1), np.concatenate(scores, axis=1)
    keys = np.where(all_ids < 0, np.float32(np.inf), -all_scores)
    order = np.lexsort((all_ids, keys), axis=1)[:, :k]
    return (
        np.ascontiguousarray(np.take_along_axis(all_ids, order, axis=1)),
        np.ascontiguousarray(np.take_along_axis(all_scores, order, axis=1)),
    )


def propensities(
    label_counts: NDArray[np.int64], num_points: int, a: float = 0.55, b: float = 1.5
) -> NDArray[np.float64]:
    """How likely each label is to be given where it holds, float64 [L] in (0, 1].

    p_l = 1 / (1 + C exp(-A log(N_l + B))), C = (log N - 1) (B + 1)^A, for a label of N_l of the N training
    points (Jain, Prabhu and Varma, KDD 2016, section 4). A and B belong to the data set: 0.5 and 0.4 for sets
    from Wikipedia, 0.6 and 2.6 for those from Amazon, otherwise 0.55 and 1.5.
    """
    c = max(np.log(max(num_points, 1)) - 1.0, 0.0) * (b + 1.0) ** a
    return 1.0 / (1.0 + c * (np.asarray(label_counts, np.float64) + b) ** -a)


def psp_at(
    ids: NDArray[np.int32],
    y_indptr: NDArray[np.int64],
    y_indices: NDArray[np.int32],
    propensity: NDArray[np.float64],
    ks: Sequence[int] = (1, 3, 5),
) -> dict[int, float]:
    """PSP@k as fractions: precision at k with a true label weighted 1 / propensity, over the best possible.

    Sums run over all points before the division, as in the Extreme Classification Repository's own scripts.
    The best possible ranks a point's rarest labels first. Without any label every value is 0.
    """
    found = hits(ids, y_indptr, y_indices)
    gains = np.where(found, 1.0 / propensity[np.where(ids >= 0, ids, 0)], 0.0)
    start = int(y_indptr[0])
    weights = 1.0 / propensity[y_indices[start : int(y_indptr[-1])]]
    rows = np.repeat(np.arange(len(found)), np.diff(y_indptr))
    order = np.lexsort((-weights, rows))
    place = np.arange(len(order)) - (y_indptr[:-1] - start)[rows]  # rank within the point, rarest first
    best = weights[order]
    result = {}
    for k in ks:
        most = best[place < k].sum()
        result[k] = float(gains[:, :k].sum() / most) if most > 0 else 0.0
    return result
