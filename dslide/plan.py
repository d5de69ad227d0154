"""What the Snakefile asks about an experiment: stamps, threads, messages, and when a run is stale."""

import ast
import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from dslide.bench import systems
from dslide.bench.spec import RunSpec
from dslide.experiment import (
    OWN_SYSTEM,
    RunId,
    composed_ids,
    composed_parts,
    load_experiment,
    run_ids,
    run_spec,
)
from dslide.experiment_data import data_folder
from dslide.paths import content_root

# What dslide's own numbers come from, beside the C++ core; a rival's come from its file in baselines/.
_TRAINER = ("trainer", "network", "samplers", "comm", "config")


class Plan:
    """One experiment file as Snakemake sees it. Paths are relative to the working directory."""

    def __init__(self, file: str) -> None:
        self.file = file if Path(file).is_file() else str(content_root() / file)
        self.experiment = load_experiment(Path(self.file))
        self.name = self.experiment.name
        self.results = f"results/{self.name}"
        self.reports = f"reports/{self.name}"
        self.runs = [self.stamp(run_id) for run_id in run_ids(self.experiment)]
        self.composed = [self.stamp(run_id) for run_id in composed_ids(self.experiment)]

    @property
    def data(self) -> str:
        """The file that says that the data set is complete."""
        return str(data_folder(self.experiment) / "meta.json")

    def stamp(self, run_id: RunId) -> str:
        """The file that says that a run's records are complete; they are in the folder of the same name."""
        return f"{self.results}/{run_id}.done"

    @staticmethod
    def run_id(wildcards: Any) -> RunId:
        """The run of a rule's wildcards; rule compose has no `kind`."""
        kind = getattr(wildcards, "kind", "composed")
        return RunId(kind, wildcards.system, wildcards.cluster, int(wildcards.seed))

    def spec(self, wildcards: Any) -> RunSpec:
        """The run's spec."""
        return run_spec(self.experiment, self.run_id(wildcards))

    def real_nodes(self, wildcards: Any) -> int:
        """MPI tasks to ask a scheduler for: a run's real nodes, or 1 (virtual nodes share a machine)."""
        where = self.experiment.clusters[wildcards.cluster]
        return where.nodes if where.kind == "slurm" else 1

    def threads(self, wildcards: Any) -> int:
        """Cores of the run on one machine: all virtual nodes together, or those of one real node."""
        cluster = self.spec(wildcards).cluster
        return cluster.cores * (cluster.nodes if cluster.kind == "virtual" else 1)

    def parts(self, wildcards: Any) -> dict[str, str]:
        """Stamps of what a composed run is made from, and of the real run that checks it, if any."""
        return {part: self.stamp(run_id) for part, run_id in self._parts(wildcards).items()}

    def check(self, wildcards: Any) -> str:
        """The option of `dslide race compose` that names the real run to compare with."""
        real = self._parts(wildcards).get("check")
        return "" if real is None else f"--check {self.stamp(real)}"

    def _parts(self, wildcards: Any) -> dict[str, RunId]:
        return composed_parts(self.experiment, self.run_id(wildcards))

    def what(self, wildcards: Any) -> str:
        """One line for people: which system, where, which seed."""
        run_id = self.run_id(wildcards)
        where = self.experiment.clusters[run_id.cluster]
        nodes = "1 node" if where.nodes == 1 else f"{where.nodes} nodes, {where.bandwidth or 'unthrottled'}"
        if run_id.kind == "composed":
            label = self.experiment.systems[run_id.system].label
            return f"{label} | composed for {nodes} | seed {run_id.seed}"
        spec = self.spec(wildcards)
        length = (
            f"{spec.stop_epochs or spec.epochs:g} epochs"
            if spec.pace_steps is None
            else f"{spec.pace_steps} timed steps"
        )
        return f"{spec.label} | {nodes} | {length} | seed {spec.seed}"

    def digest(self, wildcards: Any) -> str:
        """Changes when the run's spec or its system's code does, comments and formatting aside."""
        spec = self.spec(wildcards)
        text = spec.model_dump_json(exclude={"out", "run_id", "label"}) + self._code[spec.system]
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _cpp_digest(self) -> str:
        sources = sorted((content_root() / "dslide" / "cpp").rglob("*.[chi]*"))
        return code_digest([content_root() / "CMakeLists.txt", *sources])[:12]

    @cached_property
    def _code(self) -> dict[str, str]:
        own = [content_root() / "dslide" / f"{name}.py" for name in _TRAINER]
        shared = sorted((content_root() / "dslide" / "bench").glob("rivals_*.py"))
        digests = {}
        for name in {system.system for system in self.experiment.systems.values()}:
            digests[name] = code_digest([_system_file(name), *(own if name == OWN_SYSTEM else shared)])
        digests[OWN_SYSTEM] = digests.get(OWN_SYSTEM, "") + self._cpp_digest
        return digests

    def trainer(self, wildcards: Any) -> list[str]:
        """The stamp of the compiled trainer, named after its sources' digest; runs of rivals need none."""
        return (
            [f"build/trainer-{self._cpp_digest}.built"] if self.spec(wildcards).system == OWN_SYSTEM else []
        )

    @staticmethod
    def report_source(wildcards: Any) -> str:
        """The file in reports/ that makes a figure or table."""
        return str(content_root() / "reports" / f"{wildcards.name}.py")

    def report_files(self, kind: str) -> list[str]:
        """Names of the files in reports/ that make a `figure` or a `table`, of those wanted."""
        wanted = self.experiment.reports
        found = [
            path.stem
            for path in sorted((content_root() / "reports").glob("[!_]*.py"))
            if f"\ndef {kind}(" in path.read_text()
        ]
        return [name for name in found if wanted is None or name in wanted]


def _system_file(name: str) -> Path:
    found = [folder / f"{name}.py" for folder in systems.folders() if (folder / f"{name}.py").is_file()]
    return found[0] if found else content_root() / "baselines" / f"{name}.py"


def code_digest(files: list[Path]) -> str:
    """A digest of source files that comments, docstrings and formatting do not change."""
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(_essence(path).encode())
    return digest.hexdigest()


def _essence(path: Path) -> str:
    text = path.read_text()
    if path.suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).split())
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the run will say so; here it is only a text
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)
