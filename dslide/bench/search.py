"""A recorded search for a system's settings, the same for dslide and for its rivals.

    python -m dslide.bench.search config/search/NAME.yaml --out results/reference/search/NAME.json

Each trial is a run of the race on the validation split of the training set, on one node, that stops at the
target. A trial's cost is what it needed to reach the target; settings that do not reach it rank behind, by
their best P@1. Time is CPU time of the training clock divided by the cores, which other work on the machine
disturbs least. For a system on several nodes the time of its messages on the link is added: bytes a step and
node over the rate. Transports do the same computation with the same bytes: the best trial's settings are
timed with each of them on the real, throttled nodes, and the one with the shortest steps is taken.

The record holds every trial. A search that was interrupted continues where it stopped.
"""

import itertools
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from dslide.bench import systems
from dslide.bench.compose import step_seconds
from dslide.bench.launch import launch
from dslide.bench.records import SCHEMA_VERSION, Run, read_run
from dslide.bench.spec import Cluster, RunSpec, bits_per_second, resolve_cores
from dslide.errors import UserError
from dslide.files import write_atomic


class Link(BaseModel, extra="forbid"):
    """The nodes and links that the settings are meant for."""

    nodes: int = Field(ge=2)
    bandwidth: str
    transports: list[str] = Field(
        default_factory=list, description="values of the setting `transport`, timed with the chosen settings"
    )
    also: list[str] = Field(default_factory=list, description="bandwidths to time them at that don't decide")
    pace_steps: int = Field(default=20, ge=1)


class Search(BaseModel, extra="forbid"):
    """What is searched: a file of config/search/."""

    system: str = Field(description="the file's name in baselines/")
    label: str
    data: str = "debian-deps"
    seed: int = Field(default=0, description="of the runs and of the draws")
    trials: int = Field(default=8, ge=1)
    target: float = Field(default=0.30, gt=0, lt=1, description="P@1 on the validation split")
    epochs: float = Field(
        default=3.0, gt=0, description="length of a run that misses the target, and of its schedule"
    )
    eval_epochs: list[float] = Field(
        default=[0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5], description="the race's own points, and some between"
    )
    batch_size: int = Field(default=256, ge=1)
    budget_seconds: float = Field(default=1800.0, gt=0)
    link: Link | None = None
    settings: dict[str, Any] = Field(default_factory=dict, description="the same in all trials")
    inside: str | None = Field(
        default=None, description="the setting that holds the searched keys; none: they are settings"
    )
    first: list[dict[str, Any]] = Field(
        default_factory=list, description="trials to begin with: known good ones"
    )
    spaces: list[dict[str, list[Any]]] = Field(
        default_factory=list, description="values by key; a trial draws one of each from the spaces in turn"
    )
    reuse: str | None = Field(
        default=None,
        description="another record, beside this one, whose trials are ranked anew for this link",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "Search":
        if bool(self.reuse) == bool(self.spaces or self.first):
            raise ValueError("give either `reuse`, or trials by `first` and `spaces`")
        return self

    @classmethod
    def read(cls, path: Path) -> "Search":
        """Reads a search's file. UserError names the file and the key."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except OSError as error:
            raise UserError(f"{path}: cannot read the search: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise UserError(f"{path}: not YAML: {error}") from error
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc'])) or '(whole)'}: {e['msg']}" for e in error.errors()]
            raise UserError(f"{path}: " + "; ".join(lines)) from error

    def draws(self) -> list[dict[str, Any]]:
        """The trials' own values, by key: `first`, then random draws without repetition."""
        chosen = [dict(values) for values in self.first]
        draw = random.Random(self.seed)
        left = [list(itertools.product(*space.values())) for space in self.spaces]
        for combinations in left:
            draw.shuffle(combinations)
        for place in itertools.cycle(range(len(self.spaces))):
            if len(chosen) >= self.trials or not any(left):
                break
            if left[place]:
                values = dict(zip(self.spaces[place], left[place].pop(), strict=True))
                if values not in chosen:
                    chosen.append(values)
        return chosen[: self.trials]

    def spec(self, values: dict[str, Any], out: Path) -> RunSpec:
        """The run of one trial."""
        own = dict(values)
        batch_size = own.pop("batch_size", self.batch_size)
        settings = dict(self.settings)
        if self.inside is None:
            settings |= own
        else:
            settings[self.inside] = {**settings.get(self.inside, {}), **own}
        cores, _ = resolve_cores(1, "auto")
        return RunSpec(
            run_id=f"search {self.system}",
            experiment="search",
            system=self.system,
            label=self.label,
            settings=settings,
            data=self.data,
            split="validation",
            seed=self.seed,
            batch_size=batch_size,
            epochs=self.epochs,
            eval_epochs=self.eval_epochs,
            budget_seconds=self.budget_seconds,
            target=self.target,
            cluster=Cluster(nodes=1, cores=cores),
            exclusive=False,
            out=out,
        )


def outcome(run: Run, cores: int) -> dict[str, Any]:
    """What a trial's record says: status, the best P@1, the curve, and what it took to reach the target."""
    evals = run.of("eval")
    curve = [
        {key: event.get(key) for key in ("step", "epoch", "train_seconds", "cpu_seconds", "p1")}
        for event in evals
    ]
    result: dict[str, Any] = {
        "status": run.status,
        "p1": max((e["p1"] for e in evals), default=0.0),
        "curve": curve,
    }
    if run.reason:
        result["error"] = run.reason
    if evals and run.status == "target":
        last = evals[-1]
        result |= {"steps": last["step"], "epochs": last["epoch"], "seconds": last["cpu_seconds"] / cores}
    return result


def link_seconds(search: Search, link: Link, values: dict[str, Any]) -> float:
    """Seconds that a step's messages take on the link at its rate."""
    spec = search.spec(values, Path("unused"))
    spec = spec.model_copy(update={"cluster": Cluster(nodes=link.nodes, bandwidth=link.bandwidth)})
    return 8 * sum(systems.load(search.system).message_sizes(spec)) / bits_per_second(link.bandwidth)


def cost(search: Search, trial: dict[str, Any]) -> float | None:
    """Seconds to the target, None if it was missed."""
    if trial["status"] != "target":
        return None
    seconds = float(trial["seconds"])
    if search.link is not None:
        seconds += trial["steps"] * link_seconds(search, search.link, trial["values"])
    return seconds


def best(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The trial with the lowest cost; if all missed the target, the one with the highest P@1."""
    return min(trials, key=lambda t: (math.inf if t["cost"] is None else t["cost"], -t["p1"]))


def run_trial(search: Search, values: dict[str, Any]) -> dict[str, Any]:
    """Runs one trial; its records are not kept beyond what `outcome` takes from them. KeyboardInterrupt on
    Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="dslide-search-") as folder:
        spec = search.spec(values, Path(folder) / "run")
        load = os.getloadavg()[0]
        if launch(spec) == 130:
            raise KeyboardInterrupt
        result = outcome(read_run(spec.out), spec.cluster.cores)
    trial = {
        "values": values,
        "settings": spec.settings,
        "batch_size": spec.batch_size,
        "load": load,
        **result,
    }
    return {**trial, "cost": cost(search, trial)}


def time_transport(
    search: Search, link: Link, trial: dict[str, Any], transport: str, rate: str
) -> dict[str, Any]:
    """Steps of a trial's settings with one transport on the throttled nodes. KeyboardInterrupt on Ctrl-C;
    UserError where no step could be timed."""
    cores, _ = resolve_cores(link.nodes, "auto")
    with tempfile.TemporaryDirectory(prefix="dslide-search-") as folder:
        spec = search.spec(trial["values"], Path(folder) / "run")
        update = {
            "settings": {**spec.settings, "transport": transport},
            "cluster": Cluster(nodes=link.nodes, cores=cores, bandwidth=rate),
            "pace_steps": link.pace_steps,
            "run_id": f"search {search.system} {transport} {rate}",
        }
        if launch(spec.model_copy(update=update)) == 130:
            raise KeyboardInterrupt
        run = read_run(spec.out)
        load = os.getloadavg()[0]
        return {"transport": transport, "bandwidth": rate, "load": load, "step_seconds": step_seconds(run)}


def fastest_transport(link: Link, timed: list[dict[str, Any]]) -> str:
    """The transport with the shortest step at the link's own bandwidth."""
    there = [entry for entry in timed if entry["bandwidth"] == link.bandwidth]
    return str(min(there, key=lambda entry: entry["step_seconds"]["median"])["transport"])


def record(search: Search, trials: list[dict[str, Any]], timed: list[dict[str, Any]] | None = None) -> str:
    """The record as JSON text."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **search.model_dump(exclude={"first", "spaces"}),
        "space": {key: value for space in search.spaces for key, value in space.items()},
        "cost": "seconds to the target: CPU time of the training clock / cores"
        + (" + messages / bandwidth" if search.link else ""),
    }
    if trials:
        chosen = best(trials)
        keys = ("settings", "batch_size", "p1", "cost")
        content["chosen"] = {"trial": trials.index(chosen), **{key: chosen[key] for key in keys}}
    if timed and search.link is not None:
        settings = {**content["chosen"]["settings"], "transport": fastest_transport(search.link, timed)}
        content["chosen"]["settings"] = settings
        content["transports"] = timed
    return json.dumps({**content, "trials": trials}, indent=1) + "\n"


def time_transports(search: Search, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every transport of the link at every bandwidth, with the best trial's settings."""
    link = search.link
    if link is None:
        return []
    timed = []
    for rate, transport in itertools.product([link.bandwidth, *link.also], link.transports):
        print(f"transport {transport} at {rate}", file=sys.stderr, flush=True)
        timed.append(time_transport(search, link, best(trials), transport, rate))
    return timed


def run(search: Search, out: Path) -> None:
    """Runs the trials that `out` lacks, or ranks another record's, and times the link's transports."""
    if search.reuse is not None:
        source = json.loads((out.parent / f"{search.reuse}.json").read_text())
        trials = [{**trial, "cost": cost(search, trial)} for trial in source["trials"]]
    else:
        trials = run_trials(search, out)
    write_atomic(out, record(search, trials, time_transports(search, trials)))


def run_trials(search: Search, out: Path) -> list[dict[str, Any]]:
    """All trials; those that `out` lacks are run and written to it one by one."""
    done = json.loads(out.read_text())["trials"] if out.exists() else []
    draws = search.draws()
    kept = [trial for trial in done if trial["status"] not in ("error", "interrupted")]
    trials = [trial for values in draws for trial in kept if trial["values"] == values]
    for number, values in enumerate(draws):
        if any(trial["values"] == values for trial in trials):
            continue
        print(f"trial {number + 1}/{len(draws)}: {values}", file=sys.stderr, flush=True)
        trials.append(run_trial(search, values))
        write_atomic(out, record(search, trials))
    return trials


def main(
    config: Annotated[Path, typer.Argument(help="a file of config/search/")],
    out: Annotated[Path, typer.Option("--out", help="the record; continued if it exists")],
) -> None:
    """Searches a system's settings on the validation split."""
    try:
        run(Search.read(config), out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    typer.run(main)
