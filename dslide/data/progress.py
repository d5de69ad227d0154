"""Progress on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

_SECONDS = 5.0  # between plain lines


class Progress:
    """Shows how many bytes of a task are done; made by `progress()`."""

    def __init__(self, bar: rich.progress.Progress | None) -> None:
        self._bar = bar

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields `advance(bytes)`; `total` 0 means unknown."""
        if self._bar is not None:
            bar, task = self._bar, self._bar.add_task(title, total=total or None)
            yield lambda done: bar.advance(task, done)
            return
        done, last = 0, time.monotonic()

        def advance(size: int) -> None:
            nonlocal done, last
            done += size
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
