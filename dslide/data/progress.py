"""Progress on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.console
import rich.progress

_SECONDS = 5.0  # between plain lines


class Advance(Protocol):
    def __call__(self, step: int, size: int = 0, /) -> None: ...


class Progress:
    """Shows how many bytes of a task are done; made by `progress()`."""

    def __init__(self, bar: rich.progress.Progress | None) -> None:
        self._bar = bar

    @contextmanager
    def task(self, title: str, size: int) -> Iterator["Advance"]:
        """Yields `advance(bytes, size=0)`; a `size` of 0 means unknown, or as known before."""
        if self._bar is not None:
            bar, task = self._bar, self._bar.add_task(title, total=size or None)

            def advance_bar(step: int, size: int = 0) -> None:
                if size:
                    bar.update(task, total=size)
                bar.advance(task, step)

            yield advance_bar
            return
        done, total, last = 0, size, time.monotonic()

        def advance(step: int, size: int = 0) -> None:
            nonlocal done, total, last
            done, total = done + step, size or total
            if time.monotonic() - last >= _SECONDS:
                last = time.monotonic()
                of = f" of {total / 1e6:.0f} MB ({100 * done / total:.0f} %)" if total else " MB"
                print(f"{title}: {done / 1e6:.0f}{of}", file=sys.stderr, flush=True)

        yield advance


@contextmanager
def progress() -> Iterator[Progress]:
    """Yields a Progress for one or more tasks."""
    if not sys.stderr.isatty():
        yield Progress(None)
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        yield Progress(bar)
