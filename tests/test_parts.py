"""A batch in parts, an update in pieces: the same bits as at once, on one rank's layers and on real ranks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from mpirun import needs_mpi, run
from synthetic import make_dataset, make_points, write_prepared

from dslide import _core
from dslide.comm import cuts, payload_per_point
from dslide.config import build_config
from dslide.evaluation import core_csr
from dslide.network import Network, Shape
from dslide.samplers import label_counts, make_sampler

FEATURES, LABELS, HIDDEN = 90, 37, 24
SAMPLERS = {
    "in-batch": {"uniform_extras": 9, "log_uniform_extras": 5},
    "uniform": {"kind": "uniform", "uniform_extras": 20},
    "full": {"kind": "full"},
}


def steps(sampler, precision, optimizer, points, parts, threads, labels=LABELS, pieces=None):
    """Two steps of one rank's layers: all that they compute, and the weights afterwards. With `pieces` an
    update is begun, and so many pieces are done before the next forward pass or the end."""
    config = build_config(
        overrides={
            "network": {"hidden": HIDDEN, "bias": precision == "float32", "output_init": "normal"},
            "sampler": sampler,
            "optimizer": {"kind": optimizer},
            "precision": precision,
        }
    )
    pool, train = _core.Pool(threads), make_points(points, FEATURES, labels, 3)
    network = Network(config, Shape.of(FEATURES, HIDDEN, labels, 1), 0, pool, training=True)
    x, y = core_csr(train, FEATURES, labels)
    batch = _core.Batch(pool, x, y)
    counts = label_counts(train.y_indices, labels)
    sampler = make_sampler(config.sampler, network.output, (labels, 0, labels), counts, points, points, 0)
    sampler.refresh(0)
    core = sampler.core
    found = []
    for step in range(2):
        batch.select(np.arange(points)[::-1].copy(), step)
        h, dh = np.zeros((2, points, HIDDEN), np.float32)
        lse = np.zeros(points, np.float32)
        for part in parts:
            network.input.forward(batch, h, True, part.start, part.stop)
        for part in parts:
            network.output.forward(batch, h, core, lse[part], part.start, part.stop)
        losses = [
            network.output.backward(batch, lse[part], dh[part], True, points, part.start, part.stop)
            for part in parts
        ]
        found += [h.copy(), lse, dh.copy()]
        if pieces is None:
            network.output.update(0.1, step + 1)
        else:
            network.output.begin_update(0.1, step + 1)
            done = sum(network.output.update_some() for _ in range(pieces))
            assert done == pieces or not network.output.update_some()
            h[:] = np.nan  # the next batch's may be there before all rows are done
        for part in parts:
            network.input.backward(batch, dh, 0.1, step + 1, part.start, part.stop)
        found.append(np.round(sum(losses), 6))  # the only sum whose order differs
    network.settle()
    return [*found, *(array.copy() for array in network.weights().values())]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("points", [1, 31, 33, 65, 130])
@pytest.mark.parametrize(
    ("sampler", "precision", "optimizer"),
    [
        ("in-batch", "float32", "adagrad"),
        ("in-batch", "bfloat16", "adagrad"),
        ("uniform", "float32", "adam-catch-up"),
        ("uniform", "bfloat16", "adagrad"),
        ("full", "float32", "adam"),
    ],
)
def test_layers_compute_the_same_bits(sampler, precision, optimizer, points, threads):
    whole = steps(SAMPLERS[sampler], precision, optimizer, points, [slice(0, points)], threads)
    for count in (2, 4):
        parts = [slice(*pair) for pair in pairwise(cuts(points, count, _core.OutputLayer.part_points))]
        other = steps(SAMPLERS[sampler], precision, optimizer, points, parts, threads)
        for a, b in zip(whole, other, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("sampler", "precision", "optimizer"),
    [
        ("in-batch", "float32", "adagrad"),
        ("uniform", "float32", "adam"),
        ("uniform", "float32", "adam-catch-up"),
        ("full", "float32", "adam"),
        ("full", "float32", "adam-catch-up"),
        ("full", "bfloat16", "adagrad"),
        ("full", "bfloat16", "adam-catch-up"),
        ("lsh", "float32", "adam-catch-up"),
    ],
)
def test_an_update_in_pieces_makes_the_same_bits(sampler, precision, optimizer, threads):
    more = SAMPLERS | {"lsh": {"kind": "lsh", "log_q": False, "lsh": {"L": 4}}}
    step = (more[sampler], precision, optimizer, 65, [slice(0, 65)], threads, 901)
    at_once = steps(*step)
    for pieces in (0, 1, 2, 100):
        for a, b in zip(at_once, steps(*step, pieces=pieces), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_parts_that_cannot_be_are_refused():
    hashed = {"kind": "lsh", "lsh": {"L": 2}}
    config = build_config(overrides={"network": {"hidden": HIDDEN}, "sampler": hashed})
    pool, train = _core.Pool(1), make_points(70, FEATURES, LABELS, 3)
    network = Network(config, Shape.of(FEATURES, HIDDEN, LABELS, 1), 0, pool, training=True)
    batch = _core.Batch(pool, *core_csr(train, FEATURES, LABELS))
    batch.select(np.arange(70), 0)
    h, lse = np.zeros((70, HIDDEN), np.float32), np.zeros(70, np.float32)
    counts = label_counts(train.y_indices, LABELS)
    sampler = make_sampler(config.sampler, network.output, (LABELS, 0, LABELS), counts, 70, 70, 0)
    sampler.refresh(0)
    with pytest.raises(ValueError, match="active rows of their own"):
        network.output.forward(batch, h, sampler.core, lse[:64], 0, 64)
    full = _core.FullSampler(LABELS, 0, LABELS)
    with pytest.raises(ValueError, match="not a part"):
        network.output.forward(batch, h, full, lse[:40], 0, 40)
        network.output.forward(batch, h, full, lse[40:], 40, 70)
    with pytest.raises(ValueError, match="not a part"):
        network.output.forward(batch, h, full, lse, 0, 71)
    with pytest.raises(ValueError, match="shape"):
        network.output.forward(batch, h, full, lse, 0, 64)
    network.output.forward(batch, h, full, lse[:32], 0, 32)
    with pytest.raises(ValueError, match="in order"):
        network.output.forward(batch, h, full, lse[64:], 64, 70)
    with pytest.raises(ValueError, match="in order"):  # another array than the first part's
        network.output.forward(batch, h.copy(), full, lse[32:], 32, 70)
    with pytest.raises(ValueError, match="points of the last forward"):
        network.output.backward(batch, lse, np.zeros_like(h), True, 70)


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "points", "wire", "more"),
    [
        (2, 200, "int8", []),
        (3, 129, "fp32", ["--set", "sampler.kind=uniform", "--set", "sampler.uniform_extras=9"]),
        (2, 129, "bf16", ["--set", "precision=bfloat16"]),
    ],
)
def test_ranks_make_the_same_model(ranks, points, wire, more, tmp_path):
    """Batches of 64 and one last point, or of 64 and 8; the third of three ranks has no hidden units."""
    data = write_prepared(tmp_path / "set", make_dataset(train=points))
    models = []
    for parts in ("1", "3", "null"):
        out = tmp_path / parts
        done = run(
            ranks, "-m", "dslide", "train", "--data", data, "--out", out, "--json", "--threads", "1",
            "--set", f"network.hidden={HIDDEN}", "--set", "batch_size=64", "--set", "epochs=2",
            "--set", f"wire={wire}", "--set", f"exchange.parts={parts}", *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["bytes_sent"] == 2 * points * payload_per_point(HIDDEN, ranks, wire)
        files = sorted((out / "model").rglob("*.safetensors"))
        models.append([file.read_bytes() for file in files])
    assert len(models[0]) == ranks and models[0] == models[1] == models[2]
