"""TensorFlow on one node, full softmax: the plain thing, tuned."""

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec

NAME = "tensorflow-full"
TITLE = "TensorFlow, full softmax, one node"


class Settings(rivals_setup.FullSettings):
    """Optimiser, learning rate, schedule and initialisation; the defaults are TensorFlow's."""


def skip(spec: RunSpec) -> str | None:
    """Needs TensorFlow and a single node."""
    return rivals_setup.missing("tensorflow") or rivals_setup.one_node(spec)


def launcher(spec: RunSpec) -> str:
    """One process."""
    return "local"


def environment(spec: RunSpec) -> dict[str, str]:
    """Variables that must be set before the process starts."""
    return rivals_setup.TENSORFLOW_ENVIRONMENT


def message_sizes(spec: RunSpec) -> list[int]:
    """Nothing is sent."""
    return []


def run(spec: RunSpec, recorder: Recorder) -> None:
    """Trains and evaluates."""
    from dslide.bench.rivals_full import FullTrainer
    from dslide.bench.rivals_loop import run_on_one_node

    run_on_one_node(spec, recorder, FullTrainer, Settings.model_validate(spec.settings))
