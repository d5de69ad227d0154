"""Memory: estimated before, refused where it is not there, measured after; saving and loading take little."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from synthetic import make_dataset

from dslide import _core, memory, network
from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import TrainConfig
from dslide.errors import UserError
from dslide.memory import Need, check_memory, peak_private_bytes
from dslide.network import Manifest, Network, Shape, load_tensors, manifest, save_model
from dslide.trainer import Trainer, train

GIB = 1 << 30
Result = TypeVar("Result")


def save(model: Network, path: Path) -> None:
    """The model of one rank."""
    content = manifest(model.config, model.shape, {}, 0)
    save_model(LocalComm(), path, content, {0: (0, model.weights())}, None)


def in_a_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function` returns there, where no earlier test has left memory that would be used again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(timeout=120)


def test_a_need_that_does_not_fit_is_refused_with_its_numbers(monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * GIB)
    need = Need(weights=2 * GIB, state=GIB // 2, tables=GIB // 4, batch=GIB // 8)
    line = check_memory(LocalComm(), need)
    assert "2.88 GiB a rank" in line and "hash tables 256 MiB" in line and "3.00 GiB free" in line
    with pytest.raises(UserError, match=r"about 4.88 GiB.*3.00 GiB are free.*weights 4.00 GiB"):
        check_memory(LocalComm(), Need(weights=4 * GIB, state=GIB // 2, tables=GIB // 4, batch=GIB // 8))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_the_estimate_is_what_training_takes(kind: str, precision: str) -> None:
    dataset = make_dataset(train=200, test=30, features=40_000, labels=40_000)
    config = TrainConfig.model_validate(
        {"epochs": 1, "batch_size": 50, "threads": 1, "network": {"hidden": 256}, "optimizer": {"kind": kind},
         "precision": precision}
    )  # fmt: skip
    trainer = Trainer(config, dataset, LocalComm(), Recorder(None))
    need = trainer.shape.memory(0, config, 2)
    arrays = sum(a.nbytes for a in (trainer.network.weights() | trainer.network.state()).values())
    assert arrays <= need.weights + need.state <= 1.1 * arrays


def result_of_training() -> dict[str, Any]:
    dataset = make_dataset(features=30_000, labels=30_000)
    config = TrainConfig.model_validate(
        {"epochs": 1, "batch_size": 50, "threads": 1, "network": {"hidden": 256}, "eval_epochs": []}
    )
    return train(config, dataset, LocalComm(), Recorder(None), None)


def test_the_result_tells_bytes_a_parameter() -> None:
    result = in_a_fresh_process(result_of_training)
    assert result["parameters"] == 60_000 * 256
    # 4.1 bytes, and a batch's buffers
    assert 4 < result["bytes_per_parameter"] < 7 and result["table_bytes"] == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_loading_in_small_pieces_gives_the_same_network(tmp_path, monkeypatch, ranks: int) -> None:
    config, pool = (
        TrainConfig.model_validate({"network": {"hidden": 48, "output_init": "normal"}}),
        _core.Pool(1),
    )
    whole = Network(config, Shape.of(91, 48, 37, 1), 0, pool, training=False)
    save(whole, tmp_path / "model")
    monkeypatch.setattr(network, "_PIECE_BYTES", 500)  # two rows or so
    for rank in range(ranks):
        part = Network(config, Shape.of(91, 48, 37, ranks), rank, pool, training=False)
        for array in part.weights().values():
            array[:] = np.nan
        load_tensors(part, Manifest.read(tmp_path / "model"), part.weights())
        columns, rows = slice(*part.hidden), slice(*part.labels)
        assert np.array_equal(part.input.weights, whole.input.weights[:, columns])
        assert np.array_equal(part.output.weights, whole.output.weights[rows])


def saving_and_loading(folder: Path) -> tuple[int, int]:
    """Bytes of the weights, and what the peak grew by."""
    config, pool = TrainConfig.model_validate({"network": {"hidden": 256}}), _core.Pool(1)
    model = Network(config, Shape.of(200_000, 256, 200_000, 1), 0, pool, training=False)
    size = sum(array.nbytes for array in model.weights().values())
    for array in model.weights().values():
        array[:] = 1.0
    before = peak_private_bytes()
    save(model, folder / "model")
    load_tensors(model, Manifest.read(folder / "model"), model.weights())
    return size, peak_private_bytes() - before


def test_saving_and_loading_do_not_double_the_memory(tmp_path) -> None:
    size, grown = in_a_fresh_process(saving_and_loading, tmp_path)
    assert grown < size / 2
