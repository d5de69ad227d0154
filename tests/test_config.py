"""Settings: presets, files, --set, and what is told about mistakes."""

import pytest

from dslide.config import PRESETS, TrainConfig, build_config, parse_sets
from dslide.errors import UserError


def test_default_is_the_recipe():
    config = build_config()
    assert config == TrainConfig() == build_config("default")
    assert (config.sampler.kind, config.sampler.log_q, config.optimizer.kind) == ("in-batch", True, "adagrad")


def test_slide_is_the_papers_algorithm():
    config = build_config("slide")
    assert (config.sampler.kind, config.sampler.log_q, config.optimizer.kind) == (
        "lsh",
        False,
        "adam-catch-up",
    )
    assert (config.network.activation, config.network.bias, config.point_weight) == ("relu", True, "none")
    assert (config.sampler.lsh.rebuild_points, config.sampler.lsh.new_functions_points) == (6400, 128_000)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_yaml_and_json(preset, tmp_path):
    config = build_config(preset)
    file = tmp_path / "c.yaml"
    file.write_text(config.model_dump_json())  # JSON is YAML
    assert build_config("default", file) == config


def test_precedence(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("preset: slide\nseed: 3\nepochs: 2\nsampler: {lsh: {K: 4}}\n")
    config = build_config(None, file, parse_sets(["epochs=7", "sampler.lsh.L=9", "optimizer.eps=1e-5"]))
    assert (config.seed, config.epochs, config.optimizer.eps) == (3, 7, 1e-5)
    assert (config.sampler.lsh.K, config.sampler.lsh.L, config.sampler.kind) == (4, 9, "lsh")
    assert build_config("default", file).optimizer.kind == "adagrad"


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["optimiser.learning_rate=1"], ["optimiser.learning_rate", "'optimizer.learning_rate'"]),
        (["epoch=1"], ["'epoch'", "'epochs'"]),
        (["network.hiden=1"], ["'network.hiden'", "'network.hidden'"]),
        (["batch_size=none"], ["batch_size", "none"]),
        (["batch_size=0"], ["batch_size", "0"]),
        (["network.dropout=1.0"], ["network.dropout"]),
        (["epochs=.inf"], ["epochs"]),
        (["sampler.kind=lhs"], ["sampler.kind", "lsh"]),
        (["sampler.kind=uniform"], ["uniform_extras"]),
        (["sampler.kind=log-uniform", "sampler.uniform_extras=9"], ["log_uniform_extras"]),
        (["sampler.kind=full", "sampler.lsh_extras=3"], ["lsh_extras", "full"]),
        (["sampler.lsh.family=doph"], ["sampler.lsh", "K may be at most 8"]),
        (["sampler.lsh.rebuild_growth=0.9"], ["sampler.lsh.rebuild_growth"]),
        (["epochs"], ["key=value"]),
        (["epochs=["], ["YAML"]),
        (["network=3"], ["network"]),
    ],
)
def test_mistakes_on_the_command_line(sets, parts):
    with pytest.raises(UserError) as error:
        build_config(overrides=parse_sets(sets))
    for part in ["--set", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("network: {hidden: x}\n", ["network.hidden"]),
        ("network: {hiddn: 3}\n", ["network.hiddn", "'network.hidden'"]),
        ("seed: 1\nnetwork: [\n", [":3", "YAML"]),
        ("- 1\n", ["mapping"]),
        ("preset: slid\n", ["slid", "slide"]),
    ],
)
def test_mistakes_in_a_file(content, parts, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        build_config(None, file)
    for part in [*parts, *([] if "preset" in content else ["mine.yaml"])]:
        assert part in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        from pathlib import Path

        build_config(None, Path("nowhere.yaml"))


def test_model_dict_leaves_out_what_does_not_make_the_model():
    a = build_config(overrides={"threads": 1, "eval_epochs": [1], "budget_seconds": 5})
    assert a.model_dict() == build_config().model_dict()
