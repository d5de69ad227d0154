"""TensorFlow's steps with dslide's recipe, in a process of their own, whose allocator the environment sets.

    python -m dslide.bench.speed.tensorflow_step REQUEST

REQUEST is JSON: size (of dslide.bench.speed.sizes), source (a prepared set; null: generated points),
batch, threads, steps, settings (of RecipeSettings). Prints {"samples_per_second": ...}, from the median step.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from dslide.bench.records import Recorder
from dslide.bench.rivals_setup import RecipeSettings
from dslide.bench.spec import RunSpec
from dslide.bench.speed.sizes import Size, generated
from dslide.data import load


def samples_per_second(request: dict[str, Any]) -> float:
    """Times the steps that the request asks for, as a race times them: input made one batch ahead."""
    from dslide.bench.rivals_loop import race
    from dslide.bench.rivals_recipe import RecipeTrainer
    from dslide.bench.rivals_tf import use_threads

    use_threads(request["threads"])
    size = Size(**{**request["size"], "batches": tuple(request["size"]["batches"])})
    dataset = load(request["source"]) if request["source"] else generated(size)
    settings = RecipeSettings(hidden=size.hidden, class_mean_init=False, **request["settings"])
    trainer = RecipeTrainer(dataset, settings, seed=0, batch_size=request["batch"])
    recorder = Recorder(None)
    spec = RunSpec(
        run_id="bench",
        system="tensorflow_recipe",
        data=dataset.name,
        batch_size=request["batch"],
        pace_steps=request["steps"],
        pace_warmup=5,
        out=Path(tempfile.gettempdir()),
    )
    race(spec, recorder, dataset, trainer)
    return request["batch"] / median(e["seconds"] for e in recorder.events if e["event"] == "step")


if __name__ == "__main__":
    print(json.dumps({"samples_per_second": samples_per_second(json.loads(sys.argv[1]))}))
