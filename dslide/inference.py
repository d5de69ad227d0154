"""A trained model from its folder, for evaluation and prediction."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dslide import _core
from dslide.comm import LocalComm, local_threads
from dslide.data import Points
from dslide.errors import UserError
from dslide.evaluation import EnsemblePredictor, Predictor
from dslide.network import Manifest, Network, Shape, load_tensors
from dslide.progress import on_stderr


@dataclass(frozen=True)
class Model:
    """This rank's shards of a trained network, or of an ensemble's networks."""

    folder: Path
    manifest: Manifest
    networks: list[Network]
    comm: LocalComm
    pool: Any

    @classmethod
    def load(cls, path: Path, comm: LocalComm, threads: int = 0) -> "Model":
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
        )
        pool = _core.Pool(threads or local_threads(comm))
        networks = []
        for member in range(len(content["members"])):
            networks.append(Network(source.config, shape, comm.rank, pool, training=False))
            load_tensors(networks[-1], source, networks[-1].weights(), member)
        return cls(folder, source, networks, comm, pool)

    def topk(
        self, points: Points, k: int, where: str, *, normaliser: bool = False
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
        progress = on_stderr(self.comm.rank)
        predictors = [
            Predictor(network, self.comm, self.pool, normaliser=normaliser or several, progress=progress)
            for network in self.networks
        ]
        if several:
            return EnsemblePredictor(self.comm, self.comm, predictors, len(predictors)).topk(fitted, k)
        return predictors[0].topk(fitted, k)


def table(
    ids: NDArray[np.int32], scores: NDArray[np.float32], lse: NDArray[np.float64], names: list[str] | None
) -> str:
    """Lines of row, position (from 1), label, probability, tab-separated; missing predictions left out."""
    probability = np.exp(scores - lse[:, None])
    lines = []
    for row in range(len(ids)):
        for position, label in enumerate(ids[row].tolist()):
            if label >= 0:
                name = names[label] if names is not None else label
                lines.append(f"{row}\t{position + 1}\t{name}\t{probability[row, position]:.6g}\n")
    return "".join(lines)
