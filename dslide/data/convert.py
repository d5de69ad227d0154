"""From text (or SciPy matrices) to the prepared format: streamed, parsed natively by all cores, strict.

A file in the format of the Extreme Classification Repository ("XC") is `points features labels` in its first
line, then one line a point: `l1,l2,... f:v f:v ...`. What is accepted beyond that, and what becomes of it:

- `\\r\\n`, tabs, repeated spaces, spaces after the commas between labels; a byte order mark is skipped;
- no labels (the line begins with a space or a feature) or no features: the point is kept;
- labels written as whole floats (`12.0`), values in any notation, values that float32 rounds to 0;
- unsorted ids are sorted, repeated features added up, repeated labels kept once;
- empty lines beyond the number of points (without a header: at the end) are ignored;
- without a header, as in LIBSVM's files, `#` begins a comment.

Features and labels may also lie in files of their own (`Source.labels`): matrices as text, `rows columns`
and then a line `id:value ...` a row, or as SciPy's `.npz`; a label of value 0 is none. Train and test may be
rows of one file (`Source.rows`).

Ids start at `index_base` (labels at `label_base`). Without one they start at 0, as the format says, unless
the header proves that it is 1: the id that equals the header's size occurs, and 0 doesn't. A file without a
header needs an explicit base. Anything else is an error that names file, line and column: ids below 0 or
beyond the header, values that aren't finite, a header that counts other lines than follow, train and test of
different sizes. `lenient` leaves such lines out instead, and says how many.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dslide.data import format
from dslide.data.format import AxisWriter, Points
from dslide.data.layout import MAX_ID, Layout, Source
from dslide.data.npz import Matrix
from dslide.data.progress import Progress, progress
from dslide.data.text import Text, blocks
from dslide.errors import UserError
from dslide.files import write_atomic

# Part of the source hash: change it when the same text becomes other arrays.
CONVERT_VERSION = 2

_NO_LABELS = -1  # reader.hpp: a matrix of features alone

log = logging.getLogger(__name__)


def convert(
    folder: Path,
    train: Text | Source,
    test: Text | Source | None,
    *,
    name: str,
    source: str,
    layout: Layout | None = None,
    label_names: list[str] | None = None,
    expected: dict[str, int] | None = None,
    threads: int | None = None,
) -> None:
    """Converts `train` and `test` into the prepared folder `folder`, which appears when all is well.

    `source` is the source hash to record. UserError as described at the top of this file.
    """
    layout = layout or Layout()
    layout.check()
    sources = [
        Source(split) if isinstance(split, Text) else split for split in (train, test) if split is not None
    ]
    with (
        format.writing(folder, name=name, source=source, labels=label_names, expected=expected) as work,
        progress() as bar,
    ):
        reader = _Reader(layout, threads, bar)
        sizes = _with_bases(layout, lambda bases: _convert(sources, work.folder, reader, bases))
        if layout.header and len({(size.features, size.labels) for size in sizes}) > 1:
            shown = " but ".join(
                f"{size.where}: {size.features} features and {size.labels} labels" for size in sizes
            )
            raise UserError(f"{shown}; train and test must have the same")
        work.num_features = max(size.features for size in sizes)
        work.num_labels = max(size.labels for size in sizes)
        if label_names is not None and len(label_names) != work.num_labels:
            raise UserError(f"{len(label_names)} label names for {work.num_labels} labels")
        if test is None:
            format.write_points(work.folder / "test", format.empty(work.num_features, work.num_labels))


def write_xc(path: Path, points: Points) -> None:
    """Writes points as XC text that converts back to the same bits."""
    lines = [f"{len(points)} {points.num_features} {points.num_labels}\n"]
    for i in range(len(points)):
        labels = points.y_indices[points.y_indptr[i] : points.y_indptr[i + 1]]
        at = slice(points.x_indptr[i], points.x_indptr[i + 1])
        # a numpy float32 prints the fewest digits that give it back
        pairs = (f"{j}:{v!s}" for j, v in zip(points.x_indices[at], points.x_values[at], strict=True))
        lines.append(f"{','.join(map(str, labels))} {' '.join(pairs)}\n")
    write_atomic(path, "".join(lines))


@dataclass(frozen=True)
class _Sizes:
    where: str
    features: int
    labels: int
    low: Mapping[str, int]  # an axis' smallest id, -1: none


class _Outside(Exception):
    """An id that the header excludes, with this base; `axis` is "x" or "y"."""

    def __init__(self, message: str, axis: str) -> None:
        super().__init__(message)
        self.axis = axis


def _with_bases(layout: Layout, attempt: Callable[[Mapping[str, int]], list[_Sizes]]) -> list[_Sizes]:
    """Converts with the bases that are given or, else, with those that the header leaves possible."""
    bases = {axis: layout.base(axis) or 0 for axis in "xy"}
    first: dict[str, _Outside] = {}
    while True:
        try:
            sizes = attempt(bases)
            break
        except _Outside as error:
            if layout.base(error.axis) is not None or not layout.header or error.axis in first:
                raise UserError(str(first.get(error.axis, error))) from None
            first[error.axis] = error
            bases[error.axis] = 1  # an id 0, or one beyond the header also then, ends the next attempt
    names = {"x": "features", "y": "labels"}
    unproven = [
        axis
        for axis in "xy"
        if layout.base(axis) is None
        and axis not in first
        and min((s.low[axis] for s in sizes if s.low[axis] >= 0), default=0) > 0
    ]
    for axis, refusal in first.items():
        if unproven:  # the other axis might start at 0 or at 1
            raise UserError(str(refusal))
        log.warning(
            f"the ids of {names[axis]} start at 1: the header's number of them occurs as an id, 0 doesn't"
        )
    if len(unproven) == 2 and layout.header:
        log.warning(
            f"{sizes[0].where}: no id is 0; they are read as starting at 0; otherwise say --index-base 1"
        )
    return sizes


def _convert(
    sources: list[Source], folder: Path, reader: "_Reader", bases: Mapping[str, int]
) -> list[_Sizes]:
    """Writes the splits into their folders."""
    if all(source.rows is None for source in sources):
        return [
            reader.split(source, folder / split, bases)
            for split, source in zip(format.SPLITS, sources, strict=False)
        ]
    if any(source.points != sources[0].points for source in sources):
        raise UserError("row numbers pick points of one file: give no other one for test")
    whole = folder / "whole"
    whole.mkdir(exist_ok=True)
    sizes = reader.split(sources[0], whole, bases)
    points = format.open_split(whole, sizes.features, sizes.labels)
    for split, source in zip(format.SPLITS, sources, strict=False):
        assert source.rows is not None
        format.write_rows(folder / split, points, _row_numbers(source.rows, source.column, len(points)))
    shutil.rmtree(whole)
    return [sizes]


def _row_numbers(text: Text, column: int, points: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Row numbers from 0 of a split file, int64: all of them at once, 8 bytes a point."""
    rows = []
    with text.open() as (file, _):
        for number, line in enumerate(file, 1):
            fields = line.split()
            if not fields:
                continue
            if column >= len(fields):
                raise UserError(
                    f"{text}:{number}:1: {len(fields)} columns, asked for column {column} (from 0)"
                )
            field = fields[column]
            row = int(field) if field.isdigit() else 0
            if not 1 <= row <= points:
                raise UserError(
                    f"{text}:{number}:1: row {field.decode('ascii', 'replace')!r} lies outside 1..{points}"
                )
            rows.append(row - 1)
    return np.array(rows, np.int64)


class _Lines:
    """Appends parsed parts to one or both axes, and holds empty lines back until a point follows."""

    def __init__(self, axes: Mapping[str, AxisWriter]) -> None:
        self.axes = axes  # by the parser's name: a matrix of labels is parsed as features
        self.points = self.lines = self.unsorted = self.duplicates = self.skipped = 0
        self.first_skipped: tuple[int, int, str] | None = None  # line from 0
        self._blank = 0

    def append(self, part: Mapping[str, Any]) -> None:
        rows, blank = len(part["x_lengths"]), part["blank_tail"]
        if blank < rows:
            self._append_empty(self._blank)
        for key, axis in self.axes.items():
            lengths, ids = part[f"{key}_lengths"][: rows - blank], part[f"{key}_indices"]
            if key == "y":
                axis.append(lengths, ids)
            else:
                _append_matrix(axis, lengths, ids, part["x_values"])
        self.points += rows - blank
        self._blank += blank
        if part["skipped"] and self.first_skipped is None:
            line, column, reason, _ = part["first_skipped"]
            self.first_skipped = line + self._begin, column, reason
        self.lines += part["lines"]
        for count in ("unsorted", "duplicates", "skipped"):
            setattr(self, count, getattr(self, count) + part[count])

    def begin_block(self) -> None:
        self._begin = self.lines  # the parser counts lines from the block's first

    def close(self, promised: int | None) -> None:
        """Adds those of the empty lines at the end that the header counts."""
        if promised is not None:
            self._append_empty(min(max(promised - self.skipped - self.points, 0), self._blank))
        for axis in self.axes.values():
            axis.close()

    def _append_empty(self, count: int) -> None:
        for axis in self.axes.values():
            axis.append_empty(count)
        self.points += count
        self._blank -= count


def _append_matrix(axis: AxisWriter, lengths: Any, ids: Any, values: Any) -> None:
    """Appends rows of a matrix: features as they are, of labels those that aren't 0."""
    if axis.has_values:
        axis.append(lengths, ids, values)
        return
    kept = values != 0
    if not kept.all():
        before = np.concatenate([[0], np.cumsum(kept)])
        lengths = np.diff(before[np.concatenate([[0], np.cumsum(lengths)])])
    axis.append(lengths, ids[kept])


class _Reader:
    """Reads the files of a split in its layout."""

    def __init__(self, layout: Layout, threads: int | None, bar: Progress) -> None:
        import dslide._core as _core

        self._core, self._layout, self._bar = _core, layout, bar
        self._pool = _core.Pool(threads or len(os.sched_getaffinity(0)))

    def split(self, source: Source, folder: Path, bases: Mapping[str, int]) -> _Sizes:
        """Writes one split's arrays into `folder`."""
        x, y = AxisWriter(folder, "x"), AxisWriter(folder, "y")
        if source.labels is None:
            features, labels = self._text(source.points, {"x": x, "y": y}, bases)
        else:
            if self._layout.lenient:
                raise UserError(
                    "--lenient can't leave lines out of features and labels in files of their own"
                )
            features, labels = (
                self._matrix(source.points, folder, x, bases["x"]),
                self._matrix(source.labels, folder, y, bases["y"]),
            )
            if x.rows != y.rows:
                raise UserError(f"{source.points}: {x.rows} rows, but {source.labels} has {y.rows}")
        return _Sizes(str(source.points), features, labels, {"x": x.low, "y": y.low})

    def _matrix(self, text: Text, folder: Path, axis: AxisWriter, base: int) -> int:
        """Writes one axis; returns its number of columns."""
        if not text.name.endswith(".npz"):
            given = {"x": base, "y": base}
            return self._text(text, {"x": axis}, given)[0]
        with Matrix(text, folder) as matrix, self._bar.task(text.name, 0) as advance:
            for rows in matrix.slices():
                _append_matrix(axis, np.diff(rows.indptr), rows.indices, rows.data)
                advance(rows.indices.nbytes + rows.data.nbytes)
        axis.low = min(axis.low, 0)  # SciPy's ids start at 0, whether it occurs or not
        axis.close()
        return int(matrix.shape[1])

    def _text(self, text: Text, axes: Mapping[str, AxisWriter], bases: Mapping[str, int]) -> tuple[int, int]:
        """Writes the axes of a text; returns the number of features and labels (of a matrix: columns, 0)."""
        layout, lines = self._layout, _Lines(axes)
        of_labels = not axes["x"].has_values
        promised = None
        features = layout.labels if of_labels else layout.features
        features = MAX_ID if features is None else features
        labels = _NO_LABELS if "y" not in axes else MAX_ID if layout.labels is None else layout.labels
        with (
            text.open() as (file, size),
            self._bar.task(text.name, size) as advance,
            closing(blocks(text, file)) as parts,
        ):
            block: bytes | None = next(parts, b"")
            if layout.header:
                fields = ("points", "features", "labels") if "y" in axes else ("rows", "columns")
                (promised, features, *more), block = read_header(text, block or b"", fields)
                labels = more[0] if more else labels
            while block is not None:
                lines.begin_block()
                parsed = self._core.parse_xc(
                    self._pool, block, features, labels, bases["x"], bases["y"],
                    comments=not layout.header, lenient=layout.lenient,
                )  # fmt: skip
                if isinstance(parsed, tuple):
                    number, column, reason, kind = parsed
                    where = f"{text}:{lines.lines + number + 1 + layout.header}:{column}"
                    raise _refusal(where, reason, kind, of_labels, bases)
                for part in parsed:
                    lines.append(part)
                advance(len(block))
                block = next(parts, None)
        lines.close(promised)
        self._tell(text, lines, promised)
        if layout.header:
            return features, max(labels, 0)
        known = (layout.labels if of_labels else layout.features), layout.labels
        found = axes["x"].top + 1, axes["y"].top + 1 if "y" in axes else 0
        return found[0] if known[0] is None else known[0], found[1] if known[1] is None else known[1]

    def _tell(self, text: Text, lines: _Lines, promised: int | None) -> None:
        """Says what was mended and left out; UserError if the header counts other lines."""
        if lines.first_skipped is not None:
            line, column, reason = lines.first_skipped
            first = f"{line + 1 + self._layout.header}:{column}: {reason}"
            if lines.skipped == lines.lines:
                raise UserError(f"{text}: not one line is in the format; the first: {first}")
            log.warning(f"{text}: left {lines.skipped} of {lines.lines} lines out; the first: {first}")
        if promised is not None and lines.points + lines.skipped != promised:
            found = lines.points + lines.skipped
            message = f"{text}:1:1: the header says {promised} points, but {found} lines follow"
            if not self._layout.lenient:
                raise UserError(message)
            log.warning(message)
        if lines.unsorted or lines.duplicates:
            log.warning(
                f"{text}: sorted the ids of {lines.unsorted} points, merged {lines.duplicates} repeated ids"
            )


def _refusal(where: str, reason: str, kind: str, of_labels: bool, bases: Mapping[str, int]) -> Exception:
    """What to raise for a line that isn't in the format."""
    if of_labels:
        reason, kind = reason.replace("feature ", "label ", 1), kind.replace("feature", "label")
    if kind == "syntax":
        return UserError(f"{where}: {reason}")
    axis = "y" if kind == "label outside" else "x"
    base = bases[axis]
    hint = f"ids are read as starting at {base}; if they start at {1 - base}, say --index-base {1 - base}"
    return _Outside(f"{where}: {reason} ({hint})", axis)


def read_header(text: Text, block: bytes, names: tuple[str, ...]) -> tuple[list[int], bytes]:
    """The header's numbers, and the block without its first line."""
    head, _, rest = block.partition(b"\n")
    fields = head.removeprefix(b"\xef\xbb\xbf").split()
    if len(fields) != len(names) or not all(field.isdigit() for field in fields):
        shown = head[:60].decode("ascii", "replace").strip()
        raise UserError(
            f"{text}:1:1: expected a header '{' '.join(names)}', found {shown!r}; "
            "for a file without one say --no-header and --index-base"
        )
    numbers = [int(field) for field in fields]
    if max(numbers[1:]) > MAX_ID:
        raise UserError(f"{text}:1:1: more than {MAX_ID} {' or '.join(names[1:])}")
    return numbers, rest
