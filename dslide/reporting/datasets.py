"""A data set's figure: how often labels occur, and how many features and labels points have."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dslide.data.stats import TAIL, Stats

_COLOURS = {"train": "#0b4f9e", "test": "#f0962e"}


def draw(stats: Stats) -> Figure:
    """Three panels, all on log axes; a few hundred marks, whatever the set's size."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    labels, features, points = figure.subplots(1, 3)
    ranks, frequencies = stats.curve()
    if len(ranks):
        labels.loglog(ranks, frequencies, color=_COLOURS["train"])
        labels.axhspan(0.8, TAIL + 0.5, color="#667080", alpha=0.15, linewidth=0)
        labels.axvline(stats.head_labels, color="#667080", linestyle=":", linewidth=1)
    labels.set(xlabel="label, by frequency", ylabel="training points")
    _histogram(features, stats, "features", "features a point")
    _histogram(points, stats, "labels", "labels a point")
    points.legend(frameon=False)
    return figure


def caption(stats: Stats) -> str:
    """What the panels show, with the numbers that they can't."""
    return (
        f"{stats.name}: {stats.num_labels:,} labels, {stats.num_features:,} features. Left of the dotted "
        f"line are the {stats.head_labels:,} labels that hold half of all label entries; the grey band are "
        f"labels with at most {TAIL} training points, which hold {stats.rare_train:.1%}. "
        f"{stats.unseen_share:.1%} of the test's label entries are of labels without a training point."
    )


def _histogram(axes: Axes, stats: Stats, what: str, title: str) -> None:
    sizes = {split: getattr(getattr(stats, split), what) for split in _COLOURS}
    most = max((int(counts.max()) for counts in sizes.values() if len(counts)), default=0)
    edges = np.unique(np.rint(np.geomspace(1, most + 1, 40)).astype(np.int64))
    for split, counts in sizes.items():
        if len(counts) and len(edges) > 1:
            part, _ = np.histogram(counts, edges)
            axes.stairs(part / len(counts) / np.diff(edges), edges, color=_COLOURS[split], label=split)
    axes.set(xscale="log", xlabel=title, ylabel="share of the points")
