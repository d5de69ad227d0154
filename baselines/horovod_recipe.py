"""Horovod with dslide's own recipe and sparse gradients: what a good engineer would do to rescue it."""

from typing import Literal

import numpy as np
from pydantic import Field

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.bench.systems import Connection

NAME = "horovod-recipe"
TITLE = "Horovod, dslide's recipe, sparse gradients"


class Settings(rivals_setup.RecipeSettings):
    """The recipe's settings, and how its gradients travel."""

    # Many small messages: Open MPI has the shorter steps at 100 Mbit/s and at 1 Gbit/s; with dense gradients
    # Gloo has (results/reference/search/).
    transport: Literal["gloo", "mpi"] = "mpi"
    input_exchange: Literal["allgather", "allreduce"] = Field(
        default="allgather", description="each rank's own input rows, or the sum of the whole batch's"
    )
    fp16: bool = Field(default=True, description="send gradients in half precision")


def skip(spec: RunSpec) -> str | None:
    """Needs TensorFlow and Horovod."""
    return rivals_setup.missing("tensorflow") or rivals_setup.missing("horovod")


def launcher(spec: RunSpec) -> str:
    """The transport that the settings ask for."""
    return Settings.model_validate(spec.settings).transport


def environment(spec: RunSpec) -> dict[str, str]:
    """Variables that must be set before the processes start."""
    return rivals_setup.HOROVOD_ENVIRONMENT


def message_sizes(spec: RunSpec) -> list[int]:
    """Bytes of the gradient rows that a rank sends, output and input, in the first batch."""
    from dslide.bench.rivals_data import own_part
    from dslide.bench.rivals_loop import read_dataset
    from dslide.data import batches

    settings = Settings.model_validate(spec.settings)
    train = read_dataset(spec).train
    batch = next(batches(len(train), spec.batch_size, spec.seed, 0))
    senders = batch if settings.input_exchange == "allreduce" else own_part(batch, 0, spec.cluster.nodes)[0]
    row = settings.hidden * (2 if settings.fp16 else 4)
    return [row * len(np.unique(train.y[batch].indices)), row * len(np.unique(train.x[senders].indices))]


def connect(spec: RunSpec) -> Connection:
    """Horovod's own operations, for both transports."""
    from dslide.bench.rivals_horovod import connect as start

    return start(spec.cluster.cores)


def run(spec: RunSpec, recorder: Recorder) -> None:
    """Trains and evaluates; called on every rank."""
    from dslide.bench.rivals_horovod import NoExchange, SparseExchange
    from dslide.bench.rivals_loop import race, read_dataset
    from dslide.bench.rivals_recipe import RecipeTrainer

    dataset = read_dataset(spec)
    settings = Settings.model_validate(spec.settings)
    exchange = SparseExchange(inputs=settings.input_exchange, fp16=settings.fp16)
    trainer = RecipeTrainer(
        *(dataset, settings),
        seed=spec.seed,
        batch_size=spec.batch_size,
        exchange=exchange if spec.exchange else NoExchange(exchange),
    )
    race(spec, recorder, dataset, trainer, transport=settings.transport)
