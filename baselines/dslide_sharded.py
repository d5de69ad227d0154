"""dslide itself, through the interface of the rivals: one model, cut over the nodes."""

import itertools
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.config import TrainConfig, build_config, from_dotted, merge

NAME = "dslide-sharded"
TITLE = "dslide, one model cut over the nodes"


class Settings(BaseModel):
    """A preset and what differs from it."""

    model_config = ConfigDict(extra="forbid")

    preset: str = "default"
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="by dotted key, as --set takes them: {optimizer.learning_rate: 0.05}",
    )


def train_config(spec: RunSpec) -> TrainConfig:
    """The run's configuration: the spec's protocol over the settings. UserError names an unknown key."""
    settings = Settings.model_validate(spec.settings)
    protocol = {
        "batch_size": spec.batch_size,
        "epochs": spec.epochs,
        "eval_epochs": spec.eval_epochs,
        "seed": spec.seed,
        "threads": spec.cluster.cores,
        "budget_seconds": spec.budget_seconds,
        "target": spec.target,
        "checkpoint_every": 0,
    }
    overrides = from_dotted(settings.overrides, f"run {spec.run_id}: overrides")
    return build_config(settings.preset, None, merge(overrides, protocol))


def skip(spec: RunSpec) -> str | None:
    """Several nodes need MPI."""
    if spec.cluster.nodes == 1:
        return None
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return "mpi4py is not installed"
    return None


def launcher(spec: RunSpec) -> str:
    """One process on one node, MPI on several."""
    return "mpi" if spec.cluster.nodes > 1 else "local"


def message_sizes(spec: RunSpec) -> list[int]:
    """Bytes of the rows that one node sends to another in each exchange of a step."""
    from dslide import _core
    from dslide.comm import MESSAGE_BYTES
    from dslide.network import Shape

    config = train_config(spec)
    network = config.network
    shape = Shape.of(1, network.hidden, 1, spec.cluster.nodes, layers=network.layer_units())
    layers = [shape.hidden_cuts, *shape.layer_cuts]
    widest = [max(end - begin for begin, end in itertools.pairwise(cuts)) for cuts in layers]
    return [min(MESSAGE_BYTES, config.batch_size * _core.row_bytes(config.wire, width)) for width in widest]


def run(spec: RunSpec, recorder: Recorder) -> None:
    """Trains with the spec's protocol, or times steps."""
    from dslide import comm as comms
    from dslide.data import load
    from dslide.progress import on_stderr
    from dslide.trainer import Trainer, meta_fields, train

    config = train_config(spec)
    dataset = load(spec.data)
    if spec.split == "validation":
        dataset = dataset.validation()
    comm = comms.world() if spec.exchange else comms.silent()
    progress = on_stderr(comm.rank)
    if spec.pace_steps is None:
        train(config, dataset, comm, recorder, None, progress=progress)
        return
    trainer = Trainer(config, dataset, comm, recorder, progress=progress)
    recorder.meta(**meta_fields(trainer))
    trainer.time_steps(spec.pace_warmup, spec.pace_steps)
    recorder.end("done", **trainer.totals())
