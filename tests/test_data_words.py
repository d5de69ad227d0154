"""The word task against a plain reference, and SciPy's matrices against the arrays that they hold."""

import io
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from small_archives import npz as saved

from dslide.data import Points, npz, words
from dslide.data.convert import convert as convert_files
from dslide.data.dataset import open_prepared
from dslide.data.layout import Source
from dslide.data.text import Text
from dslide.data.words import Words
from dslide.errors import UserError


def reference(text: list[str], task: Words) -> tuple[list[str], list[tuple[list[int], list[list[int]]]]]:
    """The vocabulary, and for train and test the words and the labels of each: slow and plain."""
    counts = Counter(text)
    order = sorted(counts, key=lambda word: (-counts[word], word.encode()))
    names = ["<unk>", *(word for word in order if counts[word] >= task.min_count)]
    ids = {name: i for i, name in enumerate(names)}
    cut = int(task.train_fraction * len(text))
    splits = []
    for part in (text[:cut], text[cut:]):
        sequence = [ids.get(word, 0) for word in part]
        labels = []
        for i in range(len(sequence)):
            near = sequence[max(i - task.window, 0) : i] + sequence[i + 1 : i + 1 + task.window]
            labels.append(sorted(set(near)))
        splits.append((sequence, labels))
    return names, splits


def rows(indptr: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(values, indptr[1:-1])] if len(indptr) > 1 else []


@settings(max_examples=40)
@given(
    text=st.lists(st.sampled_from(["a", "bb", "the", "ü", "x-y", "zebra"]), min_size=8, max_size=60),
    window=st.integers(1, 4),
    min_count=st.integers(1, 4),
    fraction=st.sampled_from([0.5, 0.8, 1.0]),
    block=st.sampled_from([3, 10, 1 << 20]),
    at_once=st.sampled_from([1, 7, 1 << 20]),
    space=st.sampled_from([" ", "\n", "  \t "]),
)
def test_words_are_the_reference(
    text: list[str],
    window: int,
    min_count: int,
    fraction: float,
    block: int,
    at_once: int,
    space: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("words")
    (folder / "text").write_text(f" {space.join(text)}{space}")
    task = Words(window=window, min_count=min_count, train_fraction=fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_BLOCK", block)
        patch.setattr(words, "_ROWS", at_once)
        words.convert(folder / "set", Text(folder / "text"), task, name="w", source="s")
    data = open_prepared(folder / "set")
    names, splits = reference(text, task)
    assert data.label_names == names and data.num_features == data.num_labels == len(names)
    assert (folder / "set" / "features.txt").read_text() == (folder / "set" / "labels.txt").read_text()
    for points, (sequence, labels) in zip((data.train, data.test), splits, strict=True):
        assert points.x_indices.tolist() == sequence
        assert points.x_indptr.tolist() == list(range(len(sequence) + 1))
        assert set(points.x_values.tolist()) <= {1.0}
        assert rows(points.y_indptr, points.y_indices) == labels
    assert sorted(path.name for path in folder.iterdir()) == ["set", "text"]


def test_words_of_any_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("The GTK-3.0, C++ (and the g++). THE\xa0end".encode() + b"\xff\n")
    task = Words(tokens="words", train_fraction=0.5)
    words.convert(tmp_path / "set", Text(tmp_path / "text"), task, name="w", source="s")
    names = open_prepared(tmp_path / "set").label_names
    assert names == ["<unk>", "the", "and", "c++", "end", "g++", "gtk-3.0"]


@pytest.mark.parametrize("text, reason", [("", "0 words are too few"), ("one two", "2 words are too few")])
def test_too_little_text(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "text").write_text(text)
    with pytest.raises(UserError, match=reason):
        words.convert(tmp_path / "set", Text(tmp_path / "text"), Words(), name="w", source="s")
    assert not (tmp_path / "set").exists()


MATRICES = [
    scipy.sparse.random(n, size, 0.3, "csr", np.float32, np.random.default_rng(n + size))
    for n, size in ((40, 12), (40, 7), (15, 12), (15, 7))
]


def convert(folder: Path, matrices: list[scipy.sparse.spmatrix | bytes]) -> tuple[Points, Points]:
    for name, matrix in zip(("xa", "ya", "xb", "yb"), matrices, strict=True):
        content = matrix if isinstance(matrix, bytes) else saved(matrix)
        (folder / f"{name}.npz").write_bytes(content)
    train, test = (Source(Text(folder / f"x{k}.npz"), Text(folder / f"y{k}.npz")) for k in "ab")
    convert_files(folder / "set", train, test, name="m", source="s")
    data = open_prepared(folder / "set")
    return data.train, data.test


def unsorted(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The same matrix, each row from its last id to its first, each value in two halves."""
    rows, columns, values = [], [], []
    for i in range(matrix.shape[0]):
        for j in reversed(range(matrix.indptr[i], matrix.indptr[i + 1])):
            rows += [i, i]
            columns += [matrix.indices[j]] * 2
            values += [matrix.data[j] / 2] * 2
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=matrix.shape[0]))])
    return scipy.sparse.csr_matrix((np.array(values, np.float64), columns, indptr), matrix.shape)


@pytest.mark.parametrize("block", [1, 20, 1 << 20])
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "unsorted", "int64"])
def test_matrices_become_the_same_points(
    layout: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "_BLOCK", block)

    def stored(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.spmatrix:
        if layout == "unsorted":
            return unsorted(matrix)
        if layout == "int64":
            indices, indptr = matrix.indices.astype(np.int64), matrix.indptr.astype(np.int64)
            wide = matrix.copy()
            wide.indices, wide.indptr = indices, indptr
            return wide
        return matrix.asformat(layout)

    train, test = convert(tmp_path, [stored(matrix) for matrix in MATRICES])
    for points, x, y in ((train, *MATRICES[:2]), (test, *MATRICES[2:])):
        assert (points.x != x).nnz == 0 and (points.y != (y != 0).astype(np.float32)).nnz == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["set"]


def without(name: str) -> bytes:
    content = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(MATRICES[0]))) as old,
        zipfile.ZipFile(content, "w") as new,
    ):
        for member in old.namelist():
            if member != name:
                new.writestr(member, old.read(member))
    return content.getvalue()


def outside() -> scipy.sparse.csr_matrix:
    matrix = MATRICES[0].copy()
    matrix.indices[3] = 12
    return matrix


def infinite() -> scipy.sparse.csr_matrix:
    matrix = MATRICES[0].astype(np.float64)
    matrix.data[3] = 1e300
    return matrix


@pytest.mark.parametrize(
    "place, wrong, reason",
    [
        (0, b"text", r"xa\.npz: not a matrix"),
        (1, without("indptr.npy"), r"ya\.npz: not a matrix"),
        (0, saved(MATRICES[0])[:-50], r"xa\.npz: not a matrix"),
        (1, MATRICES[3], r"xa\.npz: 40 rows, but .*ya\.npz has 15"),
        (2, MATRICES[3], r"12 features .* but .*xb\.npz: 7 features and 7 labels; train and test must have"),
        (0, outside(), r"xa\.npz: ids outside 0\.\.11 in rows 0\.\."),
        (0, infinite(), r"xa\.npz: values that aren't finite"),
    ],
)
def test_wrong_matrices_are_named(
    place: int, wrong: scipy.sparse.spmatrix | bytes, reason: str, tmp_path: Path
) -> None:
    matrices: list[scipy.sparse.spmatrix | bytes] = [*MATRICES]
    matrices[place] = wrong
    with pytest.raises(UserError, match=reason):
        convert(tmp_path, matrices)
    assert not (tmp_path / "set").exists()
