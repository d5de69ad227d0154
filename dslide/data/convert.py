"""From XC text to the prepared format: streamed, parsed natively by all cores, strict.

A file is `points features labels` in its first line, then one line a point: `l1,l2,... f:v f:v ...`.
What is accepted beyond that, and what becomes of it:

- `\\r\\n`, tabs, repeated spaces, spaces after the commas between labels; a byte order mark is skipped;
- no labels (the line begins with a space or a feature) or no features: the point is kept;
- labels written as whole floats (`12.0`), values in any notation, values that float32 rounds to 0;
- unsorted ids are sorted, repeated features added up, repeated labels kept once;
- empty lines beyond the number of points (without a header: at the end) are ignored.

Ids start at 0 unless `index_base=1`. A file without a header needs `header=False` and an explicit index base.
Anything else is an error that names file, line and column: ids below 0 or beyond the header, values that
aren't finite, a header that counts other lines than follow, train and test of different sizes.
"""

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dslide.data import archive, format
from dslide.data.format import Points
from dslide.data.progress import Progress, progress
from dslide.errors import UserError
from dslide.files import write_atomic

# Part of the source hash: change it when the same text becomes other arrays.
CONVERT_VERSION = 1

_BLOCK = 32 << 20  # bytes of text in memory at a time
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Text:
    """A text file, plain or compressed (gzip, bzip2, xz), or a member of an archive."""

    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else str(self.path)

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, int]]:
        """The content as a stream, and its size in bytes (0: unknown); UserError if it can't be read."""
        with ExitStack() as stack:
            try:
                if self.member:
                    opened = stack.enter_context(archive.open_member(self.path, self.member))
                else:
                    opened = stack.enter_context(archive.open_file(self.path))
            except archive.DAMAGED as error:
                reason = error.strerror if isinstance(error, OSError) else None
                raise UserError(f"{self.path}: {reason or f'not a readable archive ({error})'}") from None
            yield opened


@dataclass(frozen=True)
class Layout:
    """How a text is to be read. Without a header, `features` and `labels` may give the sizes."""

    header: bool = True
    index_base: int | None = None
    features: int | None = None
    labels: int | None = None

    def check(self) -> None:
        if self.index_base not in (None, 0, 1):
            raise UserError(f"index base {self.index_base}: must be 0 or 1")
        if not self.header and self.index_base is None:
            raise UserError(
                "a file without a header needs an index base: --index-base 0 if ids start at 0, otherwise 1"
            )
        if self.header and (self.features, self.labels) != (None, None):
            raise UserError(
                "the numbers of features and labels come from the header; give them without one only"
            )
        for kind, size in (("features", self.features), ("labels", self.labels)):
            if size is not None and not 0 <= size <= _MAX_ID:
                raise UserError(f"number of {kind} {size}: must be in 0..{_MAX_ID}")


def convert(
    folder: Path,
    train: Text,
    test: Text | None,
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
    with (
        format.writing(folder, name=name, source=source, labels=label_names, expected=expected) as work,
        progress() as bar,
    ):
        sizes = []
        for split, text in zip(format.SPLITS, (train, test), strict=True):
            if text is not None:
                sizes.append((text, *_convert_split(text, work.folder / split, layout, threads, bar)))
        if layout.header and len({size[1:] for size in sizes}) > 1:
            shown = " but ".join(f"{text}: {d} features and {n} labels" for text, d, n in sizes)
            raise UserError(f"{shown}; train and test must have the same")
        work.num_features = max(size[1] for size in sizes)
        work.num_labels = max(size[2] for size in sizes)
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


class _SplitWriter:
    """Appends parsed parts to the arrays of a split, and holds empty lines back until a point follows."""

    def __init__(self, folder: Path) -> None:
        self.points = 0
        self.lines = 0
        self.top = {"x": -1, "y": -1}  # largest ids
        self.unsorted = self.duplicates = 0
        self._blank = 0
        self._ends = {"x": 0, "y": 0}
        self._arrays = {
            key: format.ArrayWriter(folder / f"{key}.npy", dtype) for key, dtype in format.ARRAYS.items()
        }
        for axis in "xy":
            self._arrays[f"{axis}_indptr"].append(np.zeros(1, np.int64))

    def append(self, part: dict[str, Any]) -> None:
        rows, blank = len(part["x_lengths"]), part["blank_tail"]
        if blank < rows:
            self._append_blank(self._blank)
        for axis in "xy":
            self._append_lengths(axis, part[f"{axis}_lengths"][: rows - blank])
            self.top[axis] = max(self.top[axis], int(part[f"{axis}_indices"].max(initial=-1)))
        for key in ("x_indices", "x_values", "y_indices"):
            self._arrays[key].append(part[key])
        self.points += rows - blank
        self._blank += blank
        self.lines += rows
        self.unsorted += part["unsorted"]
        self.duplicates += part["duplicates"]

    def close(self, promised: int | None) -> None:
        """Adds those of the empty lines at the end that the header counts."""
        if promised is not None:
            self._append_blank(min(max(promised - self.points, 0), self._blank))
        for array in self._arrays.values():
            array.close()

    def _append_blank(self, count: int) -> None:
        for axis in "xy":
            self._append_lengths(axis, np.zeros(count, np.int64))
        self.points += count
        self._blank -= count

    def _append_lengths(self, axis: str, lengths: NDArray[np.int64]) -> None:
        self._arrays[f"{axis}_indptr"].append(self._ends[axis] + np.cumsum(lengths))
        self._ends[axis] += int(lengths.sum())


def _convert_split(
    text: Text, folder: Path, layout: Layout, threads: int | None, bar: Progress
) -> tuple[int, int]:
    """Writes one split; returns the number of features and labels."""
    import dslide._core as _core

    pool = _core.Pool(threads or len(os.sched_getaffinity(0)))
    writer = _SplitWriter(folder)
    base = layout.index_base or 0
    promised = None
    features = _MAX_ID if layout.features is None else layout.features
    labels = _MAX_ID if layout.labels is None else layout.labels
    with text.open() as (file, size), bar.task(text.member or text.path.name, size) as advance:
        blocks = _blocks(text, file)
        first = next(blocks, b"")
        if layout.header:
            promised, features, labels, first = _read_header(text, first)
        for block in itertools.chain([first], blocks):
            parts = _core.parse_xc(pool, block, features, labels, base)
            if isinstance(parts, tuple):
                bad, column, reason = parts
                line = writer.lines + bad + 1 + layout.header
                raise UserError(f"{text}:{line}:{column}: {reason}{_hint(reason, base)}")
            for part in parts:
                writer.append(part)
            advance(len(block))
    writer.close(promised)
    if promised is not None and writer.points != promised:
        raise UserError(f"{text}:1:1: the header says {promised} points, but {writer.points} lines follow")
    if writer.unsorted or writer.duplicates:
        logging.getLogger(__name__).warning(
            f"{text}: sorted the ids of {writer.unsorted} points, merged {writer.duplicates} repeated ids"
        )
    if layout.header:
        return features, labels
    return (
        writer.top["x"] + 1 if layout.features is None else features,
        writer.top["y"] + 1 if layout.labels is None else labels,
    )


def _hint(reason: str, base: int) -> str:
    if "lies outside" not in reason:
        return ""
    return f" (ids are read as starting at {base}; if they start at {1 - base}, say --index-base {1 - base})"


def _read_header(text: Text, block: bytes) -> tuple[int, int, int, bytes]:
    """Points, features, labels, and the block without its first line."""
    head, _, rest = block.partition(b"\n")
    fields = head.removeprefix(b"\xef\xbb\xbf").split()
    if len(fields) != 3 or not all(field.isdigit() for field in fields):
        shown = head[:60].decode("ascii", "replace").strip()
        raise UserError(
            f"{text}:1:1: expected a header 'points features labels', found {shown!r}; "
            "for a file without one say --no-header and --index-base"
        )
    points, features, labels = (int(field) for field in fields)
    if max(features, labels) > _MAX_ID:
        raise UserError(f"{text}:1:1: more than {_MAX_ID} features or labels")
    return points, features, labels, rest


def _blocks(text: Text, file: BinaryIO) -> Iterator[bytes]:
    """The stream in blocks of whole lines."""
    rest = b""
    while True:
        try:
            data = file.read(_BLOCK)
        except archive.DAMAGED as error:
            raise UserError(f"{text}: {error}: the file is cut or damaged; fetch or copy it again") from None
        if not data:
            if rest:
                yield rest
            return
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data
