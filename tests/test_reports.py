"""Tables from records: values that were worked out by hand."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import reports_records as records
import yaml

from dslide.errors import UserError
from dslide.paths import content_root
from dslide.reporting import facts, headline, output, reference, roles, traffic
from dslide.reporting.race import Race
from dslide.reporting.targets import best_common, number, ratio, reach

CLUSTERS = {
    "one": {"nodes": 1, "cores": "auto"},
    "slow": {"nodes": 2, "cores": "auto", "bandwidth": "100mbit"},
    "free": {"nodes": 2, "cores": "auto"},
}
PLACED = {"curve": "free", "paces": ["slow"]}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dslide": {
        "system": "dslide_sharded",
        "label": "dslide",
        "seeds": [0, 1, 2],
        "clusters": ["one", "slow"],
    },
    "dense-tuned": {"system": "horovod_dense", "label": "Horovod dense, tuned", "composed": PLACED},
    "dense-published": {
        "system": "horovod_dense",
        "label": "Horovod dense, as published",
        "composed": PLACED,
    },
    "recipe": {"system": "horovod_recipe", "label": "Horovod, our recipe", "clusters": ["slow"]},
    "tf-full": {"system": "tensorflow_full", "label": "TF full", "clusters": ["one"]},
    "tf-recipe": {"system": "tensorflow_recipe", "label": "TF recipe", "clusters": ["one"]},
    "plt": {"system": "plt", "label": "PLT", "clusters": ["one"]},
}


def evals(*points: tuple[float, float]) -> list[tuple[int, float, int, float, float]]:
    """Evaluations at (seconds, P@1), a step and 100 samples apart, after one at step 0."""
    return [
        (i, i / 4, 100 * i, seconds, p1) for i, (seconds, p1) in enumerate([(0.0, 0.0), *points]) if i >= 0
    ]


def on(nodes: int, bandwidth: str | None = None, **more: Any) -> dict[str, Any]:
    """Meta data of a run on a cluster shape."""
    cluster = {
        "nodes": nodes,
        "cores": 2 // nodes,
        "bandwidth": bandwidth,
        "throttled": bandwidth is not None,
    }
    return {
        "cluster": {**cluster, "kind": "virtual"},
        "link": records.link(bandwidth),
        "batch_size": 100,
        **more,
    }


def experiment(root: Path, systems: dict[str, Any] = SYSTEMS, **more: Any) -> Path:
    """Writes the experiment's file."""
    full = {key: {"epochs": 4, "budget_seconds": 9, **value} for key, value in systems.items()}
    spec = {"name": "small", "data": "debian-deps", "targets": [0.25, 0.30], "eval_epochs": [1]}
    file = root / "small.yaml"
    file.write_text(yaml.safe_dump({**spec, "clusters": CLUSTERS, "systems": full, **more}, sort_keys=False))
    return file


@pytest.fixture
def small(tmp_path: Path) -> Race:
    """Seven systems with round numbers."""
    results = tmp_path / "results"
    for seed, (first, second) in enumerate([(1.0, 2.0), (2.0, 3.0), (4.0, 10.0)]):
        rows = evals((first, 0.26), (second, 0.31), (second + 1, 0.40 + 0.01 * seed))
        records.write_run(results / f"runs/dslide/slow/seed-{seed}", rows, meta=on(2, "100mbit"))
    for seed, second in enumerate([1.5, 1.5, 6.0]):
        rows = evals((0.5, 0.26), (second, 0.31), (second + 1, 0.40))
        records.write_run(results / f"runs/dslide/one/seed-{seed}", rows, meta=on(1))
    composed = on(2, "100mbit", kind="composed")
    records.write_run(
        results / "composed/dense-tuned/slow/seed-0", evals((300, 0.2), (600, 0.31)), meta=composed
    )
    cut = evals((450, 0.1), (900, 0.2))
    records.write_run(results / "composed/dense-published/slow/seed-0", cut, "timeout", meta=composed)
    records.write_run(
        results / "runs/recipe/slow/seed-0", evals((30, 0.30), (60, 0.35)), meta=on(2, "100mbit")
    )
    records.write_run(results / "runs/tf-full/one/seed-0", evals((20, 0.28), (45, 0.38)), meta=on(1))
    records.write_run(results / "runs/tf-recipe/one/seed-0", evals((9, 0.32), (18, 0.39)), meta=on(1))
    failed = {"reason": "out of memory & worse"}
    records.write_run(results / "runs/plt/one/seed-0", [], "error", end=failed, meta=on(1))
    return Race.load(experiment(tmp_path), results)


def row(table: output.Table, **where: Any) -> dict[str, Any]:
    """The one row of a table's data that has these values."""
    frame = table.data
    for key, value in where.items():
        frame = frame[frame[key] == value]
    assert len(frame) == 1
    return dict(frame.iloc[0])


def test_ablation_tells_what_each_change_costs(tmp_path: Path) -> None:
    def system(label: str, **more: Any) -> dict[str, Any]:
        return {"system": "dslide_sharded", "label": label, "clusters": ["one"], **more}

    systems = {
        "ours": system("ours"),
        "other": system("other"),
        "off": system("log-Q off", change_of="ours"),
        "gone": system("gone", change_of="ours"),
    }
    results = tmp_path / "results"
    for name, points in (
        ("ours", [(1, 0.26), (2, 0.40)]),
        ("other", [(3, 0.31), (9, 0.42)]),
        ("off", [(1, 0.35)]),
    ):
        records.write_run(results / f"runs/{name}/one/seed-0", evals(*points), meta=on(1))
    report, race = output.load("samplers"), Race.load(experiment(tmp_path, systems), results)
    table = report.table(race)
    assert row(table, system="off")["p1_change"] == pytest.approx(-0.05)
    assert row(table, system="ours")["seconds_to_0.3"] == 2 and math.isnan(
        row(table, system="ours")["p1_change"]
    )
    (_, samplers), (_, changes) = table.parts
    assert list(samplers["system"]) == ["other", "ours"]
    assert changes["points of P@1"].fillna("").tolist() == ["-5.0", ""]
    assert changes["end P@1"].tolist() == ["35.00%", "no record"]
    drawn = [line.get_label() for line in report.figure(race).axes[0].get_lines()][:2]
    assert drawn == ["other  42.0%", "ours  40.0%"]
    assert "gone" in report.caption(race)


def test_without_changes_there_is_no_ablation(small: Race) -> None:
    report = output.load("samplers")
    assert report.table(small).empty
    assert not report.figure(small).axes


def test_numbers_are_read_without_an_exponent() -> None:
    shown = [number(v) for v in (0, 0.0421, 0.999, 1.234, 12.34, 123.4, 1234.4, 9.999, math.inf)]
    assert shown == ["0", "0.0421", "0.999", "1.23", "12.3", "123", "1,234", "10.0", "∞"]


def test_time_to_target_is_the_first_evaluation_at_or_above_it(small: Race) -> None:
    found = reach(small.find("recipe", "slow"), 0.30)
    assert found is not None
    assert (found.seconds, found.samples, found.bound) == (30.0, 100.0, False)


def test_median_and_range_of_seeds(small: Race) -> None:
    found = reach(small.find("dslide", "slow"), 0.30)
    assert found is not None
    assert (found.seconds, found.low, found.high, found.seeds) == (3.0, 2.0, 10.0, 3)
    assert str(found) == "3.00" and found.range == "2.00–10.0"


@pytest.mark.parametrize(("missed_at", "expected"), [(2.0, "> 2.00"), (9.0, "5.00")])
def test_a_missed_seed_bounds_the_median_only_where_it_matters(
    tmp_path: Path, missed_at: float, expected: str
) -> None:
    results = tmp_path / "results"
    for seed, rows in enumerate([evals((1, 0.4)), evals((5, 0.4)), evals((missed_at, 0.1))]):
        records.write_run(results / f"runs/dslide/one/seed-{seed}", rows, meta=on(1))
    race = Race.load(experiment(tmp_path, {"dslide": SYSTEMS["dslide"]}), results)
    found = reach(race.find("dslide", "one"), 0.30)
    assert found is not None
    assert str(found) == expected and found.misses == 1 and found.range.endswith("–missed")


def test_ratios(small: Race) -> None:
    found = row(output.load("time-to-target").table(small), target=0.30, system="dslide", cluster="slow")
    assert found["ratio_dense_tuned"] == 200.0  # 600 s composed over 3 s
    assert found["ratio_dense_tuned_sign"] == ""
    assert found["ratio_dense_published"] == 300.0  # not there after 900 s
    assert found["ratio_dense_published_sign"] == ">"
    assert found["ratio_fastest_horovod"] == 10.0
    assert found["ratio_own_one_node"] == 0.5
    assert found["ratio_best_one_node"] == 0.5


def test_a_bound_over_a_bound_says_nothing(small: Race) -> None:
    published = reach(small.find("dense-published", "slow"), 0.30)
    ours = reach(small.find("dslide", "slow"), 0.30)
    assert published is not None and published.bound
    assert ratio(published, published) is None
    assert ratio(ours, None) is None
    less = ratio(ours, published)
    assert less is not None and str(less) == "< 1/300†"


def test_composed_numbers_carry_the_mark_and_measured_ones_do_not(small: Race) -> None:
    table = output.load("time-to-target").table(small)
    shown = next(frame for heading, frame in table.parts if heading == "P@1 0.30").set_index("system")
    assert shown.loc["Horovod dense, tuned", "seconds"] == "600†"
    assert shown.loc["Horovod dense, as published", "seconds"] == "> 900†"
    assert shown.loc["Horovod, our recipe", "seconds"] == "30.0"
    assert row(table, target=0.30, system="dense-tuned")["kind"] == "composed"
    ours = shown[shown["cluster"] == "2 nodes, 100 Mbit/s"].loc["dslide"]
    assert ours["dense Horovod tuned ×"] == "200†" and ours["dense Horovod published ×"] == "> 300†"
    assert ours["fastest Horovod ×"] == "10.0"


def test_a_failed_run_is_a_row_with_its_reason(small: Race) -> None:
    table = output.load("time-to-target").table(small)
    assert row(table, target=0.30, system="plt")["reason"] == "error: out of memory & worse"
    page = output.fragment(table)
    assert "error: out of memory &amp; worse" in page
    assert any("PLT on 1 node (error: out of memory & worse)" in s for s in facts.absent(small))


def test_a_run_without_a_record_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    race = Race.load(experiment(tmp_path), tmp_path / "results")
    table = output.load("time-to-target").table(race)
    assert set(table.data["reason"]) == {"no record"}
    assert len(table.data) == 2 * 8


def test_best_common_target(small: Race) -> None:
    assert best_common(small) == 0.20  # dense as published got no further
    parts = output.load("time-to-target").table(small).parts
    assert [heading.split(" (")[0] for heading, _ in parts] == ["P@1 0.20", "P@1 0.25", "P@1 0.30"]


def test_decomposition(small: Race) -> None:
    parts = output.load("accuracy").decomposition(small)
    ratios = {part["what"]: {t: str(r) for t, r in part["ratios"].items()} for part in parts}
    assert ratios == {
        "the recipe": {0.25: "2.22", 0.30: "5.00"},  # 20 / 9, 45 / 9
        "the system": {0.25: "18.0", 0.30: "6.00"},  # 9 / 0.5, 9 / 1.5
        "both": {0.25: "40.0", 0.30: "30.0"},
    }
    ends = row(output.load("accuracy").table(small), system="dslide", cluster="slow")
    assert (ends["p1"], ends["p1_low"], ends["p1_high"]) == pytest.approx((0.41, 0.40, 0.42))


def test_headline_says_both_sides(small: Race) -> None:
    lead = headline.lead(small)
    assert lead[0] == (
        "On 2 nodes at 100 Mbit/s, dslide reaches P@1 0.30 in 3.00 s: dense Horovod as published takes more "
        "than 300† times as long; dense Horovod tuned takes 200† times as long; the fastest Horovod variant "
        "(Horovod, our recipe) takes 10.0 times as long."
    )
    assert lead[1].startswith("On one node, dslide takes 1.50 s to P@1 0.30")
    assert headline.losses(small) == [
        "One node is sooner than 2 nodes, 100 Mbit/s: dslide on 1 node of 2 cores is at P@1 0.30 in 1.50 s, "
        "dslide on 2 nodes of 1 core, 100 Mbit/s in 3.00 s."
    ]


def test_a_rival_that_wins_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    records.write_run(results / "runs/dslide/one/seed-0", evals((2, 0.31)), meta=on(1))
    records.write_run(results / "runs/plt/one/seed-0", evals((1, 0.45)), meta=on(1))
    systems = {"dslide": SYSTEMS["dslide"] | {"seeds": [0], "clusters": ["one"]}, "plt": SYSTEMS["plt"]}
    race = Race.load(experiment(tmp_path, systems), results)
    assert headline.losses(race) == [
        "PLT is at P@1 0.30 before dslide on 1 node: 1.00 s against 2.00 s.",
        "PLT ends at 45.00% P@1, dslide at 31.00%.",
    ]


def test_roles() -> None:
    def part(system: str, label: str, **settings: Any) -> str | None:
        spec = {"system": system, "label": label, "settings": settings, "epochs": 1, "budget_seconds": 1}
        races = Race(Path(), Path(), _spec({"x": spec}))
        return roles.role(races, "x")

    assert part("dslide_sharded", "dslide", preset="slide") == roles.SLIDE
    assert part("dslide_sharded", "anything") == roles.DSLIDE
    assert part("horovod_dense", "Horovod dense, as published") == roles.DENSE_PUBLISHED
    assert part("horovod_dense", "Horovod dense") == roles.DENSE_PUBLISHED
    assert part("horovod_dense", "Horovod dense", lr=0.1) == roles.DENSE_TUNED
    assert part("horovod_recipe", "Horovod, our recipe") == roles.HOROVOD_RECIPE
    assert part("tensorflow_recipe", "TensorFlow, our recipe") == roles.TF_RECIPE
    assert part("tensorflow_full", "TensorFlow") == roles.TF_FULL
    assert part("plt", "label tree") == roles.TREES
    assert part("torch", "PyTorch") is None


def _spec(systems: dict[str, Any]) -> Any:
    from dslide.experiment import Experiment

    return Experiment.model_validate(
        {
            "name": "x",
            "data": "d",
            "eval_epochs": [1],
            "targets": [0.1],
            "clusters": {"one": {}},
            "systems": systems,
        }
    )


def test_bytes_and_formula(tmp_path: Path) -> None:
    results = tmp_path / "results"
    config = {"network": {"hidden": 128}, "wire": "int8"}
    meta = on(2, "100mbit", config=config, parameters=12_096_512)
    # 2·1·128·1 + 2·1·(2·4 + 4) = 280 bytes a sample, 300 samples
    end = {"samples": 300, "payload_bytes": 280 * 300, "tx_bytes": 294 * 300}
    records.write_run(
        results / "runs/dslide/slow/seed-0", evals((1, 0.1), (2, 0.2), (3, 0.3)), meta=meta, end=end
    )
    steps = {"tx_bytes": 2 * 10 * 48_386_048}
    meta = on(2, "100mbit")
    records.write_run(results / "paces/dense-tuned/slow/seed-0", [], meta=meta, end=steps, steps=[4.0] * 10)
    systems = {key: SYSTEMS[key] for key in ("dslide", "dense-tuned")}
    race = Race.load(experiment(tmp_path, systems), results)
    table = output.load("bytes").table(race)
    ours, dense = row(table, system="dslide"), row(table, system="dense-tuned")
    assert (ours["payload_bytes_per_sample"], ours["formula_bytes_per_sample"]) == (280, 280)
    assert ours["equals_formula"] is True
    assert ours["interface_over_payload"] == pytest.approx(0.05)
    assert dense["interface_bytes_per_sample"] == pytest.approx(2 * 48_386_048 / 100)
    assert dense["parameters"] == 12_096_512  # the same network as dslide's on these data
    assert traffic.dense(12_096_512, ranks=2, batch=100) == pytest.approx(dense["interface_bytes_per_sample"])


@pytest.mark.parametrize(
    ("hidden", "ranks", "wire", "expected"),
    [(128, 2, "int8", 280), (128, 2, "fp32", 1032), (64, 4, "bf16", 816), (128, 1, "int8", 0)],
)
def test_payload_formula(hidden: int, ranks: int, wire: str, expected: int) -> None:
    assert traffic.sharded(hidden, ranks, wire) == expected


def _sweep(root: Path, speeds: dict[str, list[float]], rows: list[float]) -> Race:
    clusters = {"one-core": {"nodes": 1, "cores": 1}, **CLUSTERS}
    for cluster, values in speeds.items():
        nodes = clusters[cluster]["nodes"]
        for extras, active, value in zip([0, 9], rows, values, strict=True):
            meta = on(int(str(nodes)), CLUSTERS.get(cluster, {}).get("bandwidth"))  # type: ignore[arg-type]
            meta["cluster"]["cores"] = 1 if cluster == "one-core" else meta["cluster"]["cores"]
            end = {"ranks": [{"active_rows": active / int(str(nodes))}] * int(str(nodes))}
            folder = root / "results/sweep" / f"extras-{extras}" / cluster / "seed-0"
            records.write_run(folder, [], meta=meta, end=end, steps=[100 / value] * 5)
    sweep = {"system": "dslide", "uniform_extras": [0, 9], "clusters": list(speeds)}
    return Race.load(
        experiment(root, {"dslide": SYSTEMS["dslide"]}, clusters=clusters, sweep=sweep), root / "results"
    )


def test_second_node_crossing_is_interpolated(tmp_path: Path) -> None:
    # Half of one node's speed at 1,000 rows, twice at 4,000: on logarithms, equal half-way, at 2,000.
    race = _sweep(tmp_path, {"one-core": [800, 200], "slow": [400, 400], "free": [1600, 500]}, [1000, 4000])
    second = output.load("second-node")
    assert second.gains(race) == {
        "slow": [(1000, pytest.approx(0.5)), (4000, pytest.approx(2.0))],
        "free": [(1000, pytest.approx(2.0)), (4000, pytest.approx(2.5))],
    }
    assert second.crossing([(1000, 0.5), (4000, 2.0)]) == pytest.approx(2000)
    said = second.sentences(race)
    assert said[0].startswith(
        "At 100 Mbit/s a second node pays from about 2,000 active output rows a batch on"
    )
    assert said[1].startswith("Without a throttle a second node pays at every number of active rows measured")
    assert row(second.table(race), cluster="slow", active_rows_per_batch=4000)[
        "over_one_node"
    ] == pytest.approx(2)


def test_second_node_that_never_pays_says_so(tmp_path: Path) -> None:
    race = _sweep(tmp_path, {"one-core": [800, 200], "slow": [400, 150]}, [1000, 4000])
    assert "does not pay at any number of active rows" in output.load("second-node").sentences(race)[0]


def test_second_node_of_the_same_cores_is_called_a_cut(tmp_path: Path) -> None:
    race = _sweep(tmp_path, {"one": [800, 200], "slow": [400, 150]}, [1000, 4000])
    said = output.load("second-node").sentences(race)[0]
    assert said.startswith("At 100 Mbit/s cutting 1 node of 2 cores into 2 nodes of 1 core does not pay")


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"throttled": False, "note": "no user namespaces"}, "unthrottled"),
        ({"oversubscribed": True}, "oversubscribed"),
        ({}, "link not faithful"),
    ],
)
def test_marks_against_a_cluster(tmp_path: Path, change: dict[str, Any], mark: str) -> None:
    meta = on(2, "100mbit")
    meta["cluster"] |= change
    if not change:
        meta["link"] = records.link("100mbit", faithful=False)
    records.write_run(tmp_path / "results/runs/recipe/slow/seed-0", evals((1, 0.3)), meta=meta)
    race = Race.load(experiment(tmp_path, {"recipe": SYSTEMS["recipe"]}), tmp_path / "results")
    assert facts.marks(race, race.clusters["slow"]) == [mark]
    assert f"2 nodes, 100 Mbit/s: {mark}." in output.load("p1-time").caption(race)
    if "note" in change:
        assert "The launcher: no user namespaces." in facts.warnings(race)


def test_context_of_captions(small: Race) -> None:
    text = " ".join(facts.context(small))
    for part in (
        "Example CPU 9000, 2 cores, 2 used, dslide's kernels avx512, 24 GB",
        "debian-deps, 42,672 training and 8,786 test points, 51,333 features, 43,171 labels",
        "Links of 100 Mbit/s",
        "off the ideal time by +4%",
        "round trip 0.11 ms",
        "no latency emulated",
        "Seeds: 3 of dslide; 1 of every other system",
        "Revision 0123456789",
    ):
        assert part in text


def test_published_claims_have_marks_that_may_be_shown() -> None:
    claims = output.load("claims")
    rows = claims.read_claims()
    assert len(rows) >= 20
    for claim in rows:
        assert set(claim["mark"].split("/")) <= {"S", "N"}
        assert claim["value"] == "" or float(claim["value"]) > 0


def test_claims_beside_ours(small: Race) -> None:
    claims = output.load("claims")
    value, how = claims.ours(small, "dslide@slow / horovod-dense-tuned@slow")
    assert value == "200† times" and how.endswith("to P@1 0.30")
    assert claims.ours(small, "slide@one / tensorflow-full@one") == ("", "no run")


def test_composition_reads_what_the_composed_record_holds(tmp_path: Path) -> None:
    file, results = records.write_experiment(tmp_path)
    table = output.load("composition").table(Race.load(file, results))
    found = row(table, system="horovod-dense-tuned", cluster="two-1gbit")
    assert found["step_seconds"] == pytest.approx(256 / 466)
    assert (found["check_step_error"], found["check_p1_difference"]) == (-0.031, 0.0042)
    held = dict(table.parts)["Held against a real run"]
    assert list(held["step time"])[:1] == ["-3.1%"] and list(held["P@1"])[:1] == ["+0.42 points"]


def test_reference_records_are_the_race_s_own_and_of_its_data(small: Race, tmp_path: Path) -> None:
    """Other experiments keep records beside them, and another data set's times say nothing here."""
    names = {path.name for path in (content_root() / "results/reference/runs").iterdir()}
    names |= {path.name for path in (content_root() / "results/reference/composed").iterdir()}
    used = reference.runs(content_root(), "runs", "composed")
    assert {run.folder.parent.parent.name for run in used} == names
    others = reference.runs(content_root(), "runs", experiments=True)
    assert others and not {run.folder for run in others} & {run.folder for run in used}
    small.spec = small.spec.model_copy(update={"data": used[0].meta["data"]})
    assert len(output.load("reference").table(small).data) == len(used)
    small.spec = small.spec.model_copy(update={"data": "another"})
    assert output.load("reference").table(small).data.empty


def test_every_table_is_written_as_csv_and_html(tmp_path: Path) -> None:
    file, results = records.write_experiment(tmp_path)
    race = Race.load(file, results)
    written = [name for name in output.names() if hasattr(output.load(name), "table")]
    assert {"time-to-target", "accuracy", "bytes", "second-node", "composition", "claims"} <= set(written)
    for name in written:
        output.write_table(name, race, tmp_path / f"{name}.csv")
        assert (tmp_path / f"{name}.html").stat().st_size > 0
    with (tmp_path / "time-to-target.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    ours = [r for r in rows if r["system"] == "dslide" and r["cluster"] == "one" and r["target"] == "0.3"]
    assert float(ours[0]["seconds"]) == pytest.approx(42752 / 95_000 / 1.04, rel=0.05)
    assert not re.search(r"\d{7}", ours[0]["seconds"])


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file nothing\.py"):
        output.load("nothing")
    with pytest.raises(UserError, match="run the experiment first"):
        Race.load(experiment(tmp_path), tmp_path / "absent")
    (tmp_path / "results").mkdir()
    race = Race.load(experiment(tmp_path), tmp_path / "results")
    with pytest.raises(UserError, match="has no table"):
        output.write_table("p1-time", race, tmp_path / "x.csv")
