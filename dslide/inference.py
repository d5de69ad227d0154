"""A trained model from its folder, for evaluation and prediction.

    model = dslide.load_model("runs/mine")
    ids, probabilities = model.predict(x, k=5)

A model in one process may be asked by several threads at once; it holds nothing that a question changes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dslide import _core
from dslide.comm import LocalComm, local_threads
from dslide.data import Points
from dslide.errors import UserError
from dslide.evaluation import EnsemblePredictor, Predictor
from dslide.network import Manifest, Network, Shape, load_tensors
from dslide.progress import on_stderr

_CHUNK = 4096  # points answered together, so that memory doesn't grow with the points
_PREDICTIONS = 1 << 22  # of a chunk, at most


@dataclass(frozen=True)
class Tables:
    """Hash tables for approximate prediction; None: by `resolved`'s rule."""

    family: str = "simhash"
    K: int | None = None
    L: int | None = None
    candidates: int | None = None

    def resolved(self, labels: int) -> "Tables":
        """The rule for a number of labels (docs/inference.md has what it was chosen by): buckets of about 64
        rows, 64 tables, and 1,000 candidates or a fiftieth of the labels."""
        bits = max(1, round(math.log2(max(2, labels / 64))))
        codes = bits if self.family == "simhash" else max(1, round(bits / 3))
        candidates = min(labels, max(1000, labels // 50))
        return replace(
            self,
            K=self.K if self.K is not None else codes,
            L=self.L if self.L is not None else 64,
            candidates=self.candidates if self.candidates is not None else candidates,
        )


@dataclass(frozen=True)
class Model:
    """This rank's shards of a trained network, or of an ensemble's networks."""

    folder: Path
    manifest: Manifest
    networks: list[Network]
    comm: LocalComm
    pool: Any
    tables: Any = None  # of the only network's output rows: predictions are approximate

    @classmethod
    def load(
        cls, path: Path, comm: LocalComm, threads: int = 0, approximate: Tables | None = None
    ) -> "Model":
        """Reads the model of a run's or a model's folder into any number of ranks; UserError if it can't."""
        folder = path if (path / "manifest.json").exists() else path / "model"
        source = Manifest.read(folder)
        content = source.content
        shape = Shape.of(
            content["features"],
            source.config.network.hidden,
            content["labels"],
            comm.size,
            _core.OutputLayer.topk_part,  # so that any number of ranks adds up the same parts
            source.config.network.layer_units(),
        )
        pool = _core.Pool(threads or local_threads(comm))
        networks = []
        for member in range(len(content["members"])):
            networks.append(Network(source.config, shape, comm.rank, pool, training=False))
            load_tensors(networks[-1], source, networks[-1].weights(), member)
        tables = None
        if approximate is not None:
            if len(networks) > 1:
                raise UserError(f"{folder}: an ensemble; approximate prediction is for one network")
            tables = _tables(networks[0], approximate.resolved(shape.labels))
        return cls(folder, source, networks, comm, pool, tables)

    def topk(
        self, points: Points, k: int, where: str, *, normaliser: bool = False, progress: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64] | None]:
        """As Predictor.topk, or EnsemblePredictor.topk; UserError naming `where` if the model does not know a
        feature or label."""
        shape = self.networks[0].shape
        for what, indices, limit in (
            ("feature", points.x_indices, shape.features),
            ("label", points.y_indices, shape.labels),
        ):
            if len(indices) and indices.max() >= limit:
                raise UserError(f"{where}: {what} {indices.max()} is unknown to the model, which has {limit}")
        fitted = replace(points, num_features=shape.features, num_labels=shape.labels)
        several = len(self.networks) > 1
        predictors = [
            Predictor(
                network,
                self.comm,
                self.pool,
                normaliser=normaliser or several,
                progress=on_stderr(self.comm.rank) if progress else None,
                tables=self.tables,
            )
            for network in self.networks
        ]
        if several:
            return EnsemblePredictor(self.comm, self.comm, predictors, len(predictors)).topk(fitted, k)
        return predictors[0].topk(fitted, k)

    def probable(
        self, points: Points, k: int, where: str
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
        """Collective. Ids [n, k] and probabilities [n, k] of consecutive chunks of the points, best first; -1
        and 0 where there are fewer labels. As many points a chunk for any number of threads and ranks."""
        size = max(1, min(_CHUNK, _PREDICTIONS // k))
        for begin in range(0, len(points), size):
            part = points.rows(begin, min(len(points), begin + size))
            ids, scores, lse = self.topk(part, k, where, normaliser=True, progress=False)
            assert lse is not None
            with np.errstate(invalid="ignore"):  # no candidates at all: -inf less -inf
                yield ids, np.where(ids >= 0, np.exp(scores - lse[:, None]), 0.0)

    def predict(self, x: Any, k: int = 5) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best labels of every row of `x`, best first, equal scores by lower id.

        x: scipy sparse (or dense) float [n, features]; fewer columns than the model has features will do.
        Returns ids int32 [n, k] and their softmax probabilities over all labels, float32 [n, k]; -1 and 0
        where the model has fewer than k labels. An approximate model's probabilities are over its candidates.
        ValueError for a k below 1, unknown features, values that aren't finite.
        """
        if k < 1:
            raise ValueError(f"k {k}: must be at least 1")
        try:
            chunks = list(self.probable(_as_points(x, self.networks[0].shape.features), k, "x"))
        except UserError as error:
            raise ValueError(str(error)) from None
        ids = [np.zeros((0, k), np.int32), *(ids for ids, _ in chunks)]
        return np.concatenate(ids), np.concatenate(
            [np.zeros((0, k), np.float32), *(p.astype(np.float32) for _, p in chunks)]
        )

    def label_names(self) -> list[str] | None:
        """One name a label, if the data had them."""
        return self.manifest.label_names()


def load_model(run: str | Path, threads: int = 0, approximate: Tables | bool = False) -> Model:
    """The trained model of a run's or a model's folder, in this process; `threads` 0: all its cores.

    With `approximate` hash tables choose the labels that are scored (docs/inference.md says when that pays).
    dslide.errors.UserError if there is no model or it is broken.
    """
    tables = Tables() if approximate is True else approximate or None
    return Model.load(Path(run), LocalComm(), threads, tables)


def table(
    ids: NDArray[np.int32], probability: NDArray[np.float64], names: list[str] | None, first: int = 0
) -> str:
    """Lines of row (from `first`), position (from 1), label, probability, tab-separated; missing predictions
    left out."""
    lines = []
    for row in range(len(ids)):
        for position, label in enumerate(ids[row].tolist()):
            if label >= 0:
                name = names[label] if names is not None else label
                lines.append(f"{first + row}\t{position + 1}\t{name}\t{probability[row, position]:.6g}\n")
    return "".join(lines)


def _tables(network: Network, tables: Tables) -> Any:
    try:
        return _core.ApproximateTopK(
            network.output, family=tables.family, k=tables.K, l=tables.L, candidates=tables.candidates
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _as_points(x: Any, features: int) -> Points:
    matrix = csr_matrix(x)
    if matrix.nnz and not np.isfinite(matrix.data).all():
        raise ValueError("x: holds values that aren't finite")
    nothing = np.zeros(0, np.int32)
    return Points(
        x_indptr=matrix.indptr.astype(np.int64),
        x_indices=matrix.indices.astype(np.int32),
        x_values=matrix.data.astype(np.float32),
        y_indptr=np.zeros(matrix.shape[0] + 1, np.int64),
        y_indices=nothing,
        num_features=features,
        num_labels=0,
    )
