"""Data sets from SciPy's matrices and from documents; propensities."""

import builtins
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_convert import any_points

import dslide
from dslide import metrics
from dslide.data import Points, format, load
from dslide.errors import UserError

X = sp.csr_matrix(np.array([[1, 0, 2], [0, 0, 0], [0, 1, 1]], np.float32))
Y = sp.csr_matrix(np.array([[1, 0], [1, 1], [0, 0]]))


def test_a_csr_matrix_is_shared_both_ways() -> None:
    data = dslide.from_scipy(X, Y, X[:1], Y[:1], label_names=["a", "b"])
    assert np.shares_memory(data.train.x_values, X.data) and np.shares_memory(data.train.x_indices, X.indices)
    assert np.shares_memory(data.train.x.data, X.data) and np.shares_memory(data.train.x.indices, X.indices)
    assert data.label_names == ["a", "b"] and len(data.test) == 1 and data.num_features == 3
    assert data.train.y_indices.tolist() == [0, 0, 1] and np.diff(data.train.y_indptr).tolist() == [1, 2, 0]


@settings(max_examples=30, deadline=None)
@given(points=any_points(), form=st.sampled_from(["csr", "csc", "coo", "dense"]))
def test_round_trip(points: Points, form: str) -> None:
    """Explicit zeros aside, which a dense matrix has no place for."""
    x, y = (m.toarray() if form == "dense" else m.asformat(form) for m in (points.x, points.y))
    got = dslide.from_scipy(x, y)
    np.testing.assert_array_equal(got.train.x.toarray(), points.x.toarray())
    np.testing.assert_array_equal(got.train.y.toarray(), points.y.toarray())
    format.check(got.train, "here")
    assert got.hash == dslide.from_scipy(x, y).hash


def test_untidy_matrices_are_tidied_and_left_as_they_are() -> None:
    x = sp.csr_matrix((np.ones(3, np.float32), np.array([2, 0, 2]), np.array([0, 3])), (1, 3))
    y = sp.csr_matrix((np.array([0.0, 1.0]), np.array([0, 1]), np.array([0, 2])), (1, 2))
    data = dslide.from_scipy(x, y)
    assert data.train.x_indices.tolist() == [0, 2] and data.train.x_values.tolist() == [1, 2]
    assert data.train.y_indices.tolist() == [1]
    assert x.nnz == 3 and y.nnz == 2


@pytest.mark.parametrize(
    "x, y, more, reason",
    [
        (X, Y[:2], {}, "train has 3 rows of features, 2 of labels"),
        (X, Y, {"x_test": X}, "go together"),
        (X, Y, {"x_test": X[:, :2], "y_test": Y}, "train has 3 features and 2 labels, test 2 and 2"),
        (X, Y, {"label_names": ["a"]}, "1 label names for 2 labels"),
        (X * np.float32(np.nan), Y, {}, "train features: a value isn't finite"),
        (X.astype(np.float64) * 1e300, Y, {}, "isn't finite in float32"),
        ("text", Y, {}, "train features"),
    ],
)
def test_matrices_that_do_not_fit(x: object, y: object, more: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        dslide.from_scipy(x, y, **more)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        dslide.nothing  # noqa: B018
    assert dslide.load is load


# Documents

DOCUMENTS = ["red apples and green apples", "green grass", "the red car", "", "a fast car"]
LABELS = [["fruit"], ["plant"], ["vehicle", "red"], ["nothing"], "vehicle"]


def test_the_vocabulary_is_the_training_documents(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sklearn")
    test = ["green bicycle", "unheard of"]
    with caplog.at_level(logging.WARNING):
        data = dslide.from_text(DOCUMENTS, LABELS, test, [["vehicle", "new"], []])
    assert data.label_names == ["fruit", "nothing", "plant", "red", "vehicle"]
    assert data.train.y.toarray().tolist()[2] == [0, 0, 0, 1, 1] and data.train.y.toarray()[4, 4] == 1
    assert "dropped 1 test labels" in caplog.text and data.test.y_indices.tolist() == [4]
    assert np.diff(data.test.x_indptr).tolist() == [1, 0]  # no word of "unheard of" is known
    assert len(data.train) == 5 and np.diff(data.train.x_indptr)[3] == 0  # kept
    alone = dslide.from_text(DOCUMENTS, LABELS)
    np.testing.assert_array_equal(alone.train.x_values, data.train.x_values)  # test had no say
    norms = np.sqrt(data.train.x.multiply(data.train.x).sum(axis=1))
    np.testing.assert_allclose(np.asarray(norms).ravel(), [1, 1, 1, 0, 1], rtol=1e-6)


def test_a_vectorizer_of_ones_own_is_fitted_and_kept() -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    words = text.TfidfVectorizer(ngram_range=(1, 2))
    data = dslide.from_text(DOCUMENTS, LABELS, vectorizer=words)
    assert data.num_features == len(words.vocabulary_) > 10
    again = words.transform(DOCUMENTS).toarray().astype(np.float32)
    np.testing.assert_array_equal(data.train.x.toarray(), again)


@pytest.mark.parametrize(
    "documents, labels, reason",
    [
        (["a b"], [], "1 documents, but labels of 0"),
        ([], [], "no documents"),
        (["."], ["x"], "empty vocabulary"),
    ],
)
def test_documents_that_cannot_be(documents: list[str], labels: list[str], reason: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(UserError, match=reason):
        dslide.from_text(documents, labels)


def test_without_scikit_learn_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'dslide\[text\]'"):
        dslide.from_text(["a b"], ["x"])


def test_the_readmes_example_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and labels to a trained model in ten lines, run as they stand in README.md."""
    pytest.importorskip("sklearn")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf8")
    example = re.search(r"```python\n(.*?from_text.*?)```", readme, re.DOTALL)
    assert example is not None
    code = example[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    kinds = random.integers(0, 20, 600)
    documents = [
        f"kind{kind} " + " ".join(f"w{word}" for word in random.integers(0, 50, 5)) for kind in kinds
    ]
    Path("documents.txt").write_text("\n".join(documents))
    Path("labels.txt").write_text("\n".join(f"label {kind},every {kind % 5}" for kind in kinds))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    result = names["result"]
    assert isinstance(result, dict) and result["p1"] > 0.8
    assert (tmp_path / "model" / "model" / "manifest.json").exists()


# Propensities


def test_propensities_are_the_formula() -> None:
    counts, n, a, b = np.array([0, 1, 10, 1000]), 5000, 0.6, 2.6
    c = (np.log(n) - 1) * (b + 1) ** a
    expected = [1 / (1 + c * np.exp(-a * np.log(k + b))) for k in counts]
    np.testing.assert_allclose(metrics.propensities(counts, n, a, b), expected)
    assert (np.diff(expected) > 0).all()
    assert metrics.propensities(np.zeros(2, int), 1).tolist() == [1, 1]


@settings(deadline=None)
@given(st.data())
def test_psp_is_its_definition(data: st.DataObject) -> None:
    """Slowly: gains of each point's first k, over the gains of its k rarest labels."""
    n = data.draw(st.integers(0, 6))
    truth = [data.draw(st.sets(st.integers(0, 7), max_size=4)) for _ in range(n)]
    ids = np.array([data.draw(st.permutations(range(-1, 8)))[:4] for _ in range(n)], np.int32).reshape(-1, 4)
    propensity = np.array(data.draw(st.lists(st.floats(0.05, 1), min_size=8, max_size=8)))
    indptr = np.cumsum([0, *map(len, truth)])
    indices = np.array([label for row in truth for label in sorted(row)], np.int32)
    got = metrics.psp_at(ids, indptr, indices, propensity, ks=(1, 3))
    for k in (1, 3):
        gained = sum(
            1 / propensity[i] for row, own in zip(ids, truth, strict=True) for i in row[:k] if i in own
        )
        most = sum(sum(sorted((1 / propensity[i] for i in own), reverse=True)[:k]) for own in truth)
        assert got[k] == pytest.approx(gained / most if most else 0)
