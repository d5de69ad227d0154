"""The search for settings: its record, the file it prints, time, failures, and a missing Optuna."""

import importlib.util
import json
import sys

import pytest
from synthetic import make_dataset, write_prepared

from dslide import tune
from dslide.cli import _status
from dslide.config import TrainConfig, build_config
from dslide.errors import UserError

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna is missing: pip install 'dslide[tune]'"
)


@pytest.fixture
def data(tmp_path):
    return write_prepared(tmp_path / "set", make_dataset())


@needs_optuna
def test_the_printed_file_trains_as_the_best_trial_did(data, tmp_path, capsys):
    record, file = tmp_path / "record.json", tmp_path / "mine.yaml"
    common = ["tune", "--data", str(data), "--out", str(record), "--trials", "4", "--threads", "1"]
    assert _status([*common, "--set", "network.hidden=24"]) == 0
    captured = capsys.readouterr()
    file.write_text(captured.out)
    assert captured.err.count("trial ") == 4 and "the settings as given" in captured.err
    content = json.loads(record.read_text())
    trials, best = content["trials"], content["trials"][content["best"]]
    assert len(trials) == 4 and trials[0]["values"] == {} and best["p1"] == max(t["p1"] for t in trials)
    for trial in trials[1:]:
        assert trial["values"].keys() == tune.SPACE.keys() and trial["epochs"] == trial["values"]["epochs"]
    config = build_config(None, file)
    expected = tune.Tuning(
        build_config(None, None, {"network": {"hidden": 24}, "threads": 1}), make_dataset(), record, 1
    )._config(best["values"])
    assert config == expected
    again = tune.Tuning(config, make_dataset(), record, 1)
    assert again.run(1, lambda line: None)["p1"] == best["p1"]


@needs_optuna
def test_the_time_is_kept(tmp_path):
    """A first trial without an end is cut, and counts as it is."""
    tuning = tune.Tuning(TrainConfig(epochs=1e7, threads=1), make_dataset(), tmp_path / "r.json", 0.01)
    assert tuning.run(None, lambda line: None)["status"] == "timeout"
    assert len(tuning.trials) == 1


@needs_optuna
def test_trials_that_diverge_are_recorded_and_never_the_best(tmp_path):
    config = build_config(
        None, None, {"optimizer": {"kind": "adam", "learning_rate": 1e30, "decay": "constant"}, "epochs": 30}
    )
    tuning = tune.Tuning(config, make_dataset(), tmp_path / "r.json", 1)
    with pytest.raises(UserError, match="no trial ended well"):
        tuning.run(1, lambda line: None)
    assert json.loads((tmp_path / "r.json").read_text())["trials"][0]["p1"] is None
    assert tuning.run(3, lambda line: None)["values"] != {}


def test_without_optuna_it_says_what_to_install(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert _status(["tune", "--data", str(data), "--out", str(tmp_path / "r.json")]) == 2
    assert "pip install 'dslide[tune]'" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
