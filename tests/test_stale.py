"""exchange.stale_after: the input layer's gradient is applied one step late, and nothing else is."""

import json

import numpy as np
import pytest
from mpirun import needs_mpi
from mpirun import run as run_ranks
from synthetic import make_dataset, write_prepared
from test_mpi import tensors
from test_trainer import Dies, Stop, model_bytes, run, settings

from dslide import _core
from dslide.bench.protocol import total_steps
from dslide.bench.records import Recorder
from dslide.comm import LocalComm, payload_per_point
from dslide.config import build_config
from dslide.data import batches
from dslide.errors import UserError
from dslide.evaluation import core_csr
from dslide.network import Network, Shape
from dslide.samplers import label_counts, make_sampler
from dslide.trainer import Trainer, train

BATCH, HIDDEN = 32, 24


def trained(dataset, out, stale_after, **overrides):
    """A trained model's bytes, and the result."""
    config = settings(exchange={"stale_after": stale_after}, **overrides)
    result, _ = run(config, dataset, out)
    return model_bytes(out), result


def reference(config, dataset, stale_after):
    """The weights that training gives, by steps that know nothing of each other: each has the input layer's
    weights and state set to what it must see, and the late gradient's step computes its activations again."""
    points = len(dataset.train)
    pool, shape = _core.Pool(1), Shape.of(dataset.num_features, HIDDEN, dataset.num_labels, 1)
    network = Network(config, shape, 0, pool, training=True)
    x, y = core_csr(dataset.train, dataset.num_features, dataset.num_labels)
    network.initialise(x, y)
    batch, counts = _core.Batch(pool, x, y), label_counts(dataset.train.y_indices, dataset.num_labels)
    labels = (dataset.num_labels, 0, dataset.num_labels)
    sampler = make_sampler(config.sampler, network.output, labels, counts, points, BATCH, config.seed).core
    inputs = [network.weights()["input.weights"], *network.input.state().values()]
    total = total_steps(points, BATCH, config.epochs)
    late = None  # rows, step, gradient, and the input layer that it saw

    def apply():
        rows, step, dh, saw = late
        now = [array.copy() for array in inputs]
        for array, then in zip(inputs, saw, strict=True):
            array[:] = then
        batch.select(rows, step)
        network.input.forward(batch, np.zeros_like(dh), True)  # for its derivative
        for array, then in zip(inputs, now, strict=True):
            array[:] = then
        network.input.backward(batch, dh, rate(step), step + 1)

    def rate(step):
        return config.optimizer.learning_rate * max(0.0, 1 - step / total)

    order = (rows for epoch in range(9) for rows in batches(points, BATCH, config.seed, epoch))
    for step, rows in zip(range(total), order, strict=False):
        saw = [array.copy() for array in inputs]
        h, dh = np.zeros((2, len(rows), HIDDEN), np.float32)
        lse = np.zeros(len(rows), np.float32)
        batch.select(rows, step)
        network.input.forward(batch, h, True)
        network.output.forward(batch, h, sampler, lse)
        network.output.backward(batch, lse, dh, True, len(rows))
        network.output.update(rate(step), step + 1)
        if late is not None:
            apply()
        late = rows, step, dh, saw
        if step < stale_after or step + 1 == total:
            apply()
            late = None
    return network.weights()


@pytest.mark.parametrize("stale_after", [0, 4])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_steps_see_weights_that_lack_one_gradient(optimizer, stale_after, tmp_path):
    dataset = make_dataset()
    config = settings(
        epochs=1,
        eval_epochs=[],
        threads=1,
        exchange={"stale_after": stale_after},
        optimizer={"kind": optimizer},
    )
    trainer = Trainer(config, dataset, LocalComm(), Recorder(tmp_path))
    assert trainer.run() == "done" and trainer.step == 10
    weights = reference(config, dataset, stale_after)
    for name, array in trainer.network.weights().items():
        assert array.tobytes() == weights[name].tobytes(), name


def test_the_start_is_exact_and_no_update_is_lost(tmp_path):
    """With as many exact steps as there are, or one less, since the last one's gradient is applied, too."""
    dataset = make_dataset()
    exact, result = trained(dataset, tmp_path / "exact", None)
    for steps in (result["steps"], result["steps"] - 1):
        model, other = trained(dataset, tmp_path / str(steps), steps)
        assert {k: v for k, v in model.items() if k.suffix == ".safetensors"} == {
            k: v for k, v in exact.items() if k.suffix == ".safetensors"
        }
        assert other["p1"] == result["p1"]
    assert trained(dataset, tmp_path / "stale", 0)[0] != exact


def test_it_learns_as_well_as_exact_steps(tmp_path):
    """To within 3 points of P@1, of which this small set has 400."""
    dataset = make_dataset(train=2000, test=400)
    p1 = {after: trained(dataset, tmp_path / str(after), after, epochs=4)[1]["p1"] for after in (None, 10)}
    assert p1[None] > 0.5 and p1[10] >= p1[None] - 0.03


@pytest.mark.parametrize("preset", ["default", "everything"])
def test_threads_and_resuming_change_nothing(preset, tmp_path):
    dataset = make_dataset()
    config = settings(preset, exchange={"stale_after": 6}, checkpoint_every=4, epochs=3, eval_epochs=[1])
    straight, resumed, threads = (tmp_path / name for name in ("straight", "resumed", "threads"))
    run(config, dataset, straight)
    run(config.model_copy(update={"threads": 3}), dataset, threads)
    assert model_bytes(threads) == model_bytes(straight)

    with pytest.raises(Stop):
        train(config, dataset, LocalComm(), Dies(resumed, "checkpoint", 16), resumed)
    run(config, dataset, resumed, resume=16)
    assert model_bytes(resumed) == model_bytes(straight)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"network": {"hidden_layers": [9]}}, "hidden_layers"),
        ({"optimizer": {"kind": "adam-catch-up"}}, "adam"),
    ],
)
def test_what_it_does_not_go_with_is_refused(overrides, told):
    with pytest.raises(UserError, match=f"stale_after.*{told}"):
        build_config(overrides={"exchange": {"stale_after": 0}, **overrides})


@needs_mpi
@pytest.mark.parametrize(("ranks", "wire"), [(2, "fp32"), (3, "fp32"), (2, "int8")])
def test_ranks_equal_one_rank(ranks, wire, tmp_path):
    """Up to the order of sums, and int8 to within 15 points of P@1; the payload is what it was."""
    data = write_prepared(tmp_path / "set", make_dataset())
    results = {}
    for number in (1, ranks):
        done = run_ranks(
            number, "-m", "dslide", "train", "--data", data, "--out", tmp_path / str(number), "--json",
            "--threads", "1", "--set", f"network.hidden={HIDDEN}", "--set", "batch_size=33",
            "--set", "epochs=3", "--set", f"wire={wire}",
            "--set", "exchange.stale_after=5",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results[number] = json.loads(done.stdout)
    assert results[ranks]["bytes_sent"] == 900 * payload_per_point(HIDDEN, ranks, wire)
    assert abs(results[ranks]["p1"] - results[1]["p1"]) <= (1.5 / 60 if wire == "fp32" else 0.15)
    if wire == "fp32":
        weights = tensors(tmp_path / "1")
        for name, array in tensors(tmp_path / str(ranks)).items():
            np.testing.assert_allclose(array, weights[name], rtol=0, atol=2e-3 * np.abs(weights[name]).max())
