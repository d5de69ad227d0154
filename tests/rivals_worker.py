"""Trains each Horovod rival a few steps on every rank; rank 0 writes its weights. Arguments: output folder,
cases."""

import sys
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
from synthetic import make_dataset

from dslide.bench.rivals_full import FullTrainer
from dslide.bench.rivals_horovod import SparseExchange, connect, dense_sum
from dslide.bench.rivals_recipe import RecipeTrainer
from dslide.bench.rivals_setup import FullSettings, RecipeSettings
from dslide.data import batches

POINTS, BATCH, STEPS = 41, 20, 7  # batches of 20, 20 and 1: the last leaves a rank without a point


def trained(case: str) -> list[np.ndarray]:
    """Weights after some steps of a case: "adam", "adagrad", or "recipe-EXCHANGE-PRECISION"."""
    dataset = make_dataset(train=POINTS)
    rank, size = hvd.rank(), hvd.size()
    kind, *how = case.split("-")
    trainer: FullTrainer | RecipeTrainer
    if kind == "recipe":
        exchange = SparseExchange(inputs=how[0], fp16=how[1] == "fp16")
        settings = RecipeSettings(hidden=32, extras=5, initial_accumulator_input=1e-6)
        trainer = RecipeTrainer(dataset, settings, seed=1, batch_size=BATCH, exchange=exchange)
    else:
        options = FullSettings(hidden=32, optimizer=kind, lr=0.01, eps=1e-5, init_std=0.1)
        trainer = FullTrainer(
            dataset, options, seed=1, batch_size=BATCH, rank=rank, size=size, reduce=dense_sum
        )
    trainer.prepare()
    step = 0
    for epoch in range(3):
        for batch in batches(POINTS, BATCH, 0, epoch):
            if step < STEPS:
                trainer.step(trainer.feed(batch, step), step, step / STEPS)
            step += 1
    weights = trainer.weights if isinstance(trainer, FullTrainer) else [trainer.w1, trainer.w2]
    return [w.numpy() for w in weights]


def main() -> None:
    """Writes CASE.npz for each case, with the largest difference between the ranks' weights."""
    out, *cases = sys.argv[1:]
    connection = connect(1)
    assert connection.agree is not None and connection.gather is not None and connection.barrier is not None
    assert connection.agree(float(hvd.rank())) == hvd.size() - 1
    connection.barrier()
    for case in cases:
        weights = trained(case)
        everyone = connection.gather(weights)
        assert everyone is not None
        apart = max(
            float(np.abs(a - b).max()) for other in everyone for a, b in zip(other, weights, strict=True)
        )
        if hvd.rank() == 0:
            np.savez(Path(out) / f"{case}.npz", *weights, apart=apart, size=hvd.size())


if __name__ == "__main__":
    main()
