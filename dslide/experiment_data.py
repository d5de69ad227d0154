"""The data of an experiment: a set from the catalogue, or a seeded slice of one."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dslide.data import load, prepare
from dslide.data.catalogue import prepared_folder
from dslide.data.format import Points, locked, read_meta, source_hash, write_points, writing
from dslide.errors import UserError
from dslide.experiment import Experiment, Slice, data_name


def data_folder(experiment: Experiment) -> Path:
    """Where the experiment's prepared set is or will be; a set given by its path stays where it is."""
    given = Path(data_name(experiment))
    return given if len(given.parts) > 1 else prepared_folder(str(given))


def prepare_data(experiment: Experiment) -> Path:
    """Makes what is missing, downloads included; returns the folder. UserError where that is not possible."""
    folder = data_folder(experiment)
    if experiment.slice is None:
        return folder if read_meta(folder) is not None else prepare(experiment.data)
    prepare(experiment.data)
    with locked(folder):
        if read_meta(folder) is None:
            _write_slice(experiment.data, experiment.slice, folder)
    return folder


def _write_slice(name: str, part: Slice, folder: Path) -> None:
    whole = load(name)
    if part.train > len(whole.train) or part.test > len(whole.test):
        raise UserError(f"slice: {name} has {len(whole.train)} training and {len(whole.test)} test points")
    generator = np.random.Generator(np.random.Philox(part.seed))
    train = whole.train.take(np.sort(generator.permutation(len(whole.train))[: part.train]))
    test = whole.test.take(np.sort(generator.permutation(len(whole.test))[: part.test]))
    # Labels and features that the training part lacks go, the others are numbered anew: a small network.
    labels, label_id = _numbered(train.y_indices, whole.num_labels)
    features, feature_id = _numbered(train.x_indices, whole.num_features)
    num_labels, num_features = int(labels.sum()), int(features.sum())
    source = source_hash(whole=whole.hash, train=part.train, test=part.test, seed=part.seed)
    with writing(folder, name=folder.name, source=source) as work:
        work.num_features, work.num_labels = num_features, num_labels
        for split, points in (("train", train), ("test", test)):
            x_indptr, x_kept = _kept(points.x_indptr, features[points.x_indices])
            y_indptr, y_kept = _kept(points.y_indptr, labels[points.y_indices])
            new = Points(
                x_indptr=x_indptr,
                x_indices=feature_id[points.x_indices[x_kept]],
                x_values=points.x_values[x_kept],
                y_indptr=y_indptr,
                y_indices=label_id[points.y_indices[y_kept]],
                num_features=num_features,
                num_labels=num_labels,
            )
            write_points(work.folder / split, new.take(np.flatnonzero(np.diff(y_indptr))))


def _numbered(used: NDArray[np.int32], total: int) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Which ids occur, bool [total], and their new numbers, int32 [total]."""
    occurs = np.zeros(total, bool)
    occurs[used] = True
    return occurs, (np.cumsum(occurs) - 1).astype(np.int32)


def _kept(indptr: NDArray[np.int64], keep: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row borders and positions of the entries that `keep` (bool [nnz]) marks."""
    return np.concatenate([[0], np.cumsum(keep)])[indptr].astype(np.int64), np.flatnonzero(keep)
