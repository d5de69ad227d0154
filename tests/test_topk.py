"""The core's exact top-k and log-sum-exp against numpy in float64, and what they must not depend on."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslide import _core

PART = _core.OutputLayer.topk_part


def layer(labels, hidden, *, threads=2, begin=0, end=None, bias=True, std=1.0):
    end = labels if end is None else end
    return _core.OutputLayer(_core.Pool(threads), labels, begin, end, hidden, bias=bias, init_std=std, seed=3)


def queries(points, hidden, seed=0):
    return np.random.default_rng(seed).standard_normal((points, hidden)).astype(np.float32)


def topk(output, h, k):
    ids = np.full((len(h), k), 99, np.int32)
    scores, lse = np.empty((len(h), k), np.float32), np.empty(len(h))
    output.topk(h, k, ids, scores, lse)
    return ids, scores, lse


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("points", "labels", "hidden", "k"),
    [(1, 1, 1, 1), (7, 37, 5, 50), (3, 700, 16, 5), (300, PART + 1, 24, 3), (2, 2 * PART + 77, 128, 2500),
     (9, 130, 33, 130), (0, 12, 4, 2)],
)  # fmt: skip
def test_it_is_numpys(points, labels, hidden, k, bias):
    output, h = layer(labels, hidden, bias=bias), queries(points, hidden)
    ids, scores, lse = topk(output, h, k)
    logits = h.astype(float) @ output.weights.T.astype(float) + (output.bias if bias else 0)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert (ids[:, labels:] == -1).all() and np.isneginf(scores[:, labels:]).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    wanted = np.take_along_axis(logits, best, axis=1)
    np.testing.assert_allclose(scores[:, :labels], wanted, rtol=1e-4, atol=1e-4)
    chosen = np.take_along_axis(logits, ids[:, :labels].astype(np.int64), axis=1)
    np.testing.assert_allclose(chosen, wanted, rtol=1e-4, atol=1e-4)  # but for ties of float32
    assert all(len(set(row)) == len(row) for row in ids[:, :labels].tolist())
    np.testing.assert_allclose(lse, np.logaddexp.reduce(logits, axis=1), rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400).flatmap(
        lambda labels: st.tuples(
            st.lists(st.integers(-2, 2), min_size=labels, max_size=labels), st.integers(1, 2 * labels + 3)
        )
    ),
    st.integers(1, 3),
)
def test_equal_scores_go_to_the_lower_id(case, threads):
    values, k = case
    output = layer(len(values), 2, threads=threads, bias=False)
    output.weights[:] = np.column_stack([values, np.zeros(len(values))])
    ids, _, lse = topk(output, np.array([[1, 5], [-1, 5], [0, 0]], np.float32), k)
    for row, sign in enumerate((1, -1, 0)):
        order = sorted(range(len(values)), key=lambda i: (-sign * values[i], i))[:k]
        assert ids[row, : len(order)].tolist() == order and (ids[row, len(order) :] == -1).all()
        assert lse[row] == pytest.approx(np.logaddexp.reduce(np.array(values) * float(sign)), abs=1e-5)


def test_neither_threads_nor_other_points_nor_shards_matter():
    labels, hidden, k = 3 * PART + 5, 24, 6
    h = queries(300, hidden)
    ids, scores, lse = topk(layer(labels, hidden, threads=1), h, k)
    for threads in (2, 3, 7):
        again = topk(layer(labels, hidden, threads=threads), h, k)
        assert all(np.array_equal(a, b) for a, b in zip((ids, scores, lse), again, strict=True))
    output = layer(labels, hidden)
    for row in (0, 255, 256, 299):
        alone = topk(output, h[row : row + 1], k)
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(alone, (ids, scores, lse), strict=True))
    shards = [topk(layer(labels, hidden, begin=b, end=e), h, k) for b, e in ((0, PART), (PART, labels))]
    merged = np.concatenate([scores for _, scores, _ in shards], axis=1)
    assert np.array_equal(-np.sort(-merged, axis=1)[:, :k], scores)
    total = np.logaddexp(shards[0][2], shards[1][2])
    np.testing.assert_allclose(total, lse, rtol=1e-14)


def test_large_and_infinite_logits():
    output = layer(3, 1, bias=False)
    output.weights[:] = [[1.0], [2.0], [3.0]]
    _, scores, lse = topk(output, np.array([[1e4], [-1e4], [np.inf]], np.float32), 2)
    assert lse[0] == pytest.approx(3e4) and lse[1] == pytest.approx(-1e4)
    assert scores[0].tolist() == [3e4, 2e4]


def test_several_threads_may_ask_at_once():
    output, h = layer(2 * PART, 32), queries(64, 32)
    want = topk(output, h, 5)
    wrong = []

    def ask():
        for _ in range(20):
            got = topk(output, h, 5)
            if not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
                wrong.append(got)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not wrong


def test_wrong_shapes_are_refused():
    output = layer(10, 4)
    with pytest.raises(ValueError, match="ids"):
        output.topk(queries(2, 4), 3, np.empty((2, 2), np.int32), np.empty((2, 3), np.float32))
    with pytest.raises(ValueError, match="lse"):
        output.topk(queries(2, 4), 3, np.empty((2, 3), np.int32), np.empty((2, 3), np.float32), np.empty(3))
    with pytest.raises(ValueError, match="positive"):
        output.topk(queries(2, 4), 0, np.empty((2, 0), np.int32), np.empty((2, 0), np.float32))
