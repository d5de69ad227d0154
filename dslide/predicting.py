"""`dslide predict`: points in, lines out, in bounded memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dslide.data import Points
from dslide.data.layout import Layout
from dslide.data.stream import stream
from dslide.data.text import STDIN, Text
from dslide.errors import UserError
from dslide.files import atomic_file
from dslide.inference import Model, table


def predict_file(model: Model, source: Path, out: Path, k: int, layout: Layout) -> int:
    """Predicts the points of `source` (`-`: standard input) into `out` (`-`: standard output). Collective.

    `out` appears when all is written. Returns the number of points. UserError as stream.
    """
    text = Text(source)
    if model.comm.rank > 0:
        return _answer(model, _shared(model, None), str(text), k, lambda _: None)
    if source != STDIN and (source.is_dir() or not source.exists()):
        raise UserError(f"{source}: no such file")
    if out.is_dir():
        raise UserError(f"{out}: a folder; --out takes a file, or - for standard output")
    blocks = stream(text, model.networks[0].shape.features, layout=layout, threads=model.pool.threads)
    with _output(out) as write:
        return _answer(model, _shared(model, blocks), str(text), k, write)


def _answer(
    model: Model, blocks: Iterator[Points], where: str, k: int, write: Callable[[bytes], None]
) -> int:
    names, row = model.label_names(), 0
    for points in blocks:
        for ids, probabilities in model.probable(points, k, where):
            if model.comm.rank == 0:
                write(table(ids, probabilities, names, row).encode())
            row += len(ids)
    return row


def _shared(model: Model, blocks: Iterator[Points] | None) -> Iterator[Points]:
    """Rank 0's blocks on every rank: it alone reads. An error there ends all ranks (dslide.cli)."""
    while True:
        block = model.comm.bcast(next(blocks, None) if blocks is not None else None)
        if block is None:
            return
        yield block


@contextmanager
def _output(out: Path) -> Iterator[Callable[[bytes], None]]:
    if out != Path("-"):
        with atomic_file(out) as file:
            yield lambda data: _write_all(file.write, data)
        return

    def write(data: bytes) -> None:
        try:
            _write_all(lambda part: os.write(1, part), data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise type(error)(error.errno, error.strerror, "standard output") from error

    yield write


def _write_all(write: Callable[[bytes], int], data: bytes) -> None:
    while data:
        data = data[write(data) :]
