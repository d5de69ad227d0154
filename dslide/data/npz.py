"""SciPy's `.npz` matrices, in which PECOS publishes its sets, read in slices of rows.

They are never in memory as a whole, other layouts than CSR and the borders of the rows excepted.
"""

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, load_npz

from dslide.data import archive
from dslide.data.text import Text
from dslide.errors import UserError

_BLOCK = 4 << 20  # non-zeros in memory at a time


class Matrix:
    """A sparse matrix in an `.npz` file that is read from its first row to its last; a context manager.

    A copy lies in `folder` meanwhile. UserError if it isn't what scipy.sparse.save_npz writes.
    """

    def __init__(self, text: Text, folder: Path) -> None:
        self.name = str(text)
        self._stack = ExitStack()
        try:
            with text.open() as (stream, _):  # a member of a tar archive can't be read in two places at once
                file = self._stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
                shutil.copyfileobj(stream, file, 1 << 20)
            file.seek(0)
            with np.load(file, allow_pickle=False) as content:
                layout = content["format"].item()
                self.shape = tuple(int(size) for size in content["shape"])
                if layout == b"csr":
                    self.indptr = content["indptr"].astype(np.int64)
            file.seek(0)
            self._whole: csr_matrix | None = None
            if layout == b"csr":
                members = self._stack.enter_context(zipfile.ZipFile(file))
                self._indices, self._values = (_Array(members, key) for key in ("indices", "data"))
                nnz = len(self._indices)
                if len(self._values) != nnz:
                    raise ValueError(f"{nnz} indices but {len(self._values)} values")
            else:
                self._whole = load_npz(file).tocsr()
                self.indptr = self._whole.indptr.astype(np.int64)
                nnz = self._whole.nnz
            if len(self.shape) != 2 or len(self.indptr) != self.shape[0] + 1 or max(self.shape) > 2**31 - 1:
                raise ValueError(f"shape {self.shape} with {len(self.indptr) - 1} rows")
            if self.indptr[0] != 0 or self.indptr[-1] != nnz or (np.diff(self.indptr) < 0).any():
                raise ValueError("indptr doesn't fit the indices")
        except (KeyError, ValueError, *archive.DAMAGED) as error:
            self._stack.close()
            raise UserError(f"{self.name}: not a matrix of scipy.sparse.save_npz ({error})") from None

    def __enter__(self) -> "Matrix":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slices(self) -> Iterator[csr_matrix]:
        """All rows in slices of about _BLOCK non-zeros, at least one row each.

        Ids ascend within a row and repeated ones are added up; values are float32. UserError for ids outside
        the shape and for values that aren't finite.
        """
        begin, last = 0, len(self.indptr) - 1
        while begin < last:
            end = int(np.searchsorted(self.indptr, self.indptr[begin] + _BLOCK, side="right")) - 1
            end = min(max(end, begin + 1), last)
            yield self._read(begin, end)
            begin = end

    def _read(self, begin: int, end: int) -> csr_matrix:
        if self._whole is not None:
            rows = self._whole[begin:end].astype(np.float32)
        else:
            indptr = self.indptr[begin : end + 1]
            count = int(indptr[-1] - indptr[0])
            try:
                indices, values = self._indices.read(count), self._values.read(count)
            except archive.DAMAGED as error:
                raise UserError(f"{self.name}: {error}: the file is cut or damaged") from None
            if count and (indices.min() < 0 or indices.max() >= self.shape[1]):
                raise UserError(f"{self.name}: ids outside 0..{self.shape[1] - 1} in rows {begin}..{end - 1}")
            ids, borders = indices.astype(np.int32), (indptr - indptr[0]).astype(np.int32)
            with np.errstate(over="ignore"):  # looked for below
                numbers = values.astype(np.float32)
            rows = csr_matrix((numbers, ids, borders), (end - begin, self.shape[1]))
        if not np.isfinite(rows.data).all():
            raise UserError(f"{self.name}: values that aren't finite in float32 in rows {begin}..{end - 1}")
        rows.has_canonical_format = False  # looked at only now: nobody has said so
        rows.sum_duplicates()
        return rows


class _Array:
    """A one-dimensional `.npy` inside of an `.npz` as a stream."""

    def __init__(self, members: zipfile.ZipFile, name: str) -> None:
        self._stream: BinaryIO = members.open(f"{name}.npy")  # type: ignore[assignment]
        old = np.lib.format.read_magic(self._stream) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, self._dtype = read(self._stream)
        if len(shape) != 1 or self._dtype.hasobject:
            raise ValueError(f"{name}: {self._dtype} {shape}, expected one dimension of numbers")
        self._length = shape[0]

    def __len__(self) -> int:
        return int(self._length)

    def read(self, count: int) -> NDArray:
        """The next `count` numbers; EOFError if the file ends before."""
        content = self._stream.read(count * self._dtype.itemsize)
        if len(content) != count * self._dtype.itemsize:
            raise EOFError("the array ends too early")
        return np.frombuffer(content, self._dtype)
