"""The training loop: steps (dslide.step), evaluations and checkpoints, under the harness's clock."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.bench.protocol import eval_steps, total_steps
from dslide.bench.records import Recorder
from dslide.comm import LocalComm, local_threads
from dslide.config import TrainConfig
from dslide.data import Dataset, batches
from dslide.depth import class_means
from dslide.errors import UserError
from dslide.evaluation import Predictor, core_csr
from dslide.memory import check_memory, private_bytes
from dslide.network import Network, Shape, manifest, save_model
from dslide.progress import Progress
from dslide.samplers import TableSampler, label_counts, make_sampler
from dslide.step import Steps

if TYPE_CHECKING:
    from dslide.ensemble import EnsembleTrainer

CHECK_SECONDS = 0.25  # how often ranks agree whether to go on
TOP = 5


def agree_on_inputs(config: TrainConfig, dataset: Dataset, comm: LocalComm) -> None:
    """Collective. Ranks that see other data or settings would compute nonsense without any error."""
    settings = json.dumps(config.model_dump(mode="json", exclude={"threads"}), sort_keys=True)
    mine = {
        "data": dataset.hash,
        "config": hashlib.sha256(settings.encode()).hexdigest(),
    }
    everyone = comm.bcast(comm.gather(mine))
    for rank, other in enumerate(everyone):
        for what, value in other.items():
            if value != everyone[0][what]:
                raise UserError(
                    f"rank {rank} has another {what} ({value[:12]}) than rank 0 "
                    f"({everyone[0][what][:12]}); all need the same files and settings"
                )


class Trainer:
    """One rank of a run. Every rank makes one, with the same config and data, and calls `run`."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        comm: LocalComm,
        recorder: Recorder,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.dataset, self.comm, self.recorder = config, dataset, comm, recorder
        self.progress = progress or Progress(None)
        self.points = len(dataset.train)
        if self.points == 0:
            raise UserError(f"{dataset.name}: the training split has no points")
        self.batch_size = min(config.batch_size, self.points)
        self.total_steps = total_steps(self.points, self.batch_size, config.epochs)
        if not math.isfinite(np.add.reduce(dataset.train.x_values, dtype=np.float64)):  # reads the pages, too
            raise UserError(f"{dataset.name}: a feature's value is not a finite number")
        self.threads = config.threads or local_threads(comm)
        agree_on_inputs(config, dataset, comm)
        self.shape = Shape.of(
            dataset.num_features,
            config.network.hidden,
            dataset.num_labels,
            comm.size,
            layers=config.network.layer_units(),
        )
        labels_a_point = math.ceil(len(dataset.train.y_indices) / self.points)
        self.progress.note(check_memory(comm, self.shape.memory(comm.rank, config, labels_a_point)))
        self.pool = _core.Pool(self.threads)
        self.network = Network(config, self.shape, comm.rank, self.pool, training=True)
        sizes, power = (dataset.num_features, dataset.num_labels), config.network.input_power
        with nullcontext() if power == 1 else recorder.clock:  # a system's own preparation is timed
            self._x, self._y = core_csr(dataset.train, *sizes, power)
        data = self._x, self._y
        self.steps = Steps(config, self.network, comm, self.pool, data, self.points, self.batch_size)
        self._predictor = Predictor(self.network, comm, self.pool, progress=self.progress)
        self.step = 0
        self.samples = 0
        self._until = self.total_steps  # where the weights are looked at next
        self.last_eval: dict[str, Any] = {}
        self._loss_sum, self._loss_points = 0.0, 0
        self._active_rows, self._active_pairs, self._steps_here = 0, 0, 0
        self.table_bytes = 0
        self.earlier = {"payload_bytes": 0, "other_bytes": 0}  # before a resume: of all ranks, kept by rank 0

    # The loop

    def run(self, checkpoint: "Path | None" = None, resume: bool = False) -> str:
        """Trains to the end, a target, the budget, divergence or an interrupt; returns the status.
        Collective.

        Checkpoints go to the folder `checkpoint`; `resume` begins from the one that is there.
        """
        from dslide import checkpoint as files

        clock, config = self.recorder.clock, self.config
        evaluate_at = eval_steps(self.points, self.batch_size, config.epochs, config.evaluation_epochs())
        if resume:
            assert checkpoint is not None
            files.restore(self, checkpoint)
        self.recorder.start(epoch=self.samples / self.points)
        self.progress.start(self.total_steps, self.step)
        clock.start()
        self._prepare(initialise=not resume)
        clock.stop()
        status = "done"
        if not resume:
            status = self._evaluate(status)
        while status == "done" and self.step < self.total_steps:
            until = min(s for s in [*evaluate_at, self.total_steps] if s > self.step)
            if config.checkpoint_every:
                until = min(until, self.step - self.step % config.checkpoint_every + config.checkpoint_every)
            clock.start()
            status = self._steps(until)
            self.network.settle()  # on the clock: dense Adam would have moved these rows at every step
            clock.stop()
            if self.step in evaluate_at and status == "done":
                status = self._evaluate(status)
            if (
                (
                    checkpoint is not None
                    and config.checkpoint_every
                    and self.step % config.checkpoint_every == 0
                )
                and status == "done"
                and self.step < self.total_steps
            ):
                files.write(self, checkpoint)
                clock.start()
                self.sampler.refresh(self.samples)
                self.steps.hidden.refresh(self.samples)
                clock.stop()
        if status in ("timeout", "diverged") and self.last_eval.get("step") != self.step:
            self._evaluate(status)
        self.progress.stop()
        return status

    def _prepare(self, *, initialise: bool) -> None:
        """What the system needs before step 1 and a rival might not: on the clock."""
        train = self.dataset.train
        if initialise and not self.network.hidden_layers:
            self.network.initialise(self._x, self._y)
        elif initialise and self.config.network.output_init == "class-mean":
            labels = train.y_indptr, train.y_indices
            stack, batch = self.steps.hidden, self.steps.batches[0]
            class_means(stack, self.network, batch, labels, self.points, self.batch_size)
        before = private_bytes()
        hashed = self.steps.hidden.make_samplers(self.samples)
        self.sampler = make_sampler(
            self.config.sampler,
            self.network.output,
            (self.shape.labels, *self.network.labels),
            label_counts(train.y_indices, self.shape.labels),
            self.points,
            self.batch_size,
            self.config.seed,
        )
        self.sampler.refresh(self.samples)
        hashed = hashed or isinstance(self.sampler, TableSampler)
        self.table_bytes = private_bytes() - before if hashed else 0
        self.steps.begin(self.step, self._batch_order(self.step), self.sampler)

    def _batch_order(self, step: int) -> Iterator[NDArray[np.int64]]:
        per_epoch = math.ceil(self.points / self.batch_size)
        epoch, skip = divmod(step, per_epoch)
        while True:
            for number, rows in enumerate(batches(self.points, self.batch_size, self.config.seed, epoch)):
                if number >= skip:
                    yield rows
            epoch, skip = epoch + 1, 0

    def _steps(self, until: int) -> str:
        """Steps to `until` or to a reason to stop; ranks look for one together, every CHECK_SECONDS or so."""
        self._until = until
        check = 1  # steps until ranks next agree; rank 0's pace decides
        begin, begin_step = time.perf_counter(), self.step
        while self.step < until:
            if not self._one_step():
                return "diverged"
            check -= 1
            if check <= 0 and self.step < until:
                stop, check = self._meet((time.perf_counter() - begin) / (self.step - begin_step))
                if stop:
                    break
        else:
            stop = self._meet(1.0)[0]
        self.steps.finish()
        return stop or "done"

    def _meet(self, seconds_a_step: float) -> tuple[str | None, int]:
        """Collective: why to stop, and in how many steps to ask again."""
        budget = self.config.budget_seconds
        seconds = self.recorder.clock.seconds
        everyone = self.comm.gather(self._loss_sum)
        answer: tuple[str | None, int] | None = None
        if everyone is not None:
            loss = sum(everyone) / max(1, self._loss_points)
            stop = None
            if not math.isfinite(loss):
                stop = "diverged"
            elif budget is not None and seconds > budget and self.step < self.total_steps:
                stop = "timeout"
            self.progress.update(
                self.step, self.samples, self.samples / self.points, seconds, loss, self.last_eval
            )
            answer = (stop, max(1, int(CHECK_SECONDS / max(seconds_a_step, 1e-6))))
        self._loss_sum, self._loss_points = 0.0, 0
        return self.comm.bcast(answer)  # type: ignore[no-any-return]

    def _learning_rate(self) -> float:
        rate = self.config.optimizer.learning_rate
        return (
            rate * max(0.0, 1 - self.step / self.total_steps)
            if self.config.optimizer.decay == "linear"
            else rate
        )

    def _one_step(self) -> bool:
        """One batch; False if the loss is no longer a number (every rank sees the same)."""
        rate, until = self._learning_rate(), max(self._until, self.step + 1)
        taken = self.steps.take(self.step, self.samples, rate, until=until, total=self.total_steps)
        if taken is None:
            return False
        loss, size = taken
        self._loss_sum += loss
        self._loss_points += size
        self._active_rows += self.network.output.active_rows
        self._active_pairs += self.network.output.active_pairs
        self._steps_here += 1
        self.step += 1
        self.samples += size
        return True

    def _evaluate(self, status: str) -> str:
        """Exact P@1/3/5 on the whole test split; the status afterwards. Collective, the clock stands."""
        test = self.dataset.test
        if len(test) == 0:
            return status
        begin = time.perf_counter()
        ids, scores, _ = self._predictor.topk(test, TOP)
        if self.comm.agree(float(np.isnan(scores).any())):
            status = "diverged"
        self.last_eval = self.comm.bcast(
            self.recorder.evaluation(
                self.step,
                self.samples,
                self.samples / self.points,
                ids if self.comm.rank == 0 else None,
                scores if self.comm.rank == 0 else None,
                test,
                seconds=time.perf_counter() - begin,
            )
        )
        self.progress.evaluated(self.last_eval)
        target = self.config.target
        if status == "done" and target is not None and self.last_eval["p1"] >= target and self.step > 0:
            status = "target"
        return status

    # What is kept and told afterwards

    def save(self, path: Path) -> None:
        """Writes the model's folder. Collective."""
        network, dataset = self.network, self.dataset
        content = manifest(self.config, self.shape, data_record(dataset), self.step)
        save_model(self.comm, path, content, {0: (self.comm.rank, network.weights())}, dataset.label_names)

    def sent_bytes(self) -> tuple[int, int]:
        """What this rank sent in training and in evaluations; what was sent before a resume is rank 0's."""
        earlier, comm = self.earlier, self.comm
        return comm.payload_bytes + earlier["payload_bytes"], comm.other_bytes + earlier["other_bytes"]

    def totals(self) -> dict[str, Any]:
        """This rank's numbers for the `end` event; what was sent before a resume is told by rank 0."""
        payload, other = self.sent_bytes()
        steps = max(1, self._steps_here)
        seconds = self.recorder.clock.seconds
        return {
            "payload_bytes": payload,
            "evaluation_bytes": other,
            "wait_seconds": self.comm.wait_seconds,
            "compute_seconds": max(0.0, seconds - self.comm.wait_seconds),
            "active_rows": self._active_rows / steps,
            "active_pairs": self._active_pairs / steps,
            **({"activations": record} if (record := self.steps.hidden.record()) else {}),
            "table_bytes": self.table_bytes,
            "threads": self.threads,
            "step": self.step,
            "samples": self.samples,
            "epoch": self.samples / self.points,
        }

    def _mean_loss(self) -> float | None:
        """Collective. The mean loss of the points since it was last asked for, on rank 0; None elsewhere."""
        everyone = self.comm.gather(self._loss_sum)
        loss = None if everyone is None else sum(everyone) / max(1, self._loss_points)
        self._loss_sum, self._loss_points = 0.0, 0
        return loss

    def time_steps(self, warmup: int, steps: int) -> None:
        """Steps for their times and losses alone (`step` events); each begins when all ranks are there."""
        clock = self.recorder.clock
        self.total_steps = max(self.total_steps, warmup + steps + 1)
        self._until = warmup + steps
        self.recorder.start()
        clock.start()
        self._prepare(initialise=True)
        clock.stop()
        for number in range(warmup + steps):
            if number >= warmup:
                self._mean_loss()  # what the warm-up left
                clock.start()
            begin = time.perf_counter()
            self._one_step()
            if number >= warmup:
                clock.stop()
                seconds = self.comm.agree(time.perf_counter() - begin)
                self.recorder.event("step", step=self.step, seconds=seconds, loss=self._mean_loss())
        self.steps.finish()


def data_record(dataset: Dataset) -> dict[str, Any]:
    """What records and manifests say of the data."""
    return {
        "name": dataset.name,
        "hash": dataset.hash,
        "num_features": dataset.num_features,
        "num_labels": dataset.num_labels,
        "train_points": len(dataset.train),
        "test_points": len(dataset.test),
    }


def meta_fields(trainer: "Trainer | EnsembleTrainer") -> dict[str, Any]:
    """What dslide adds to meta.json."""
    shape, config = trainer.shape, trainer.config
    return {
        "config": config.model_dump(mode="json"),
        "data": data_record(trainer.dataset),
        "seed": config.seed,
        "batch_size": config.batch_size,
        "total_steps": trainer.total_steps,
        "parameters": config.ensemble * shape.parameters(config),
        "instruction_set": _core.instruction_set(),
        "hidden_offsets": shape.hidden_cuts,
        **({"layer_offsets": shape.layer_cuts} if shape.layer_cuts else {}),
        "label_offsets": shape.label_cuts,
    }


def train(
    config: TrainConfig,
    dataset: Dataset,
    comm: LocalComm,
    recorder: Recorder,
    out: Path | None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and records; saves the model to `out`/model unless `out` is None or training failed.

    Collective: every rank calls it with the same arguments.

    Args:
        config: the whole configuration.
        dataset: training points, and test points to evaluate on (none: no evaluation).
        comm: the ranks.
        recorder: of this rank; its records end with the status.
        out: the run's folder, for the model and for checkpoints (those of an ensemble's member in training
            are beside the checkpoint of the trained ones).
        resume: continue from `out`/checkpoint.
        progress: where to show it.

    Returns:
        The result that `dslide train --json` prints, the same on every rank.

    Raises:
        UserError: data or settings that cannot be trained with.
        KeyboardInterrupt, SystemExit: from a signal's handler; the records end with `interrupted` and no
            model is written. With several ranks the caller must end the job, see dslide.comm.leave.
    """
    if config.checkpoint_every and out is None:
        raise UserError("checkpoint_every needs a run folder")
    config.ranks.check(comm.size, config.ensemble)
    from dslide.ensemble import EnsembleTrainer

    trainer: Trainer | EnsembleTrainer
    if config.ensemble == 1:
        trainer = Trainer(config, dataset, comm, recorder, progress=progress)
    else:
        trainer = EnsembleTrainer(config, dataset, comm, recorder, progress=progress)
    recorder.meta(**meta_fields(trainer))
    try:
        status = trainer.run(out / "checkpoint" if out is not None else None, resume)
        model = None
        if out is not None and status in ("done", "target", "timeout"):
            model = out / "model"
            trainer.save(model)
    except (KeyboardInterrupt, SystemExit):
        # Not Recorder.end, which waits for all ranks: they are no longer in step.
        recorder.event("end", status="interrupted", **trainer.totals())
        raise
    finally:
        trainer.progress.stop()
    end = comm.bcast(recorder.end(status, **trainer.totals()))
    return _result(trainer, status, end, model)


def _result(
    trainer: "Trainer | EnsembleTrainer", status: str, end: dict[str, Any], model: Path | None
) -> dict[str, Any]:
    seconds = trainer.recorder.clock.seconds
    evaluation = trainer.last_eval
    parameters = trainer.config.ensemble * trainer.shape.parameters(trainer.config)
    return {
        "status": status,
        "epochs": trainer.samples / trainer.points,
        "steps": trainer.step,
        "samples": trainer.samples,
        "train_seconds": end["train_seconds"],
        "samples_per_second": trainer.samples / seconds if seconds else 0.0,
        "p1": evaluation.get("p1"),
        "p3": evaluation.get("p3"),
        "p5": evaluation.get("p5"),
        "peak_rss_bytes": end["peak_rss_bytes"],
        "parameters": parameters,
        "bytes_per_parameter": sum(rank["training_bytes"] for rank in end["ranks"]) / parameters,
        "table_bytes": sum(rank.get("table_bytes", 0) for rank in end["ranks"]),
        "bytes_sent": end["payload_bytes"],
        "evaluation_bytes_sent": sum(rank["evaluation_bytes"] for rank in end["ranks"]),
        "active_rows": sum(rank["active_rows"] for rank in end["ranks"]),
        "active_pairs": sum(rank["active_pairs"] for rank in end["ranks"]),
        "ranks": trainer.comm.size,
        "threads": trainer.threads,
        "instruction_set": _core.instruction_set(),
        "model": str(model) if model is not None else None,
    }
