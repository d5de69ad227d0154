"""Data sets from what a person has in memory: SciPy matrices, or documents with their labels."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from dslide.data.dataset import Dataset
from dslide.data.format import ARRAYS, Points, check, empty
from dslide.errors import UserError

log = logging.getLogger(__name__)


def from_scipy(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    label_names: Sequence[str] | None = None,
    name: str = "scipy",
) -> Dataset:
    """A data set of matrices: features [n, D], labels [n, L] whose non-zeros are the labels.

    Anything that `scipy.sparse.csr_matrix` takes. A CSR matrix of float32 with sorted indices is shared, not
    copied; repeated entries are added up. UserError for shapes that don't fit each other, values that aren't
    finite in float32, and other than L label names.
    """
    if (x_test is None) != (y_test is None):
        raise UserError("from_scipy: test features and test labels go together")
    train = _points(x, y, "train")
    test = (
        _points(x_test, y_test, "test") if x_test is not None else empty(train.num_features, train.num_labels)
    )
    if (train.num_features, train.num_labels) != (test.num_features, test.num_labels):
        raise UserError(
            f"from_scipy: train has {train.num_features} features and {train.num_labels} labels, "
            f"test {test.num_features} and {test.num_labels}"
        )
    if label_names is not None and len(label_names) != train.num_labels:
        raise UserError(f"from_scipy: {len(label_names)} label names for {train.num_labels} labels")
    names = None if label_names is None else list(label_names)
    return Dataset(name, _digest(train, test), train.num_features, train.num_labels, train, test, names)


def from_text(
    documents: Iterable[str],
    labels: Iterable[str | Iterable[str]],
    test_documents: Iterable[str] = (),
    test_labels: Iterable[str | Iterable[str]] = (),
    *,
    vectorizer: Any = None,
    name: str = "text",
) -> Dataset:
    """A data set of documents and their labels (each a name, or several), as tf-idf of their words.

    `vectorizer` is fitted on the training documents alone and can transform others afterwards; without one it
    is scikit-learn's TfidfVectorizer with logarithmic counts and words that occur in at least two documents
    (in one, if there are fewer than 100). Labels are numbered in the order of their names; test labels that
    no training document has are dropped, and their number is logged. Documents without labels or known words
    are kept. UserError without scikit-learn and for numbers of documents and labels that differ.
    """
    documents, test_documents = list(documents), list(test_documents)
    of_train, of_test = ([_names(entry) for entry in entries] for entries in (labels, test_labels))
    for split, texts, entries in (("", documents, of_train), ("test ", test_documents, of_test)):
        if len(texts) != len(entries):
            raise UserError(f"from_text: {len(texts)} {split}documents, but labels of {len(entries)}")
    if not documents:
        raise UserError("from_text: no documents")
    if vectorizer is None:
        vectorizer = _vectorizer(min_df=2 if len(documents) >= 100 else 1)
    try:
        x = vectorizer.fit_transform(documents)
    except ValueError as error:  # for example, not one word
        raise UserError(f"from_text: {error}") from None
    names = sorted(set().union(*of_train))
    ids = {label: number for number, label in enumerate(names)}
    unknown = sum(label not in ids for entry in of_test for label in entry)
    if unknown:
        log.warning("from_text: dropped %d test labels that no training document has", unknown)
    y, y_test = (_indicator(entries, ids) for entries in (of_train, of_test))
    x_test = vectorizer.transform(test_documents) if test_documents else None
    return from_scipy(x, y, x_test, y_test if test_documents else None, label_names=names, name=name)


def _names(entry: str | Iterable[str]) -> set[str]:
    return {entry} if isinstance(entry, str) else set(entry)


def _vectorizer(min_df: int) -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise UserError(
            "from_text: scikit-learn is not installed: pip install 'dslide[text]', or give a vectorizer"
        ) from None
    return TfidfVectorizer(sublinear_tf=True, min_df=min_df, dtype=np.float32)


def _indicator(entries: list[set[str]], ids: dict[str, int]) -> scipy.sparse.csr_matrix:
    rows = [sorted(ids[label] for label in entry if label in ids) for entry in entries]
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.fromiter((number for row in rows for number in row), np.int32, indptr[-1])
    return scipy.sparse.csr_matrix(
        (np.ones(len(indices), np.float32), indices, indptr), (len(rows), len(ids))
    )


def _points(x: Any, y: Any, split: str) -> Points:
    features, labels = _csr(x, f"{split} features"), _csr(y, f"{split} labels")
    if features.shape[0] != labels.shape[0]:
        raise UserError(
            f"from_scipy: {split} has {features.shape[0]} rows of features, {labels.shape[0]} of labels"
        )
    if not labels.data.all():
        labels = labels.copy()
        labels.eliminate_zeros()
    points = Points(
        x_indptr=_as(features.indptr, np.int64),
        x_indices=_as(features.indices, np.int32),
        x_values=features.data,
        y_indptr=_as(labels.indptr, np.int64),
        y_indices=_as(labels.indices, np.int32),
        num_features=features.shape[1],
        num_labels=labels.shape[1],
    )
    check(points, f"from_scipy: {split}")
    return points


def _csr(matrix: Any, what: str) -> scipy.sparse.csr_matrix:
    """float32, ids ascending and occurring once; the same arrays where they are so already."""
    try:
        with np.errstate(over="ignore"):  # what float32 can't hold is told below
            csr = scipy.sparse.csr_matrix(matrix, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"from_scipy: {what}: {error}") from None
    if not csr.has_canonical_format:
        csr = csr.copy()  # it may share the caller's arrays
        csr.sum_duplicates()
    if not np.isfinite(csr.data).all():
        raise UserError(f"from_scipy: {what}: a value isn't finite in float32")
    return csr


def _as(array: NDArray, dtype: type) -> NDArray:
    return array.astype(dtype, copy=False)


def _digest(train: Points, test: Points) -> str:
    """Hash of all arrays and sizes, as of a prepared set."""
    digest = hashlib.sha256(f"{train.num_features} {train.num_labels}".encode())
    for points in (train, test):
        for array in ARRAYS:
            content = np.ascontiguousarray(getattr(points, array))
            digest.update(f"{array} {len(content)}".encode())
            digest.update(content.data)
    return digest.hexdigest()
