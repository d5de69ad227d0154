"""Layouts beside one XC file a split: matrices of their own, SciPy's, row numbers; lenient reading."""

import bz2
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_convert import any_points, rows
from typer.testing import CliRunner

from dslide.data import Points, from_files, load, npz
from dslide.data import text as text_files
from dslide.data.cli import app
from dslide.data.layout import Layout, Source
from dslide.data.text import Text
from dslide.errors import UserError


@pytest.fixture(autouse=True)
def _data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data-root"))


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def pair(x: Path, y: Path) -> Source:
    return Source(Text(x), Text(y))


# Index bases


@pytest.mark.parametrize(
    "text, place",
    [
        ("2 3 2\n1 1:1\n0 3:1 0:1\n", "3:3"),  # neither base fits the features
        ("1 9 2\n2 1:1\n", "2:1"),  # the labels start at 1, but do the features?
        ("1 3 9\n1 3:1\n", "2:3"),
    ],
)
def test_a_base_is_proven_or_asked_for(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(UserError, match=rf"a\.txt:{place}: .*say --index-base 1"):
        from_files(write(tmp_path / "a.txt", text))


def test_train_proves_the_base_of_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, test = (write(tmp_path / name, f"1 3 2\n2 {i}:1\n") for name, i in (("a", 3), ("b", 1)))
    for first, second in ((train, test), (test, train)):
        data = from_files(first, second)
        assert sorted([*data.train.x_indices, *data.test.x_indices]) == [0, 2]
        assert "ids of features start at 1" in caplog.text and "ids of labels start at 1" in caplog.text


def test_a_base_that_nothing_proves_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = from_files(write(tmp_path / "a", "1 3 3\n1 1:1\n"))
    assert data.train.x_indices.tolist() == [1] and "no id is 0" in caplog.text
    caplog.clear()
    from_files(write(tmp_path / "a", "1 3 3\n1 1:1\n"), layout=Layout(index_base=0))
    assert "no id is 0" not in caplog.text


# Lenient


def test_lenient_counts_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = [f"{i % 3} {i % 5}:{i}" for i in range(1, 60)]
    bad = ["x 1:1", "0 9:1", "7 1:1", "0 1:nan", "0 1:1 2", "0 3:3e38 3:3e38"]
    lines = good.copy()
    for number, line in enumerate(bad):
        lines.insert(7 * number + 4, line)
    layout = Layout(index_base=0, lenient=True)
    expected = from_files(write(tmp_path / "good", "\n".join([f"{len(good)} 5 3", *good]))).hash
    file = write(tmp_path / "bad", "\n".join([f"{len(lines)} 5 3", *lines]))
    for block, threads in ((1 << 20, 1), (1 << 20, 3), (13, 2)):
        monkeypatch.setattr(text_files, "BLOCK", block)
        monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / f"{block}-{threads}"))
        caplog.clear()
        assert from_files(file, layout=layout, threads=threads).hash == expected
        assert "left 6 of 65 lines out; the first: 6:1: label 'x' isn't a number" in caplog.text
    with pytest.raises(UserError, match=r"bad:6:1: label 'x' isn't a number"):
        from_files(file)


def test_lenient_has_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="--lenient needs an index base"):
        from_files(write(tmp_path / "a", "1 3 2\n0 0:1\n"), layout=Layout(lenient=True))
    layout = Layout(index_base=0, lenient=True)
    with pytest.raises(UserError, match=r"a: not one line is in the format; the first: 2:1"):
        from_files(write(tmp_path / "a", "1 3 2\nx 0:1\n"), layout=layout)
    from_files(write(tmp_path / "a", "5 3 2\n1 0:1\n"), layout=layout)
    assert "the header says 5 points, but 1 lines follow" in caplog.text
    x, y = write(tmp_path / "x", "1 3\n0:1\n"), write(tmp_path / "y", "1 2\n0:1\n")
    with pytest.raises(UserError, match="features and labels in files of their own"):
        from_files(pair(x, y), layout=layout)


# Matrices


X = "3 4\n0:1 3:0.5\n\n2:1e-1 1:2\n"
Y = "3 3\n0:1.0 2:1\n1:0 2:1\n\n"


def test_a_pair_of_texts_is_a_split(tmp_path: Path) -> None:
    data = from_files(pair(write(tmp_path / "trn_X_Xf.txt", X), write(tmp_path / "trn_X_Y.txt", Y)))
    x, y = rows(data.train)
    assert x == [[[0, 1], [3, 0.5]], [], [[1, 2], [2, float(np.float32(0.1))]]]
    assert y == [[0, 2], [2], []] and (data.num_features, data.num_labels) == (4, 3)
    one = (write(tmp_path / "x1", "1 3\n1:1 3:2\n"), write(tmp_path / "y1", "1 2\n2:1\n"))
    assert rows(from_files(pair(*one)).train) == ([[[0, 1], [2, 2]]], [[1]])


@pytest.mark.parametrize(
    "x, y, reason",
    [
        (X, "2 3\n0:1\n1:1\n", r"x: 3 rows, but .*y has 2"),
        (X, "3 3\n0:1\n0:1 3:1\n\n", r"y:3:5: label '3:1' lies outside 0\.\.2"),
        ("1 4\n1,2 0:1\n", "1 3\n0:1\n", r"x:2:1: expected feature:value, found '1,2'"),
        ("1 4 2\n0:1\n", "1 3\n0:1\n", r"x:1:1: expected a header 'rows columns', found '1 4 2'"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, x: str, y: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        from_files(pair(write(tmp_path / "x", x), write(tmp_path / "y", y)))


def save(path: Path, values: object, **options: object) -> Path:
    sp.save_npz(path, sp.csr_matrix(values), **options)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, bool])
@pytest.mark.parametrize("compressed", [True, False])
def test_scipy_matrices(
    tmp_path: Path, dtype: type, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "_BLOCK", 2)
    x = np.array([[1, 0, 2], [0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 2]]).astype(dtype)
    y = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [1, 1]]).astype(dtype)
    files = [save(tmp_path / f"{n}.npz", m, compressed=compressed) for n, m in (("x", x), ("y", y))]
    data = from_files(pair(*files), pair(*files))
    for points in (data.train, data.test):
        np.testing.assert_array_equal(points.x.toarray(), x.astype(np.float32))
        np.testing.assert_array_equal(points.y.toarray(), y.astype(np.float32))


def test_untidy_scipy_matrices_are_tidied(tmp_path: Path) -> None:
    untidy = sp.csr_matrix((np.array([1.0, 2, 3, 4]), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), (2, 3))
    sp.save_npz(tmp_path / "x.npz", untidy)
    zeros = sp.csr_matrix((np.array([0.0, 1]), np.array([0, 1]), np.array([0, 1, 2])), (2, 2))
    sp.save_npz(tmp_path / "y.npz", zeros)
    x, y = rows(from_files(pair(tmp_path / "x.npz", tmp_path / "y.npz")).train)
    assert x == [[[0, 2], [2, 4]], [[1, 4]]] and y == [[], [1]]


def break_(path: Path, **arrays: object) -> None:
    np.savez(path, **{**dict(np.load(path)), **arrays})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arrays, reason",
    [
        ({"indices": np.array([0, 3])}, r"x\.npz: ids outside 0\.\.2 in rows 0\.\.1"),
        ({"indices": np.array([-1, 2])}, r"x\.npz: ids outside 0\.\.2 in rows 0\.\.1"),
        ({"data": np.array([1, np.nan])}, r"values that aren't finite"),
        ({"data": np.array([1, 1e300])}, r"values that aren't finite in float32"),
        ({"data": np.array([1.0])}, "2 indices but 1 values"),
        ({"indptr": np.array([0, 2, 1])}, "indptr doesn't fit"),
        ({"indptr": np.array([0, 1, 1])}, "indptr doesn't fit"),
        ({"indptr": np.array([1, 1, 2])}, "indptr doesn't fit"),
        ({"indptr": np.array([0, 2])}, "with 1 rows"),
    ],
)
def test_broken_scipy_matrices(tmp_path: Path, arrays: dict[str, object], reason: str) -> None:
    x = save(tmp_path / "x.npz", [[1, 0, 0], [0, 0, 1]])
    y = save(tmp_path / "y.npz", [[1], [1]])
    break_(x, **arrays)
    with pytest.raises(UserError, match=reason):
        from_files(pair(x, y))


def test_files_that_are_no_scipy_matrices(tmp_path: Path) -> None:
    y = save(tmp_path / "y.npz", [[1]])
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    for name, content in (("text.npz", b"1 1 1\n"), ("cut.npz", y.read_bytes()[:100]), ("other.npz", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            from_files(pair(tmp_path / name, y))


def write_pair(folder: Path, points: Points, kind: str) -> Source:
    """The points as two matrices: texts or SciPy's files."""
    if kind == "npz":
        sp.save_npz(folder / "x.npz", points.x)
        sp.save_npz(folder / "y.npz", points.y)
        return pair(folder / "x.npz", folder / "y.npz")
    for name, m in (("x", points.x), ("y", points.y)):
        lines = [
            " ".join(f"{j}:{v!s}" for j, v in zip(m[i].indices, m[i].data, strict=True))
            for i in range(m.shape[0])
        ]
        (folder / name).write_text("\n".join([f"{m.shape[0]} {m.shape[1]}", *lines]) + "\n")
    return pair(folder / "x", folder / "y")


@settings(max_examples=15, deadline=None)
@given(points=any_points(), kind=st.sampled_from(["text", "npz"]))
def test_round_trip_of_matrices(tmp_path_factory: pytest.TempPathFactory, points: Points, kind: str) -> None:
    folder = tmp_path_factory.mktemp("round")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIDE_DATA", str(folder / "data"))
        got = from_files(write_pair(folder, points, kind), layout=Layout(index_base=0)).train
    for name in ("x_indptr", "x_indices", "x_values", "y_indptr", "y_indices"):
        np.testing.assert_array_equal(getattr(got, name), getattr(points, name))
    assert (got.num_features, got.num_labels) == (points.num_features, points.num_labels)


# Row numbers


def test_rows_of_one_file_become_train_and_test(tmp_path: Path) -> None:
    whole = write(tmp_path / "d.txt", "4 3 4\n0 0:1\n1 1:1\n2 2:1\n3 0:2\n")
    train, test = write(tmp_path / "tr", "4 1\n2 3\n"), write(tmp_path / "te", "1 2\n3 4\n")
    out = tmp_path / "set"
    options = ["--train", str(whole), "--train-rows", str(train), "--test-rows", str(test), "--out", str(out)]
    for column, rows_of in ((0, ([3, 1], [0, 2])), (1, ([0, 2], [1, 3]))):
        done = CliRunner().invoke(app, ["convert", *options, "--column", str(column)])
        assert done.exit_code == 0, done.exception
        data = load(out)
        assert (data.train.y_indices.tolist(), data.test.y_indices.tolist()) == rows_of
        assert sorted(path.name for path in out.iterdir()) == ["meta.json", "test", "train"]


@pytest.mark.parametrize(
    "numbers, reason",
    [("1\n5\n", "tr:2:1: row '5' lies outside 1..4"), ("0\n", "tr:1:1: row '0'"), ("x\n", "tr:1:1: row 'x'"),
     ("\n1 2\n\n", "")],
)  # fmt: skip
def test_row_numbers_are_checked(tmp_path: Path, numbers: str, reason: str) -> None:
    whole = write(tmp_path / "d.txt", "4 3 4\n0 0:1\n1 1:1\n2 2:1\n3 0:2\n")
    source = Source(Text(whole), rows=Text(write(tmp_path / "tr", numbers)))
    if not reason:
        assert len(from_files(source).train) == 1
        with pytest.raises(UserError, match="tr:2:1: 2 columns, asked for column 2"):
            from_files(Source(source.points, rows=source.rows, column=2))
        return
    with pytest.raises(UserError, match=reason):
        from_files(source)


def test_a_libsvm_file_needs_its_bases(tmp_path: Path) -> None:
    file = tmp_path / "set.svm.bz2"
    file.write_bytes(bz2.compress(b"0,2 1:0.5 3:1\n1 2:1\n"))
    options = ["convert", "--train", str(file), "--no-header", "--out", str(tmp_path / "set")]
    refused = CliRunner().invoke(app, options)
    assert isinstance(refused.exception, UserError) and "needs an index base" in str(refused.exception)
    done = CliRunner().invoke(app, [*options, "--index-base", "1", "--label-base", "0"])
    assert done.exit_code == 0, done.exception
    assert rows(load(tmp_path / "set").train) == ([[[0, 0.5], [2, 1]], [[1, 1]]], [[0, 2], [1]])


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--train", "x.npz"], "give the one of the labels"),
        (["--train", "x", "--test-rows", "r"], "needs --train-rows"),
        (["--train", "x", "--test", "y", "--train-rows", "r", "--test-rows", "r"], "picks points of --train"),
        ([], "say what to convert"),
        (["debian-deps", "--train", "x"], "give SET alone"),
    ],
)
def test_wrong_usage(tmp_path: Path, options: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["convert", *options, "--out", str(tmp_path / "set")])
    assert isinstance(done.exception, UserError) and reason in str(done.exception)
