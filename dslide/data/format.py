"""The prepared format: a folder of memory-mapped CSR parts that numpy opens without us.

    meta.json            format_version, name, hash, source_hash, num_features, num_labels, splits, checksums
    train/ and test/     x_indptr int64 [n+1], x_indices int32 [nnz], x_values float32 [nnz],
                         y_indptr int64 [n+1], y_indices int32 [label_nnz], each a `.npy`
    train/groups.npy     optional, int32 [n]: points of one group stay together in a validation split
    labels.txt, features.txt   optional, one name a line

Ids start at 0, ascend within a row and occur once. `hash` covers the arrays, so two sets with the same hash
train the same; `source_hash` covers what the set was made from and how; `checksums` has each file's sha256.
"""

import fcntl
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dslide.errors import UserError
from dslide.files import atomic_dir

FORMAT_VERSION = 1
SPLITS = ("train", "test")
ARRAYS = {
    "x_indptr": np.int64,
    "x_indices": np.int32,
    "x_values": np.float32,
    "y_indptr": np.int64,
    "y_indices": np.int32,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Points:
    """Sparse points and their labels as CSR arrays; usually read-only maps of the prepared files."""

    x_indptr: NDArray[np.int64]
    x_indices: NDArray[np.int32]
    x_values: NDArray[np.float32]
    y_indptr: NDArray[np.int64]
    y_indices: NDArray[np.int32]
    num_features: int
    num_labels: int

    def __len__(self) -> int:
        return len(self.x_indptr) - 1

    @property
    def x(self) -> csr_matrix:
        """Features, float32 [n, num_features]; shares indices and values with this object."""
        shape = (len(self), self.num_features)
        return csr_matrix((self.x_values, self.x_indices, self.x_indptr), shape, copy=False)

    @property
    def y(self) -> csr_matrix:
        """Labels as ones, float32 [n, num_labels]; shares the indices with this object."""
        ones = np.ones(len(self.y_indices), np.float32)
        return csr_matrix((ones, self.y_indices, self.y_indptr), (len(self), self.num_labels), copy=False)

    def rows(self, begin: int, end: int) -> "Points":
        """Consecutive rows [begin, end); shares indices and values with this object."""
        x, y = self.x_indptr[begin : end + 1], self.y_indptr[begin : end + 1]
        return replace(
            self,
            x_indptr=x - x[0],
            x_indices=self.x_indices[x[0] : x[-1]],
            x_values=self.x_values[x[0] : x[-1]],
            y_indptr=y - y[0],
            y_indices=self.y_indices[y[0] : y[-1]],
        )

    def take(self, rows: NDArray[np.integer]) -> "Points":
        """A copy of some rows, in the order given."""
        x_indptr, x_from = _select(self.x_indptr, rows)
        y_indptr, y_from = _select(self.y_indptr, rows)
        return replace(
            self,
            x_indptr=x_indptr,
            x_indices=self.x_indices[x_from],
            x_values=self.x_values[x_from],
            y_indptr=y_indptr,
            y_indices=self.y_indices[y_from],
        )

    def keep_labels(self, keep: NDArray[np.bool_]) -> "Points":
        """Only the labels whose entry in `keep` [num_labels] is true, then only points that have a label."""
        kept = keep[self.y_indices]
        before = np.zeros(len(kept) + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        points = replace(self, y_indptr=before[self.y_indptr], y_indices=self.y_indices[kept])
        return points.take(np.flatnonzero(np.diff(points.y_indptr)))


def empty(num_features: int, num_labels: int) -> Points:
    """No points at all: the test split of data that has none."""
    arrays = {name: np.zeros(1 if name.endswith("indptr") else 0, dtype) for name, dtype in ARRAYS.items()}
    return Points(**arrays, num_features=num_features, num_labels=num_labels)


def _select(indptr: NDArray, rows: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indptr of the rows, and where their entries were."""
    lengths = np.diff(indptr)[rows]
    new = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=new[1:])
    return new, np.arange(new[-1]) + np.repeat(indptr[:-1][rows] - new[:-1], lengths)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock `.<name>.lock` beside `path`; waits for another process that holds it.

    Work folders that a killed process left beside `path` are removed. UserError if it can't be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; set DSLIDE_DATA to a folder that can be written"
        ) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process is preparing %s; waiting for it", path)
            fcntl.flock(handle, fcntl.LOCK_EX)
        left = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}")  # tempfile.mkdtemp's names
        for folder in path.parent.iterdir():
            if left.fullmatch(folder.name) and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
        yield


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def source_hash(**parts: Any) -> str:
    """Hash of everything that decides what a set becomes; pass contents' hashes and settings, not paths."""
    content = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass
class Work:
    """A set in the making: its folder, and the sizes, which may be set as late as they are known."""

    folder: Path
    num_features: int = 0
    num_labels: int = 0


@contextmanager
def writing(
    folder: Path,
    *,
    name: str,
    source: str,
    labels: list[str] | None = None,
    features: list[str] | None = None,
    expected: Mapping[str, int] | None = None,
) -> Iterator[Work]:
    """Yields a work folder with `train/` and `test/` to fill; completed with meta.json it becomes `folder`.

    Nothing appears at `folder` unless the block ends well, the arrays are consistent, and the sizes are
    `expected` (train and test points, features, labels).
    """
    with atomic_dir(folder) as place:
        for split in SPLITS:
            (place / split).mkdir()
        work = Work(place)
        yield work
        for file, names in (("labels.txt", labels), ("features.txt", features)):
            if names is not None:
                (place / file).write_text("".join(f"{entry}\n" for entry in names), encoding="utf8")
        sizes = (work.num_features, work.num_labels)
        splits = {}
        for split in SPLITS:
            points = open_split(place / split, *sizes)
            check(points, f"{folder}/{split}")
            splits[split] = _sizes(points)
        files = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
        checksums = {file: file_sha256(place / file) for file in files}
        meta = {
            "format_version": FORMAT_VERSION,
            "name": name,
            "hash": array_hash(checksums, *sizes),
            "source_hash": source,
            "num_features": work.num_features,
            "num_labels": work.num_labels,
            "splits": splits,
            "checksums": checksums,
        }
        if expected is not None:
            expect(meta, expected)
        (place / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _sizes(points: Points) -> dict[str, int]:
    return {"points": len(points), "nnz": len(points.x_indices), "label_nnz": len(points.y_indices)}


def counts(meta: Mapping[str, Any]) -> dict[str, int]:
    """Train and test points, features and labels of a prepared set, as a catalogue states them."""
    points = {split: meta["splits"][split]["points"] for split in SPLITS}
    return points | {"features": meta["num_features"], "labels": meta["num_labels"]}


def expect(meta: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    """UserError if the prepared set isn't as large as its catalogue entry says."""
    found = counts(meta)
    wrong = [f"{key} {found[key]}, expected {n}" for key, n in expected.items() if found[key] != n]
    if wrong:
        raise UserError(f"{meta['name']}: {'; '.join(wrong)}: not the set that the catalogue describes")


class ArrayWriter:
    """A one-dimensional `.npy` file that grows: `append` as often as needed, then `close`.

    Writes its own header of 128 bytes, so that files (and their checksums) don't depend on numpy's version.
    """

    def __init__(self, path: Path, dtype: type) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self._file = path.open("wb")
        self._file.write(b" " * 128)

    def append(self, values: NDArray) -> None:
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def close(self) -> None:
        header = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.length},), }}"
        self._file.seek(0)
        self._file.write(
            b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n"
        )
        self._file.close()


def write_array(path: Path, values: NDArray) -> None:
    """Writes a whole array the way that ArrayWriter does."""
    writer = ArrayWriter(path, values.dtype.type)
    writer.append(values)
    writer.close()


def write_points(folder: Path, points: Points) -> None:
    """Writes the five arrays of a split into `folder`."""
    for name, dtype in ARRAYS.items():
        write_array(folder / f"{name}.npy", np.asarray(getattr(points, name), dtype))


@dataclass(frozen=True)
class Part:
    """Consecutive points: lengths int64 [n] of rows, ids int32 and values float32 of all rows together."""

    x_lengths: NDArray[np.int64]
    x_indices: NDArray[np.int32]
    x_values: NDArray[np.float32]
    y_lengths: NDArray[np.int64]
    y_indices: NDArray[np.int32]


class AxisWriter:
    """Appends rows to a split's arrays of one axis: "x" (features, with values) or "y" (labels)."""

    def __init__(self, folder: Path, axis: str) -> None:
        self.rows, self.has_values = 0, axis == "x"
        self.low, self.top = -1, -1  # the smallest and the largest id so far, -1: none
        self._nnz = 0
        self._arrays = {
            key.removeprefix(f"{axis}_"): ArrayWriter(folder / f"{key}.npy", dtype)
            for key, dtype in ARRAYS.items()
            if key.startswith(axis)
        }
        self._arrays["indptr"].append(np.zeros(1, np.int64))

    def append(
        self, lengths: NDArray[np.int64], ids: NDArray[np.int32], values: NDArray[np.float32] | None = None
    ) -> None:
        """Appends rows of these lengths [n]; `values` are the features' and left out for labels."""
        self._arrays["indptr"].append(self._nnz + np.cumsum(lengths))
        self._arrays["indices"].append(ids)
        if values is not None:
            self._arrays["values"].append(values)
        self.rows += len(lengths)
        self._nnz += len(ids)
        if len(ids):
            low = int(ids.min())
            self.low = low if self.low < 0 else min(self.low, low)
            self.top = max(self.top, int(ids.max()))

    def append_empty(self, count: int) -> None:
        """Appends rows without an id."""
        self._arrays["indptr"].append(np.full(count, self._nnz, np.int64))
        self.rows += count

    def close(self) -> None:
        """Completes the files."""
        for array in self._arrays.values():
            array.close()


class PointsWriter:
    """Appends parts of a split to its five files in `folder`; `close` completes them."""

    def __init__(self, folder: Path) -> None:
        self.x, self.y = AxisWriter(folder, "x"), AxisWriter(folder, "y")

    def append(self, part: Part) -> None:
        """Appends the points of `part`."""
        self.x.append(part.x_lengths, part.x_indices, part.x_values)
        self.y.append(part.y_lengths, part.y_indices)

    def close(self) -> None:
        """Completes the files."""
        self.x.close()
        self.y.close()


def write_rows(folder: Path, points: Points, rows: NDArray[np.int64]) -> None:
    """Writes some points as a split, in the order of `rows` (from 0), in slices of bounded size."""
    writer = PointsWriter(folder)
    for begin in range(0, len(rows), _SLICE_ROWS):
        part = points.take(rows[begin : begin + _SLICE_ROWS])
        writer.x.append(np.diff(part.x_indptr), part.x_indices, part.x_values)
        writer.y.append(np.diff(part.y_indptr), part.y_indices)
    writer.close()


def array_hash(checksums: Mapping[str, str], num_features: int, num_labels: int) -> str:
    """The set's identity: what the trainer sees, not the names of labels or files."""
    arrays = {file: digest for file, digest in checksums.items() if file.endswith(".npy")}
    content = json.dumps([num_features, num_labels, arrays], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check(points: Points, where: str) -> None:
    """UserError unless the arrays are what this module promises; reads them in slices of bounded size."""
    if len(points.x_indptr) != len(points.y_indptr) or len(points.x_values) != len(points.x_indices):
        raise UserError(f"{where}: arrays of different lengths")
    for axis, limit in (("x", points.num_features), ("y", points.num_labels)):
        indptr, indices = getattr(points, f"{axis}_indptr"), getattr(points, f"{axis}_indices")
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise UserError(f"{where}: {axis}_indptr doesn't fit {axis}_indices")
        for begin in range(0, len(points), _SLICE_ROWS):
            rows = indptr[begin : begin + _SLICE_ROWS + 1]
            part = indices[rows[0] : rows[-1]]
            if not len(part):
                continue
            if part.min() < 0 or part.max() >= limit:
                raise UserError(f"{where}: {axis}_indices outside 0..{limit - 1}")
            ascends = np.diff(part) > 0
            starts = rows[1:-1] - rows[0]
            ascends[starts[(starts > 0) & (starts < len(part))] - 1] = True
            if not ascends.all():
                raise UserError(f"{where}: {axis}_indices don't ascend within a row")


_SLICE_ROWS = 1 << 18


def read_meta(folder: Path) -> dict[str, Any] | None:
    """meta.json of a prepared folder, None if there is none; UserError if it is broken."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; delete {folder} and prepare the set again") from None
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        found = meta.get("format_version") if isinstance(meta, dict) else None
        raise UserError(
            f"{path}: format_version {found}, this program reads {FORMAT_VERSION}; "
            f"delete {folder} and prepare the set again"
        )
    return meta


def open_split(folder: Path, num_features: int, num_labels: int) -> Points:
    """Maps the five arrays in a split's folder, as they are."""
    arrays = {name: open_array(folder / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()}
    return Points(**arrays, num_features=num_features, num_labels=num_labels)


def open_points(folder: Path, split: str, meta: Mapping[str, Any]) -> Points:
    """Maps the arrays of a split; UserError if a file is missing, cut or not as long as meta.json says."""
    points = open_split(folder / split, meta["num_features"], meta["num_labels"])
    promised = meta["splits"][split]
    found = _sizes(points)
    if found != promised:
        raise UserError(f"{folder / split}: {found}, but meta.json says {promised}; prepare the set again")
    return points


def open_array(path: Path, dtype: type) -> NDArray:
    """Maps a one-dimensional `.npy` file of exactly this type, read-only."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; delete the folder and prepare the set again") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: {error}; delete the folder and prepare the set again") from None
    if array.dtype != dtype or array.ndim != 1:
        raise UserError(f"{path}: {array.dtype} {array.shape}, expected one dimension of {np.dtype(dtype)}")
    return np.asarray(array)


def verify(folder: Path) -> dict[str, Any]:
    """Recomputes every checksum and checks the arrays; returns meta.json, UserError if anything differs."""
    meta = read_meta(folder)
    if meta is None:
        raise UserError(f"{folder}: no meta.json, so not a prepared set")
    for file, digest in meta["checksums"].items():
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: missing; delete the folder and prepare the set again")
        found = file_sha256(folder / file)
        if found != digest:
            raise UserError(
                f"{folder / file}: sha256 {found}, meta.json says {digest}; "
                "the file was changed or damaged: delete the folder and prepare the set again"
            )
    if array_hash(meta["checksums"], meta["num_features"], meta["num_labels"]) != meta["hash"]:
        raise UserError(f"{folder}/meta.json: the hash doesn't fit the checksums; prepare the set again")
    for split in SPLITS:
        check(open_points(folder, split, meta), f"{folder}/{split}")
    return meta
