"""A search for the settings of a training run, for data that nobody has tuned for: `dslide tune`.

Every trial trains on a part of the training set and is scored by P@1 on the rest (Dataset.validation); the
test split is never read. The first trial is the configuration as it is, so the outcome is at least as good
on the validation part; Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) draws the others from
SPACE.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dslide.bench.records import Recorder
from dslide.comm import LocalComm
from dslide.config import PRESETS, TrainConfig, from_dotted, merge, validated
from dslide.data import Dataset
from dslide.errors import UserError
from dslide.files import write_atomic
from dslide.trainer import train

SCHEMA_VERSION = 1

# By dotted key: a list of values, or a scale with the lowest and highest number.
SPACE: dict[str, Any] = {
    "optimizer.learning_rate": ("log", 0.03, 0.4),
    "batch_size": [128, 256, 512, 1024],
    "epochs": ("integer", 2, 12),
    "network.hidden": [64, 128, 256],
    "network.dropout": ("real", 0.0, 0.4),
    "sampler.uniform_extras": [0, 1000, 4000],
}


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("dslide tune: optuna is not installed; pip install 'dslide[tune]'") from error
    return optuna


@contextmanager
def display(minutes: float) -> Iterator[Callable[[str], None]]:
    """What shows a line a trial on stderr, above the elapsed time where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    columns = TextColumn("tuning"), BarColumn(), TimeElapsedColumn(), TextColumn(f"of {minutes:g} min")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, begin = bar.add_task("tuning", total=60 * minutes), time.monotonic()

        def tell(line: str) -> None:
            bar.console.print(line, highlight=False)
            bar.update(task, completed=time.monotonic() - begin)

        yield tell


def _distributions(optuna: Any) -> dict[str, Any]:
    """SPACE in Optuna's terms."""
    kinds = optuna.distributions
    found: dict[str, Any] = {}
    for key, space in SPACE.items():
        if isinstance(space, list):
            found[key] = kinds.CategoricalDistribution(space)
        elif space[0] == "integer":
            found[key] = kinds.IntDistribution(*space[1:])
        else:
            found[key] = kinds.FloatDistribution(*space[1:], log=space[0] == "log")
    return found


def _value(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _inside(key: str, value: Any) -> bool:
    space = SPACE[key]
    if isinstance(space, list):
        return value in space
    whole = space[0] != "integer" or float(value).is_integer()
    return whole and space[1] <= value <= space[2]


class Tuning:
    """One search: its trials so far, and the record of them."""

    def __init__(self, config: TrainConfig, dataset: Dataset, out: Path, minutes: float) -> None:
        """`config` is what all trials share and the first trial; `out` the record; `minutes` of wall time."""
        self.config, self.out, self.minutes = config, out, minutes
        self.data = dataset.validation()
        if len(self.data.test) == 0:
            raise UserError(f"{dataset.name}: no point of the validation part has a label that is trained")
        self.trials: list[dict[str, Any]] = []

    @property
    def best(self) -> dict[str, Any] | None:
        """The trial with the highest P@1, the first of equals; None while none has ended well."""
        good = [trial for trial in self.trials if trial["p1"] is not None]
        return max(good, key=lambda trial: trial["p1"], default=None)

    def run(self, trials: int | None, tell: Callable[[str], None]) -> dict[str, Any]:
        """Searches until the time is over, or for `trials`; returns the best trial. UserError if all failed.

        The record is complete after every trial. `tell` gets a line a trial.
        """
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.config.seed)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        space = _distributions(optuna)
        end = time.monotonic() + 60 * self.minutes
        self._tried({}, 60 * self.minutes, tell)
        own = {key: _value(self.config, key) for key in SPACE}
        first = self.trials[0]["p1"]
        if first is not None and all(_inside(key, value) for key, value in own.items()):
            study.add_trial(optuna.trial.create_trial(params=own, distributions=space, value=first))
        while (left := end - time.monotonic()) > 0 and (trials is None or len(self.trials) < trials):
            trial = study.ask(space)
            score = self._tried(trial.params, left, tell)
            if score is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
        if self.best is None:
            raise UserError(f"no trial ended well ({self.trials[0]['status']}); {self.out} has them all")
        return self.best

    def _tried(self, values: dict[str, Any], left: float, tell: Callable[[str], None]) -> float | None:
        self.trials.append(self._trial(values, left))
        write_atomic(self.out, self.record())
        tell(self._line())
        return self.trials[-1]["p1"]  # type: ignore[no-any-return]

    def _trial(self, values: dict[str, Any], left: float) -> dict[str, Any]:
        config = self._config(values).model_copy(
            update={"eval_epochs": [], "budget_seconds": left, "target": None, "checkpoint_every": 0}
        )
        recorder = Recorder(None)
        result = train(config, self.data, LocalComm(), recorder, None)
        good = result["status"] in ("done", "timeout") and result["steps"] > 0
        return {
            "values": values,
            "status": result["status"],
            **{key: result[key] if good else None for key in ("p1", "p3", "p5")},
            "epochs": result["epochs"],
            "train_seconds": result["train_seconds"],
            "cpu_seconds": recorder.clock.cpu_seconds,
        }

    def _config(self, values: dict[str, Any]) -> TrainConfig:
        return validated(merge(self.config.model_dump(), from_dotted(values, "tune")), "tune")

    def _line(self) -> str:
        last, best = self.trials[-1], self.best
        score = f"P@1 {100 * last['p1']:.2f} %" if last["p1"] is not None else last["status"]
        settings = ", ".join(f"{key.rsplit('.', 1)[-1]} {value:.3g}" for key, value in last["values"].items())
        top = f"  best {100 * best['p1']:.2f} %" if best is not None else ""
        return (
            f"trial {len(self.trials)}: {score} in {last['train_seconds']:.1f} s{top}  "
            f"({settings or 'the settings as given'})"
        )

    def record(self) -> str:
        """The record as JSON text."""
        best = self.best
        content = {
            "schema_version": SCHEMA_VERSION,
            "data": {"name": self.data.name, "hash": self.data.hash},
            "validation_points": len(self.data.test),
            "minutes": self.minutes,
            "config": self.config.model_dump(mode="json"),
            "space": SPACE,
            "best": self.trials.index(best) if best is not None else None,
            "trials": self.trials,
        }
        return json.dumps(content, indent=1) + "\n"

    def yaml(self, trial: dict[str, Any]) -> str:
        """The trial's settings as a file for `dslide train --config`: what the default preset lacks."""
        chosen = self._config(trial["values"]).model_dump(mode="json")
        base = TrainConfig.model_validate(PRESETS["default"]).model_dump(mode="json")
        points = f"{len(self.data.test)} validation points of {self.data.name.removesuffix('#validation')}"
        head = f"# P@1 {100 * trial['p1']:.2f} % on {points}\n"
        return head + yaml.safe_dump({"preset": "default", **_difference(base, chosen)}, sort_keys=False)


def _difference(base: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in chosen.items():
        if value == base[key]:
            continue
        found[key] = _difference(base[key], value) if isinstance(value, dict) else value
    return found
