"""What users of other systems complain about when it comes to data, each with what happens here instead.

Tests are named after the thread (repository and number) or, without one, after the program.
"""

from pathlib import Path

import numpy as np
import pytest
from test_data_convert import rows

from dslide.data import format, from_files, text
from dslide.data.layout import Layout
from dslide.errors import UserError


@pytest.fixture(autouse=True)
def _data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data-root"))


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize("base", [None, 0, 1])
def test_pyxclib_10_the_index_base_is_not_guessed(tmp_path: Path, base: int | None) -> None:
    """Ids 1 to 2 of 3 fit both bases: they are read as asked, and as the format says when nobody asks."""
    file = write(tmp_path / "points.txt", "2 3 3\n1 1:1 2:1\n2 2:1\n")
    x, y = rows(from_files(file, layout=Layout(index_base=base)).train)
    first = 1 if base is None else 1 - base
    assert y == [[first], [first + 1]] and x == [[[first, 1], [first + 1, 1]], [[first + 1, 1]]]


@pytest.mark.parametrize(
    "content, header, reason",
    [
        ("0 0:1\n1 1:1\n", True, r"points\.txt:1:1: expected a header"),  # taken for a header elsewhere
        ("2 3 2\n0 0:1\n", True, r"points\.txt:1:1: the header says 2 points, but 1 lines follow"),
        (
            "1 3 2\n0 0:1\n",
            False,
            r"points\.txt:1:3: expected feature:value, found '3'",
        ),  # for a point elsewhere
    ],
)
def test_pyxclib_11_a_header_is_not_guessed(tmp_path: Path, content: str, header: bool, reason: str) -> None:
    layout = Layout(header=header, index_base=0)
    with pytest.raises(UserError, match=reason):
        from_files(write(tmp_path / "points.txt", content), layout=layout)


def test_hashing_deep_learning_a_point_without_labels_keeps_its_features(tmp_path: Path) -> None:
    """The original SLIDE takes the first feature of such a line for a label."""
    for line in (" 1:0.5 2:1", "1:0.5 2:1"):
        x, y = rows(from_files(write(tmp_path / "points.txt", f"2 3 2\n{line}\n0 0:1\n")).train)
        assert x[0] == [[1, 0.5], [2, 1]] and y == [[], [0]]


@pytest.mark.parametrize("content", ["", "\0" * 64, "1 1 1", "1 1 1\n0 0:", "99999999999 1 1\n"])
def test_hashing_deep_learning_6_27_37_a_wrong_file_is_an_error(tmp_path: Path, content: str) -> None:
    """A wrong path or an empty file ends in a segmentation fault elsewhere."""
    with pytest.raises(UserError, match=r"absent\.txt: No such file"):
        from_files(tmp_path / "absent.txt")
    with pytest.raises(UserError, match=r"points\.txt:\d+:\d+: "):
        from_files(write(tmp_path / "points.txt", content))


def test_scikit_learn_the_header_no_shift_and_trailing_features(tmp_path: Path) -> None:
    """Its reader fails on the header, shifts all ids if no 0 occurs, and drops features that none has."""
    data = from_files(write(tmp_path / "points.txt", "1 9 4\n1 2:1 3:2\n"))
    assert data.train.x.shape == (1, 9) and data.train.y.shape == (1, 4)
    assert data.train.x_indices.tolist() == [2, 3] and data.train.y_indices.tolist() == [1]


def test_slide_files_are_sorted_by_label_and_batches_are_not(tmp_path: Path) -> None:
    """Training in a file's order sees one label at a time."""
    from dslide.data import batches

    lines = "".join(f"{i // 100} 0:1\n" for i in range(1000))
    data = from_files(write(tmp_path / "points.txt", f"1000 1 10\n{lines}"))
    labels = data.train.y_indices
    for batch in batches(len(data.train), 100, seed=0, epoch=0):
        assert len(np.unique(labels[batch])) == 10


def test_pecos_223_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only blocks of bounded size are ever asked for."""
    sizes: list[int] = []
    real = text.archive.open_file

    class Watched:
        def __init__(self, file: object) -> None:
            self._file = file

        def read(self, size: int = -1) -> bytes:
            sizes.append(size)
            return self._file.read(size)  # type: ignore[attr-defined, no-any-return]

    def opened(path: Path):  # type: ignore[no-untyped-def]
        from contextlib import contextmanager

        @contextmanager
        def watched():  # type: ignore[no-untyped-def]
            with real(path) as (file, size):
                yield Watched(file), size

        return watched()

    monkeypatch.setattr(text.archive, "open_file", opened)
    monkeypatch.setattr(text, "BLOCK", 1000)
    file = write(tmp_path / "points.txt", "5000 9 9\n" + "".join(f"{i % 9} {i % 9}:1\n" for i in range(5000)))
    assert len(from_files(file).train) == 5000
    assert len(sizes) > 20 and set(sizes) == {1000}


def test_snakemake_153_what_is_interrupted_looks_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output beside its place, complete, renamed; an interruption leaves nothing under its name."""
    file = write(tmp_path / "points.txt", "1 3 2\n0 0:1\n")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(format, "array_hash", interrupt)
        from_files(file)
    left = [path.name for path in (tmp_path / "data-root" / "prepared").iterdir()]
    assert len(left) == 1 and left[0].endswith(".lock")
    assert len(from_files(file).train) == 1


def test_snakemake_1972_a_changed_source_is_noticed(tmp_path: Path) -> None:
    """By content, not by time stamp."""
    file = write(tmp_path / "points.txt", "1 3 2\n0 0:1\n")
    first = from_files(file)
    file.touch()
    assert from_files(file).hash == first.hash
    assert from_files(write(file, "1 3 2\n0 0:2\n")).hash != first.hash
