"""The recorded search: its draws, its costs, what it chooses, and that it continues where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from dslide.bench import search as searching
from dslide.bench.search import Search
from dslide.errors import UserError
from dslide.paths import content_root

SPACE = {"lr": [1, 2, 3], "batch_size": [8, 16]}


def make(**fields: Any) -> Search:
    return Search.model_validate({"system": "dummy", "label": "Dummy", "spaces": [SPACE], **fields})


def trial(values: dict[str, Any], seconds: float | None, p1: float) -> dict[str, Any]:
    status = "target" if seconds is not None else "done"
    return {
        "values": values,
        "settings": {},
        "batch_size": 8,
        "status": status,
        "p1": p1,
        "seconds": seconds,
        "steps": 10,
    }


@pytest.fixture(autouse=True)
def dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLIDE_SYSTEMS", str(Path(__file__).with_name("systems")))


def test_draws_begin_with_the_known_ones_and_never_repeat() -> None:
    search = make(trials=5, first=[{"lr": 2, "batch_size": 16}])
    draws = search.draws()
    assert draws == search.draws() and draws[0] == {"lr": 2, "batch_size": 16}
    assert len({json.dumps(d, sort_keys=True) for d in draws}) == 5
    assert len(make(trials=50).draws()) == 6  # all there are
    assert make(trials=3, seed=1).draws() != make(trials=3).draws()


def test_a_trial_runs_on_the_validation_split_with_its_own_values() -> None:
    spec = make(settings={"bytes": 1}).spec({"steps": 4, "batch_size": 16}, Path("out"))
    assert (spec.split, spec.batch_size, spec.settings) == ("validation", 16, {"bytes": 1, "steps": 4})
    inside = make(settings={"preset": "slide"}, inside="overrides").spec({"a.b": 2}, Path("out"))
    assert inside.settings == {"preset": "slide", "overrides": {"a.b": 2}}


def test_cost_adds_the_messages_time_on_the_link() -> None:
    reached = trial({"bytes": 10**6}, 2.0, 0.3)
    assert searching.cost(make(), reached) == 2.0
    on_link = make(link={"nodes": 2, "bandwidth": "100mbit"})
    assert searching.cost(on_link, reached) == pytest.approx(2.0 + 10 * 8e6 / 1e8)
    assert searching.cost(on_link, trial({}, None, 0.2)) is None


def test_the_cheapest_that_reaches_the_target_is_chosen_else_the_most_accurate() -> None:
    trials = [trial({}, s, p) for s, p in ((None, 0.29), (5.0, 0.3), (4.0, 0.3), (None, 0.2))]
    for t in trials:
        t["cost"] = searching.cost(make(), t)
    assert searching.best(trials) is trials[2]
    assert searching.best([trials[3], trials[0]]) is trials[0]


def test_a_real_trial_is_recorded_and_a_second_search_runs_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "record.json"
    search = make(data="debian-deps", spaces=[{"steps": [2, 3]}], trials=1, eval_epochs=[])
    searching.run(search, out)
    record = json.loads(out.read_text())
    (only,) = record["trials"]
    assert only["status"] == "done" and only["p1"] == 1.0 and only["curve"][-1]["epoch"] == 1.0
    assert record["chosen"]["settings"] == only["settings"]
    asked: list[dict[str, Any]] = []

    def remember(search: Search, values: dict[str, Any]) -> dict[str, Any]:
        asked.append(values)
        return trial(values, None, 0.5) | {"cost": None}

    monkeypatch.setattr(searching, "run_trial", remember)
    searching.run(search.model_copy(update={"trials": 2}), out)
    assert len(asked) == 1 and asked[0] != only["values"]
    assert [t["p1"] for t in json.loads(out.read_text())["trials"]] == [1.0, 0.5]


def test_a_trial_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    search = make(spaces=[{"steps": [2]}])
    for status in ("error", "target"):
        result = trial({"steps": 2}, 1.0, 0.3) | {"status": status, "cost": None}
        monkeypatch.setattr(searching, "run_trial", lambda search, values, result=result: result)
        searching.run(search, out)
    assert [t["status"] for t in json.loads(out.read_text())["trials"]] == ["target"]


def test_another_records_trials_are_ranked_anew(tmp_path: Path) -> None:
    fast = trial({"bytes": 10**9, "steps": 1}, 1.0, 0.3) | {"cost": 1.0}
    light = trial({"bytes": 1, "steps": 2}, 3.0, 0.3) | {"cost": 3.0}
    (tmp_path / "source.json").write_text(json.dumps({"trials": [fast, light]}))
    search = make(spaces=[], reuse="source", link={"nodes": 2, "bandwidth": "1gbit"})
    searching.run(search, tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["chosen"]["trial"] == 1 and record["trials"][0]["cost"] == pytest.approx(81.0)


def test_the_transport_with_the_shortest_steps_at_the_links_rate_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medians = {("a", "1gbit"): 0.2, ("b", "1gbit"): 0.1, ("a", "10gbit"): 0.01, ("b", "10gbit"): 0.02}

    def timed(search: Search, link: Any, trial: dict[str, Any], transport: str, rate: str) -> dict[str, Any]:
        assert trial["steps"] == 10
        seconds = {"median": medians[transport, rate]}
        return {"transport": transport, "bandwidth": rate, "step_seconds": seconds}

    monkeypatch.setattr(searching, "time_transport", timed)
    (tmp_path / "source.json").write_text(json.dumps({"trials": [trial({"steps": 1}, 1.0, 0.3)]}))
    link = {"nodes": 2, "bandwidth": "1gbit", "transports": ["a", "b"], "also": ["10gbit"]}
    searching.run(make(spaces=[], reuse="source", link=link), tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["chosen"]["settings"] == {"transport": "b"} and len(record["transports"]) == 4


def test_a_transport_is_timed_by_real_steps(tmp_path: Path) -> None:
    search = make(
        data="debian-deps", link={"nodes": 2, "bandwidth": "1gbit", "pace_steps": 3}, spaces=[{"steps": [3]}]
    )
    link = search.link
    assert link is not None
    entry = searching.time_transport(search, link, {"values": {}}, "mpi", "1gbit")
    assert entry["step_seconds"]["steps"] == 3 and entry["step_seconds"]["median"] > 0


def test_a_broken_file_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text("system: dummy\nlabel: x\ntrails: 3\nfirst: [{}]\n")
    with pytest.raises(UserError, match=r"search\.yaml: trails"):
        Search.read(file)
    file.write_text("system: dummy\nlabel: x\n")
    with pytest.raises(UserError, match="either `reuse`"):
        Search.read(file)


@pytest.mark.parametrize(
    "file", sorted((content_root() / "config" / "search").glob("*.yaml")), ids=lambda f: f.stem
)
def test_shipped_searches_draw_settings_that_their_systems_accept(file: Path) -> None:
    from dslide.bench import systems

    search = Search.read(file)
    system = systems.load(search.system)
    for values in search.draws():
        spec = search.spec(values, Path("out"))
        systems.settings(system, spec)
        if hasattr(system, "train_config"):
            system.train_config(spec)
