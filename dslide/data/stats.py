"""What a data set is like: frequencies of labels, sizes of points, head and tail, unseen test labels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dslide.data.dataset import Dataset
from dslide.data.format import Points

TAIL = 5  # a label with at most so many training points is rare


@dataclass(frozen=True)
class SplitStats:
    """A split: points, and how many features and labels each has (int64 [points])."""

    features: NDArray[np.int64]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, points: Points) -> "SplitStats":
        """Counts every point's features and labels."""
        return cls(np.diff(points.x_indptr), np.diff(points.y_indptr))


@dataclass(frozen=True)
class Stats:
    """Figures of a data set. Shares are of label entries: pairs of a point and one of its labels."""

    name: str
    num_features: int
    num_labels: int
    train: SplitStats
    test: SplitStats
    frequencies: NDArray[np.int64]  # [num_labels], training points of each label, falling
    never: int  # labels without a training point
    rare: int  # labels with 1 to TAIL training points
    rare_train: float  # share of the training entries
    rare_test: float  # ... of the test entries
    head_labels: int  # as many of the most frequent labels hold half of the training entries
    top_share: float  # share of the training entries that the most frequent hundredth of all labels holds
    unseen_labels: int  # distinct test labels without a training point
    unseen_share: float  # ... their share of the test entries
    unseen_points: int  # test points that have labels, none of them in training

    @classmethod
    def of(cls, data: Dataset) -> "Stats":
        """Counts; a pass over the labels of each split."""
        counts = np.bincount(data.train.y_indices, minlength=data.num_labels)
        falling = np.sort(counts)[::-1]
        of_test = counts[data.test.y_indices]
        cumulated = np.cumsum(falling)
        entries = int(cumulated[-1]) if len(cumulated) else 0
        rare = (counts > 0) & (counts <= TAIL)
        rows = np.repeat(np.arange(len(data.test)), np.diff(data.test.y_indptr))
        known = np.bincount(rows, of_test > 0, len(data.test))
        has_labels = np.diff(data.test.y_indptr) > 0
        return cls(
            name=data.name,
            num_features=data.num_features,
            num_labels=data.num_labels,
            train=SplitStats.of(data.train),
            test=SplitStats.of(data.test),
            frequencies=falling,
            never=int((counts == 0).sum()),
            rare=int(rare.sum()),
            rare_train=_share(counts[rare].sum(), entries),
            rare_test=_share(((of_test > 0) & (of_test <= TAIL)).sum(), len(of_test)),
            head_labels=int(np.searchsorted(cumulated, entries / 2)) + 1 if entries else 0,
            top_share=_share(falling[: -(-data.num_labels // 100)].sum(), entries),
            unseen_labels=len(np.unique(data.test.y_indices[of_test == 0])),
            unseen_share=_share((of_test == 0).sum(), len(of_test)),
            unseen_points=int((has_labels & (known == 0)).sum()),
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """A table for people: what, of train (or of the whole set), of test."""

        def both(title: str, axis: str, form: str) -> tuple[str, str, str]:
            train, test = getattr(self.train, axis), getattr(self.test, axis)
            return title, _describe(train, form), _describe(test, form)

        return [
            ("points", f"{len(self.train.labels):,}", f"{len(self.test.labels):,}"),
            both("features a point: mean, median, most", "features", "sizes"),
            both("points without features", "features", "none"),
            both("labels a point: mean, median, most", "labels", "sizes"),
            both("points without labels", "labels", "none"),
            ("labels with training points", f"{self.num_labels - self.never:,} of {self.num_labels:,}", ""),
            ("training points of the most frequent label", f"{self.frequencies[:1].sum():,}", ""),
            ("labels that hold half of all entries (head)", f"{self.head_labels:,}", ""),
            ("entries of the most frequent 1 % of labels", f"{self.top_share:.1%}", ""),
            (f"labels with 1 to {TAIL} training points (tail)", f"{self.rare:,}", ""),
            ("entries of the tail", f"{self.rare_train:.1%}", f"{self.rare_test:.1%}"),
            ("labels without a training point", f"{self.never:,}", f"{self.unseen_labels:,}"),
            ("entries of labels without a training point", "", f"{self.unseen_share:.1%}"),
            ("points with no label that occurs in training", "", f"{self.unseen_points:,}"),
        ]

    def curve(self, most: int = 300) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ranks from 1 and frequencies of labels that occur, at most about `most`, evenly on a log axis."""
        occurs = self.num_labels - self.never
        if occurs == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        ranks = np.unique(np.rint(np.geomspace(1, occurs, most)).astype(np.int64))
        return ranks, self.frequencies[ranks - 1]


def _share(part: int, whole: int) -> float:
    return float(part) / whole if whole else 0.0


def _describe(sizes: NDArray[np.int64], form: str) -> str:
    if form == "none":
        return f"{(sizes == 0).sum():,}"
    if not len(sizes):
        return ""
    return f"{sizes.mean():.2f}, {np.median(sizes):.0f}, {sizes.max():,}"
