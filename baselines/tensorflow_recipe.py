"""TensorFlow on one node with dslide's own recipe: what the recipe gives without the system."""

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec

NAME = "tensorflow-recipe"
TITLE = "TensorFlow, dslide's recipe, one node"


class Settings(rivals_setup.RecipeSettings):
    """The recipe's settings; the defaults are dslide's."""


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
    from dslide.bench.rivals_loop import run_on_one_node
    from dslide.bench.rivals_recipe import RecipeTrainer

    run_on_one_node(spec, recorder, RecipeTrainer, Settings.model_validate(spec.settings))
