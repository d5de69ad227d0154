"""The TensorFlow rivals compute what they claim, held against the numpy reference, and run through the race's
loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import Reference, in_batch_log_q
from synthetic import make_dataset, write_prepared

from dslide.bench import systems
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.data import Dataset, batches

pytestmark = pytest.mark.rivals
BATCH = 20


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return make_dataset()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """TensorFlow's threads are set once a process: as `race` below will want them."""
    from dslide.bench.rivals_tf import use_threads

    use_threads(1)


def full(dataset: Dataset, **settings: Any) -> Any:
    from dslide.bench.rivals_full import FullTrainer
    from dslide.bench.rivals_setup import FullSettings

    return FullTrainer(dataset, FullSettings(hidden=32, init_std=0.3, **settings), seed=1, batch_size=BATCH)


def recipe(dataset: Dataset, **settings: Any) -> Any:
    from dslide.bench.rivals_recipe import RecipeTrainer
    from dslide.bench.rivals_setup import RecipeSettings

    return RecipeTrainer(
        dataset, RecipeSettings(hidden=32, init_std=0.3, dropout=0, **settings), seed=1, batch_size=BATCH
    )


def dense(dataset: Dataset, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return dataset.train.x[rows].toarray().astype(float), (dataset.train.y[rows].toarray() > 0).astype(float)


def reference_of_full(trainer: Any) -> Reference:
    w1, b1, w2 = (w.numpy().astype(float) for w in trainer.weights)
    return Reference(w1, b1, w2[:, :-1], w2[:, -1], slope=0, weight_labels=False)


def test_full_softmax_gradient_equals_numpy(dataset: Dataset) -> None:
    trainer = full(dataset)
    rows = np.arange(BATCH)  # with points that lack features, and one that lacks labels
    x, y = dense(dataset, rows)
    expected = reference_of_full(trainer).gradients(x, y, np.ones_like(y, bool))
    d_w1, d_b1, d_w2 = trainer.gradients(trainer.feed(rows, 0))
    for got, want in (
        (d_w1, expected.W),
        (d_b1, expected.b),
        (d_w2[:, :-1], expected.U),
        (d_w2[:, -1], expected.c),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


def test_full_softmax_trains_with_dense_adam(dataset: Dataset) -> None:
    trainer = full(dataset, lr=0.01, eps=1e-4, schedule="linear")
    expected = reference_of_full(trainer)
    for step, rows in enumerate(list(batches(len(dataset.train), BATCH, 0, 0))[:4]):
        trainer.step(trainer.feed(rows, step), step, step / 10)
        x, y = dense(dataset, rows)
        expected.adam(expected.gradients(x, y, np.ones_like(y, bool)), 0.01 * (1 - step / 10), 1e-4, step + 1)
    w1, _, w2 = (w.numpy() for w in trainer.weights)
    np.testing.assert_allclose(w1, expected.W, atol=1e-5)
    np.testing.assert_allclose(w2, np.column_stack([expected.U, expected.c]), atol=1e-5)


@pytest.mark.parametrize("everything", [False, True])
def test_recipe_equals_numpy_and_with_all_classes_sampled_equals_full_softmax(
    dataset: Dataset, everything: bool
) -> None:
    """With very many uniform extras every label is active and its log q is 0: nothing is left of the
    sampling."""
    extras = 5000 if everything else 7
    trainer = recipe(dataset, extras=extras, initial_accumulator=1e-3, initial_accumulator_input=1e-3)
    trainer.prepare()
    bias = np.zeros(32), np.zeros(dataset.num_labels)
    start = trainer.w1.numpy().astype(float), trainer.w2.numpy().astype(float)
    expected = Reference(start[0], bias[0], start[1], bias[1], slope=0.4, weight_labels=True, bias=False)
    counts = np.bincount(dataset.train.y.indices, minlength=dataset.num_labels)
    if not everything:
        expected.log_q = in_batch_log_q(counts, len(dataset.train), BATCH, extras, dataset.num_labels)
    for step, rows in enumerate(list(batches(len(dataset.train), BATCH, 0, 0))[:4]):
        feed = trainer.feed(rows, step)
        trainer.step(feed, step, 0.0)
        x, y = dense(dataset, rows)
        active = np.zeros_like(y, bool)
        active[:, feed.labels.labels] = True
        assert active.all() or not everything
        gradients = expected.gradients(x, y, active)
        expected.adagrad(gradients, 0.1, 1e-8, {"W": 1e-3, "U": 1e-3}, block=32)
    np.testing.assert_allclose(trainer.w1.numpy(), expected.W, atol=2e-5)
    np.testing.assert_allclose(trainer.w2.numpy(), expected.U, atol=2e-5)


def test_output_rows_start_at_unit_class_means(dataset: Dataset) -> None:
    trainer = recipe(dataset)
    trainer.prepare()
    x, y = dense(dataset, np.arange(len(dataset.train)))
    a = x @ trainer.w1.numpy()
    h = np.where(a > 0, a, 0.4 * a)
    sums = y.T @ (h - h.mean(axis=0))
    np.testing.assert_allclose(
        trainer.w2.numpy(), sums / np.linalg.norm(sums, axis=1, keepdims=True), atol=1e-4
    )


def test_top5_is_exact_and_ties_go_to_the_lower_id(dataset: Dataset) -> None:
    trainer = recipe(dataset)
    trainer.prepare()
    weights = trainer.w2.numpy()
    weights[20] = weights[3]  # scores that are equal for every point
    trainer.w2.assign(weights)
    x = dataset.test.x
    ids, scores = trainer.predict(x)
    a = x.toarray() @ trainer.w1.numpy()
    z = np.where(a > 0, a, 0.4 * a) @ weights.T
    assert ids.shape == scores.shape == (x.shape[0], 5)
    empty = np.flatnonzero(np.diff(x.indptr) == 0)
    assert len(empty) and (ids[empty] == np.arange(5)).all()  # all scores are 0
    np.testing.assert_allclose(scores, -np.sort(-z, axis=1)[:, :5], atol=1e-5)
    both = [row for row in ids.tolist() if 3 in row and 20 in row]
    assert both and all(row.index(3) < row.index(20) for row in both)


def race(folder: Path, system: str, **fields: Any) -> Recorder:
    spec = RunSpec.model_validate(
        {"run_id": "t", "system": system, "data": str(folder), "batch_size": BATCH, "out": "unused", **fields}
    )
    recorder = Recorder(None)
    systems.load(system).run(spec, recorder)
    return recorder


@pytest.mark.parametrize("system", ["tensorflow_full", "tensorflow_recipe"])
def test_race_evaluates_at_the_protocols_steps_and_learns(system: str, tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "set", make_dataset(gaps=False))
    settings = {"lr": 0.02} if system == "tensorflow_full" else {}
    recorder = race(folder, system, epochs=4, eval_epochs=[0.5, 1, 2], settings=settings)
    evals = [e for e in recorder.events if e["event"] == "eval"]
    assert [e["step"] for e in evals] == [0, 8, 15, 30, 60]
    assert [e["samples"] for e in evals] == [0, 160, 300, 600, 1200]
    assert evals[-1]["p1"] > max(0.5, evals[0]["p1"])  # chance is 0.05
    assert recorder.events[-1]["status"] == "done"
    assert evals[0]["train_seconds"] < evals[-1]["train_seconds"]


def test_race_stops_at_the_target_at_the_budget_and_when_it_diverges(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "set", make_dataset(gaps=False))
    ends = [
        race(folder, "tensorflow_recipe", epochs=2, eval_epochs=[1], **fields).events[-1]
        for fields in ({"target": 0.1}, {"budget_seconds": 1e-6}, {"settings": {"lr": 1e38}})
    ]
    assert [end["status"] for end in ends] == ["target", "timeout", "diverged"]
    assert ends[1]["steps"] < 30


def test_paced_steps_are_timed_and_nothing_is_evaluated(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "set", make_dataset())
    recorder = race(folder, "tensorflow_recipe", pace_steps=20)  # more than an epoch's steps with the warm-up
    kinds = [e["event"] for e in recorder.events]
    assert kinds.count("step") == 20 and "eval" not in kinds
    assert all(e["seconds"] > 0 for e in recorder.events if e["event"] == "step")


def test_label_tree_learns_and_has_one_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("napkinxc")
    folder = write_prepared(tmp_path / "set", make_dataset(gaps=False))
    recorder = race(folder, "plt", settings={"max_leaves": 10})
    evals = [e for e in recorder.events if e["event"] == "eval"]
    assert len(evals) == 1 and evals[0]["p1"] > 0.5
    assert evals[0]["train_seconds"] > 0
