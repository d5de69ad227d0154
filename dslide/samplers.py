"""Which output neurons a training point touches: the core's samplers, made from a config."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.config import LshConfig, SamplerConfig


class Sampler(Protocol):
    """A core sampler (`core`) and what must happen to it between batches."""

    core: Any
    asks_activations: bool  # active rows depend on the activations of the batch's points

    def prepare(self, samples: int) -> None:
        """Called before the batch that begins after `samples` training points."""

    def refresh(self, samples: int) -> None:
        """Called where a run may be resumed: then the state depends on the weights and `samples` alone."""


class FixedSampler:
    """A sampler without tables."""

    asks_activations = False

    def __init__(self, core: Any) -> None:
        self.core = core

    def prepare(self, samples: int) -> None:
        """Nothing changes between batches."""

    def refresh(self, samples: int) -> None:
        """Nothing to bring up to date."""


class TableSampler:
    """A sampler with hash tables over the shard's output neurons.

    The first rebuild comes after `rebuild_points` points and every gap is `rebuild_growth` times the one
    before: 1 as in the published code, above 1 the paper's exponential schedule (Chen et al. 2020; growth is
    its e^lambda). The schedule counts points, not seconds. A rebuild draws new hash functions if
    `new_functions_points` more points have been seen. Caps, counts and top-up hold per shard, so the active
    sets depend on the number of ranks. Tables lag behind the weights; a checkpoint therefore rebuilds them,
    in the run that goes on as in the one that resumes, so that both have the same.
    """

    asks_activations = True

    def __init__(self, core: Any, tables: Any, lsh: LshConfig, seed: int) -> None:
        self.core, self._tables, self._lsh, self._seed = core, tables, lsh, seed
        self._rebuilds, self._functions = -1, 0

    def prepare(self, samples: int) -> None:
        """Rebuilds when the schedule says so."""
        if rebuilds_due(samples, self._lsh.rebuild_points, self._lsh.rebuild_growth) != self._rebuilds:
            self.refresh(samples)

    def refresh(self, samples: int) -> None:
        """Rebuilds from the weights as they are."""
        functions = samples // self._lsh.new_functions_points
        if functions != self._functions:
            self._tables.new_functions(functions_key(self._seed, functions))
            self._functions = functions
        self._tables.rebuild(draw=samples)
        self._rebuilds = rebuilds_due(samples, self._lsh.rebuild_points, self._lsh.rebuild_growth)


def rebuilds_due(samples: int, first: int, growth: float) -> int:
    """Rebuilds after `samples` points: the n-th is due at first * (1 + growth + ... + growth^(n - 1))."""
    if growth == 1:
        return samples // first
    due, gap, at = 0, float(first), float(first)
    while at <= samples:
        due, gap = due + 1, gap * growth
        at += gap
    return due


def functions_key(seed: int, generation: int) -> int:
    """The seed of a generation of hash functions."""
    return int(np.random.SeedSequence([seed, generation]).generate_state(1, np.uint64)[0] >> 1)


def make_tables(output: Any, lsh: LshConfig, seed: int, *, shared_top: int = 0) -> Any:
    """The core's tables; with `shared_top` a point's answer is its `shared_top` ids with the most hits."""
    return _core.LshSampler(
        output,
        family=lsh.family,
        k=lsh.K,
        l=lsh.L,
        projections=lsh.projections,
        zeros=lsh.zeros,
        packing=lsh.packing,
        bucket_policy=lsh.bucket_policy,
        bucket_cap=lsh.bucket_cap,
        selection="top-k" if shared_top else lsh.selection,
        beta=shared_top or lsh.beta,
        min_hits=lsh.min_hits,
        min_active=lsh.min_active,
        top_up=lsh.top_up,
        seed=functions_key(seed, 0),
    )


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
        tables = make_tables(output, config.lsh, seed)
        return TableSampler(tables, tables, config.lsh, seed)
    tables = None
    if config.lsh_extras:
        tables = make_tables(output, config.lsh, seed, shared_top=config.lsh_extras)
    shared = _core.InBatchSampler(
        *labels,
        counts,
        num_points=num_points,
        batch_size=batch_size,
        extras=config.uniform_extras,
        log_uniform=config.log_uniform_extras,
        log_q=config.log_q,
        own_only=config.kind != "in-batch",
        seed=seed,
        proposer=tables,
    )
    return FixedSampler(shared) if tables is None else TableSampler(shared, tables, config.lsh, seed)


def label_counts(y_indices: NDArray[np.int32], num_labels: int) -> NDArray[np.int64]:
    """Training points of each label [num_labels]."""
    return np.bincount(y_indices, minlength=num_labels).astype(np.int64, copy=False)
