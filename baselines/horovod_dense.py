"""Horovod, full softmax with dense gradients: the baseline of the SLIDE papers."""

from typing import Literal

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.bench.systems import Connection

NAME = "horovod-dense"
TITLE = "Horovod, full softmax, dense gradients"


class Settings(rivals_setup.FullSettings):
    """Those of full softmax, and Horovod's transport; the defaults are the frameworks' own."""

    transport: Literal["gloo", "mpi"] = "gloo"


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
    """Bytes of the two layers' gradients, output first: that is the order in which they are ready."""
    from dslide.data import load

    dataset, hidden = load(spec.data), Settings.model_validate(spec.settings).hidden
    return [4 * dataset.num_labels * (hidden + 1), 4 * dataset.num_features * hidden]


def connect(spec: RunSpec) -> Connection:
    """Horovod's own operations, for both transports."""
    from dslide.bench.rivals_horovod import connect as start

    return start(spec.cluster.cores)


def run(spec: RunSpec, recorder: Recorder) -> None:
    """Trains and evaluates; called on every rank."""
    from dslide.bench.rivals_full import FullTrainer
    from dslide.bench.rivals_horovod import dense_sum
    from dslide.bench.rivals_loop import race, read_dataset

    dataset = read_dataset(spec)
    settings = Settings.model_validate(spec.settings)
    trainer = FullTrainer(
        *(dataset, settings),
        seed=spec.seed,
        batch_size=spec.batch_size,
        rank=recorder.rank,
        size=recorder.size,
        reduce=dense_sum if spec.exchange else list,
    )
    race(spec, recorder, dataset, trainer, transport=settings.transport)
