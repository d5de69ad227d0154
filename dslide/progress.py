"""Progress on stderr: a bar where it is a terminal, else a plain line every few seconds."""

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 5.0


class Progress:
    """Shows how far a run is. Made with None (other ranks, tests) it shows nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._bar: Bar | None = None
        self._total = 0
        self._last_line = time.monotonic()
        self._rate = (0.0, 0)  # training seconds and samples at the last update

    def note(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        elif self._stream is not None:
            print(line, file=self._stream, flush=True)

    def start(self, total: int, step: int) -> None:
        """Training begins at `step` of `total`."""
        self._total = total
        self._rate = (0.0, 0)
        self._last_line = time.monotonic()
        if self._stream is not None and self._stream.isatty():
            self._bar = Bar(
                TextColumn("training"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("training", total=total, completed=step, text="")
            self._bar.start()

    def update(
        self, step: int, samples: int, epoch: float, seconds: float, loss: float, last: dict[str, Any]
    ) -> None:
        """How far training is: the mean loss since the last update, the last evaluation's event."""
        if self._stream is None:
            return
        p1 = f"  P@1 {100 * last['p1']:.2f} %" if "p1" in last else ""
        if self._bar is None and time.monotonic() - self._last_line < LINE_SECONDS:
            return
        then, before = self._rate
        pace = (samples - before) / max(seconds - then, 1e-9)
        self._rate = (seconds, samples)
        text = f"epoch {epoch:.2f}  {pace:,.0f} samples/s  loss {loss:.3f}{p1}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        else:
            self._last_line = time.monotonic()
            self.note(f"step {step}/{self._total}  {text}")

    def scored(self, done: int, total: int) -> None:
        """Within an evaluation."""
        if self._bar is not None:
            self._bar.update(self._task, text=f"scoring {done:,} of {total:,} points")
        elif self._stream is not None and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.note(f"scoring {done:,} of {total:,} points")

    def evaluated(self, event: dict[str, Any]) -> None:
        """An evaluation has been made."""
        self.note(
            f"epoch {event['epoch']:.2f}  step {event['step']}  {event['train_seconds']:.2f} s  "
            f"P@1 {100 * event['p1']:.2f}  P@3 {100 * event['p3']:.2f}  P@5 {100 * event['p5']:.2f} %"
        )

    def stop(self) -> None:
        """Training is over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def on_stderr(rank: int) -> Progress:
    """Rank 0's progress goes to stderr, the others' nowhere."""
    return Progress(sys.stderr if rank == 0 else None)
