"""Training steps of dslide's settings, each beside its bound and, where it is installed, TensorFlow."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.speed.bounds import Work
from dslide.bench.speed.measure import Row, last_line, measure
from dslide.bench.speed.rates import measured
from dslide.bench.speed.sizes import Size
from dslide.comm import LocalComm
from dslide.config import build_config, from_dotted, merge
from dslide.data import Dataset, batches
from dslide.errors import UserError
from dslide.trainer import Trainer

BENCH = "train-step"
PRECISIONS = ("float32", "bfloat16")
SETTINGS = ("in-batch", "uniform", "shared", "full", "slide")
_PUBLISHED = {"sampler.lsh.family": "dwta", "sampler.lsh.packing": "published", "sampler.lsh.K": 6}


@dataclass(frozen=True)
class Setting:
    """A way to train: a preset, other values (dotted keys), and the TensorFlow recipe of the same shape."""

    name: str
    preset: str
    overrides: dict[str, Any]
    tensorflow: dict[str, Any] | None = None


def settings(size: Size) -> list[Setting]:
    """The settings that SETTINGS names. TensorFlow's side gets as many rows a batch and the same products."""
    uniform, shared = size.uniform_extras, size.shared_negatives
    # The published tables (K = 6, codes of 3 bits packed into 2) are made for hundreds of thousands of rows.
    tables = _PUBLISHED if size.labels > 100_000 else {}
    return [
        Setting("in-batch", "default", {}, {"extras": 0}),
        Setting(
            f"in-batch + {uniform:,} uniform",
            "default",
            {"sampler.uniform_extras": uniform},
            {"extras": uniform},
        ),
        Setting(
            f"shared negatives {shared:,}",
            "default",
            {"sampler.kind": "uniform", "sampler.uniform_extras": shared},
            {"extras": shared},
        ),
        Setting("full", "default", {"sampler.kind": "full"}),
        Setting("slide", "slide", tables),
    ]


def ready(
    dataset: Dataset,
    setting: Setting,
    batch: int,
    threads: int,
    hidden: int,
    sets: dict[str, Any],
    comm: LocalComm | None = None,
) -> Trainer:
    """A trainer that has begun: initialised, its tables built, the first batch indexed. `comm`: of several
    ranks."""
    comm = comm or LocalComm()
    protocol = {"batch_size": batch, "epochs": 1e6, "threads": threads, "network": {"hidden": hidden}}
    overrides = merge(merge(from_dotted(setting.overrides, setting.name), protocol), sets)
    config = build_config(setting.preset, None, overrides)
    trainer = Trainer(config, dataset, comm, Recorder.of(comm, None))
    trainer._prepare(initialise=True)
    return trainer


def work_of(trainer: Trainer) -> Work:
    """What the trainer's steps touched: output rows from its counters, inputs from the batches themselves."""
    config, shape, network = trainer.config, trainer.shape, trainer.network
    steps = max(1, trainer._steps_here)
    rows, pairs = trainer._active_rows / steps, trainer._active_pairs / steps
    x = trainer.dataset.train
    order = itertools.islice(batches(trainer.points, trainer.batch_size, config.seed, 0), 8)
    chosen = [np.concatenate([x.x_indices[x.x_indptr[r] : x.x_indptr[r + 1]] for r in b]) for b in order]
    features = float(np.mean([len(np.unique(ids)) for ids in chosen]))
    weight = network.output.weights.itemsize
    state = {
        "input": _state_bytes(network.state(), "input") / shape.features,
        "output": _state_bytes(network.state(), "output") / shape.labels,
    }
    idle = [(shape.features - features, state["input"]), (shape.labels - rows, state["output"])]
    moved = (
        sum(2 * n * (shape.hidden * weight + s) for n, s in idle) if config.optimizer.kind == "adam" else 0
    )
    tables = config.sampler.kind == "lsh"
    part = trainer.batch_size / config.sampler.lsh.rebuild_points
    return Work(
        batch=trainer.batch_size,
        hidden=shape.hidden,
        features=features,
        entries=float(np.mean([len(ids) for ids in chosen])),
        rows=rows,
        pairs=pairs if tables else 0.0,
        every_row=rows >= shape.labels,
        weight_bytes=weight,
        input_state=state["input"],
        output_state=state["output"],
        dense_bytes=moved,
        rebuild_bytes=part * shape.labels * shape.hidden * weight if tables else 0.0,
    )


def _state_bytes(state: dict[str, Any], side: str) -> int:
    return sum(array.nbytes for name, array in state.items() if name.startswith(f"{side}.weights."))


def time_steps(trainer: Trainer, case: str, size: Size, threads: int) -> Row:
    """Samples a second, with the bound. A repetition of a setting with tables has a whole rebuild period."""
    for _ in range(3):
        trainer._one_step()
    begin = time.perf_counter()
    trainer._one_step()
    pace = time.perf_counter() - begin
    steps = max(1, round(size.seconds / 10 / pace))
    if trainer.config.sampler.kind == "lsh" and size.labels > 100_000:
        steps = math.ceil(trainer.config.sampler.lsh.rebuild_points / trainer.batch_size)

    def repetition() -> None:
        for _ in range(steps):
            trainer._one_step()

    amount = steps * trainer.batch_size
    row = measure(BENCH, case, "samples/s", amount, repetition, repeats=5, seconds=size.seconds)
    work = work_of(trainer)
    row_bytes = trainer.shape.hidden * work.weight_bytes
    rates, _ = measured(size, threads, row_bytes, half=work.weight_bytes == 2)
    seconds = trainer.batch_size / row.value
    return row.with_(
        bound=trainer.batch_size / work.seconds(rates),
        gbytes=work.bytes / seconds / 1e9,
        gflops=work.flops / seconds / 1e9,
        note=f"{work.features:,.0f} input rows, {work.rows:,.0f} output rows"
        + (f", {work.pairs / trainer.batch_size:,.0f} a point" if work.pairs else ""),
    )


def train_step(
    size: Size,
    threads: int,
    *,
    dataset: Dataset,
    sets: dict[str, Any],
    source: str | None,
    rivals: bool,
    only: tuple[str, ...] = SETTINGS,
    **_: Any,
) -> list[Row]:
    """Every setting at every batch size; with `rivals` TensorFlow's same shape in float32 beside what it
    can do.

    `only`: which of SETTINGS.
    """
    rows, found = [], dict[tuple[str, int], tuple[float | None, str | None]]()  # TensorFlow's figures
    asked = [setting for name, setting in zip(SETTINGS, settings(size), strict=True) if name in only]
    for setting, precision in itertools.product(asked, PRECISIONS):
        if not _possible(setting, precision, sets):
            continue
        chosen = merge(sets, {"precision": precision})
        for batch in size.batches:
            case = setting.name if precision == PRECISIONS[0] else f"{setting.name}, {precision}"
            trainer = ready(dataset, setting, batch, threads, size.hidden, chosen)
            row = time_steps(trainer, f"{case}, batch {batch}", size, threads)
            if rivals and (setting.name, batch) not in found:
                found[setting.name, batch] = _tensorflow(setting, batch, size, threads, source)
            rows.append(_beside(row, *found.get((setting.name, batch), (None, None))))
    return rows


def _possible(setting: Setting, precision: str, sets: dict[str, Any]) -> bool:
    """Whether a setting is timed in a precision: in all that it can have, or in the one that `sets` names."""
    if sets.get("precision", precision) != precision:
        return False
    overrides = merge(from_dotted(setting.overrides, setting.name), sets)
    build_config(setting.preset, None, overrides | {"precision": PRECISIONS[0]})  # other mistakes are told
    try:
        build_config(setting.preset, None, overrides | {"precision": precision})
    except UserError:
        return False
    return True


def _beside(row: Row, rival: float | None, failure: str | None) -> Row:
    """The row with TensorFlow's figure, or with why there is none."""
    if failure is not None:
        return row.with_(note=f"{row.note}; TensorFlow failed: {failure}")
    return row if rival is None else row.with_(rival=rival, rival_name="TensorFlow")


def _tensorflow(
    setting: Setting, batch: int, size: Size, threads: int, source: str | None
) -> tuple[float | None, str | None]:
    """TensorFlow's samples/s, or why there are none; both None where it can't do the setting or is absent."""
    if setting.tensorflow is None or rivals_setup.missing("tensorflow"):
        return None, None
    request = {
        "size": size.__dict__,
        "source": source,
        "batch": batch,
        "threads": threads,
        "settings": setting.tensorflow,
        "steps": 5 if size.labels < 10_000 else 40,
    }
    result = subprocess.run(
        [sys.executable, "-m", "dslide.bench.speed.tensorflow_step", json.dumps(request)],
        env={**os.environ, **rivals_setup.TENSORFLOW_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        return None, last_line(result.stderr)
    return float(json.loads(result.stdout)["samples_per_second"]), None
