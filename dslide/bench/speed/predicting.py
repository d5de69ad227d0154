"""Exact predictions: evaluation of a test split, and a few points at a time."""

from pathlib import Path
from typing import Any

import numpy as np

from dslide import _core
from dslide.bench.speed.answering import answers
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.rates import measured
from dslide.bench.speed.sizes import Size
from dslide.comm import LocalComm
from dslide.config import TrainConfig
from dslide.data import Dataset
from dslide.evaluation import Predictor
from dslide.network import Network, Shape


def _predictor(size: Size, threads: int, dataset: Dataset, sets: dict[str, Any]) -> Predictor:
    config = TrainConfig.model_validate(
        {**sets, "network": {**sets.get("network", {}), "hidden": size.hidden}}
    )
    shape = Shape.of(dataset.num_features, size.hidden, dataset.num_labels, 1)
    pool = _core.Pool(threads)
    return Predictor(Network(config, shape, 0, pool, training=False), LocalComm(), pool)


def _time(bench: str, points: int, size: Size, threads: int, dataset: Dataset, sets: dict[str, Any]) -> Row:
    """Points a second, `points` at a time; the bound is the products over all labels alone."""
    predictor = _predictor(size, threads, dataset, sets)
    part = dataset.test.take(np.arange(points) % len(dataset.test))
    row = measure(
        bench,
        f"top-5 of {points:,} points over {dataset.num_labels:,} labels",
        "points/s",
        points,
        lambda: predictor.topk(part, 5),
        repeats=5,
        seconds=size.seconds,
    )
    flops = 2 * size.hidden * dataset.num_labels
    rates, _ = measured(size, threads, 4 * size.hidden)
    read = 4 * size.hidden * dataset.num_labels / (rates.stream_read * 1e9)  # the weights, once
    return row.with_(
        bound=points / max(read, points * flops / (rates.product * 1e9)), gflops=row.value * flops / 1e9
    )


def evaluation(size: Size, threads: int, *, dataset: Dataset, sets: dict[str, Any], **_: Any) -> list[Row]:
    """A whole test split's worth of points."""
    return [_time("evaluation", len(dataset.test), size, threads, dataset, sets)]


def inference(
    size: Size,
    threads: int,
    *,
    dataset: Dataset,
    sets: dict[str, Any],
    model: Path | None,
    rivals: bool,
    **_: Any,
) -> list[Row]:
    """One point, and a few, at a time; with a trained model what its answers cost, and approximate ones."""
    if model is not None:
        return answers(size, threads, dataset, model, rivals)
    return [_time("inference", points, size, threads, dataset, sets) for points in (1, 16, 64)]
