"""Small learnable data sets, and the files that hold them."""

import json
from pathlib import Path

import numpy as np

from dslide.data import Dataset, Points


def make_points(
    n: int, features: int, labels: int, seed: int, *, gaps: bool = True, per_label: int = 4
) -> Points:
    """Points whose features tell their labels: label l shows `per_label` features of its own, amid noise.

    With `gaps` every 7th point has no features and every 11th no labels.
    """
    random = np.random.default_rng(seed)
    signs = np.random.default_rng(99).integers(0, features, (labels, per_label))
    x_rows, y_rows = [], []
    for row in range(n):
        own = np.unique(random.integers(0, labels, random.integers(1, 4)))
        there = np.unique(np.concatenate([signs[own].ravel(), random.integers(0, features, 3)]))
        x_rows.append(there[:0] if gaps and row % 7 == 3 else there)
        y_rows.append(own[:0] if gaps and row % 11 == 5 else own)
    x_indptr = np.cumsum([0, *map(len, x_rows)]).astype(np.int64)
    lengths = np.maximum(1, np.diff(x_indptr))
    values = np.repeat(1 / np.sqrt(lengths), np.diff(x_indptr))
    return Points(
        x_indptr=x_indptr,
        x_indices=np.concatenate(x_rows or [np.zeros(0)]).astype(np.int32),
        x_values=(values * random.uniform(0.5, 1.5, len(values))).astype(np.float32),
        y_indptr=np.cumsum([0, *map(len, y_rows)]).astype(np.int64),
        y_indices=np.concatenate(y_rows or [np.zeros(0)]).astype(np.int32),
        num_features=features,
        num_labels=labels,
    )


def make_dataset(
    train: int = 300, test: int = 60, features: int = 90, labels: int = 37, *, gaps: bool = True
) -> Dataset:
    """A learnable set; odd sizes on purpose."""
    return Dataset(
        name="synthetic",
        hash=f"synthetic-{train}-{test}-{features}-{labels}-{gaps}",
        num_features=features,
        num_labels=labels,
        train=make_points(train, features, labels, 1, gaps=gaps),
        test=make_points(test, features, labels, 2, gaps=gaps),
    )


def write_prepared(folder: Path, dataset: Dataset) -> Path:
    """The set as a prepared folder, for `--data`."""
    splits = {}
    for split, points in (("train", dataset.train), ("test", dataset.test)):
        (folder / split).mkdir(parents=True)
        for name in ("x_indptr", "x_indices", "x_values", "y_indptr", "y_indices"):
            np.save(folder / split / f"{name}.npy", getattr(points, name))
        sizes = {"points": len(points), "nnz": len(points.x_indices), "label_nnz": len(points.y_indices)}
        splits[split] = sizes
    meta = {
        "format_version": 1,
        "name": dataset.name,
        "hash": dataset.hash,
        "source_hash": "synthetic",
        "num_features": dataset.num_features,
        "num_labels": dataset.num_labels,
        "splits": splits,
        "checksums": {},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_xc(path: Path, points: Points) -> Path:
    """The points in the XC text format."""
    lines = [f"{len(points)} {points.num_features} {points.num_labels}"]
    for row in range(len(points)):
        ys = points.y_indices[points.y_indptr[row] : points.y_indptr[row + 1]]
        part = slice(points.x_indptr[row], points.x_indptr[row + 1])
        xs = zip(points.x_indices[part].tolist(), points.x_values[part].tolist(), strict=True)
        lines.append(",".join(map(str, ys.tolist())) + " " + " ".join(f"{f}:{v:.9g}" for f, v in xs))
    path.write_text("\n".join(lines) + "\n")
    return path
