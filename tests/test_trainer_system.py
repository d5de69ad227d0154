"""dslide through the interface of the rivals."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_dataset, write_prepared

from dslide.bench import systems
from dslide.bench.protocol import eval_steps
from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.errors import UserError
from dslide.trainer import Trainer

SYSTEM = systems.load("dslide-sharded")


@pytest.fixture
def spec(tmp_path):
    folder = write_prepared(tmp_path / "set", make_dataset(gaps=False))

    def make(**fields):
        base = {
            "run_id": "x",
            "system": "dslide_sharded",
            "settings": {"preset": "default", "overrides": {"network.hidden": 24}},
            "data": str(folder),
            "batch_size": 32,
            "epochs": 2,
            "eval_epochs": [0.5, 1],
            "out": tmp_path / "out",
        }
        return RunSpec.model_validate({**base, **fields})

    return make


def run(spec):
    recorder = Recorder(None)
    SYSTEM.run(spec, recorder)
    return recorder.events


def test_it_follows_the_protocol(spec):
    events = run(spec())
    assert [e["step"] for e in events if e["event"] == "eval"] == eval_steps(300, 32, 2, [0.5, 1])
    assert events[-1]["event"] == "end" and events[-1]["status"] == "done"
    assert not spec().out.exists()


def test_target_budget_and_validation(spec):
    assert run(spec(epochs=30, eval_epochs=[10, 20], target=0.1))[-1]["status"] == "target"
    assert run(spec(epochs=1e6, eval_epochs=[], budget_seconds=0.02))[-1]["status"] == "timeout"
    events = run(spec(split="validation"))
    assert [e["samples"] for e in events if e["event"] == "eval"][-1] < 2 * 300


def test_it_times_steps_beyond_its_epochs(spec):
    events = run(spec(epochs=0.1, pace_steps=25, pace_warmup=2))
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(3, 28))


def test_settings_are_checked(spec):
    with pytest.raises(UserError, match=r"'network\.hiden'.*'network\.hidden'"):
        SYSTEM.train_config(spec(settings={"overrides": {"network.hiden": 3}}))
    with pytest.raises(UserError, match="presets"):
        systems.settings(SYSTEM, spec(settings={"presets": "slide"}))
    config = SYSTEM.train_config(spec(settings={"preset": "slide"}, seed=4, cluster={"nodes": 2, "cores": 3}))
    assert (config.sampler.kind, config.seed, config.threads, config.batch_size) == ("lsh", 4, 3, 32)


def test_what_the_launcher_asks(spec):
    two = {"nodes": 2, "cores": 1}
    assert SYSTEM.launcher(spec()) == "local" and SYSTEM.launcher(spec(cluster=two)) == "mpi"
    assert SYSTEM.skip(spec()) is None
    assert SYSTEM.message_sizes(spec(settings={}, batch_size=256, cluster=two)) == [256 * 68]
    wide = {"overrides": {"network.hidden": 512, "wire": "fp32"}}
    assert SYSTEM.message_sizes(spec(settings=wide, batch_size=1024, cluster=two)) == [60_000]


def test_values_that_are_no_numbers_are_refused():
    dataset = make_dataset()
    values = dataset.train.x_values.copy()
    values[5] = np.nan
    broken = replace(dataset, train=replace(dataset.train, x_values=values))
    with pytest.raises(UserError, match="not a finite number"):
        Trainer(SYSTEM.build_config(), broken, None, Recorder(None))
