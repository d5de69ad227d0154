"""Several networks as one model: trained apart, their softmax probabilities averaged.

A member is an ordinary run with its own seed, which decides its first weights and its batches: member 0 is
the network that the same configuration trains alone. Members are trained one after another by all ranks, or
`ranks.groups` at a time, each by a group of the ranks; that is placement and no part of the model. A round
of members takes as long as its slowest, rounds add up. The members so far are evaluated after each round.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide import checkpoint as files
from dslide.bench.clock import TrainClock
from dslide.bench.protocol import total_steps
from dslide.bench.records import Recorder
from dslide.comm import LocalComm, local_threads
from dslide.config import RanksConfig, TrainConfig
from dslide.data import Dataset
from dslide.evaluation import EnsemblePredictor, Predictor
from dslide.memory import check_memory
from dslide.network import Manifest, Network, Shape, load_tensors, manifest, save_model
from dslide.progress import Progress
from dslide.trainer import TOP, Trainer, agree_on_inputs, data_record

_SUMMED = ("payload_bytes", "evaluation_bytes", "wait_seconds", "compute_seconds")
_AVERAGED = ("active_rows", "active_pairs")


def member_seed(seed: int, member: int) -> int:
    """The seed of a member's draws; member 0 keeps `seed`."""
    if member == 0:
        return seed
    return int(np.random.SeedSequence([seed, member]).generate_state(1, np.uint64)[0] >> 1)


class EnsembleTrainer:
    """One rank of an ensemble's run; from outside like a Trainer."""

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
        agree_on_inputs(config, dataset, comm)
        self.group, self._group_number = comm.split(config.ranks.groups)
        self.threads = config.threads or local_threads(comm)
        self.points = len(dataset.train)
        self.batch_size = max(1, min(config.batch_size, self.points))
        self.total_steps = config.ensemble * total_steps(max(1, self.points), self.batch_size, config.epochs)
        self.shape = Shape.of(
            dataset.num_features,
            config.network.hidden,
            dataset.num_labels,
            self.group.size,
            layers=config.network.layer_units(),
        )
        members = -(-config.ensemble // config.ranks.groups)
        kept = members * self.shape.weight_bytes(self.group.rank, config)
        labels_a_point = -(-len(dataset.train.y_indices) // max(1, self.points))
        need = self.shape.memory(self.group.rank, config, labels_a_point)
        self.progress.note(check_memory(comm, replace(need, weights=need.weights + kept)))
        self.pool = _core.Pool(self.threads)
        self.networks: dict[int, Network] = {}  # the trained members that this rank's group holds
        self.done = 0
        self.step = 0
        self.samples = 0
        self.last_eval: dict[str, Any] = {}
        self.earlier = {"payload_bytes": 0, "other_bytes": 0}  # before a resume: of all ranks, kept by rank 0
        self._sums = dict.fromkeys((*_SUMMED, *_AVERAGED), 0)
        self._activations: list[dict[str, Any]] = []
        self._trained_here = 0

    def run(self, checkpoint: Path | None = None, resume: bool = False) -> str:
        """As Trainer.run. A round cut short by the budget is left out, unless it is the first."""
        config = self.config
        if resume:
            assert checkpoint is not None
            files.restore_members(self, checkpoint)
        self.recorder.start(epoch=self.samples / self.points if self.points else 0.0)
        keep = checkpoint if config.checkpoint_every else None
        if keep is not None and not resume:
            files.write_members(self, keep)
        status = "done"
        while status == "done" and self.done < config.ensemble:
            before = self.done
            status = self._round(keep, resume)
            if self.done > before:
                status = self._evaluate(status)
            if keep is not None and status == "done" and self.done < config.ensemble:
                files.write_members(self, keep)
                self._forget(keep)
        if keep is not None:
            self._forget(keep)
        return status

    def _round(self, checkpoint: Path | None, resume: bool) -> str:
        """Trains the next members, one a group; the round's status."""
        config, clock = self.config, self.recorder.clock
        width = min(config.ranks.groups, config.ensemble - self.done)
        left = None
        if config.budget_seconds is not None:
            left = config.budget_seconds - clock.seconds
            if left <= 0:
                return "timeout"
        members = range(self.done, self.done + width)
        report, trainer = None, None
        for member in members:
            if self._holds(member):  # at most one, since there are as many groups
                status, trainer = self._train(member, left, checkpoint, resume)
                report = status, trainer.step, trainer.samples
        took = trainer.recorder.clock if trainer is not None else TrainClock()
        clock.restore(
            clock.seconds + self.comm.agree(took.seconds),
            clock.cpu_seconds + took.cpu_seconds,
            clock.tx_bytes + took.tx_bytes,
            clock.rx_bytes + took.rx_bytes,
        )
        everyone = self.comm.bcast(self.comm.gather(report if self.group.rank == 0 else None))
        reports = [report for report in everyone if report is not None]
        statuses = {status for status, _, _ in reports}
        worst = next((status for status in ("diverged", "timeout") if status in statuses), "done")
        if worst == "done" or (worst == "timeout" and self.done == 0):
            for member in members:
                self.add(member, trainer.network.weights() if trainer is not None else {})
            self.step += sum(step for _, step, _ in reports)
            self.samples += sum(samples for _, _, samples in reports)
        return worst

    def _train(
        self, member: int, left: float | None, checkpoint: Path | None, resume: bool
    ) -> tuple[str, Trainer]:
        """Trains one member by this rank's group, without evaluations."""
        config, group = self.config, self.group
        own = config.model_copy(
            update={
                "seed": member_seed(config.seed, member),
                "ensemble": 1,
                "ranks": RanksConfig(),
                "threads": self.threads,
                "eval_epochs": [],
                "target": None,
                "budget_seconds": left,
            }
        )
        nothing = self.dataset.test.take(np.zeros(0, np.int64))
        self._sums["evaluation_bytes"] += group.other_bytes
        group.payload_bytes = group.other_bytes = 0
        group.wait_seconds = 0.0
        recorder = Recorder.of(group, None)
        self.progress.note(f"member {member + 1} of {config.ensemble}")
        trainer = Trainer(own, replace(self.dataset, test=nothing), group, recorder)
        trainer.progress = self.progress
        folder = _member_checkpoint(checkpoint, member) if checkpoint is not None else None
        there = group.bcast(resume and folder is not None and (folder / "progress.json").exists())
        status = trainer.run(folder, there)
        totals = trainer.totals()
        for name in self._sums:
            self._sums[name] += totals[name]
        self._activations += [{"member": member, **layer} for layer in totals.get("activations", [])]
        self._trained_here += 1
        group.payload_bytes = group.other_bytes = 0  # they are in the sums
        return status, trainer

    def _holds(self, member: int) -> bool:
        """Whether this rank's group trains and keeps the member."""
        return member % self.config.ranks.groups == self._group_number

    def add(self, member: int, weights: dict[str, NDArray[Any]] | Manifest) -> None:
        """Takes in the next trained member: this rank's weights, or the files they are in."""
        self.done = member + 1
        if not self._holds(member):
            return
        network = Network(self.config, self.shape, self.group.rank, self.pool, training=False)
        if isinstance(weights, Manifest):
            load_tensors(network, weights, network.weights(), member)
        else:
            for name, array in network.weights().items():
                array[:] = weights[name]
        self.networks[member] = network

    def _evaluate(self, status: str) -> str:
        """Exact P@1/3/5 of the members trained so far, averaged; the status afterwards. Collective."""
        test = self.dataset.test
        if len(test) == 0:
            return status
        predictors = [
            Predictor(network, self.group, self.pool, normaliser=True, progress=self.progress)
            for network in self.networks.values()
        ]
        ids, scores, _ = EnsemblePredictor(self.comm, self.group, predictors, self.done).topk(test, TOP)
        self.last_eval = self.comm.bcast(
            self.recorder.evaluation(
                self.step, self.samples, self.samples / self.points, ids, scores, test, members=self.done
            )
        )
        self.progress.evaluated(self.last_eval)
        target = self.config.target
        if status == "done" and target is not None and self.last_eval["p1"] >= target:
            status = "target"
        return status

    def shards(self) -> dict[int, tuple[int, dict[str, NDArray[Any]]]]:
        """This rank's part of the trained members: the number of the shard, its tensors."""
        return {member: (self.group.rank, network.weights()) for member, network in self.networks.items()}

    def save(self, path: Path) -> None:
        """Writes the model's folder. Collective."""
        content = manifest(self.config, self.shape, data_record(self.dataset), self.step, self.done)
        save_model(self.comm, path, content, self.shards(), self.dataset.label_names)

    def _forget(self, checkpoint: Path) -> None:
        """Removes the checkpoints of members that are trained."""
        self.comm.barrier()
        if self.comm.rank == 0:
            for member in range(self.done):
                shutil.rmtree(_member_checkpoint(checkpoint, member), ignore_errors=True)
        self.comm.barrier()

    def sent_bytes(self) -> tuple[int, int]:
        """As Trainer.sent_bytes."""
        payload = self._sums["payload_bytes"] + self.earlier["payload_bytes"]
        other = self._sums["evaluation_bytes"] + self.group.other_bytes + self.earlier["other_bytes"]
        return int(payload), int(other)

    def totals(self) -> dict[str, Any]:
        """As Trainer.totals; active rows and pairs are a step's, the mean over members."""
        payload, other = self.sent_bytes()
        members = max(1, self._trained_here) * self.config.ranks.groups
        return {
            **{name: self._sums[name] for name in ("wait_seconds", "compute_seconds")},
            **{name: self._sums[name] / members for name in _AVERAGED},
            **({"activations": self._activations} if self._activations else {}),
            "payload_bytes": payload,
            "evaluation_bytes": other,
            "threads": self.threads,
            "step": self.step,
            "samples": self.samples,
            "epoch": self.samples / self.points if self.points else 0.0,
        }


def _member_checkpoint(checkpoint: Path, member: int) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}-member-{member}")
