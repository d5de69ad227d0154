"""Points of the XC text format as they come: for prediction, which needs none of them twice."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from dslide import _core
from dslide.data.convert import read_header
from dslide.data.format import Points
from dslide.data.layout import MAX_ID, Layout
from dslide.data.progress import progress
from dslide.data.text import Text, whole_lines
from dslide.errors import UserError

BLOCK = 4 << 20  # bytes of text in memory at a time


def stream(
    text: Text, features: int, *, layout: Layout | None = None, threads: int | None = None
) -> Iterator[Points]:
    """Yields the points of `text` block by block, without their labels; shows progress on stderr.

    `features` is what the reader of the points knows: a feature beyond it is an error. What is accepted, and
    the errors (file, line, column), are otherwise those of dslide.data.convert. Blocks don't depend on
    `threads`.
    """
    layout = layout or Layout()
    layout.check()
    pool = _core.Pool(threads or len(os.sched_getaffinity(0)))
    base = layout.index_base or 0
    promised, limit, read, points, blank = None, features, 0, 0, 0
    with text.open() as (file, size), progress() as bar, bar.task(text.name, size) as advance:
        blocks = whole_lines(text, file, BLOCK)
        first = next(blocks, b"")
        if layout.header:
            head = len(first)
            (promised, stated, _), first = read_header(text, first, ("points", "features", "labels"))
            advance(head - len(first))
            limit = min(features, stated)
        for block in itertools.chain([first], blocks):
            parts = _core.parse_xc(pool, block, limit, MAX_ID, base, comments=not layout.header)
            if isinstance(parts, tuple):
                line, column, reason, kind = parts
                known = ""
                if kind == "feature outside" and limit == features:
                    known = f"; the model has {features} features, ids from {base}"
                raise UserError(f"{text}:{read + line + 1 + layout.header}:{column}: {reason}{known}")
            read += sum(part["lines"] for part in parts)
            lengths = [np.zeros(blank, np.int64), *(part["x_lengths"] for part in parts)]
            x_lengths = np.concatenate(lengths)
            blank = _blank_tail(parts, blank)
            yield _points(parts, x_lengths[: len(x_lengths) - blank], features)
            points += len(x_lengths) - blank
            advance(len(block))
    if promised is not None:
        tail = min(max(promised - points, 0), blank)
        if points + tail != promised:
            raise UserError(f"{text}:1:1: the header says {promised} points, but {points} lines follow")
        yield _points([], np.zeros(tail, np.int64), features)


def _blank_tail(parts: list[dict[str, Any]], before: int) -> int:
    """Empty lines at the end so far: points only if others follow, or if the header counts them."""
    blank = before
    for part in parts:
        rows = len(part["x_lengths"])
        blank = blank + rows if part["blank_tail"] == rows else part["blank_tail"]
    return blank


def _points(parts: list[dict[str, Any]], x_lengths: "np.ndarray[Any, Any]", features: int) -> Points:
    def joined(key: str, dtype: type) -> "np.ndarray[Any, Any]":
        return np.concatenate([np.zeros(0, dtype), *(part[key] for part in parts)])

    indptr = np.zeros(len(x_lengths) + 1, np.int64)
    np.cumsum(x_lengths, out=indptr[1:])
    return Points(
        x_indptr=indptr,
        x_indices=joined("x_indices", np.int32),
        x_values=joined("x_values", np.float32),
        y_indptr=np.zeros(len(x_lengths) + 1, np.int64),
        y_indices=np.zeros(0, np.int32),
        num_features=features,
        num_labels=0,
    )
