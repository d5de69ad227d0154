"""Text files, plain, compressed or inside of archives, as blocks of whole lines that are read ahead."""

import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from dslide.data import archive
from dslide.errors import UserError

BLOCK = 32 << 20  # bytes of text in memory at a time; twice, since the next block is read meanwhile
LONGEST_LINE = 1 << 30
STDIN = Path("-")


class _Stdin:
    """Standard input; Python's own read of many bytes looks for signals only once it waits for a pipe."""

    def read(self, size: int) -> bytes:
        parts = []
        source = cast(BufferedReader, sys.stdin.buffer)
        while size > 0 and (data := source.read1(size)):
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


@dataclass(frozen=True)
class Text:
    """A file, plain or compressed (gzip, bzip2, xz), a member of an archive, or standard input (`-`)."""

    path: Path
    member: str = ""

    def __str__(self) -> str:
        if self.path == STDIN:
            return "standard input"
        return f"{self.path}/{self.member}" if self.member else str(self.path)

    @property
    def name(self) -> str:
        """What to call it in a progress bar; its ending tells the format."""
        return self.member or self.path.name

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, int]]:
        """The content as a stream, and its size in bytes (0: unknown); UserError if it can't be read."""
        if self.path == STDIN:
            yield cast(BinaryIO, _Stdin()), 0
            return
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


def blocks(text: Text, file: BinaryIO) -> Generator[bytes, None, None]:
    """The stream in blocks of whole lines; a thread reads (and unpacks) the next one meanwhile.

    Close it when you leave early: left to the garbage collector, its thread may be joined by a thread that is
    itself just starting, which never ends.
    """
    source = whole_lines(text, file, BLOCK)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, source, None)
        while (block := coming.result()) is not None:
            coming = reader.submit(next, source, None)
            yield block


def whole_lines(text: Text, file: BinaryIO, size: int) -> Iterator[bytes]:
    """The stream in blocks of whole lines, of about `size` bytes each."""
    rest = b""
    while True:
        try:
            data = file.read(size)
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
            if len(rest) > LONGEST_LINE:
                raise UserError(f"{text}: a line of more than {LONGEST_LINE >> 30} GB: not a text of points")
