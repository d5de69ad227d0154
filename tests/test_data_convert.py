"""The XC text format: golden files for every variant, errors with line and column, round trips."""

import bz2
import gzip
import json
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dslide import _core
from dslide.data import Dataset, Points, from_files, load
from dslide.data import text as text_files
from dslide.data.cli import app
from dslide.data.convert import write_xc
from dslide.data.layout import Layout
from dslide.errors import UserError

GOLDEN = sorted((Path(__file__).parent / "data" / "xc").glob("*.txt"))


@pytest.fixture(autouse=True)
def _data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data-root"))


def rows(points: Points) -> tuple[list[list[list[float]]], list[list[int]]]:
    """Features and labels of each point as plain lists."""
    x, y = [], []
    for i in range(len(points)):
        at = slice(points.x_indptr[i], points.x_indptr[i + 1])
        pairs = zip(points.x_indices[at].tolist(), points.x_values[at].tolist(), strict=True)
        x.append([list(pair) for pair in pairs])
        y.append(points.y_indices[points.y_indptr[i] : points.y_indptr[i + 1]].tolist())
    return x, y


def write(tmp_path: Path, text: str, name: str = "bad.txt") -> Path:
    (tmp_path / name).write_bytes(text.encode())
    return tmp_path / name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_golden(file: Path, threads: int) -> None:
    expected = json.loads(file.with_suffix(".json").read_text())
    data = from_files(file, layout=Layout(**expected["layout"]), threads=threads)
    x, y = rows(data.train)
    assert (data.num_features, data.num_labels) == (expected["features"], expected["labels"])
    assert y == expected["y"]
    assert x == [[[i, float(np.float32(v))] for i, v in row] for row in expected["x"]]
    assert len(data.test) == 0


@pytest.mark.parametrize(
    "text, place, reason",
    [
        ("", "1:1", "expected a header"),
        ("1,2 0:1\n", "1:1", "expected a header"),
        ("2 3\n", "1:1", "expected a header"),
        ("-1 3 3\n", "1:1", "expected a header"),
        ("1 99999999999 3\n", "1:1", "more than"),
        ("3 2 2\n1 1:1\n1 1:1\n", "1:1", "the header says 3 points, but 2 lines follow"),
        ("1 2 2\n1 1:1\n1 1:1\n", "1:1", "the header says 1 points, but 2 lines follow"),
        ("1 2 2\n1 1:1\n \n", "1:1", "the header says 1 points, but 2 lines follow"),
        ("2 3 2\n1 1:1\n0 0:1 3:1\n", "3:7", "feature '3:1' lies outside 0..2 .*--index-base 1"),
        ("1 3 2\n2 1:1\n", "2:1", "label '2' lies outside 0..1"),
        ("1 3 2\n0,1,2 1:1\n", "2:5", "label '2' lies outside 0..1"),
        ("1 3 2\n-1 1:1\n", "2:1", "label '-1' lies outside"),
        ("1 3 2\n0 -1:1\n", "2:3", "feature '-1:1' lies outside"),
        ("1 3 2\n0 99999999999999999999:1\n", "2:3", "lies outside"),
        ("1 3 2\n99999999999999999999 1:1\n", "2:1", "lies outside"),
        ("1 3 2\n1e30 1:1\n", "2:1", "lies outside"),
        ("1 3 2\n0.5 1:1\n", "2:1", "isn't a whole number"),
        ("1 3 2\nx 1:1\n", "2:1", "label 'x' isn't a number"),
        ("1 3 2\n0x 1:1\n", "2:1", "label '0x' isn't a number"),
        ("1 3 2\n0,,1 1:1\n", "2:3", "isn't a number"),
        ("1 3 2\n,1 1:1\n", "2:1", "isn't a number"),
        ("1 3 2\n0, \n", "2:2", "the labels end with ','"),
        ("1 3 2\n0, 1:1\n", "2:4", "a label was expected after ','"),
        ("1 3 2\n0 1 1:1\n", "2:3", "expected feature:value, found '1'"),
        ("1 3 2\n0 1:\n", "2:3", "the value of '1:' isn't a number"),
        ("1 3 2\n0 1: 2\n", "2:3", "the value of '1:' isn't a number"),
        ("1 3 2\n0 1:a\n", "2:3", "the value of '1:a' isn't a number"),
        ("1 3 2\n0 1:1x\n", "2:3", "the value of '1:1x' isn't a number"),
        ("1 3 2\n0 1:1,5\n", "2:3", "isn't a number"),
        ("1 3 2\n0 1:0x10\n", "2:3", "isn't a number"),
        ("1 3 2\n0 1:+-1\n", "2:3", "isn't a number"),
        ("1 3 2\n0 1:nan\n", "2:3", "isn't finite"),
        ("1 3 2\n0 1:-inf\n", "2:3", "isn't finite"),
        ("1 3 2\n0 1:1e39\n", "2:3", "isn't finite in float32"),
        ("1 3 2\n0 1:1e400\n", "2:3", "isn't finite in float32"),
        ("1 3 2\n0 1:3e38 1:3e38\n", "2:1", "add up to more"),
        ("1 3 2\n0 1.0:1\n", "2:3", "expected feature:value"),
        ("1 3 2\n0 :1\n", "2:3", "isn't a number"),
        ("1 3 2\n0 1:1\x00\n", "2:3", r"the value of '1:1\?' isn't a number"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_malformed_lines_are_named(tmp_path: Path, text: str, place: str, reason: str, threads: int) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError, match=f"bad.txt:{place}: .*{reason}"):
        from_files(file, threads=threads)
    left = list((tmp_path / "data-root" / "prepared").iterdir())
    assert len(left) == 1 and left[0].name.endswith(".lock")


def test_a_refusal_leaves_no_reading_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK", 100)
    file = write(tmp_path, "900 3 2\n" + "0 1:x\n" * 900)
    before = set(threading.enumerate())
    with pytest.raises(UserError) as held:  # its traceback keeps the frames, and what they hold, alive
        from_files(file)
    assert held.tb is not None and set(threading.enumerate()) == before


def test_base_one_excludes_zero(tmp_path: Path) -> None:
    file = write(tmp_path, "1 3 2\n1 0:1\n")
    with pytest.raises(UserError, match=r"bad.txt:2:3: feature '0:1' lies outside 1\.\.3 .*--index-base 0"):
        from_files(file, layout=Layout(index_base=1))


@pytest.mark.parametrize(
    "layout, reason",
    [
        (Layout(header=False), "needs an index base"),
        (Layout(index_base=2), "must be 0 or 1"),
        (Layout(features=3), "come from the header"),
        (Layout(header=False, index_base=0, labels=-1), "number of labels -1"),
    ],
)
def test_layouts_that_cannot_be(tmp_path: Path, layout: Layout, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        from_files(write(tmp_path, "0 1 1\n"), layout=layout)


def test_the_first_bad_line_is_named_wherever_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{i % 7} {i % 11}:1\n" for i in range(1000)]
    lines[617] = "8 1:1\n"
    lines[800] = "nonsense\n"
    file = write(tmp_path, f"1000 11 8\n{''.join(lines)}")
    for block, threads in ((1 << 20, 1), (1 << 20, 4), (64, 2), (1, 1)):
        monkeypatch.setattr(text_files, "BLOCK", block)
        with pytest.raises(UserError, match=r"bad.txt:619:1: label '8' lies outside 0\.\.7"):
            from_files(file, threads=threads)


def test_blocks_and_threads_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "9 3 3\n0 1:1\n\n\n1,2 2:1\n \n\n0 0:1\n\n\n\n\n"
    file = write(tmp_path, text)
    whole = from_files(file)
    assert [len(row) for row in rows(whole.train)[1]] == [1, 0, 0, 2, 0, 0, 1, 0, 0]
    for block in range(1, 8):
        for threads in (1, 2, 5):
            monkeypatch.setattr(text_files, "BLOCK", block)
            monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / f"{block}-{threads}"))
            assert from_files(file, threads=threads).hash == whole.hash


floats = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def any_points(draw: st.DrawFn) -> Points:
    features, labels = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    size = draw(st.integers(0, 12))
    x = [draw(st.dictionaries(st.integers(0, features - 1), floats, max_size=6)) for _ in range(size)]
    y = [draw(st.sets(st.integers(0, labels - 1), max_size=4)) for _ in range(size)]
    return Points(
        x_indptr=np.cumsum([0, *map(len, x)]),
        x_indices=np.array([i for row in x for i in sorted(row)], np.int32),
        x_values=np.array([row[i] for row in x for i in sorted(row)], np.float32),
        y_indptr=np.cumsum([0, *map(len, y)]),
        y_indices=np.array([i for row in y for i in sorted(row)], np.int32),
        num_features=features,
        num_labels=labels,
    )


@settings(max_examples=30, deadline=None)
@given(points=any_points(), threads=st.integers(1, 3), block=st.integers(1, 300))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, points: Points, threads: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIDE_DATA", str(folder / "data"))
        patch.setattr(text_files, "BLOCK", block)
        write_xc(folder / "points.txt", points)
        data = from_files(folder / "points.txt", folder / "points.txt", threads=threads)
    for got in (data.train, data.test):
        for name in ("x_indptr", "x_indices", "x_values", "y_indptr", "y_indices"):
            np.testing.assert_array_equal(getattr(got, name), getattr(points, name))
        assert (got.num_features, got.num_labels) == (points.num_features, points.num_labels)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("0123 4:,.-+eE\n\r\tx\x00", max_size=80) | st.binary(max_size=60), threads=st.integers(1, 3)
)
def test_any_bytes_are_parsed_or_refused(text: str | bytes, threads: int) -> None:
    """The parser never crashes, and what it accepts is in order."""
    content = text.encode() if isinstance(text, str) else text
    got = _core.parse_xc(_core.Pool(threads), content, 5, 4)
    if isinstance(got, tuple):
        line, column, reason, kind = got
        assert kind in ("syntax", "feature outside", "label outside")
        assert 0 <= line <= content.count(b"\n")
        assert 1 <= column <= len(content.split(b"\n")[line]) + 1 and reason
        return
    lines = content.count(b"\n") + (0 if content.endswith(b"\n") or not content else 1)
    assert len(got) == threads
    assert sum(len(part["x_lengths"]) for part in got) == lines
    for part in got:
        assert len(part["x_lengths"]) == len(part["y_lengths"])
        for axis, limit in (("x", 5), ("y", 4)):
            lengths, ids = part[f"{axis}_lengths"], part[f"{axis}_indices"]
            assert lengths.sum() == len(ids)
            for row in np.split(ids, np.cumsum(lengths)[:-1]):
                assert (np.diff(row) > 0).all() and ((row >= 0) & (row < limit)).all()
        assert np.isfinite(part["x_values"]).all()


def test_compressed_files_give_the_same(tmp_path: Path) -> None:
    text = b"2 3 2\n0 1:0.5\n1 2:1\n"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(text))
    hashes = {from_files(tmp_path / name).hash for name in ("a.txt", "a.txt.gz", "a.txt.bz2")}
    assert len(hashes) == 1
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(UserError, match=r"cut\.txt\.gz"):
        from_files(tmp_path / "cut.txt.gz")
    (tmp_path / "not.txt.gz").write_bytes(text)
    with pytest.raises(UserError, match=r"not\.txt\.gz"):
        from_files(tmp_path / "not.txt.gz")


def test_train_and_test_must_fit(tmp_path: Path) -> None:
    train, test = write(tmp_path, "1 3 2\n0 1:1\n", "a.txt"), write(tmp_path, "1 4 2\n0 1:1\n", "b.txt")
    with pytest.raises(UserError, match=r"a\.txt: 3 features and 2 labels but .*b\.txt: 4 features"):
        from_files(train, test)
    # without a header the larger one counts
    train, test = write(tmp_path, "0 1:1\n", "a.txt"), write(tmp_path, "2 5:1\n", "b.txt")
    data = from_files(train, test, layout=Layout(header=False, index_base=0))
    assert (data.num_features, data.num_labels) == (6, 3)


def test_changed_files_are_converted_anew(tmp_path: Path) -> None:
    file = write(tmp_path, "1 3 2\n0 1:1\n", "a.txt")
    first = from_files(file)
    assert from_files(file).hash == first.hash and first.name == "a.txt"
    write(tmp_path, "1 3 2\n0 1:2\n", "a.txt")
    assert from_files(file).train.x_values.tolist() == [2]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.txt: No such file"):
        from_files(tmp_path / "absent.txt")
    with pytest.raises(UserError, match="directory"):
        from_files(tmp_path)


def test_what_was_mended_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from_files(write(tmp_path, "2 3 3\n1,0 1:1\n2 2:1 2:1\n"))
    assert "sorted the ids of 1 points, merged 1 repeated ids" in caplog.text


def test_the_command_converts_by_name_and_to_a_folder(tmp_path: Path) -> None:
    train = write(tmp_path, "1,2 1:1\n", "train.txt")
    names = write(tmp_path, "one\ntwo\n", "names.txt")
    options = [
        "convert",
        "--train",
        str(train),
        "--no-header",
        "--index-base",
        "1",
        "--label-names",
        str(names),
    ]
    result = CliRunner().invoke(app, [*options, "--name", "mine"])
    assert result.exit_code == 0 and result.output.strip() == str(
        tmp_path / "data-root" / "prepared" / "mine"
    )
    data = load("mine")
    assert data.label_names == ["one", "two"] and data.train.y_indices.tolist() == [0, 1]
    assert CliRunner().invoke(app, ["verify", "mine"]).exit_code == 0
    out = tmp_path / "elsewhere" / "set"
    assert CliRunner().invoke(app, [*options, "--out", str(out)]).exit_code == 0
    assert load(out).hash == data.hash
    assert [path.name for path in out.parent.iterdir()] == ["set"]


@pytest.mark.parametrize(
    "more, reason",
    [
        ([], "either --name"),
        (["--name", "a", "--out", "b"], "either --name"),
        (["--name", "../a"], "folder's name"),
        (["--name", "debian-deps"], "embedded or generated set"),
        (["--name", "Amazon-670K"], "train 1, expected 490449"),
        (["--name", "mine", "--label-names", "absent"], "absent: No such file"),
    ],
)
def test_wrong_usage_of_convert(tmp_path: Path, more: list[str], reason: str) -> None:
    train = write(tmp_path, "1 2 2\n1 1:1\n", "train.txt")
    result = CliRunner().invoke(app, ["convert", "--train", str(train), *more])
    assert isinstance(result.exception, UserError) and reason in str(result.exception)


def test_label_names_must_be_as_many(tmp_path: Path) -> None:
    train, names = write(tmp_path, "1 2 2\n1 1:1\n"), write(tmp_path, "one\n", "names.txt")
    arguments = ["convert", "--train", str(train), "--name", "m", "--label-names", str(names)]
    result = CliRunner().invoke(app, arguments)
    assert "1 label names for 2 labels" in str(result.exception)


def test_an_unrelated_folder_is_never_replaced(tmp_path: Path) -> None:
    train = write(tmp_path, "1 2 2\n1 1:1\n")
    result = CliRunner().invoke(app, ["convert", "--train", str(train), "--out", str(tmp_path)])
    assert "no prepared set" in str(result.exception) and train.exists()


def _convert_in_a_process(file: str, results: "multiprocessing.Queue[str]") -> None:
    results.put(from_files(file).hash)


def test_two_processes_convert_the_same_file(tmp_path: Path) -> None:
    file = write(tmp_path, f"2000 50 10\n{''.join(f'{i % 10} {i % 50}:1' + chr(10) for i in range(2000))}")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_convert_in_a_process, args=(str(file), results)) for _ in range(2)]
    for process in processes:
        process.start()
    hashes = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert hashes == {from_files(file).hash}
    visible = [p for p in (tmp_path / "data-root" / "prepared").iterdir() if not p.name.startswith(".")]
    assert len(visible) == 1


def test_a_dataset_has_a_test_split_even_without_one(tmp_path: Path) -> None:
    data = from_files(write(tmp_path, "1 2 2\n1 1:1\n"))
    assert isinstance(data, Dataset) and len(data.test) == 0 and data.test.x.shape == (0, 2)
