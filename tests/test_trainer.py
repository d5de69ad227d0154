"""Training in one process: determinism, resuming, stopping, odd data, learning."""

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_dataset

from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import build_config
from dslide.errors import UserError
from dslide.inference import Model
from dslide.metrics import precision_at
from dslide.trainer import Trainer, train

SMALL_LSH = {"kind": "lsh", "lsh": {"K": 3, "L": 6, "min_active": 12, "top_up": 9, "bucket_cap": 4,
             "rebuild_points": 100, "new_functions_points": 250}}  # fmt: skip
# One shared set of all that can be in one, its tables with a growing schedule and reservoirs.
EVERYTHING = {"uniform_extras": 5, "log_uniform_extras": 5, "lsh_extras": 3,
              "lsh": {**SMALL_LSH["lsh"], "bucket_policy": "reservoir", "rebuild_growth": 1.5}}  # fmt: skip


def settings(preset="default", **overrides):
    base = {"batch_size": 32, "epochs": 2, "threads": 2, "eval_epochs": [1], "network": {"hidden": 24}}
    if preset == "slide":
        base["sampler"] = SMALL_LSH
    if preset == "everything":
        preset, base["sampler"] = "default", EVERYTHING
    return build_config(preset, None, {**base, **overrides})


def run(config, dataset, out=None, resume=False, **arguments):
    recorder = Recorder(out, resume_step=resume or None)
    return train(config, dataset, LocalComm(), recorder, out, resume=bool(resume), **arguments), recorder


class Stop(Exception):
    """What `Dies` ends a run with."""


class Dies(Recorder):
    """A recorder whose run ends instead of the event of this kind at this step."""

    def __init__(self, out, kind, step):
        super().__init__(out)
        self._last = kind, step

    def event(self, kind, **fields):
        if (kind, fields.get("step")) == self._last:
            raise Stop
        return super().event(kind, **fields)


def model_bytes(out):
    return {f.relative_to(out): f.read_bytes() for f in sorted((out / "model").rglob("*")) if f.is_file()}


@pytest.mark.parametrize("preset", ["default", "slide", "everything"])
def test_the_model_is_the_same_for_any_number_of_threads(preset, tmp_path):
    dataset, models = make_dataset(), []
    for threads in (1, 2, 3):
        out = tmp_path / str(threads)
        run(settings(preset, threads=threads), dataset, out)
        models.append(model_bytes(out))
    assert models[0] == models[1] == models[2]
    other = tmp_path / "other"
    run(settings(preset, seed=1), dataset, other)
    assert model_bytes(other) != models[0]


@pytest.mark.parametrize("preset", ["default", "slide", "everything"])
def test_a_resumed_run_equals_the_uninterrupted_one(preset, tmp_path):
    dataset = make_dataset()
    config = settings(preset, checkpoint_every=4, epochs=3, eval_epochs=[1, 2])
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    result, _ = run(config, dataset, straight)

    with pytest.raises(Stop):
        train(config, dataset, LocalComm(), Dies(resumed, "eval", 20), resumed)
    assert not (resumed / "model").exists()
    assert json.loads((resumed / "checkpoint" / "progress.json").read_text())["step"] == 16
    again, _ = run(config, dataset, resumed, resume=16)
    assert model_bytes(resumed) == model_bytes(straight)
    assert {k: again[k] for k in ("p1", "p3", "p5", "steps", "epochs")} == {
        k: result[k] for k in ("p1", "p3", "p5", "steps", "epochs")
    }

    def curve(out):
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        return [(e["step"], e["p1"], e["p5"]) for e in events if e["event"] == "eval"]

    assert curve(resumed) == curve(straight)
    assert len(curve(straight)) == 4


def test_resuming_with_other_settings_or_data_is_refused(tmp_path):
    dataset, config = make_dataset(), settings(checkpoint_every=4)
    run(config, dataset, tmp_path)
    with pytest.raises(UserError, match="batch_size"):
        run(settings(batch_size=16), dataset, tmp_path, resume=16)
    with pytest.raises(UserError, match="not on these data"):
        run(config, make_dataset(train=301), tmp_path, resume=16)


def test_a_longer_run_may_continue_where_the_rate_is_constant(tmp_path):
    constant = {"optimizer": {"decay": "constant"}, "checkpoint_every": 8}
    run(settings(epochs=2, **constant), make_dataset(), tmp_path)
    result, _ = run(settings(epochs=3, **constant), make_dataset(), tmp_path, resume=16)
    assert result["steps"] == 30


def test_saved_models_predict_what_training_measured(tmp_path):
    dataset = make_dataset()
    result, _ = run(settings(), dataset, tmp_path)
    for folder in (tmp_path, tmp_path / "model"):
        ids, _, _ = Model.load(folder, LocalComm(), 1).topk(dataset.test, 5, "test")
        precision = precision_at(ids, dataset.test.y_indptr, dataset.test.y_indices)
        assert precision == {k: result[f"p{k}"] for k in (1, 3, 5)}


def test_probabilities_are_the_softmax_over_all_labels(tmp_path):
    dataset = make_dataset(labels=7)
    run(settings(), dataset, tmp_path)
    ids, scores, lse = Model.load(tmp_path, LocalComm()).topk(dataset.test, 9, "test", normaliser=True)
    assert (ids[:, 7:] == -1).all() and (np.sort(ids[:, :7], axis=1) == np.arange(7)).all()
    assert (np.diff(scores[:, :7], axis=1) <= 0).all()
    np.testing.assert_allclose(np.exp(scores - lse[:, None]).sum(axis=1), 1, rtol=1e-4)


@pytest.mark.parametrize("preset", ["default", "slide", "everything"])
@pytest.mark.parametrize(
    "shape",
    [
        {"train": 1, "test": 1},
        {"train": 33, "test": 0},
        {"labels": 1},
        {"features": 1},
        {"train": 5, "labels": 300},
    ],
    ids=str,
)
def test_odd_sizes(preset, shape, tmp_path):
    """Points without features or labels, batches larger than the data, one label, one feature."""
    result, recorder = run(settings(preset, batch_size=64, epochs=3), make_dataset(**shape), tmp_path)
    assert result["status"] == "done"
    points = shape.get("train", 300)
    assert result["steps"] == 3 * -(-points // min(64, points))
    for array in Model.load(tmp_path, LocalComm()).networks[0].weights().values():
        assert np.isfinite(array).all()
    assert recorder.events[-1]["event"] == "end"


@pytest.mark.parametrize("preset", ["default", "slide"])
def test_a_feature_twice_in_a_point_counts_as_its_sum(preset, tmp_path):
    dataset, weights = make_dataset(), []
    once = dataset.train
    halves = replace(
        once,
        x_indptr=once.x_indptr * 2,
        x_indices=np.repeat(once.x_indices, 2),
        x_values=np.repeat(once.x_values / 2, 2),
    )
    for points in (once, halves):
        out = tmp_path / str(len(weights))
        run(settings(preset, epochs=0.5, eval_epochs=[]), replace(dataset, train=points), out)
        weights.append(Model.load(out, LocalComm()).networks[0].weights())
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def test_data_without_any_label_train_to_nothing(tmp_path):
    dataset = make_dataset(train=20, test=5)
    bare = replace(dataset.train, y_indptr=np.zeros(21, np.int64), y_indices=np.zeros(0, np.int32))
    result, _ = run(settings(), replace(dataset, train=bare), tmp_path)
    assert result["status"] == "done"


def test_no_training_points_is_a_mistake():
    with pytest.raises(UserError, match="no points"):
        run(settings(), make_dataset(train=0))


def test_a_target_ends_the_run_at_the_first_evaluation_that_reaches_it(tmp_path):
    result, recorder = run(
        settings(epochs=30, eval_epochs=[5, 10, 15, 20], target=0.3), make_dataset(), tmp_path
    )
    evals = [e for e in recorder.events if e["event"] == "eval"]
    assert result["status"] == "target" and result["p1"] == evals[-1]["p1"] >= 0.3
    assert all(e["p1"] < 0.3 for e in evals[:-1] if e["step"] > 0)
    assert result["steps"] < 280 and (tmp_path / "model" / "manifest.json").exists()


def test_a_budget_ends_the_run_and_its_last_state_is_evaluated(tmp_path):
    result, recorder = run(
        settings(epochs=1e6, eval_epochs=[], budget_seconds=0.05), make_dataset(), tmp_path
    )
    assert result["status"] == recorder.events[-1]["status"] == "timeout"
    assert 0 < result["steps"] == recorder.events[-2]["step"]


def test_a_diverging_run_says_so_and_leaves_no_model(tmp_path):
    config = settings(epochs=20, optimizer={"kind": "adam", "learning_rate": 1e30, "decay": "constant"})
    result, recorder = run(config, make_dataset(), tmp_path)
    assert result["status"] == recorder.events[-1]["status"] == "diverged"
    assert result["model"] is None and not (tmp_path / "model").exists()


@pytest.mark.parametrize("when", ["_one_step", "_evaluate"])
def test_an_interrupt_is_recorded_and_leaves_nothing_half_written(when, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(settings(), make_dataset(), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["status"] == "interrupted"
    assert {f.name for f in tmp_path.iterdir()} <= {"events.jsonl", "meta.json", "predictions"}


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated():
    dataset = make_dataset()
    huge = replace(dataset, num_features=2**31 - 1, num_labels=2**31 - 1)
    with pytest.raises(UserError, match=r"needs about [\d.]+ GiB on .*, where [\d.]+ GiB are free"):
        Trainer(settings(), huge, LocalComm(), Recorder(None))


def test_step_times_are_recorded_without_evaluation():
    recorder = Recorder(None)
    Trainer(settings(), make_dataset(), LocalComm(), recorder).time_steps(2, 5)
    assert [e["event"] for e in recorder.events] == ["start"] + ["step"] * 5
    assert all(e["seconds"] > 0 for e in recorder.events[1:])


def test_the_input_power_is_that_of_a_transformed_set(tmp_path):
    """A row's values raised, their signs kept, and scaled to unit norm; in training and in prediction."""
    dataset = make_dataset()
    dataset.train.x_values[::5] *= -1

    def transformed(points):
        values = np.zeros(len(points.x_values))
        for row in range(len(points)):
            part = slice(points.x_indptr[row], points.x_indptr[row + 1])
            raised = np.array([np.sign(v) * abs(v) ** 1.5 for v in points.x_values[part].astype(float)])
            values[part] = raised / (np.linalg.norm(raised) or 1)
        return replace(points, x_values=values.astype(np.float32))

    by_hand = replace(dataset, train=transformed(dataset.train), test=transformed(dataset.test))
    result, _ = run(settings(network={"hidden": 24, "input_power": 1.5}), dataset, tmp_path / "power")
    expected, _ = run(settings(), by_hand, tmp_path / "hand")
    assert result["p5"] == pytest.approx(expected["p5"], abs=0.01)
    one, other = (
        Model.load(tmp_path / name, LocalComm()).networks[0].weights() for name in ("power", "hand")
    )
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=1e-3)
    ids, _, _ = Model.load(tmp_path / "power", LocalComm(), 1).topk(dataset.test, 5, "test")
    assert precision_at(ids, dataset.test.y_indptr, dataset.test.y_indices)[5] == result["p5"]
