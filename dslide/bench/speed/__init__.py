"""The benchmarks behind `dslide bench`, one idea a file.

Each is a function `(size, threads, *, dataset, source, sets, model, only, rivals) -> list[Row]`: `dataset` is
what to measure on and `source` its name (None: generated), `sets` other values of the training settings,
`model` a trained run's folder (None: no model), `only` the parts of scaling and train-step that are wanted.
Figures are medians over repetitions with the range beside them.
Absolute times move with the machine: compare rows of one run.
"""

from collections.abc import Callable

from dslide.bench.speed.converting import converting
from dslide.bench.speed.exchange import exchange
from dslide.bench.speed.measure import Row
from dslide.bench.speed.precision import precision
from dslide.bench.speed.predicting import evaluation, inference
from dslide.bench.speed.rates import kernels
from dslide.bench.speed.scaling import scaling
from dslide.bench.speed.tables import hashing, look_up, table_build
from dslide.bench.speed.training import train_step

BENCHES: dict[str, Callable[..., list[Row]]] = {
    "kernels": kernels,
    "hashing": hashing,
    "table-build": table_build,
    "look-up": look_up,
    "train-step": train_step,
    "precision": precision,
    "evaluation": evaluation,
    "inference": inference,
    "exchange": exchange,
    "scaling": scaling,
    "convert": converting,
}
