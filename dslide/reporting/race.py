"""The records of one experiment, arranged for tables and figures: systems, cluster shapes, seeds.

Nothing here measures and nothing writes: a `Race` is a pure function of the experiment file and the
record folders.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from dslide.bench.records import Run, read_run
from dslide.bench.spec import bits_per_second
from dslide.errors import UserError
from dslide.experiment import Experiment, System, load_experiment

# Statuses whose evaluations count. An error or an interruption says nothing about how long the system needs.
_COUNTS = ("done", "target", "timeout", "diverged")


@dataclass(frozen=True)
class Cluster:
    """A cluster shape of the experiment file; `bandwidth` in tc's spelling ("100mbit") or None."""

    id: str
    nodes: int = 1
    bandwidth: str | None = None
    cores: int | None = None

    @property
    def title(self) -> str:
        """For people: "1 node", "2 nodes, 100 Mbit/s", "2 nodes, no throttle"."""
        if self.nodes == 1:
            return "1 node"
        return f"{self.nodes} nodes, {speed(self.bandwidth) if self.bandwidth else 'no throttle'}"

    @property
    def shape(self) -> str:
        """With the cores that the records tell: "1 node of 2 cores", "2 nodes of 1 core, 100 Mbit/s"."""
        if self.cores is None:
            return self.title
        nodes, comma, link = self.title.partition(",")
        return f"{nodes} of {self.cores} core{'s' if self.cores > 1 else ''}{comma}{link}"

    @property
    def bits(self) -> float:
        """The link's rate in bit/s, infinite where nothing throttles it."""
        return bits_per_second(self.bandwidth) if self.bandwidth else math.inf


def speed(rate: str) -> str:
    """ "100mbit" -> "100 Mbit/s"."""
    value = bits_per_second(rate)
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} bit/s"


@dataclass(frozen=True, eq=False)
class Entry:
    """The runs of one system on one cluster shape, one a seed: a line of the figures, a row of the tables."""

    system: str
    label: str
    cluster: Cluster
    composed: bool
    runs: tuple[Run, ...]

    @cached_property
    def counted(self) -> list[Run]:
        """The runs with an evaluation after step 0 and a status that lets it count."""
        return [run for run in self.runs if run.status in _COUNTS and len(later(run))]

    @cached_property
    def frames(self) -> list[pd.DataFrame]:
        """The evaluations of the counted runs (see `evaluations`)."""
        return [evaluations(run) for run in self.counted]

    @property
    def reason(self) -> str | None:
        """Why there is no line, or None: the status and reason of what stopped it."""
        if self.counted:
            return None
        if not self.runs:
            return "no record"
        return f"{self.runs[0].status}: {self.runs[0].reason or ''}".rstrip(": ")

    @property
    def statuses(self) -> str:
        """The statuses of the seeds, "done" or "done, timeout"."""
        return ", ".join(sorted({str(run.status) for run in self.runs})) or "no record"

    @property
    def point(self) -> bool:
        """Whether the system was evaluated only once after step 0 (it may have no batches): a marker,
        not a line."""
        return bool(self.frames) and all((frame["step"] > 0).sum() == 1 for frame in self.frames)

    @cached_property
    def curve(self) -> pd.DataFrame:
        """Medians over seeds at every evaluation that at least half of them made, step 0 included.

        Columns step, epoch, samples, seconds, p1, p3, p5 (fractions) and p1_low, p1_high (the seeds' range).
        """
        frames = self.frames
        if not frames:
            return pd.DataFrame(
                columns=["step", "epoch", "samples", "seconds", "p1", "p3", "p5", "p1_low", "p1_high"]
            )
        groups = pd.concat(frames).groupby("step")
        curve = groups.median(numeric_only=True)
        curve["p1_low"], curve["p1_high"] = groups["p1"].min(), groups["p1"].max()
        return curve[groups.size() * 2 >= len(frames)].reset_index()

    @property
    def cut(self) -> bool:
        """Whether most seeds were stopped by their time budget."""
        return sum(run.status == "timeout" for run in self.counted) * 2 > len(self.counted)


def evaluations(run: Run) -> pd.DataFrame:
    """One row an evaluation, by step: step, epoch, samples, seconds (training clock), p1, p3, p5."""
    frame = run.evals().rename(columns={"train_seconds": "seconds"})
    columns = ["step", "epoch", "samples", "seconds", "p1", "p3", "p5"]
    return frame.reindex(columns=columns).sort_values("step", kind="stable").reset_index(drop=True)


def later(run: Run) -> pd.DataFrame:
    """The evaluations after step 0."""
    frame = evaluations(run)
    return frame[frame["step"] > 0]


@dataclass
class Race:
    """An experiment's file and records.

    `inputs` names every file that was read, relative to the results folder or, for the experiment, by
    its name,
    with its sha256.
    """

    experiment: Path
    results: Path
    spec: Experiment
    clusters: dict[str, Cluster] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, experiment: Path, results: Path) -> Race:
        """Reads all records below `results`; raises UserError where the experiment cannot be read."""
        spec = load_experiment(experiment)
        if not results.is_dir():
            raise UserError(f"{results}: no such folder; run the experiment first")
        race = cls(experiment, results, spec)
        race.inputs[experiment.name] = hashlib.sha256(experiment.read_bytes()).hexdigest()
        race.clusters = {
            key: Cluster(key, value.nodes, value.bandwidth, race._cores(key))
            for key, value in spec.clusters.items()
        }
        race.entries = race._entries()
        return race

    def _cores(self, cluster: str) -> int | None:
        """Cores a node, as the first record of a cluster shape has it ("auto" is resolved there)."""
        for file in sorted(self.results.glob(f"*/*/{cluster}/seed-*/meta.json")):
            cores = (read_run(file.parent).meta.get("cluster") or {}).get("cores")
            if cores:
                return int(cores)
        return None

    @property
    def targets(self) -> list[float]:
        """The experiment's targets: P@1, fractions, ascending."""
        return self.spec.targets

    @property
    def systems(self) -> dict[str, System]:
        """The experiment's systems by id, in its order."""
        return self.spec.systems

    def _entries(self) -> list[Entry]:
        entries = []
        for key, system in self.systems.items():
            composed = system.composed.paces if system.composed else []
            for cluster in dict.fromkeys([*system.clusters, *composed]):
                runs = self.seeds("composed" if cluster in composed else "runs", key, cluster)
                entries.append(
                    Entry(key, system.label, self.clusters[cluster], cluster in composed, tuple(runs))
                )
        return entries

    def seeds(self, kind: str, system: str, cluster: str) -> list[Run]:
        """The runs of results/<kind>/<system>/<cluster>/seed-*, by seed."""
        folder = self.results / kind / system / cluster
        found = [path for path in folder.glob("seed-*") if (path / "meta.json").is_file()]
        return [
            self.read(path) for path in sorted(found, key=lambda path: int(path.name.removeprefix("seed-")))
        ]

    def read(self, folder: Path) -> Run:
        """Reads one run and remembers its files as inputs."""
        for name in ("meta.json", "events.jsonl"):
            if (folder / name).is_file():
                key = (folder / name).relative_to(self.results).as_posix()
                self.inputs[key] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        return read_run(folder)

    @property
    def drawn(self) -> list[Cluster]:
        """The cluster shapes with an entry, in the experiment's order: the panels."""
        used = {entry.cluster.id for entry in self.entries}
        return [cluster for cluster in self.clusters.values() if cluster.id in used]

    def find(self, system: str | None, cluster: str) -> Entry | None:
        """The entry of a system on a cluster shape, or None."""
        for entry in self.entries:
            if entry.system == system and entry.cluster.id == cluster:
                return entry
        return None
