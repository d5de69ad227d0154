"""The experiment model: expansion into runs, messages for mistakes, schema, configs, digests."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dslide.bench import systems
from dslide.bench.search import Search
from dslide.config import build_config, from_dotted
from dslide.data import load
from dslide.errors import UserError
from dslide.experiment import (
    OWN_SYSTEM,
    Experiment,
    RunId,
    composed_ids,
    composed_parts,
    load_experiment,
    run_ids,
    run_spec,
    schema,
)
from dslide.experiment_data import prepare_data
from dslide.paths import content_root
from dslide.plan import code_digest

CONFIG = content_root() / "config"
CONFIGS = sorted(path.name for path in CONFIG.glob("*.yaml"))

SMALL = """\
name: small
data: debian-deps
batch_size: 64
eval_epochs: [1, 2]
targets: [0.1]
clusters:
  one: {nodes: 1, cores: 1}
  free: {nodes: 2, cores: 1, oversubscribed: true}
  slow: {nodes: 2, cores: 1, bandwidth: 100mbit, oversubscribed: true}
systems:
  ours:
    {system: dslide_sharded, label: us, seeds: [0, 1], clusters: [one, slow], epochs: 2, budget_seconds: 9}
  dense:
    system: horovod_dense
    label: dense
    epochs: 3
    batch_size: 128
    budget_seconds: 60
    composed: {curve: free, paces: [slow], pace_steps: 25, check: {cluster: slow, epochs: 1}}
sweep: {system: ours, uniform_extras: [0, 500], clusters: [one, slow], pace_steps: 7}
"""


def small(tmp_path: Path, text: str = SMALL) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def test_expansion(tmp_path: Path) -> None:
    experiment = load_experiment(small(tmp_path))
    assert [str(run_id) for run_id in run_ids(experiment)] == [
        "runs/ours/one/seed-0",
        "runs/ours/one/seed-1",
        "runs/ours/slow/seed-0",
        "runs/ours/slow/seed-1",
        "runs/dense/free/seed-0",
        "paces/dense/slow/seed-0",
        "checks/dense/slow/seed-0",
        "sweep/extras-0/one/seed-0",
        "sweep/extras-0/slow/seed-0",
        "sweep/extras-500/one/seed-0",
        "sweep/extras-500/slow/seed-0",
    ]
    assert [str(run_id) for run_id in composed_ids(experiment)] == ["composed/dense/slow/seed-0"]
    parts = composed_parts(experiment, composed_ids(experiment)[0])
    assert {part: str(run_id) for part, run_id in parts.items()} == {
        "curve": "runs/dense/free/seed-0",
        "pace": "paces/dense/slow/seed-0",
        "check": "checks/dense/slow/seed-0",
    }


def test_specs(tmp_path: Path) -> None:
    experiment = load_experiment(small(tmp_path))

    def spec(run_id: str):
        return run_spec(experiment, RunId.parse(run_id))

    run = spec("runs/ours/slow/seed-1")
    assert (run.system, run.label, run.seed, run.batch_size, run.epochs) == (
        "dslide_sharded",
        "us",
        1,
        64,
        2,
    )
    assert (run.cluster.nodes, run.cluster.cores, run.cluster.bandwidth) == (2, 1, "100mbit")
    assert run.eval_epochs == [1, 2] and run.pace_steps is None and run.experiment == "small"
    assert run.out.parts[-6:] == ("results", "small", "runs", "ours", "slow", "seed-1")
    assert spec("runs/dense/free/seed-0").batch_size == 128
    assert spec("paces/dense/slow/seed-0").pace_steps == 25
    check = spec("checks/dense/slow/seed-0")
    assert (check.epochs, check.stop_epochs, check.eval_epochs, check.pace_steps) == (3, 1, [1], None)
    sweep = spec("sweep/extras-500/slow/seed-0")
    assert (sweep.pace_steps, sweep.settings) == (7, {"overrides": {"sampler.uniform_extras": 500}})
    with pytest.raises(UserError, match="no run runs/ours/free/seed-0"):
        spec("runs/ours/free/seed-0")
    with pytest.raises(UserError, match="a run id looks like"):
        RunId.parse("ours")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("targets: [0.1]", "targets: [0.2, 0.1]", r"small.yaml:5: targets: must ascend"),
        ("bandwidth: 100mbit", "bandwidth: fast", r"small.yaml:9: clusters.slow.bandwidth"),
        (
            "label: dense",
            "lable: dense",
            r"small.yaml:15: systems.dense.lable: Extra inputs are not permitted",
        ),
        (
            "[one, slow], epochs",
            "[one, fast], epochs",
            r"no cluster 'fast' in `clusters` \(one, free, slow\)",
        ),
        ("curve: free", "curve: one", "slow and one differ in more than the link"),
        ("name: small", "name: other", r"small.yaml:1: name: .*small"),
        ("system: horovod_dense", "system: dslide_sharded", "dslide's own curve is measured, never composed"),
        ("{system: ours, uni", "{system: dense, uni", "dense is not dslide"),
        ("label: us,", "label: us, change_of: them,", r"systems.ours.change_of: no system 'them'"),
        ("data: debian-deps", "data: [", "small.yaml: not valid YAML"),
    ],
)
def test_mistakes_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(UserError, match=message):
        load_experiment(small(tmp_path, SMALL.replace(old, new)))


def test_a_missing_file_says_where_experiments_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="experiments are in config/"):
        load_experiment(tmp_path / "absent.yaml")


def test_more_cores_than_the_machine_has_are_refused(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0)) + 1
    text = SMALL.replace("one: {nodes: 1, cores: 1}", f"one: {{nodes: 1, cores: {cores}}}")
    with pytest.raises(UserError, match=f"want {cores} cores"):
        run_spec(load_experiment(small(tmp_path, text)), RunId("runs", "ours", "one", 0))
    allowed = text.replace(f"cores: {cores}}}", f"cores: {cores}, oversubscribed: true}}")
    assert run_spec(
        load_experiment(small(tmp_path, allowed)), RunId("runs", "ours", "one", 0)
    ).cluster.oversubscribed


def test_auto_cores_are_a_share_of_the_machine(tmp_path: Path) -> None:
    have = len(os.sched_getaffinity(0))
    for cores, nodes, each in (
        ("auto", 1, have),
        ("auto/2", 1, max(1, have // 2)),
        ("auto", 2, max(1, have // 2)),
    ):
        shape = f"one: {{nodes: {nodes}, cores: {cores}, oversubscribed: true}}"
        text = SMALL.replace("one: {nodes: 1, cores: 1}", shape)
        spec = run_spec(load_experiment(small(tmp_path, text)), RunId("runs", "ours", "one", 0))
        assert spec.cluster.cores == each
        assert spec.cluster.oversubscribed == (each * nodes > have)


def test_schema_file_is_the_models() -> None:
    assert (CONFIG / "schema.json").read_text() == schema(), "run: dslide race schema > config/schema.json"


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid(name: str) -> None:
    import jsonschema

    values = yaml.safe_load((CONFIG / name).read_text())
    jsonschema.validate(values, json.loads(schema()))
    experiment = load_experiment(CONFIG / name)
    assert run_ids(experiment)
    assert isinstance(experiment, Experiment)


def test_a_slice_is_small_complete_and_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path))
    text = SMALL.replace("data: debian-deps", "data: debian-deps\nslice: {train: 200, test: 100}")
    folder = prepare_data(load_experiment(small(tmp_path, text)))
    part, whole = load(folder.name), load("debian-deps")
    assert len(part.train) == 200 and 0 < len(part.test) <= 100
    assert part.num_labels < 2000 < whole.num_labels
    for points in (part.train, part.test):
        assert (np.diff(points.y_indptr) > 0).all()
    assert set(part.train.y_indices) == set(range(part.num_labels))
    assert set(part.train.x_indices) == set(range(part.num_features))
    first = part.train.x_values[: part.train.x_indptr[1]]
    starts = whole.train.x_indptr
    assert any(np.array_equal(whole.train.x_values[a:b], first) for a, b in itertools.pairwise(starts))
    modified = (folder / "meta.json").stat().st_mtime_ns
    assert prepare_data(load_experiment(small(tmp_path, text))) == folder
    assert (folder / "meta.json").stat().st_mtime_ns == modified


def test_digest_ignores_comments_only(tmp_path: Path) -> None:
    python, cpp = tmp_path / "a.py", tmp_path / "a.cpp"
    python.write_text('def f(x):\n    """Says."""\n    return x + 1  # one\n')
    cpp.write_text("int f(int x) { return x + 1; } // one\n")
    before = code_digest([python, cpp])
    python.write_text('def f(x):\n\n    """Says more."""\n    return x+1\n')
    cpp.write_text("/* f */ int f(int x) {\n  return x + 1; }\n")
    assert code_digest([python, cpp]) == before
    cpp.write_text("int f(int x) { return x + 2; }\n")
    assert code_digest([python, cpp]) != before


def searches() -> list[Path]:
    return sorted((content_root() / "results" / "reference" / "search").glob("*.json"))


def resolved(system: str, settings: dict[str, Any]) -> Any:
    """What the settings come to with the system's defaults; presets and overrides resolved."""
    values = systems.load(system).Settings.model_validate(settings)
    if system != OWN_SYSTEM:
        return values.model_dump()
    return build_config(values.preset, None, from_dotted(values.overrides, "settings"))


@pytest.mark.parametrize("config", ["default.yaml", "full.yaml", "full-wordnet.yaml"])
@pytest.mark.parametrize("record", [pytest.param(path, id=path.stem) for path in searches()])
def test_settings_are_those_that_the_recorded_search_chose(record: Path, config: str) -> None:
    found = json.loads(record.read_text())
    wanted = Search.read(CONFIG / "search" / f"{record.stem}.yaml").trials
    if len(found["trials"]) < wanted:
        pytest.skip(f"the search is not complete: {len(found['trials'])} of {wanted} trials")
    experiment = load_experiment(CONFIG / config)
    system, chosen = experiment.systems[record.stem], found["chosen"]
    assert resolved(system.system, system.settings) == resolved(system.system, chosen["settings"])
    assert (system.batch_size or experiment.batch_size) == chosen["batch_size"]
