"""Measures against their definitions, one point and one position at a time."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslide.metrics import hits, merge_topk, precision_at


def csr(rows):
    return (
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array([label for row in rows for label in sorted(row)], np.int32),
    )


label_sets = st.sets(st.integers(0, 12), max_size=6)
predictions = st.lists(st.integers(0, 12), min_size=5, max_size=5, unique=True)


@given(st.lists(st.tuples(label_sets, predictions), max_size=20))
def test_precision_is_its_definition(points):
    truth, ids = [set(t) for t, _ in points], np.array([p for _, p in points], np.int32).reshape(-1, 5)
    result = precision_at(ids, *csr(truth), ks=(1, 3, 5))
    for k in (1, 3, 5):
        each = [len(truth[row] & set(ids[row, :k].tolist())) / k for row in range(len(truth))]
        assert result[k] == pytest.approx(np.mean(each) if each else 0.0)


def test_a_point_without_labels_counts_as_zero():
    ids = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], np.int32)
    assert precision_at(ids, *csr([{1, 3}, set()])) == {
        1: 0.5,
        3: pytest.approx(1 / 3),
        5: pytest.approx(0.2),
    }


def test_missing_predictions_count_as_wrong():
    """-1 stands for none, even where -1 would be a neighbouring row's label in a flat index."""
    ids = np.array([[3, -1, -1], [0, -1, -1]], np.int32)
    result = precision_at(ids, *csr([{3}, {0}]), ks=(1, 3))
    assert result == {1: 1.0, 3: pytest.approx(1 / 3)}
    assert not hits(ids, *csr([{3}, {0}]))[:, 1:].any()


def test_no_points_and_no_labels_at_all():
    assert precision_at(np.zeros((0, 5), np.int32), *csr([])) == {1: 0.0, 3: 0.0, 5: 0.0}
    assert precision_at(np.zeros((2, 5), np.int32), *csr([set(), set()])) == {1: 0.0, 3: 0.0, 5: 0.0}


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="points"):
        precision_at(np.zeros((3, 5), np.int32), *csr([{1}]))


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=11, max_size=11), min_size=1, max_size=6
    ),
    st.integers(0, 11),
    st.integers(0, 11),
)
def test_merging_shards_is_ranking_them_together(scores, first, second):
    """Three shards, perhaps empty, with many equal scores: as one list, ties to the lower id."""
    scores = np.array(scores, np.float32)
    borders = [0, min(first, second), max(first, second), 11]
    ids, parts = [], []
    for begin, end in pairwise(borders):
        shard_ids, shard_scores = (
            np.full((len(scores), 5), -1, np.int32),
            np.full((len(scores), 5), -np.inf, "f4"),
        )
        for row in range(len(scores)):
            best = sorted(range(begin, end), key=lambda label: (-scores[row, label], label))[:5]
            shard_ids[row, : len(best)], shard_scores[row, : len(best)] = best, scores[row, best]
        ids.append(shard_ids)
        parts.append(shard_scores)
    merged, best = merge_topk(ids, parts, 5)
    for row in range(len(scores)):
        expected = sorted(range(11), key=lambda label: (-scores[row, label], label))[:5]
        assert merged[row].tolist() == expected
        assert best[row].tolist() == scores[row, expected].tolist()
