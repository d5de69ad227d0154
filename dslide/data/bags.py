"""Bags of words: what the embedded sets are made of, and how tf-idf features come out of them.

An embedded set is one `.npz` (a zip of arrays, LZMA-compressed, readable by `numpy.load`) of integers:

    documents             int64 scalar    documents that the frequencies below were counted on
    document_frequency    int32 [D]       in how many of them a feature occurs
    features, labels      uint8           names, UTF-8, one a line
    <split>_x_lengths     [n]             features of a point
    <split>_x_gaps        [nnz]           their ids, ascending; all but a row's first as gaps
    <split>_x_counts      [nnz]           how often they occur in the point
    <split>_y_lengths, <split>_y_gaps     the labels, likewise
    train_groups          int32 [n]       optional: points that share a source
"""

import decimal
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dslide.data.format import Points
from dslide.errors import UserError
from dslide.files import write_atomic

# Part of the source hash of an embedded set: change it when the same counts give other features.
BAGS_VERSION = 1

_TOKEN = re.compile(r"[a-z0-9][a-z0-9+#.\-]*[a-z0-9+#]|[a-z0-9]")


def tokens(text: str) -> list[str]:
    """The words of `text`: lower case, inner `.`, `-`, `+`, `#` kept ("c++", "gtk-3.0")."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Document:
    """One point before it has ids: word counts, label names, and the source that it shares with others."""

    words: Counter[str]
    labels: frozenset[str]
    group: str | None = None


@dataclass(frozen=True)
class Bags:
    """A set as integers; `arrays` as described at the top of this file."""

    arrays: dict[str, NDArray]

    @property
    def num_features(self) -> int:
        return len(self.arrays["document_frequency"])

    @property
    def num_labels(self) -> int:
        return len(self.names("labels"))

    def names(self, kind: str) -> list[str]:
        """The names of the "features" or the "labels", in the order of their ids."""
        text = self.arrays[kind].tobytes().decode()
        return text.split("\n") if text else []

    def points(self, split: str) -> Points:
        """The points of "train" or "test" with tf-idf values, each row of length 1 (float32)."""
        x_indptr, x_indices = _rows(self.arrays[f"{split}_x_lengths"], self.arrays[f"{split}_x_gaps"])
        y_indptr, y_indices = _rows(self.arrays[f"{split}_y_lengths"], self.arrays[f"{split}_y_gaps"])
        values = _tf_idf(
            x_indptr,
            x_indices,
            self.arrays[f"{split}_x_counts"],
            self.arrays["document_frequency"],
            int(self.arrays["documents"]),
        )
        return Points(x_indptr, x_indices, values, y_indptr, y_indices, self.num_features, self.num_labels)


def build(train: Sequence[Document], test: Sequence[Document], min_df: int = 2) -> Bags:
    """Numbers words and labels in sorted order and drops what can't be learned or tested.

    The vocabulary (words in at least `min_df` documents) and the document frequencies come from all of
    `train`, also from documents without labels; the labels from train. Then labels unseen in train are
    dropped, and points without a label or a word.
    """
    frequency = Counter(word for document in train for word in document.words)
    words = sorted(word for word, count in frequency.items() if count >= min_df)
    labels = sorted({label for document in train for label in document.labels})
    word_ids = {word: i for i, word in enumerate(words)}
    label_ids = {label: i for i, label in enumerate(labels)}
    arrays: dict[str, NDArray] = {
        "documents": np.array(len(train), np.int64),
        "document_frequency": np.array([frequency[word] for word in words], np.int32),
        "features": np.frombuffer("\n".join(words).encode(), np.uint8),
        "labels": np.frombuffer("\n".join(labels).encode(), np.uint8),
    }
    for split, documents in (("train", train), ("test", test)):
        kept = [d for d in documents if d.words.keys() & word_ids.keys() and d.labels & label_ids.keys()]
        features = [sorted((word_ids[w], c) for w, c in d.words.items() if w in word_ids) for d in kept]
        targets = [sorted(label_ids[name] for name in d.labels if name in label_ids) for d in kept]
        ids = [[feature for feature, _ in row] for row in features]
        arrays[f"{split}_x_lengths"], arrays[f"{split}_x_gaps"] = _gaps(ids)
        arrays[f"{split}_x_counts"] = _compact([count for row in features for _, count in row])
        arrays[f"{split}_y_lengths"], arrays[f"{split}_y_gaps"] = _gaps(targets)
        if split == "train" and any(d.group is not None for d in kept):
            names = {name: i for i, name in enumerate(sorted({str(d.group) for d in kept}))}
            arrays["train_groups"] = np.array([names[str(d.group)] for d in kept], np.int32)
    return Bags(arrays)


def save(bags: Bags, path: Path) -> None:
    """Writes the same bytes for the same arrays: no time stamps inside."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        for name in sorted(bags.arrays):
            content = io.BytesIO()
            np.lib.format.write_array(content, bags.arrays[name], version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_LZMA)
    write_atomic(path, buffer.getvalue())


def read(path: Path) -> Bags:
    """Reads what `save` wrote; UserError if it isn't there or broken."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Bags({name: archive[name] for name in archive.files})
    except FileNotFoundError:
        raise UserError(f"{path}: the embedded data set is missing; reinstall, or restore the file") from None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{path}: not a readable set of bags ({error}); restore the file") from None


def _compact(values: Iterable[int]) -> NDArray:
    """As the smallest unsigned type that holds them all."""
    array = np.fromiter(values, np.int64)
    top = int(array.max()) if len(array) else 0
    return array.astype(np.uint8 if top < 1 << 8 else np.uint16 if top < 1 << 16 else np.uint32)


def _gaps(rows: Sequence[Sequence[int]]) -> tuple[NDArray, NDArray]:
    gaps = (b - a for row in rows for a, b in zip([0, *row], row, strict=False))
    return _compact(len(row) for row in rows), _compact(gaps)


def _rows(lengths: NDArray, gaps: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """CSR index arrays from lengths and gaps: a running sum that starts anew at every row."""
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    total = np.zeros(len(gaps) + 1, np.int64)
    np.cumsum(gaps, out=total[1:])
    return indptr, (total[1:] - np.repeat(total[indptr[:-1]], np.diff(indptr))).astype(np.int32)


def _tf_idf(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], counts: NDArray, frequency: NDArray, documents: int
) -> NDArray[np.float32]:
    """(1 + ln tf)(ln((1+n)/(1+df)) + 1), rows scaled to length 1: the same bits on every machine.

    Logarithms differ in the last bit between math libraries, so they are taken in decimal arithmetic (of the
    few distinct arguments only); the rest is single IEEE operations in float64 with sums in a fixed order.
    """
    local = 1 + _ln(counts, lambda count: count)
    rarity = 1 + _ln(frequency, lambda df: decimal.Decimal(1 + documents) / (1 + df))
    values = local * rarity[indices]
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    norm = np.sqrt(np.bincount(row, values * values, minlength=len(indptr) - 1))
    return (values / norm[row]).astype(np.float32)


def _ln(values: NDArray, of: Callable[[decimal.Decimal], decimal.Decimal]) -> NDArray[np.float64]:
    """ln(of(value)) of integers, computed once for each distinct one."""
    unique, inverse = np.unique(values, return_inverse=True)
    with decimal.localcontext(decimal.Context(prec=40)):
        logs = [float(of(decimal.Decimal(int(value))).ln()) for value in unique]
    return np.array(logs, np.float64)[inverse]
