"""What a trained model's answers cost: exactly, by hash tables and their recall, and beside a label tree."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dslide.bench import rivals_setup, systems
from dslide.bench.speed.measure import Row, measure
from dslide.bench.speed.sizes import Size
from dslide.data import Dataset
from dslide.inference import Model, Tables, load_model

K = 5
ALONE = 200  # points that are asked one by one

Ask = Callable[[csr_matrix], NDArray[np.int32]]  # points [n, features] -> best labels [n, K]


def answers(size: Size, threads: int, dataset: Dataset, run: Path, rivals: bool) -> list[Row]:
    """Rows of the trained model in `run` on the test split of `dataset`: exact, then by several tables.

    Points a CPU second of all threads for the whole split, points a second for one point at a time. Recall is
    of the exact answer's labels. With `rivals` napkinXC's label tree, trained here with its defaults, is the
    exact rows' rival.
    """
    x = csr_matrix(dataset.test.x, dtype=np.float32)
    model = load_model(run, threads)
    exact = model.predict(x, K)[0]
    rows = _rows(size, "exact", x, _ask(model))
    if rivals and rivals_setup.missing("napkinxc") is None:
        tree = _rows(size, "napkinXC PLT", x, _label_tree(dataset, threads))
        rows = [
            row.with_(rival=other.value, rival_name="napkinXC PLT")
            for row, other in zip(rows, tree, strict=True)
        ] + tree
    if len(model.networks) > 1:  # an ensemble has no approximate answers
        return rows
    for tables in _settings(model.networks[0].shape.labels):
        approximate = load_model(run, threads, tables)
        found = approximate.predict(x, K)[0]
        case = f"{tables.family} K={tables.K} L={tables.L}, {tables.candidates:,} candidates"
        recall = ", ".join(f"recall@{k} {_recall(found[:, :k], exact[:, :k]):.2f}" for k in (1, K))
        rows += [
            row.with_(note=f"{recall}{', ' + row.note if row.note else ''}")
            for row in _rows(size, case, x, _ask(approximate))
        ]
    return rows


def _settings(labels: int) -> list[Tables]:
    """The rule's tables; larger buckets, with as many candidates and with four times as many; DWTA."""
    rule = Tables().resolved(labels)
    assert rule.K is not None and rule.candidates is not None
    wide, more = max(1, rule.K - 2), min(labels, 4 * rule.candidates)
    choices = [rule, Tables(K=wide), Tables(K=wide, candidates=more), Tables("dwta")]
    return [tables.resolved(labels) for tables in choices]


def _rows(size: Size, case: str, x: csr_matrix, ask: Ask) -> list[Row]:
    n = x.shape[0]
    whole = measure(
        "inference",
        f"{case}: top-{K} of all {n:,} points",
        "points/CPU s",
        n,
        lambda: ask(x),
        repeats=5,
        seconds=size.seconds,
        clock=time.process_time,
    )
    singles = [x[row] for row in range(0, n, -(-n // ALONE))]
    ask(singles[0])
    times = []
    for one in singles:
        begin = time.perf_counter()
        ask(one)
        times.append(time.perf_counter() - begin)
    middle, late = np.percentile(times, [50, 99])
    alone = Row(
        "inference",
        f"{case}: one point at a time",
        value=1 / middle,
        low=1 / max(times),
        high=1 / min(times),
        unit="points/s",
        repeats=len(times),
        note=f"p50 {1000 * middle:.2f} ms, p99 {1000 * late:.2f} ms",
    )
    return [whole.with_(note=f"{n / whole.value:.2f} CPU s"), alone]


def _ask(model: Model) -> Ask:
    return lambda x: model.predict(x, K)[0]


def _label_tree(dataset: Dataset, threads: int) -> Ask:
    """napkinXC's probabilistic label tree, trained on the training split with the library's defaults."""
    from napkinxc.models import PLT

    plt = systems.load("plt")
    folder = tempfile.TemporaryDirectory(prefix="dslide-plt-")
    tree: Any = PLT(folder.name, seed=0, threads=threads, **plt.Settings().model_dump())
    tree.fit(dataset.train.x.astype(np.float32), dataset.train.y)
    tree.load()

    def ask(x: csr_matrix) -> NDArray[np.int32]:
        assert folder  # its files stay while the tree is asked
        return plt.top5(tree.predict_proba(x, top_k=K))[0]  # type: ignore[no-any-return]

    return ask


def _recall(found: NDArray[np.int32], exact: NDArray[np.int32]) -> float:
    """The part of the exact labels that were found; there are no equal ids in a row."""
    return float((found[:, :, None] == exact[:, None, :]).any(axis=1).mean())
