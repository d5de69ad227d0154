"""Records of a run: what every table and figure is made from.

A run's folder has meta.json (written before step 1), events.jsonl (one object a line, appended and made
durable line by line), predictions/eval-<step>.npz (top-5 ids and scores, so that any metric can be computed
later) and log.txt. An event has `event`, `time` (seconds since 1970), `train_seconds`, and what belongs to
its kind: `eval` has step, epoch, samples, p1, p3, p5 (fractions); `step` has step and seconds; `end` has
status, reason and totals.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dslide.bench import machine
from dslide.bench.clock import TrainClock
from dslide.errors import UserError
from dslide.files import read_json_object, write_atomic
from dslide.memory import peak_bytes, peak_private_bytes, private_bytes

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
STATUSES = ("done", "target", "timeout", "diverged", "error", "skipped", "interrupted")
HEARTBEAT = ".heartbeat"  # in a run's folder while it runs
KINDS = ("measured", "composed", "projected")
_SUMMED = ("payload_bytes", "tx_bytes", "rx_bytes", "cpu_seconds")
_LARGEST = ("peak_rss_bytes", "training_bytes", "wait_seconds", "compute_seconds")


def plain(value: Any) -> Any:
    """For json.dumps: numpy scalars and arrays, paths."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


def append_event(folder: Path, event: dict[str, Any]) -> None:
    """Appends one event to a run's events.jsonl and makes it durable."""
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event, default=plain) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a file; a last line without its end (the writer died) is left out. UserError names file and
    line."""
    events = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not a JSON object: {error.msg}") from error
    return events


class Ranks(Protocol):
    """The ranks of a run and how they meet (see `dslide.bench.systems.Connection`)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def barrier(self) -> Callable[[], None] | None: ...
    @property
    def gather(self) -> Callable[[Any], list[Any] | None] | None: ...
    @property
    def agree(self) -> Callable[[float], float] | None: ...


class Recorder:
    """Writes a run's records. Created on every rank; only rank 0 writes.

    Args:
        out: the run's folder; None keeps the events in memory (`events`).
        rank, size: this rank and their number.
        barrier, gather, agree: how the ranks meet (see `dslide.bench.systems.Connection`); None for one rank.
        resume_step: continues a run that stopped: cuts events and predictions after this step, and sets the
            clock to what the last event left says.
        context: fields of the meta data that the launcher knows (cluster, link, spec).
    """

    @classmethod
    def of(cls, ranks: Ranks, out: Path | None, **more: Any) -> "Recorder":
        """This rank's recorder; `more`: resume_step, context."""
        return cls(
            out,
            rank=ranks.rank,
            size=ranks.size,
            barrier=ranks.barrier,
            gather=ranks.gather,
            agree=ranks.agree,
            **more,
        )

    def __init__(
        self,
        out: Path | None,
        *,
        rank: int = 0,
        size: int = 1,
        barrier: Callable[[], None] | None = None,
        gather: Callable[[Any], list[Any] | None] | None = None,
        agree: Callable[[float], float] | None = None,
        resume_step: int | None = None,
        context: dict[str, Any] | None = None,
    ) -> None:
        if size > 1 and (barrier is None or gather is None):
            raise ValueError("a recorder of several ranks needs barrier and gather")
        self.out = out
        self.rank = rank
        self.size = size
        self.events: list[dict[str, Any]] = []
        self.clock = TrainClock(barrier, agree)
        self.context = dict(context or {})
        self._gather = gather
        self._agree = agree
        self._resume_step = resume_step
        self._ended = False
        self._private_before = private_bytes()
        self._next_beat = 0.0
        if out is not None and rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                (out / "events.jsonl").unlink(missing_ok=True)
            else:
                self._cut_back(out, resume_step)

    def _cut_back(self, out: Path, step: int) -> None:
        path = out / "events.jsonl"
        events = read_events(path) if path.exists() else []
        kept = [e for e in events if e["event"] != "end" and e.get("step", 0) <= step]
        write_atomic(path, "".join(json.dumps(e) + "\n" for e in kept))
        for file in (out / "predictions").glob("eval-*.npz"):
            if int(file.stem.removeprefix("eval-")) > step:
                file.unlink()
        self.events = kept
        if kept:
            last = max(kept, key=lambda e: e["train_seconds"])
            self.clock.restore(last["train_seconds"], last.get("cpu_seconds", 0.0))

    def agree(self, value: float) -> float:
        """The maximum of a number over the ranks, the same on all; collective."""
        return value if self._agree is None else self._agree(value)

    def gather(self, value: Any) -> list[Any] | None:
        """All ranks' objects on rank 0; collective."""
        return [value] if self._gather is None else self._gather(value)

    def heartbeat(self, step: int, steps: int, **numbers: float) -> None:
        """Tells the launcher that the run is alive and how far it is; cheap, any rank may call it at every
        step.

        A run that gives no sign (event, heartbeat or log line) for the spec's `stall_seconds` is ended.
        """
        now = time.monotonic()
        if self.rank != 0 or self.out is None or now < self._next_beat:
            return
        self._next_beat = now + 1.0
        beat = {"step": step, "steps": steps, "train_seconds": self.clock.seconds, **numbers}
        (self.out / HEARTBEAT).write_text(json.dumps(beat, default=plain))

    def pace(self, step: Callable[[], None], *, warmup: int, steps: int) -> None:
        """Times steps: `warmup` untimed ones, then `steps` under the clock with a `step` event each;
        collective.

        An event has step (from 0), seconds, tx_bytes and rx_bytes (of rank 0's interface).
        """
        clock = self.clock
        for number in range(-warmup, steps):
            if number < 0:
                step()
                continue
            before = clock.seconds, clock.tx_bytes, clock.rx_bytes
            with clock:
                step()
            self.event(
                "step",
                step=number,
                seconds=clock.seconds - before[0],
                tx_bytes=clock.tx_bytes - before[1],
                rx_bytes=clock.rx_bytes - before[2],
            )

    def out_of_time(self, budget_seconds: float) -> bool:
        """Whether the training clock passed the budget on any rank; collective where the ranks have
        `agree`."""
        return self.agree(self.clock.seconds) > budget_seconds

    def meta(self, **fields: Any) -> None:
        """Writes meta.json: machine, versions, source, ranks, the launcher's context and `fields`.
        Collective.

        Call it before step 1. A resumed run keeps the meta data that it began with.
        """
        ranks = self.gather(machine.rank_facts())
        if self.rank != 0:
            return
        self._meta = {
            "schema_version": SCHEMA_VERSION,
            "kind": "measured",
            "created": time.time(),
            **self.context,
            "machine": machine.capture(),
            "ranks": ranks,
            **fields,
        }
        if self._meta["kind"] not in KINDS:
            raise ValueError(f"kind {self._meta['kind']!r} is none of {KINDS}")
        if self.out is not None and not (self._resume_step is not None and (self.out / "meta.json").exists()):
            write_atomic(self.out / "meta.json", json.dumps(self._meta, indent=1, default=plain) + "\n")

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Appends an event on rank 0; returns it. Not collective."""
        event = {
            "event": kind,
            "time": time.time(),
            "train_seconds": self.clock.seconds,
            "cpu_seconds": self.clock.cpu_seconds,
            **fields,
        }
        if self.rank == 0:
            self.events.append(event)
            if self.out is not None:
                append_event(self.out, event)
        return event

    def start(self, **fields: Any) -> None:
        """Marks the beginning of training, or of its continuation."""
        step = self._resume_step or 0
        self.event("start" if self._resume_step is None else "resume", **{"step": step, **fields})

    def evaluation(
        self,
        step: int,
        samples: int,
        epoch: float,
        ids: np.ndarray | None,
        scores: np.ndarray | None,
        points: Any,
        **fields: Any,
    ) -> dict[str, Any]:
        """Writes an `eval` event and the predictions. The clock must stand still. Collective where ranks
        `agree`.

        Args:
            step, samples, epoch: how far training is.
            ids: [n, 5] int32 labels, best first, of all points of the split; ranks other than 0 may give
            None. scores: [n, 5] float32 or float16; None keeps the ids alone.
            points: the split, for its y_indptr and y_indices.
            fields: more for the event.

        Returns:
            The event; with `agree`, p1, p3 and p5 are the same on all ranks.
        """
        if self.clock.running:
            raise RuntimeError("stop the training clock before an evaluation")
        values = [0.0, 0.0, 0.0]
        if self.rank == 0:
            from dslide.metrics import precision_at

            if ids is None:
                raise ValueError("rank 0 must give the predictions")
            precision = precision_at(ids, points.y_indptr, points.y_indices, ks=(1, 3, 5))
            values = [float(precision[k]) for k in (1, 3, 5)]
            if self.out is not None:
                self._write_predictions(self.out, step, ids, scores)
        p1, p3, p5 = (self.agree(v) for v in values)
        return self.event("eval", step=step, epoch=epoch, samples=samples, p1=p1, p3=p3, p5=p5, **fields)

    @staticmethod
    def _write_predictions(out: Path, step: int, ids: np.ndarray, scores: np.ndarray | None) -> None:
        arrays = {"ids": np.asarray(ids, np.int32)}
        if scores is not None:
            arrays["scores"] = np.asarray(scores)
        folder = out / "predictions"
        folder.mkdir(exist_ok=True)
        part = folder / f".eval-{step}.npz"
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / f"eval-{step}.npz")

    def end(self, status: str, **fields: Any) -> dict[str, Any]:
        """Writes the `end` event with the totals of every rank; returns it on rank 0. Collective.

        Args:
            status: one of STATUSES.
            fields: this rank's: payload_bytes (summed over ranks in the event, like tx_bytes, rx_bytes and
                cpu_seconds), wait_seconds and compute_seconds (the largest), and anything else (rank 0's).
                `ranks` has each rank's own.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {STATUSES}")
        if self._ended:
            raise RuntimeError("the run has ended before")
        self._ended = True
        own = {
            "peak_rss_bytes": peak_bytes(),
            "training_bytes": max(0, peak_private_bytes() - self._private_before),
            "tx_bytes": self.clock.tx_bytes,
            "rx_bytes": self.clock.rx_bytes,
            "cpu_seconds": self.clock.cpu_seconds,
            **fields,
        }
        ranks = self.gather(own)
        if self.rank != 0:
            return {}
        assert ranks is not None
        totals = {k: sum(r[k] for r in ranks) for k in _SUMMED if all(k in r for r in ranks)}
        totals |= {k: max(r[k] for r in ranks) for k in _LARGEST if all(k in r for r in ranks)}
        kept = int | float | np.generic | list
        numbers = [{k: v for k, v in r.items() if isinstance(v, kept)} for r in ranks]
        resumed = {} if self._resume_step is None else {"resumed_from": self._resume_step}
        return self.event("end", **{**resumed, "status": status, **fields, **totals, "ranks": numbers})

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended


@dataclass(frozen=True)
class Run:
    """A run as it was recorded."""

    meta: dict[str, Any]
    events: list[dict[str, Any]]
    folder: Path
    notes: list[str] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any] | None:
        """The `end` event, None if there is none."""
        return next((e for e in reversed(self.events) if e["event"] == "end"), None)

    @property
    def status(self) -> str:
        """How it ended; a run without an `end` event was interrupted."""
        end = self.end
        return "interrupted" if end is None else str(end["status"])

    @property
    def reason(self) -> str | None:
        """Why it failed or was skipped."""
        end = self.end
        return None if end is None else end.get("reason")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return [e for e in self.events if e["event"] == kind]

    def evals(self) -> "pd.DataFrame":
        """One row an evaluation: step, epoch, samples, train_seconds, p1, p3, p5, cpu_seconds."""
        import pandas as pd

        columns = ["step", "epoch", "samples", "train_seconds", "p1", "p3", "p5", "cpu_seconds"]
        return pd.DataFrame([{c: e.get(c) for c in columns} for e in self.of("eval")], columns=columns)

    def predictions(self, step: int) -> dict[str, np.ndarray]:
        """Arrays `ids` [n, 5] and perhaps `scores` of the evaluation after `step`."""
        with np.load(self.folder / "predictions" / f"eval-{step}.npz") as arrays:
            return {name: arrays[name] for name in arrays.files}


def read_run(folder: Path | str) -> Run:
    """Reads a run's folder. UserError if it has no meta.json, is of another version, or a line is broken."""
    folder = Path(folder)
    path = folder / "meta.json"
    meta = read_json_object(path, "a run's record")
    if meta.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version {meta.get('schema_version')}, this dslide reads {SCHEMA_VERSION}"
        )
    events = folder / "events.jsonl"
    return Run(meta=meta, events=read_events(events) if events.exists() else [], folder=folder)
