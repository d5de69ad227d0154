"""Synthetic twins: sets of the shape of a published one, generated from a seed, that a network can learn.

What is planted. Labels lie in topics of `topic_labels`. A point draws a topic, then some of its labels
without replacement (weighted: Efraimidis and Spirakis 2006), then words: about half of the topic's own, half
of each of its labels' own, and background words of a power law. Topics, labels within a topic and words have
power-law frequencies; ids of labels and features are shuffled, so an id tells nothing. Values are
(1 + ln tf) idf, rows L2-normalised, with the idf of the planted frequencies.

Random numbers are words of Philox (Salmon et al. 2011) at a counter that the point's number gives: a point is
the same whatever is generated before it or beside it, so chunks of any size give the same set, and a smaller
set of the same seed and sizes is the beginning of a larger one. Weights are whole numbers until the one
division by the row's length: no CPU rounds them differently.
"""

from pathlib import Path

import numpy as np
import pydantic
from numpy.typing import NDArray

from dslide.data import format
from dslide.data.format import Part
from dslide.data.progress import Progress

# Part of the source hash: change it when the same settings give other points.
TWIN_VERSION = 1

CHUNK = 4096  # points in memory at a time
TOPIC_WORDS, LABEL_WORDS = 24, 6
_FEATURES, _LABELS, _TOPIC_WORDS, _LABEL_WORDS, _TRAIN, _TEST = range(6)  # streams of random numbers


class Twin(pydantic.BaseModel, extra="forbid", frozen=True):
    """What a generated set is like; the defaults are Amazon-670K's: 75 non-zeros and 5.4 labels a point."""

    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    labels_per_point: float = pydantic.Field(default=5.4, ge=1, description="mean; uniform from 1")
    background: int = pydantic.Field(default=98, ge=0, description="most background words of a point")
    topic_labels: int = pydantic.Field(default=16, ge=1)
    topic_exponent: float = pydantic.Field(
        default=1.5, ge=0, description="P(rank) ~ (rank + offset)^-exponent"
    )
    topic_offset: float = pydantic.Field(default=50, gt=0)
    uniform_topics: float = pydantic.Field(
        default=0.2, ge=0, le=1, description="share of topics drawn uniformly"
    )
    label_exponent: float = pydantic.Field(default=0.5, ge=0)
    feature_exponent: float = pydantic.Field(default=1.0, ge=0)
    feature_offset: float = pydantic.Field(default=20, gt=0)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Twin":
        if 2 * self.labels_per_point - 1 > self.topic_labels:
            raise ValueError(
                "topic_labels must be at least 2 labels_per_point - 1: a point's labels are one topic's"
            )
        return self


class Generator:
    """The points of a twin; its tables take some 40 bytes a label and a feature, whatever the points."""

    def __init__(self, twin: Twin, num_features: int, num_labels: int) -> None:
        self.twin, self.num_features, self.num_labels = twin, num_features, num_labels
        topics = -(-num_labels // twin.topic_labels)
        planted = _power_law(topics, twin.topic_exponent, twin.topic_offset)
        self._topics = np.cumsum((1 - twin.uniform_topics) * planted + twin.uniform_topics / topics)
        self._label_weights = (np.arange(twin.topic_labels) + 1.0) ** -twin.label_exponent
        words = _power_law(num_features, twin.feature_exponent, twin.feature_offset)
        self._words = np.cumsum(words)
        own = np.sqrt(words)  # words of topics and labels are rarer than the background's
        own = np.cumsum(own / own.sum())
        self._feature_ids = self._shuffled(num_features, _FEATURES)
        self._label_ids = self._shuffled(num_labels, _LABELS)
        self._topic_words = self._draw(own, self._raw(_TOPIC_WORDS, 0, topics, TOPIC_WORDS))
        self._label_words = self._draw(own, self._raw(_LABEL_WORDS, 0, num_labels, LABEL_WORDS))
        often = np.minimum(1.0, words * (1 + twin.background / 2))  # the share of points that have a word
        self._idf = np.empty(num_features, np.int64)
        self._idf[self._feature_ids] = np.rint(64 * (1 - np.log(often)))

    def points(self, split: str, first: int, count: int) -> Part:
        """Points `first` to `first + count` of "train" or "test"."""
        most = self.twin.topic_labels
        raw = self._raw(
            _TRAIN if split == "train" else _TEST, first, count, 4 + 2 * most + self.twin.background
        )
        head, keys, bits, background = np.split(raw, np.cumsum([4, most, most]), axis=1)
        uniform = _uniform(head)
        topic = np.minimum(np.searchsorted(self._topics, uniform[:, 0]), len(self._topics) - 1)
        there = np.minimum(most, self.num_labels - topic * most)  # the last topic may have fewer labels
        wanted = 1 + (uniform[:, 1] * (2 * self.twin.labels_per_point - 1)).astype(np.int64)
        y_lengths = np.minimum(wanted, there)
        waits = -np.log(1 - _uniform(keys)) / self._label_weights
        waits[np.arange(most) >= there[:, None]] = np.inf
        chosen = topic[:, None] * most + np.argsort(waits, axis=1, kind="stable")
        is_chosen = np.arange(most) < y_lengths[:, None]
        chosen = np.where(is_chosen, chosen, 0)
        labels = np.sort(np.where(is_chosen, self._label_ids[chosen], self.num_labels), axis=1)

        absent = np.int32(self.num_features)
        of_topic = np.where(_bits(head[:, 2], TOPIC_WORDS), self._topic_words[topic], absent)
        kept = _bits(bits, LABEL_WORDS) & is_chosen[:, :, None]
        of_labels = np.where(kept, self._label_words[chosen], absent).reshape(count, -1)
        drawn = np.arange(self.twin.background) < np.floor(uniform[:, 3:] * (self.twin.background + 1))
        others = np.where(drawn, self._draw(self._words, background), absent)
        x_lengths, x_indices, x_values = self._tf_idf(np.concatenate([of_topic, of_labels, others], axis=1))
        return Part(x_lengths, x_indices, x_values, y_lengths, labels[labels < self.num_labels])

    def _tf_idf(self, words: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Lengths, ids and values of the rows of [n, width] words, of which num_features stands for none."""
        words = np.sort(words, axis=1)
        new = np.ones(words.shape, bool)
        new[:, 1:] = words[:, 1:] != words[:, :-1]
        present = words < self.num_features
        begins = np.flatnonzero(new[present])
        times = np.diff(begins, append=np.count_nonzero(present))
        ids = words[present][begins]
        lengths = np.count_nonzero(new & present, axis=1)
        logs = np.rint(256 * (1 + np.log(np.arange(1, words.shape[1] + 1)))).astype(np.int64)
        weights = logs[times - 1] * self._idf[ids]
        rows = np.repeat(np.arange(len(words)), lengths)
        squares = np.bincount(rows, weights * weights, len(words))  # whole numbers below 2^53: exact
        return lengths, ids, (weights / np.sqrt(squares)[rows]).astype(np.float32)

    def _raw(self, stream: int, first: int, count: int, width: int) -> NDArray[np.uint64]:
        """Random words [count, width] of rows `first` and on of a stream."""
        blocks = -(-width // 4)  # a counter gives four
        philox = np.random.Philox(key=np.array([self.twin.seed, stream], np.uint64), counter=first * blocks)
        return philox.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :width]

    def _shuffled(self, size: int, stream: int) -> NDArray[np.int32]:
        return np.argsort(self._raw(stream, 0, size, 1)[:, 0], kind="stable").astype(np.int32)

    def _draw(self, cumulated: NDArray[np.float64], raw: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Feature ids of a distribution over ranks."""
        ranks = np.searchsorted(cumulated, _uniform(raw))
        return self._feature_ids[np.minimum(ranks, self.num_features - 1)]


def write(
    folder: Path, split: str, points: int, generator: Generator, bar: Progress, chunk: int = CHUNK
) -> None:
    """Writes a split's arrays into `folder`, `chunk` points at a time."""
    writer = format.PointsWriter(folder)
    with bar.task(split, 0) as advance:
        for first in range(0, points, chunk):
            part = generator.points(split, first, min(chunk, points - first))
            writer.append(part)
            advance(sum(array.nbytes for array in vars(part).values()))
    writer.close()


def _power_law(size: int, exponent: float, offset: float) -> NDArray[np.float64]:
    """Probabilities [size] of ranks, ~ (rank + offset)^-exponent."""
    weights = np.power(np.arange(size) + offset, -exponent, dtype=np.float64)
    return weights / weights.sum()


def _uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In [0, 1)."""
    return np.multiply(raw >> np.uint64(11), 2.0**-53, dtype=np.float64)


def _bits(raw: NDArray[np.uint64], count: int) -> NDArray[np.bool_]:
    """The lowest `count` bits of every word, along a new last axis."""
    return (raw[..., None] >> np.arange(count, dtype=np.uint64) & np.uint64(1)).astype(bool)
