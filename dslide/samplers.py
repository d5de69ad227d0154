"""Which output neurons a training point touches: the core's samplers, made from a config."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.config import SamplerConfig


class Sampler(Protocol):
    """A core sampler (`core`) and what must happen to it between batches."""

    core: Any

    def prepare(self, samples: int) -> None:
        """Called before the batch that begins after `samples` training points."""

    def refresh(self, samples: int) -> None:
        """Called where a run may be resumed: then the state depends on the weights and `samples` alone."""


class FixedSampler:
    """A sampler without tables."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def prepare(self, samples: int) -> None:
        """Nothing changes between batches."""

    def refresh(self, samples: int) -> None:
        """Nothing to bring up to date."""


class LshTables:
    """Hash tables over the shard's output neurons.

    They are rebuilt every `rebuild_points` points and get new hash functions every `new_functions_points`, as
    in the published code, which counts points, not seconds. Caps and top-up hold per shard, so the active
    sets depend on the number of ranks. Tables lag behind the weights; a checkpoint therefore rebuilds them,
    in the run that goes on as in the one that resumes, so that both have the same.
    """

    def __init__(self, output: Any, config: SamplerConfig, seed: int) -> None:
        lsh = config.lsh
        self._rebuild_points, self._new_points = lsh.rebuild_points, lsh.new_functions_points
        self._seed = seed
        self._build, self._functions = -1, 0
        self.core = _core.LshSampler(
            output,
            family=lsh.family,
            k=lsh.K,
            l=lsh.L,
            bucket_cap=lsh.bucket_cap,
            min_active=lsh.min_active,
            top_up=lsh.top_up,
            packing=lsh.packing,
            seed=self._key(0),
        )

    def _key(self, generation: int) -> int:
        return int(np.random.SeedSequence([self._seed, generation]).generate_state(1, np.uint64)[0] >> 1)

    def prepare(self, samples: int) -> None:
        """Rebuilds when the schedule says so."""
        if samples // self._rebuild_points != self._build:
            self.refresh(samples)

    def refresh(self, samples: int) -> None:
        """Rebuilds from the weights as they are."""
        functions = samples // self._new_points
        if functions != self._functions:
            self.core.new_functions(self._key(functions))
            self._functions = functions
        self.core.rebuild()
        self._build = samples // self._rebuild_points


def make_sampler(
    config: SamplerConfig,
    output: Any,
    labels: tuple[int, int, int],
    counts: NDArray[np.int64],
    num_points: int,
    batch_size: int,
    seed: int,
) -> Sampler:
    """The sampler of a shard.

    Args:
        config: its kind and numbers.
        output: the core's output layer.
        labels: (all labels, first own label, end of own labels).
        counts: [all labels] training points of each label.
        num_points: training points.
        batch_size: the global batch, which the log-Q correction needs.
        seed: of the draws.
    """
    if config.kind == "full":
        return FixedSampler(_core.FullSampler(*labels))
    if config.kind == "lsh":
        return LshTables(output, config, seed)
    return FixedSampler(
        _core.InBatchSampler(
            *labels,
            counts,
            num_points=num_points,
            batch_size=batch_size,
            extras=config.uniform_extras,
            log_q=config.log_q,
            own_only=config.kind == "uniform",
            seed=seed,
        )
    )


def label_counts(y_indices: NDArray[np.int32], num_labels: int) -> NDArray[np.int64]:
    """Training points of each label [num_labels]."""
    return np.bincount(y_indices, minlength=num_labels).astype(np.int64, copy=False)
