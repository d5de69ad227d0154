"""What the rivals share, without their frameworks: plug-in interface, batches, log-Q, label-tree output."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from reference import in_batch_log_q
from synthetic import make_dataset

from dslide.bench import rivals_setup, systems
from dslide.bench.rivals_data import Distinct, InputMaker, LabelMaker, log_inclusion, own_part
from dslide.bench.spec import Cluster, RunSpec
from dslide.errors import UserError

RIVALS = ("tensorflow_full", "tensorflow_recipe", "horovod_dense", "horovod_recipe", "plt")


def spec(system: str, **fields: object) -> RunSpec:
    return RunSpec.model_validate({"run_id": "t", "system": system, "data": "x", "out": Path("x"), **fields})


@pytest.mark.parametrize("name", RIVALS)
def test_each_rival_is_a_system_and_refuses_unknown_settings(name: str) -> None:
    system = systems.load(name)
    assert name.replace("_", "-") == system.NAME
    assert system.launcher(spec(name)) in systems.LAUNCHERS
    systems.settings(system, spec(name))
    with pytest.raises(UserError, match=r"settings\.no_such"):
        systems.settings(system, spec(name, settings={"no_such": 1}))


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_that_is_not_installed_says_so_and_names_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals_setup, "find_spec", lambda package: None)
    reason = systems.load(name).skip(spec(name))
    assert reason is not None and "not installed" in reason and "scripts/install_rivals.sh" in reason


def test_horovod_without_its_tensorflow_part_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").touch()
    found = importlib.util.spec_from_file_location("horovod", tmp_path / "__init__.py")
    monkeypatch.setattr(rivals_setup, "find_spec", lambda package: found)
    assert "without TensorFlow" in (rivals_setup.missing("horovod") or "")


@pytest.mark.parametrize("name", ["tensorflow_full", "tensorflow_recipe", "plt"])
def test_rivals_of_one_node_say_so(name: str) -> None:
    reason = systems.load(name).skip(spec(name, cluster=Cluster(nodes=2)))
    assert reason is not None and ("one node" in reason or "not installed" in reason)


def test_transport_chooses_the_launcher() -> None:
    for name in ("horovod_dense", "horovod_recipe"):
        chosen = [systems.load(name).launcher(spec(name, settings={"transport": t})) for t in ("gloo", "mpi")]
        assert chosen == ["gloo", "mpi"]


def test_distinct_ids_and_their_places() -> None:
    ids = np.array([7, 3, 7, 0, 3])
    distinct = Distinct(9)
    assert distinct.of(ids).tolist() == [0, 3, 7]
    assert distinct.places(ids).tolist() == [2, 1, 2, 0, 1]
    assert distinct.of(np.array([8])).tolist() == [8]  # nothing is left of the first


def test_inputs_are_the_rows_and_their_transpose_over_distinct_features() -> None:
    x = make_dataset().train.x
    rows = np.array([5, 3, 17, 3])  # 3 and 17 have no features
    inputs = InputMaker(x).make(rows)
    expected = x[rows].toarray()[:, inputs.features]
    forward, transpose = np.zeros_like(expected), np.zeros_like(expected.T)
    forward[tuple(inputs.x.places.T)] = inputs.x.values
    transpose[tuple(inputs.x_t.places.T)] = inputs.x_t.values
    np.testing.assert_array_equal(forward, expected)
    np.testing.assert_array_equal(transpose, expected.T)
    assert expected.any(axis=0).all() and expected.astype(bool).sum() == x[rows].nnz
    assert (np.diff(inputs.x_t.places[:, 0]) >= 0).all()  # in row order


@pytest.mark.parametrize("extras", [0, 50])
def test_log_q_is_the_chance_of_being_drawn(extras: int) -> None:
    counts = np.array([1, 2, 5, 30, 100])
    expected = in_batch_log_q(counts, 100, 20, extras, 5)
    np.testing.assert_allclose(log_inclusion(counts, 100, 20, extras), expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(log_inclusion(np.array([0, 3]), 100, 20, 0)).all()


def test_active_labels_are_the_whole_batchs_and_own_ones_are_not_corrected() -> None:
    dataset = make_dataset()
    y = dataset.train.y
    maker = LabelMaker(y, 8, extras=5, logq=True, weight_labels=True, seed=3)
    batch = np.arange(8)
    whole, half = maker.make(batch, batch, 0), maker.make(batch, batch[1::2], 0)
    assert set(y[batch].indices) <= set(whole.labels.tolist())
    np.testing.assert_array_equal(whole.labels, half.labels)  # the same draws and labels on every rank
    np.testing.assert_array_equal(whole.shift[1::2], half.shift)
    np.testing.assert_array_equal(whole.target[1::2], half.target)
    np.testing.assert_array_equal(whole.weight[1::2], half.weight)
    own = y[batch].toarray()[:, whole.labels] > 0
    assert (whole.shift[own] == 0).all() and (whole.shift[~own] > 0).all()
    sums = whole.target.sum(axis=1)
    np.testing.assert_allclose(sums[own.any(axis=1)], 1, rtol=1e-6)
    np.testing.assert_allclose(whole.weight, np.sqrt(own.sum(axis=1)) / 8, rtol=1e-6)
    assert own.any(axis=1).tolist().count(False) == 1  # a point without labels weighs nothing


def test_every_point_belongs_to_one_rank_and_none_is_left_without() -> None:
    batch = np.arange(10, 17)
    parts = [own_part(batch, rank, 3) for rank in range(3)]
    assert sorted(np.concatenate([p for p, _ in parts]).tolist()) == batch.tolist()
    assert not any(stand_in for _, stand_in in parts)
    part, stand_in = own_part(batch[:1], 2, 3)
    assert part.tolist() == [10] and stand_in


def test_label_tree_predictions_are_ordered_and_padded() -> None:
    ids, scores = systems.load("plt").top5([[(9, 0.5), (4, 0.5), (1, 0.7)], []])
    assert ids.tolist() == [[1, 4, 9, -1, -1], [-1] * 5]
    np.testing.assert_allclose(scores[0], [0.7, 0.5, 0.5, 0, 0], rtol=1e-6)
