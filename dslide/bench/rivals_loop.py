"""The training loop of the rivals that train in batches: one order, one clock, the same evaluation points."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from scipy import sparse

from dslide.bench.protocol import eval_steps, samples_at, total_steps
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.data import Dataset, Points, batches, load

_CHECK_EVERY = 2.0  # seconds between looks at the budget: the ranks must agree, which costs an exchange


class Trainer(Protocol):
    """A rival's network, ready to train: traced, compiled and back at its initial weights."""

    def prepare(self) -> None:
        """What depends on the data and belongs to training: counts, data-dependent initialisation."""

    def feed(self, batch: NDArray[np.int64], step: int) -> Any:
        """Host-side preparation of a global batch; runs in a thread of its own, one batch ahead."""

    def step(self, feed: Any, step: int, progress: float) -> None:
        """One step; `progress` is the share of all steps that lies behind, 0 to 1, for the learning rate."""

    def predict(self, x: sparse.csr_matrix) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Exact top-5 of the points x, CSR [n, D]: ids and scores [n, 5]. Not collective."""


def read_dataset(spec: RunSpec) -> Dataset:
    """The run's data set; its training part's validation split if the spec says so."""
    dataset = load(spec.data)
    return dataset.validation() if spec.split == "validation" else dataset


def _order(spec: RunSpec, num_points: int, steps: int) -> Iterator[NDArray[np.int64]]:
    step = epoch = 0
    while step < steps:
        for batch in batches(num_points, spec.batch_size, spec.seed, epoch):
            if step == steps:
                return
            yield batch
            step += 1
        epoch += 1


def _feeds(ahead: Executor, trainer: Trainer, order: Iterator[NDArray[np.int64]]) -> Iterator[Any]:
    """What `trainer.feed` makes of each batch, made while the step before it runs."""
    coming: Future[Any] | None = None
    for step, batch in enumerate(order):
        following = ahead.submit(trainer.feed, batch, step)
        if coming is not None:
            yield coming.result()
        coming = following
    if coming is not None:
        yield coming.result()


def run_on_one_node(
    spec: RunSpec, recorder: Recorder, trainer: Callable[..., Trainer], settings: BaseModel
) -> None:
    """A whole run of TensorFlow in one process: reads the data, makes the trainer, races it."""
    from dslide.bench.rivals_tf import use_threads  # here: the module serves systems without TensorFlow too

    use_threads(spec.cluster.cores)
    dataset = read_dataset(spec)
    race(spec, recorder, dataset, trainer(dataset, settings, seed=spec.seed, batch_size=spec.batch_size))


def race(spec: RunSpec, recorder: Recorder, dataset: Dataset, trainer: Trainer, **meta: Any) -> None:
    """Trains and evaluates by the spec and ends the record: `done`, `target`, `timeout` or `diverged`.

    The clock runs from `prepare` to the last step and stands still during evaluations. With `pace_steps` only
    steps are timed and nothing is evaluated. Collective.
    """
    recorder.meta(data_hash=dataset.hash, **meta)
    recorder.start()
    if spec.pace_steps is not None:
        _pace(spec, recorder, dataset, trainer, spec.pace_steps)
        return
    points = len(dataset.train)
    steps = total_steps(points, spec.batch_size, spec.epochs)
    looks = set(eval_steps(points, spec.batch_size, spec.epochs, spec.eval_epochs))
    recorder.clock.start()
    trainer.prepare()
    recorder.clock.stop()
    status = _evaluate(spec, recorder, dataset, trainer, 0)
    step = 0
    if status is None:
        last = steps if spec.stop_epochs is None else total_steps(points, spec.batch_size, spec.stop_epochs)
        step, status = _train(spec, recorder, dataset, trainer, steps, min(last, steps), looks)
    if step not in looks and status != "diverged":
        _evaluate(spec, recorder, dataset, trainer, step)
    recorder.end(status or "done", steps=step)


def _train(
    spec: RunSpec,
    recorder: Recorder,
    dataset: Dataset,
    trainer: Trainer,
    steps: int,
    last: int,
    looks: set[int],
) -> tuple[int, str | None]:
    """Trains up to step `last` on a schedule of `steps`; returns the steps done and the status that ended it
    early, if one did."""
    step, check, status = 0, 1, None
    with ThreadPoolExecutor(1) as ahead:
        recorder.clock.start()
        for feed in _feeds(ahead, trainer, _order(spec, len(dataset.train), last)):
            trainer.step(feed, step, step / steps)
            step += 1
            if step in looks:
                recorder.clock.stop()
                status = _evaluate(spec, recorder, dataset, trainer, step)
                recorder.clock.start()
            if status is None and step >= check:
                seconds = recorder.agree(recorder.clock.seconds)
                status = "timeout" if seconds > spec.budget_seconds else None
                check = step + max(1, int(_CHECK_EVERY * step / seconds))
            if status is not None:
                break
            recorder.heartbeat(step, steps)
        recorder.clock.stop()
    return step, status


def _evaluate(spec: RunSpec, recorder: Recorder, dataset: Dataset, trainer: Trainer, step: int) -> str | None:
    """Records an evaluation; returns the status that it ends the run with, or None."""
    began = time.perf_counter()
    ids, scores = _predict(recorder, dataset.test, trainer)
    points = len(dataset.train)
    samples = samples_at(step, points, spec.batch_size)
    seconds = time.perf_counter() - began
    event = recorder.evaluation(
        step, samples, samples / points, ids, scores, dataset.test, eval_seconds=seconds
    )
    if recorder.rank == 0:
        where = f"step {step}, epoch {samples / points:.2f}"
        print(f"{where}: P@1 {event['p1']:.4f}, {event['train_seconds']:.2f} s", file=sys.stderr, flush=True)
    if recorder.agree(float(scores is not None and not np.isfinite(scores).all())):
        return "diverged"
    return "target" if spec.target is not None and event["p1"] >= spec.target else None


def _predict(
    recorder: Recorder, points: Points, trainer: Trainer
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Every rank predicts its part; rank 0 gets all of it, the others None."""
    n, rank, size = len(points), recorder.rank, recorder.size
    parts = recorder.gather(trainer.predict(points.x[n * rank // size : n * (rank + 1) // size]))
    if recorder.rank != 0 or parts is None:
        return None, None
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([scores for _, scores in parts])


def _pace(spec: RunSpec, recorder: Recorder, dataset: Dataset, trainer: Trainer, timed: int) -> None:
    """Times single steps after a warm-up; a step waits for its batch, as it does in training."""
    trainer.prepare()
    total = spec.pace_warmup + timed
    with ThreadPoolExecutor(1) as ahead:
        feeds = enumerate(_feeds(ahead, trainer, _order(spec, len(dataset.train), total)))

        def step() -> None:
            number, feed = next(feeds)
            trainer.step(feed, number, 0.0)

        recorder.pace(step, warmup=spec.pace_warmup, steps=timed)
    recorder.end("done", steps=total)
