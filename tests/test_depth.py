"""Several hidden layers: gradients, samplers, threads, ranks, files, and what crosses the network."""

import json
import threading
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from mpirun import needs_mpi
from mpirun import run as run_ranks
from reference import Reference, in_batch_log_q
from safetensors import safe_open
from synthetic import make_dataset, make_points, write_prepared
from test_comm import Postman, ThreadComm
from test_trainer import Dies, Stop

import dslide
from dslide import _core
from dslide.bench.records import Recorder
from dslide.comm import Exchange, LocalComm, cuts, payload_per_point
from dslide.config import TrainConfig, build_config
from dslide.depth import HiddenStack, SampledExchange, inclusion_probability
from dslide.errors import UserError
from dslide.evaluation import core_csr
from dslide.inference import Model
from dslide.metrics import precision_at
from dslide.network import Manifest, Network, Shape
from dslide.samplers import label_counts, make_sampler
from dslide.trainer import Trainer, train

FEATURES, HIDDEN, LABELS, POINTS = 23, 20, 17, 13
# Few codes and no top-up: some points get few units, some none, most another set than their neighbours.
HASHED = {"units": 33, "sampler": "lsh", "lsh": {"K": 3, "L": 2, "min_active": 0, "rebuild_points": 100}}
DRAWN = {"units": 33, "sampler": "uniform", "draws": 12}
LAYERS = {
    "one": [9],
    "two": [35, 7],
    "drawn": [DRAWN, 19],
    "hashed": [HASHED, 19],
    "hashed-last": [11, HASHED],
}


@dataclass
class DeepReference(Reference):
    """With further layers: weights V [units, inputs] and biases d, and factors of their activations (0: not
    active)."""

    V: list = field(default_factory=list)
    d: list = field(default_factory=list)
    factors: list = field(default_factory=list)

    def hidden(self, x):
        h, _ = super().hidden(x)
        for weights, bias, factor in zip(self.V, self.d, self.factors, strict=True):
            a = h @ weights.T + bias
            h = np.where(a > 0, a, self.slope * a) * factor
        return h, np.zeros(1)  # its loss alone is wanted


class Deep:
    """A core network of several hidden layers on one batch."""

    def __init__(self, layers, optimizer, *, threads=2, bias=True, accumulator=1e6):
        network = {
            "hidden": HIDDEN, "hidden_layers": layers, "dropout": 0.0, "input_init_std": 0.7, "bias": bias,
            "output_init": "normal", "output_init_std": 0.7,
        }  # fmt: skip
        accumulators = {f"initial_accumulator_{side}": accumulator for side in ("input", "output")}
        self.config = TrainConfig.model_validate(
            {"network": network, "optimizer": {"kind": optimizer, **accumulators}, "batch_size": POINTS}
        )
        points = make_points(POINTS, FEATURES, LABELS, 5)
        shape = Shape.of(FEATURES, HIDDEN, LABELS, 1, layers=self.config.network.layer_units())
        pool, comm = _core.Pool(threads), LocalComm()
        self.network = Network(self.config, shape, 0, pool, training=True)
        for layer in self.network.hidden_layers:
            layer.rows.bias[:] = np.random.default_rng(layer.number).normal(size=layer.rows.bias.shape)
        self.batch = _core.Batch(pool, *core_csr(points, FEATURES, LABELS))
        self.rows = np.random.default_rng(3).permutation(POINTS).astype(np.int64)
        self.stack = HiddenStack(self.network, comm, pool, "fp32", POINTS, points=POINTS)
        self.stack.make_samplers(0)
        counts = label_counts(points.y_indices, LABELS)
        self.sampler = make_sampler(
            self.config.sampler, self.network.output, (LABELS, 0, LABELS), counts, POINTS, POINTS, 0
        )
        self.x = np.asarray(points.x.todense(), np.float64)[self.rows]
        self.y = np.asarray(points.y.todense(), np.float64)[self.rows]
        self.present = self.y.any(axis=0)
        self.log_q = np.zeros(LABELS)
        self.log_q[self.present] = in_batch_log_q(
            counts[self.present].astype(float), POINTS, POINTS, 0, LABELS
        )

    def step(self, lr, step=1):
        """One step of the core; the mean loss before it."""
        network, stack = self.network, self.stack
        self.batch.select(self.rows, step)
        whole = slice(0, POINTS)
        stack.start(self.batch, whole)
        h = stack.finish(whole, self.rows, step, step * POINTS)
        lse = np.empty(POINTS, np.float32)
        network.output.forward(self.batch, h, self.sampler.core, lse)
        loss = network.output.backward(self.batch, lse, stack.grad(POINTS), True, POINTS)
        stack.scatter(whole)
        network.output.update(lr, step)
        stack.backward(self.batch, POINTS, lr, step)
        return loss / POINTS

    def factor(self, layer):
        """[POINTS, units]: what the last step multiplied activations with."""
        active, factor = layer.core.active_units(), np.zeros((POINTS, layer.config.units))
        if active is None:
            return factor + 1
        indptr, units = active
        if indptr is None:
            factor[:, units] = 1 / inclusion_probability(layer.config.units, layer.config.draws)
        else:
            factor[np.repeat(np.arange(POINTS), np.diff(indptr)), units] = 1
        return factor

    def reference(self, weights):
        """The network with `weights` and the last step's active units."""
        exact = {name: array.astype(np.float64) for name, array in weights.items()}
        layers = self.network.hidden_layers
        return DeepReference(
            W=exact["input.weights"],
            b=exact["input.bias"],
            U=exact["output.weights"],
            c=exact["output.bias"],
            slope=0.4,
            weight_labels=True,
            log_q=self.log_q,
            V=[exact[f"hidden-{layer.number}.weights"] for layer in layers],
            d=[exact[f"hidden-{layer.number}.bias"] for layer in layers],
            factors=[self.factor(layer) for layer in layers],
        )

    def copies(self):
        return {name: array.copy() for name, array in self.network.weights().items()}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_against_finite_differences(layers, threads):
    """Adagrad with huge accumulators is plain gradient descent, so a step's change is the gradient."""
    case = Deep(LAYERS[layers], "adagrad", threads=threads)
    before = case.copies()
    loss = case.step(lr=1e3)
    reference, after = case.reference(before), case.copies()
    active = np.broadcast_to(case.present, (POINTS, LABELS))

    def exact_loss():
        return reference.gradients(case.x, case.y, active).loss

    assert loss == pytest.approx(exact_loss(), rel=1e-5)
    if "hashed" in layers:
        shares = [factor.mean() for factor in reference.factors]
        assert 0.05 < min(shares) < 0.9  # some are active, some are not
    arrays = {"input.weights": reference.W, "input.bias": reference.b, "output.weights": reference.U,
              "output.bias": reference.c}  # fmt: skip
    for number, (weights, bias) in enumerate(zip(reference.V, reference.d, strict=True)):
        arrays |= {f"hidden-{number}.weights": weights, f"hidden-{number}.bias": bias}
    random = np.random.default_rng(1)
    for name, array in arrays.items():
        change = before[name].astype(float) - after[name]
        largest = np.argsort(-np.abs(change), axis=None)[: max(8, change.size // 4)]
        for flat in [*random.permutation(largest)[:8], *random.integers(0, change.size, 4)]:
            spot = np.unravel_index(flat, change.shape)
            keep, losses = array[spot], []
            for delta in (1e-6, -1e-6):
                array[spot] = keep + delta
                losses.append(exact_loss())
            array[spot] = keep
            assert change[spot] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=2e-3, abs=5e-6), name
        assert np.abs(change).max() > 1e-3


@pytest.mark.parametrize("layers", ["two", "drawn"])
def test_adam_with_catch_up_is_dense_adam(layers):
    weights = []
    for kind in ("adam", "adam-catch-up"):
        case = Deep(LAYERS[layers], kind)
        for step in range(1, 9):
            case.step(0.01, step)
        case.network.settle()
        weights.append(case.copies())
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=1e-3, atol=2e-4, err_msg=name)


def settings(layers, **overrides):
    network = {"hidden": 24, "hidden_layers": LAYERS[layers], "bias": True}
    base = {"batch_size": 32, "epochs": 2, "threads": 2, "eval_epochs": [1], "network": network}
    return build_config(None, None, {**base, **overrides})


def run(config, dataset, out=None, resume=0):
    recorder = Recorder(out, resume_step=resume or None)
    return train(config, dataset, LocalComm(), recorder, out, resume=bool(resume))


def model_bytes(out):
    return {f.relative_to(out): f.read_bytes() for f in sorted((out / "model").rglob("*")) if f.is_file()}


@pytest.mark.parametrize("layers", ["two", "drawn", "hashed"])
def test_the_model_is_the_same_for_any_number_of_threads(layers, tmp_path):
    for threads in (1, 2, 3):
        run(settings(layers, threads=threads), make_dataset(), tmp_path / str(threads))
    assert model_bytes(tmp_path / "1") == model_bytes(tmp_path / "2") == model_bytes(tmp_path / "3")


@pytest.mark.parametrize("optimizer", ["adagrad", "adam-catch-up"])
@pytest.mark.parametrize("layers", ["two", "drawn", "hashed"])
def test_a_resumed_run_equals_the_uninterrupted_one(layers, optimizer, tmp_path):
    config = settings(layers, checkpoint_every=7, epochs=3, optimizer={"kind": optimizer})
    run(config, make_dataset(), tmp_path / "straight")

    resumed = tmp_path / "resumed"
    with pytest.raises(Stop):
        train(config, make_dataset(), LocalComm(), Dies(resumed, "checkpoint", 14), resumed)
    run(config, make_dataset(), resumed, resume=14)
    assert model_bytes(resumed) == model_bytes(tmp_path / "straight")


@pytest.mark.parametrize("layers", ["two", "drawn", "hashed-last"])
def test_saved_models_predict_what_training_measured(layers, tmp_path):
    dataset = make_dataset()
    result = run(settings(layers), dataset, tmp_path)
    ids, _, _ = Model.load(tmp_path, LocalComm(), 1).topk(dataset.test, 5, "test")
    precision = precision_at(ids, dataset.test.y_indptr, dataset.test.y_indices)
    assert precision == {k: result[f"p{k}"] for k in (1, 3, 5)}
    units = [24, *settings(layers).network.layer_units()]
    sizes = [dataset.num_features, *units, dataset.num_labels]
    assert result["parameters"] == sum(a * b for a, b in pairwise(sizes)) + sum(sizes[1:])
    near = dslide.load_model(tmp_path, approximate=True).predict(dataset.test.x, 5)[0]
    assert (near[:, 0] == ids[:, 0]).mean() > 0.9  # few labels: the tables propose nearly all


def test_an_ensemble_of_deep_networks(tmp_path):
    dataset = make_dataset()
    result = run(settings("two", ensemble=2), dataset, tmp_path)
    ids, _, _ = Model.load(tmp_path, LocalComm(), 1).topk(dataset.test, 5, "test")
    assert precision_at(ids, dataset.test.y_indptr, dataset.test.y_indices)[1] == result["p1"]


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_the_memory_estimate_counts_all_layers(kind):
    dataset = make_dataset(train=50, test=5)
    layers = [1500, {"units": 2000, "sampler": "uniform", "draws": 100}]
    network = {"hidden": 64, "hidden_layers": layers, "output_init": "normal"}
    config = TrainConfig.model_validate({"network": network, "optimizer": {"kind": kind}, "threads": 1})
    trainer = Trainer(config, dataset, LocalComm(), Recorder(None))
    need = trainer.shape.memory(0, config, 2)
    arrays = sum(a.nbytes for a in (trainer.network.weights() | trainer.network.state()).values())
    assert arrays <= need.weights + need.state <= 1.1 * arrays


EVEN = {"two": [35, 8], "drawn": [DRAWN, 18], "hashed": [HASHED, 18]}


@pytest.mark.parametrize("layers", EVEN)
def test_bfloat16_rows_and_float32_layers_between(layers, tmp_path):
    """The wide layers' weights take half, it learns as in float32, and threads and saving change nothing."""
    results = {}
    for precision, threads in (("float32", 1), ("bfloat16", 1), ("bfloat16", 3)):
        network = {"hidden": 24, "hidden_layers": EVEN[layers], "bias": True}
        config = settings("two", network=network, precision=precision, threads=threads, epochs=6)
        out = tmp_path / f"{precision}-{threads}"
        results[precision] = run(config, make_dataset(), out)
    assert model_bytes(tmp_path / "bfloat16-1") == model_bytes(tmp_path / "bfloat16-3")
    member = Manifest.read(tmp_path / "bfloat16-1/model").content["members"][0]
    with safe_open(tmp_path / "bfloat16-1/model" / member["folder"] / member["files"][0], "np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    halves = {name for name, kind in types.items() if kind == "BF16"}
    assert halves == {"input.weights", "output.weights"}
    assert set(types.values()) == {"BF16", "F32"}
    assert abs(results["bfloat16"]["p1"] - results["float32"]["p1"]) <= 6 / 60
    ids, _, _ = Model.load(tmp_path / "bfloat16-1", LocalComm(), 1).topk(make_dataset().test, 5, "test")
    test = make_dataset().test
    assert precision_at(ids, test.y_indptr, test.y_indices)[1] == results["bfloat16"]["p1"]


def test_bfloat16_needs_an_even_last_layer():
    with pytest.raises(UserError, match=r"even units of the last of network.hidden_layers, not 7"):
        settings("two", precision="bfloat16")


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ([0], r"hidden_layers.0.units.*greater than or equal to 1"),
        ([8, {"units": 8, "sampler": "uniform"}], r"hidden_layers.1: .*needs draws > 0"),
        ([{"units": 8, "draws": 4}], r"hidden_layers.0: .*draws is for sampler uniform"),
        ([{"unit": 8}], r"hidden_layers"),
    ],
)
def test_mistakes_name_their_key(layers, told):
    with pytest.raises(UserError, match=told):
        build_config(None, None, {"network": {"hidden_layers": layers}})


def test_two_hidden_layers_learn():
    """Points that show their labels' features amid noise; the most frequent label alone scores below 10 %."""
    dataset = make_dataset(train=2000, test=300)
    for layers, least in (("two", 0.55), ("drawn", 0.4), ("hashed", 0.45)):
        layer = {**LAYERS[layers][0], "units": 64} if layers != "two" else 64
        network = {"hidden": 32, "hidden_layers": [layer, 48]}
        config = {"epochs": 6, "eval_epochs": [6], "batch_size": 64, "threads": 1, "network": network}
        assert run(build_config(None, None, config), dataset)["p1"] > least, layers


# What crosses the network


def sampled_bytes(wire, width, rows, counts, shared):
    """Of one rank's message and of a peer's answer, by the documented format."""
    value, scale = {"fp32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}[wire]
    dense = rows * (width * value + scale)
    ids = 2 * (1 + counts[0]) if shared else 2 * (rows + sum(counts))
    answer = sum(counts) * value + rows * scale
    return (16 + ids + answer, answer) if ids + answer < dense else (16 + dense, dense)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("active", ["few", "most", "columns", "none", "all"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sampled_activations_travel_in_the_smaller_form(wire, active, ranks):
    """They arrive as a dense exchange brings them, and the bytes are the formula's."""
    rows, most, units = 11, 13, 70
    random = np.random.default_rng(1)
    share = {"few": 0.1, "most": 0.9, "columns": 0.3, "none": 0.0, "all": 1.0}[active]
    mask = random.random((rows, units)) < share
    if active == "columns":
        mask[:] = mask[0]
    h = np.where(mask, random.normal(size=(rows, units)), 0).astype(np.float32)
    grads = random.normal(size=(ranks, rows, units)).astype(np.float32)
    borders = cuts(units, ranks, 16)
    post, plain, results, sent = Postman(ranks), Postman(ranks), {}, {}

    def work(rank):
        part = slice(borders[rank], borders[rank + 1])
        own = mask[:, part]
        known = (np.concatenate([[0], own.sum(axis=1).cumsum()]), np.nonzero(own)[1].astype(np.int32))
        if active == "columns":
            known = (None, np.nonzero(own[0])[0].astype(np.int32))
        comm = ThreadComm(rank, ranks, post)
        sparse = SampledExchange(comm, borders, wire, most)
        dense = Exchange(ThreadComm(rank, ranks, plain), borders, wire, most)
        for _ in range(2):
            sparse.own(rows)[:] = dense.own(rows)[:] = h[:, part]
            there = sparse.gather_active(rows, known).copy(), dense.gather(rows).copy()
            sparse.grad(rows)[:] = grads[rank]
            dense.grad(rows)[:] = np.where(mask, grads[rank], 0)
            sparse.scatter(slice(0, rows))
            dense.scatter(slice(0, rows))
            back = sparse.collect(rows) * own, dense.collect(rows).copy() * own
        results[rank], sent[rank] = (there, back), (comm.payload_bytes, sparse.sent)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == ranks
    for (here, expected), (back, wanted) in results.values():
        assert np.array_equal(here, expected)
        tolerance = 0 if wire != "int8" or active not in ("most", "all") else 0.1
        np.testing.assert_allclose(back, wanted, rtol=0, atol=tolerance)
    total = 0
    for rank in range(ranks):
        own = mask[:, borders[rank] : borders[rank + 1]]
        there, back = sampled_bytes(wire, own.shape[1], rows, own.sum(axis=1).tolist(), active == "columns")
        total += 2 * (ranks - 1) * (there + back)
        form = "ids" if active in ("few", "columns", "none") else "dense"
        assert sent[rank][1][form] == 2 * (ranks - 1)
    assert sum(payload for payload, _ in sent.values()) == total
    assert sum(record["bytes"] for _, record in sent.values()) == total


class Rank(ThreadComm):
    """A rank that is a thread, with the small collectives that training needs."""

    def __init__(self, rank, size, postman, meeting, items):
        super().__init__(rank, size, postman)
        self.meeting, self.items = meeting, items

    def start(self, messages):
        before = self.payload_bytes
        super().start(messages)
        if self.paused:
            self.other_bytes += self.payload_bytes - before
            self.payload_bytes = before

    def barrier(self):
        self.meeting.wait(timeout=60)

    def gather(self, item):
        self.items[self.rank] = item
        self.barrier()
        everyone = list(self.items) if self.rank == 0 else None
        self.barrier()
        return everyone

    def bcast(self, item):
        everyone = self.gather(item)
        if self.rank == 0:
            self.items[0] = everyone[0]
        self.barrier()
        first = self.items[0]
        self.barrier()
        return first

    def agree(self, value):
        everyone = self.gather(value)
        return self.bcast(max(everyone) if self.rank == 0 else None)


def train_on(ranks, config, out):
    """Trains on so many ranks that are threads; the result, and the ranks' records of sampled activations."""
    if ranks == 1:
        recorder = Recorder(out)
        return train(config, make_dataset(), LocalComm(), recorder, out), recorder.events[-1]["ranks"]
    postman, meeting, items = Postman(ranks), threading.Barrier(ranks), [None] * ranks
    results = {}

    def work(rank):
        comm = Rank(rank, ranks, postman, meeting, items)
        try:
            recorder = Recorder(
                out if rank == 0 else None,
                rank=rank,
                size=ranks,
                barrier=comm.barrier,
                gather=comm.gather,
                agree=comm.agree,
            )
            results[rank] = train(config, make_dataset(), comm, recorder, out), recorder
        except BaseException:
            meeting.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == ranks
    result, recorder = results[0]
    return result, recorder.events[-1]["ranks"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs by (layers, ranks), each made once: the result, the ranks' records, the folder."""
    made = {}

    def get(layers, ranks):
        if (layers, ranks) not in made:
            out = tmp_path_factory.mktemp("run") / "run"
            config = settings(layers, batch_size=33, epochs=3, threads=1, wire="fp32")
            made[layers, ranks] = *train_on(ranks, config, out), out
        return made[layers, ranks]

    return get


def tensors(out):
    """The whole model's tensors, shards joined."""
    from safetensors.numpy import load_file

    member = Manifest.read(out / "model").content["members"][0]
    shards = [load_file(out / "model" / member["folder"] / file) for file in member["files"]]
    return {
        name: np.concatenate(
            [s[name] for s in shards], axis=shards[0][name].ndim - 1 if name.startswith("input") else 0
        )
        for name in shards[0]
    }


@pytest.mark.parametrize(("layers", "ranks"), [("two", 2), ("two", 3), ("drawn", 2), ("drawn", 3)])
def test_ranks_equal_one_rank(layers, ranks, trained):
    """Up to the order of sums."""
    (alone, _, one), (together, _, several) = trained(layers, 1), trained(layers, ranks)
    weights = tensors(one)
    for name, array in tensors(several).items():
        np.testing.assert_allclose(
            array, weights[name], rtol=0, atol=2e-3 * np.abs(weights[name]).max(), err_msg=name
        )
    assert abs(together["p1"] - alone["p1"]) <= 1.5 / 60
    assert alone["bytes_sent"] == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_payload_is_the_formulas(ranks, trained):
    """A step's, of every layer; and all training points' activations once, for the first output rows."""
    result, _, _ = trained("two", ranks)
    layers = [24, 35, 7]
    steps = sum(payload_per_point(units, ranks, "fp32") for units in layers)
    steps -= 4 * (len(layers) - 1) * ranks * (ranks - 1)  # one log-sum-exp a point, however many layers
    start = sum(4 * (ranks - 1) * units for units in layers)
    assert result["bytes_sent"] == result["samples"] * steps + 300 * start
    result, told, _ = trained("drawn", ranks)
    records = [rank["activations"] for rank in told]
    assert all([record["layer"] for record in rank] == [2] for rank in records)
    sampled = sum(record["bytes"] for (record,) in records)
    dense = [24, 19]
    steps = sum(payload_per_point(units, ranks, "fp32") for units in dense) - 4 * ranks * (ranks - 1)
    start = sum(4 * (ranks - 1) * units for units in (*dense, 33))
    assert result["bytes_sent"] == sampled + result["samples"] * steps + 300 * start
    assert sampled < result["samples"] * 2 * 4 * (ranks - 1) * 33  # less than dense
    for (record,) in records:
        assert record["ids"] + record["dense"] == (ranks - 1) * result["steps"]


@needs_mpi
@pytest.mark.parametrize(("layers", "precision"), [("hashed", "float32"), ("drawn", "bfloat16")])
def test_real_ranks_train_and_a_model_loads_into_another_number(layers, precision, tmp_path):
    data, out = write_prepared(tmp_path / "set", make_dataset()), tmp_path / "run"
    done = run_ranks(3, "-m", "dslide", "train", "--data", data, "--out", out, "--json",
                     "--set", f"network.hidden_layers={json.dumps(EVEN[layers])}",
                     "--set", "network.hidden=24", "--set", f"precision={precision}",
                     "--threads", "1", "--epochs", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "done" and result["bytes_sent"] > 0
    done = run_ranks(2, "-m", "dslide", "evaluate", out, "--data", data, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert {k: measured[k] for k in ("p1", "p3", "p5")} == {k: result[k] for k in ("p1", "p3", "p5")}
