"""napkinXC's probabilistic label tree on one node: what an extreme-classification user would pick.

It trains without batches, so it has one evaluation, at its end, recorded as epoch 1. Its clock covers the one
call that trains: building the tree, fitting the nodes' linear classifiers, and writing them (the library
cannot train without writing its model, which is put in memory-backed storage where there is some). Reading
the data set and loading the model for prediction are outside.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from dslide.bench import rivals_setup
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec

NAME = "plt"
TITLE = "napkinXC, probabilistic label tree, one node"


class Settings(BaseModel, extra="forbid"):
    """napkinXC's own names and defaults."""

    tree_type: Literal["hierarchicalKmeans", "balancedInOrder", "balancedRandom", "huffman"] = (
        "hierarchicalKmeans"
    )
    arity: int = Field(default=2, ge=2)
    max_leaves: int = Field(default=100, ge=2)
    kmeans_eps: float = Field(default=1e-4, gt=0)
    loss: Literal["log", "l2"] = "log"
    weights_threshold: float = Field(default=0.1, ge=0)
    liblinear_c: float = Field(default=10.0, gt=0)
    liblinear_eps: float = Field(default=0.1, gt=0)
    liblinear_max_iter: int = Field(default=100, ge=1)
    ensemble: int = Field(default=1, ge=1)


def skip(spec: RunSpec) -> str | None:
    """Needs napkinXC and a single node; has no steps to pace."""
    if spec.pace_steps is not None:
        return "a label tree has no steps to time"
    return rivals_setup.missing("napkinxc") or rivals_setup.one_node(spec)


def launcher(spec: RunSpec) -> str:
    """One process."""
    return "local"


def message_sizes(spec: RunSpec) -> list[int]:
    """Nothing is sent."""
    return []


def top5(predictions: list[list[tuple[int, float]]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Lists of (label, probability) as ids int32 [n, 5] and scores float32 [n, 5], best first, ties to the
    lower id; -1 where the tree found fewer."""
    ids = np.full((len(predictions), 5), -1, np.int32)
    scores = np.zeros((len(predictions), 5), np.float32)
    for row, found in enumerate(predictions):
        best = sorted(found, key=lambda pair: (-pair[1], pair[0]))[:5]
        for place, (label, probability) in enumerate(best):
            ids[row, place], scores[row, place] = label, probability
    return ids, scores


def run(spec: RunSpec, recorder: Recorder) -> None:
    """Trains, predicts once, and records it."""
    from napkinxc.models import PLT

    from dslide.bench.rivals_loop import read_dataset

    dataset = read_dataset(spec)
    settings = Settings.model_validate(spec.settings)
    recorder.meta(data_hash=dataset.hash)
    recorder.start()
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dslide-plt-", dir=shared_memory) as folder:
        tree: Any = PLT(
            str(Path(folder) / "model"), seed=spec.seed, threads=spec.cluster.cores, **settings.model_dump()
        )
        x, y = dataset.train.x.astype(np.float32), dataset.train.y
        print("training the label tree", file=sys.stderr, flush=True)
        recorder.clock.start()
        tree.fit(x, y)
        recorder.clock.stop()
        print(f"trained in {recorder.clock.seconds:.1f} s, predicting", file=sys.stderr, flush=True)
        began = time.perf_counter()
        tree.load()
        ids, scores = top5(tree.predict_proba(dataset.test.x.astype(np.float32), top_k=5))
        seconds = time.perf_counter() - began
    event = recorder.evaluation(1, len(dataset.train), 1.0, ids, scores, dataset.test, eval_seconds=seconds)
    print(f"P@1 {event['p1']:.4f}", file=sys.stderr, flush=True)
    reached = spec.target is not None and event["p1"] >= spec.target
    late = recorder.out_of_time(spec.budget_seconds)
    recorder.end("target" if reached else "timeout" if late else "done", steps=1)
