"""An experiment file: systems x clusters x seeds, expanded into the runs that the workflow starts one by one.

A run's id is its folder below results/<experiment>/: `<kind>/<system>/<cluster>/seed-<n>`, where the kind is

runs      a complete run, evaluated at the experiment's epochs;
paces     timed steps on a throttled link, without evaluation (for a system too slow to finish there);
checks    a short real run on that link, to hold a composed one against;
sweep     timed steps of one system at several numbers of active rows (does a second node pay?);
composed  not a run: a complete run's accuracy per step placed at a pace's step times.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dslide.bench.spec import Cluster, RunSpec, resolve_cores
from dslide.errors import UserError

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
Cores = Annotated[str, Field(pattern=r"^auto(/[1-9][0-9]?)?$")]
Bandwidth = Annotated[str, Field(pattern=r"^[1-9][0-9]*(kbit|mbit|gbit)$")]
OWN_SYSTEM = "dslide_sharded"  # in baselines/, like the rivals
KINDS = ("runs", "paces", "checks", "sweep")
PACE_EPOCHS = 1000.0  # a pace ends by its number of steps, never by its epochs


class _Strict(BaseModel):
    """Unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Slice(_Strict):
    """A seeded part of a data set, for tests and first tries."""

    train: int = Field(ge=1, description="training points kept")
    test: int = Field(ge=1, description="test points drawn; those without a known label drop out")
    seed: int = Field(0, ge=0)


class ClusterConfig(_Strict):
    """Where a run takes place: virtual nodes on this machine, or real ones of Slurm or an MPI host file."""

    nodes: int = Field(1, ge=1)
    cores: int | Cores = Field(
        "auto", description="a node's; auto: the machine's divided by the nodes; auto/2: half of that"
    )
    bandwidth: Bandwidth | None = Field(None, description="each node's link: 100mbit; none: unthrottled")
    kind: Literal["virtual", "slurm", "hostfile"] = "virtual"
    hostfile: Path | None = Field(None, description="an MPI host file, for kind: hostfile")
    oversubscribed: bool = Field(False, description="allow more cores than there are; figures say so")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "virtual" and (self.bandwidth or isinstance(self.cores, str)):
            raise ValueError(f"kind: {self.kind} uses real nodes: `cores` is a number there, no `bandwidth`")
        if (self.kind == "hostfile") != (self.hostfile is not None):
            raise ValueError("`hostfile` and `kind: hostfile` belong together")
        if self.nodes == 1 and self.bandwidth:
            raise ValueError("one node has no link: remove `bandwidth`, or ask for two nodes")
        return self


class Check(_Strict):
    """A short real run on a throttled link, held against the composed one."""

    cluster: Name
    epochs: float = Field(1, gt=0)


class Composed(_Strict):
    """How a system too slow for a throttled link is placed on it: its own curve at measured step times."""

    curve: Name = Field(description="an unthrottled cluster; its complete run gives accuracy per step")
    paces: list[Name] = Field(description="the throttled clusters on which steps are timed")
    pace_steps: int = Field(20, ge=1)
    check: Check | None = None


class System(_Strict):
    """One line of the figure: a system from baselines/, its settings, and where it runs."""

    system: Name = Field(description="the file's name in baselines/, without .py")
    label: str
    settings: dict[str, Any] = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    clusters: list[Name] = Field(default_factory=list)
    epochs: float = Field(gt=0)
    budget_seconds: float = Field(gt=0, description="of training; then the run ends as `timeout`")
    batch_size: int | None = Field(None, ge=1, description="global; one that the system's search found")
    eval_epochs: list[float] | None = None
    target: float | None = Field(None, gt=0, lt=1, description="stop at the first evaluation with this P@1")
    composed: Composed | None = None
    change_of: Name | None = Field(
        None, description="the system that this one differs from by one choice: a row of the ablation's table"
    )


class Sweep(_Strict):
    """Step times at several numbers of uniform extras, on each cluster: where does a second node pay?"""

    system: Name = Field(description="an id of `systems` that is dslide; its settings are taken")
    uniform_extras: list[int] = Field(min_length=1)
    clusters: list[Name] = Field(min_length=1)
    pace_steps: int = Field(40, ge=1)
    batch_size: int | None = Field(None, ge=1)


class Experiment(_Strict):
    """The whole file."""

    name: Name = Field(description="results/<name>/ and reports/<name>/")
    title: str = ""
    data: str = Field(description="a data set's name (`dslide data list`) or the path of a prepared one")
    slice: Slice | None = None
    split: Literal["test", "validation"] = "test"
    batch_size: int = Field(256, ge=1, description="global: the sum over the nodes")
    eval_epochs: list[float] = Field(min_length=1)
    targets: list[float] = Field(min_length=1, description="P@1, fractions")
    baseline: Name | None = Field(None, description="the system that ratios are first taken to")
    clusters: dict[Name, ClusterConfig]
    systems: dict[Name, System]
    sweep: Sweep | None = None
    reports: list[str] | None = Field(None, description="files of reports/ to make; none: all")

    @field_validator("targets", "eval_epochs")
    @classmethod
    def _ascending(cls, values: list[float]) -> list[float]:
        if values != sorted(set(values)):
            raise ValueError("must ascend, each value once")
        return values

    @model_validator(mode="after")
    def _references(self) -> Self:
        def cluster(name: str, where: str) -> ClusterConfig:
            if name not in self.clusters:
                raise ValueError(f"{where}: no cluster {name!r} in `clusters` ({', '.join(self.clusters)})")
            return self.clusters[name]

        for key, system in self.systems.items():
            for name in system.clusters:
                cluster(name, f"systems.{key}.clusters")
            if system.composed is not None:
                self._check_composed(key, system, cluster)
            if system.change_of is not None and system.change_of not in self.systems:
                raise ValueError(f"systems.{key}.change_of: no system {system.change_of!r} in `systems`")
        if self.sweep is not None:
            if self.sweep.system not in self.systems:
                raise ValueError(f"sweep.system: no system {self.sweep.system!r} in `systems`")
            if self.systems[self.sweep.system].system != OWN_SYSTEM:
                raise ValueError(f"sweep.system: {self.sweep.system} is not dslide (dslide_sharded)")
            for name in self.sweep.clusters:
                cluster(name, "sweep.clusters")
        if self.baseline is not None and self.baseline not in self.systems:
            raise ValueError(f"baseline: no system {self.baseline!r} in `systems`")
        return self

    @staticmethod
    def _check_composed(key: str, system: System, cluster: Any) -> None:
        where, parts = f"systems.{key}.composed", system.composed
        assert parts is not None
        if system.system == OWN_SYSTEM:
            raise ValueError(f"{where}: dslide's own curve is measured, never composed")
        curve = cluster(parts.curve, f"{where}.curve")
        for name in [*parts.paces, *([parts.check.cluster] if parts.check else [])]:
            other = cluster(name, where)
            if (other.nodes, other.cores) != (curve.nodes, curve.cores):
                raise ValueError(f"{where}: {name} and {parts.curve} differ in more than the link")
        if parts.check is not None and parts.check.cluster not in parts.paces:
            raise ValueError(f"{where}.check.cluster: must be one of `paces`")


class RunId(NamedTuple):
    """The four parts of a run's folder."""

    kind: str
    system: str
    cluster: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.system}/{self.cluster}/seed-{self.seed}"

    @classmethod
    def parse(cls, text: str) -> "RunId":
        parts = text.strip("/").split("/")
        if len(parts) != 4 or not parts[3].removeprefix("seed-").isdigit():
            raise UserError(f"{text}: a run id looks like runs/dslide/one/seed-0")
        return cls(parts[0], parts[1], parts[2], int(parts[3].removeprefix("seed-")))


def load_experiment(path: Path) -> Experiment:
    """Reads and checks an experiment file; raises UserError naming file, line and key."""
    try:
        text = path.read_text()
        node = yaml.compose(text)
        values = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; experiments are in config/") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        lines = [_explain(path, node, detail) for detail in error.errors()]
        raise UserError("\n".join(lines)) from error
    if experiment.name != path.stem:  # a copied file would overwrite the other one's results
        line = _explain(path, node, {"loc": ("name",), "msg": f"must be the file's name, {path.stem}"})
        raise UserError(line)
    return experiment


def _explain(path: Path, node: Any, detail: Any) -> str:
    """One message: file:line: key: reason."""
    keys = [str(part) for part in detail["loc"]]
    line = node.start_mark.line + 1 if node is not None else 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == key), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
    return f"{path}:{line}: {'.'.join(keys) or 'experiment'}: {detail['msg'].removeprefix('Value error, ')}"


def run_ids(experiment: Experiment) -> list[RunId]:
    """Every run that has to take place, in the order of the file, without repeats."""
    ids: dict[RunId, None] = {}
    for key, system in experiment.systems.items():
        for cluster in system.clusters:
            ids.update((RunId("runs", key, cluster, seed), None) for seed in system.seeds)
        if system.composed is None:
            continue
        for seed in system.seeds:
            ids[RunId("runs", key, system.composed.curve, seed)] = None
            ids.update((RunId("paces", key, cluster, seed), None) for cluster in system.composed.paces)
            if system.composed.check is not None:
                ids[RunId("checks", key, system.composed.check.cluster, seed)] = None
    if experiment.sweep is not None:
        for extras in experiment.sweep.uniform_extras:
            for cluster in experiment.sweep.clusters:
                ids[RunId("sweep", f"extras-{extras}", cluster, 0)] = None
    return list(ids)


def composed_ids(experiment: Experiment) -> list[RunId]:
    """Every curve that is put together from a run and a pace."""
    return [
        RunId("composed", key, cluster, seed)
        for key, system in experiment.systems.items()
        if system.composed is not None
        for cluster in system.composed.paces
        for seed in system.seeds
    ]


def composed_parts(experiment: Experiment, run_id: RunId) -> dict[str, RunId]:
    """`curve`, the run that gives accuracy a step; `pace`, seconds a step; perhaps `check`, a real run."""
    composed = experiment.systems[run_id.system].composed
    assert composed is not None
    parts = {
        "curve": run_id._replace(kind="runs", cluster=composed.curve),
        "pace": run_id._replace(kind="paces"),
    }
    if composed.check is not None and composed.check.cluster == run_id.cluster:
        parts["check"] = run_id._replace(kind="checks")
    return parts


def data_name(experiment: Experiment) -> str:
    """The prepared set that the runs load: the experiment's own, or its slice's name."""
    if experiment.slice is None:
        return experiment.data
    part = experiment.slice
    return f"{experiment.data}-slice-{part.train}-{part.test}-{part.seed}"


def run_spec(experiment: Experiment, run_id: RunId, results: Path = Path("results")) -> RunSpec:
    """The run's complete instruction; UserError for an unknown run, or if the machine has too few cores."""
    if run_id not in run_ids(experiment):
        raise UserError(f"experiment {experiment.name} has no run {run_id}; `dslide race list` shows them")
    sweep = experiment.sweep if run_id.kind == "sweep" else None
    system = experiment.systems[sweep.system if sweep else run_id.system]
    where = experiment.clusters[run_id.cluster]
    if where.kind == "virtual":
        cores, over = _cores(where)
    else:  # real nodes: this machine's cores say nothing
        cores, over = int(where.cores), where.oversubscribed
    hostfile = where.hostfile.absolute() if where.hostfile else None
    cluster = Cluster(
        kind=where.kind,
        hostfile=hostfile,
        nodes=where.nodes,
        cores=cores,
        bandwidth=where.bandwidth,
        oversubscribed=over,
    )
    timed, settings, label = None, dict(system.settings), system.label
    stop: float | None = None
    if sweep is not None:
        extras = int(run_id.system.removeprefix("extras-"))
        overrides = settings.get("overrides", {}) | {"sampler.uniform_extras": extras}
        timed, settings = sweep.pace_steps, settings | {"overrides": overrides}
        label = f"{label}, {extras} extras"
    elif run_id.kind == "paces" and system.composed is not None:
        timed = system.composed.pace_steps
    elif run_id.kind == "checks" and system.composed is not None and system.composed.check is not None:
        stop = system.composed.check.epochs  # on the whole run's schedule: its first part
    points = system.eval_epochs or experiment.eval_epochs
    return RunSpec(
        run_id=str(run_id),
        experiment=experiment.name,
        system=system.system,
        label=label,
        settings=settings,
        data=data_name(experiment),
        split=experiment.split,
        seed=run_id.seed,
        batch_size=(sweep.batch_size if sweep else None) or system.batch_size or experiment.batch_size,
        epochs=system.epochs if timed is None else PACE_EPOCHS,
        stop_epochs=stop,
        eval_epochs=[epoch for epoch in points if epoch <= (stop or system.epochs)],
        budget_seconds=system.budget_seconds,
        target=system.target if timed is None else None,
        cluster=cluster,
        pace_steps=timed,
        out=(results / experiment.name / str(run_id)).absolute(),
    )


def _cores(where: ClusterConfig) -> tuple[int, bool]:
    """Cores a virtual node, and whether all of them together are more than the machine has."""
    if isinstance(where.cores, int):
        return resolve_cores(where.nodes, where.cores, oversubscribed=where.oversubscribed)
    parts = int(where.cores.removeprefix("auto").removeprefix("/") or 1)
    each, _ = resolve_cores(where.nodes * parts, "auto", oversubscribed=True)
    return resolve_cores(where.nodes, each, oversubscribed=where.oversubscribed)


def schema() -> str:
    """The JSON schema of an experiment file, for editors; config/schema.json is this text."""
    return json.dumps(Experiment.model_json_schema(), indent=1, sort_keys=True) + "\n"
