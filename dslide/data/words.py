"""The word task of the SLIDE papers from running text: a word predicts its neighbours (skip-gram).

Every word of the text is a point: its one feature is the word, its labels are the words at most `window`
places before and after it (Mikolov et al. 2013; Daghaghi et al. 2021 use a window of 2 on Text8). Ids are the
vocabulary's, for features and labels alike: 0 stands for words that are too rare to be in it, then the words
by falling frequency, equally frequent ones in the order of their bytes. On Text8 that makes 253,855 ids, as
in the papers. The first `train_fraction` of the text are the training points, the rest the test points (the
papers give only the sizes), and no window crosses the cut.

The text is read once, in blocks; what is in memory is a block and the vocabulary, never the text.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from dslide.data import archive, format
from dslide.data.bags import tokens
from dslide.data.progress import Progress, progress
from dslide.data.text import Text
from dslide.errors import UserError

# Part of the source hash: change it when the same text becomes other arrays.
WORDS_VERSION = 1

UNKNOWN = "<unk>"
_BLOCK = 8 << 20  # bytes of text in memory at a time
_ROWS = 1 << 20  # points in memory at a time
_SPACE = b" \t\n\r\x0b\x0c"


class Words(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the word task."""

    window: int = pydantic.Field(default=2, ge=1, le=100)
    min_count: int = pydantic.Field(default=1, ge=1)  # rarer words become id 0
    train_fraction: float = pydantic.Field(default=0.8, gt=0, le=1)
    # what is between spaces (text that is prepared, like Text8), or dslide.data.bags.tokens (any text)
    tokens: Literal["spaces", "words"] = "spaces"


def convert(
    folder: Path, text: Text, words: Words, *, name: str, source: str, expected: dict[str, int] | None = None
) -> None:
    """Converts a text into the prepared folder `folder`; `source` is the source hash to record.

    UserError, and no folder, if the text can't be read, is too short, or has other sizes than expected.
    """
    # The vocabulary is known at the end only, but names of ids are given to `writing` at its beginning.
    names: list[str] = []
    with (
        format.writing(
            folder, name=name, source=source, labels=names, features=names, expected=expected
        ) as work,
        progress() as bar,
    ):
        place = work.folder / "sequence.npy"
        vocabulary, counts = _read(text, words, place, bar)
        new_id, kept = _by_frequency(vocabulary, counts, words.min_count)
        names += [UNKNOWN, *(word.decode("utf8", "replace") for word in kept)]
        work.num_features = work.num_labels = len(names)
        sequence = format.open_array(place, np.int32)
        cut = int(words.train_fraction * len(sequence))
        if min(cut, len(sequence)) < 2:
            raise UserError(f"{text}: {len(sequence)} words are too few to learn from")
        for split, part in zip(format.SPLITS, (sequence[:cut], sequence[cut:]), strict=True):
            writer = format.PointsWriter(work.folder / split)
            with bar.task(f"{name} {split}", 4 * len(part)) as advance:
                for points in _windows(part, new_id, words.window):
                    writer.append(points)
                    advance(4 * len(points.x_lengths))
            writer.close()
        place.unlink()


def _read(text: Text, words: Words, place: Path, bar: Progress) -> tuple[list[bytes], NDArray[np.int64]]:
    """Writes the text as ids in the order of first occurrence; returns the words in it, and their counts."""
    ids: defaultdict[bytes, int] = defaultdict(itertools.count().__next__)
    counts = np.zeros(0, np.int64)
    writer = format.ArrayWriter(place, np.int32)
    with text.open() as (file, size), bar.task(str(text.member or text.path.name), size) as advance:
        try:
            for block in _blocks(iter(lambda: file.read(_BLOCK), b"")):
                found = block.split() if words.tokens == "spaces" else _tokens(block)
                part = np.fromiter(map(ids.__getitem__, found), np.int32, len(found))
                more = np.bincount(part, minlength=len(ids))
                more[: len(counts)] += counts
                counts = more
                writer.append(part)
                advance(len(block))
        except archive.DAMAGED as error:
            raise UserError(f"{text}: {error}: the file is cut or damaged; fetch or copy it again") from None
    writer.close()
    return list(ids), counts


def _tokens(block: bytes) -> list[bytes]:
    return [word.encode() for word in tokens(block.decode("utf8", "replace"))]


def _blocks(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same text in blocks of whole words."""
    rest = b""
    for block in blocks:
        end = max(block.rfind(bytes([space])) for space in _SPACE) + 1
        if end == 0:
            rest += block
        else:
            yield rest + block[:end]
            rest = block[end:]
    yield rest


def _by_frequency(
    vocabulary: list[bytes], counts: NDArray[np.int64], min_count: int
) -> tuple[NDArray[np.int32], list[bytes]]:
    """The final id of every word, int32 [words], and the words that have one of their own, in its order."""
    order = sorted(range(len(vocabulary)), key=lambda word: (-counts[word], vocabulary[word]))
    kept = [word for word in order if counts[word] >= min_count]
    new_id = np.zeros(len(vocabulary), np.int32)
    new_id[kept] = np.arange(1, len(kept) + 1)
    return new_id, [vocabulary[word] for word in kept]


def _windows(sequence: NDArray[np.int32], new_id: NDArray[np.int32], window: int) -> Iterator[format.Part]:
    """The points of a text, in its order."""
    total = len(sequence)
    for begin in range(0, total, _ROWS):
        end = min(begin + _ROWS, total)
        first, last = max(begin - window, 0), min(end + window, total)
        # -1 beyond the ends of the text
        around = np.full(end - begin + 2 * window, -1, np.int32)
        at = first - (begin - window)
        around[at : at + last - first] = new_id[sequence[first:last]]
        centre = around[window : window + end - begin]
        places = [place for place in range(2 * window + 1) if place != window]
        labels = np.stack([around[place : place + end - begin] for place in places], axis=1)
        labels.sort(axis=1)
        keep = labels >= 0
        keep[:, 1:] &= labels[:, 1:] != labels[:, :-1]
        yield format.Part(
            x_lengths=np.ones(end - begin, np.int64),
            x_indices=centre,
            x_values=np.ones(end - begin, np.float32),
            y_lengths=keep.sum(axis=1, dtype=np.int64),
            y_indices=labels[keep],
        )
