"""Figures and the page from records: files, determinism, self-containment, missing and failed systems."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reports_records as records
import yaml
from synthetic import make_dataset, write_prepared

from dslide.experiment_data import data_folder
from dslide.reporting import chart, output, page
from dslide.reporting.race import Race

FIGURES = ["bytes", "p1-epochs", "p1-time", "second-node", "time-to-target"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Race, Path]:
    """A complete experiment with its figures and its page."""
    root = tmp_path_factory.mktemp("reports")
    race = Race.load(*records.write_experiment(root))
    for name in FIGURES:
        output.write_figure(name, race, root / "out" / f"{name}.svg", ["make"])
    page.write_page(race, root / "out" / "index.html", "make")
    return race, root / "out"


def test_all_figures_are_covered_here() -> None:
    found = [name for name in output.names() if hasattr(output.load(name), "figure")]
    elsewhere = ["data", "samplers", "scaling"]  # not of the race's records: tested with what they show
    assert sorted(found) == sorted([*FIGURES, *elsewhere])


def test_the_data_are_drawn_where_they_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race.load(*records.write_experiment(tmp_path))
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "absent"))
    output.write_figure("data", race, tmp_path / "absent.svg")
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "there"))
    write_prepared(data_folder(race.spec), make_dataset())
    output.write_figure("data", race, tmp_path / "there.svg")
    absent, there = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("absent", "there"))
    assert absent["empty"] and "isn't prepared" in absent["caption"]
    assert not there["empty"] and "37 labels, 90 features" in there["caption"]
    assert (tmp_path / "there.svg").stat().st_size < 200_000


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_svg_png_and_sidecar(made: tuple[Race, Path], name: str) -> None:
    race, out = made
    assert (out / f"{name}.svg").read_text().startswith("<?xml")
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    sidecar = json.loads((out / f"{name}.json").read_text())
    assert sidecar["empty"] is False
    assert sidecar["command"] == ["make"] and sidecar["revision"]
    assert "Example CPU 9000" in sidecar["caption"]
    assert len(sidecar["inputs"]["runs/dslide/one/seed-0/events.jsonl"]) == 64
    assert race.experiment.name in sidecar["inputs"]


@pytest.mark.parametrize("name", ["p1-time", "second-node"])
def test_a_figure_is_the_same_when_made_again(made: tuple[Race, Path], tmp_path: Path, name: str) -> None:
    race, out = made
    again = Race.load(race.experiment, race.results)
    output.write_figure(name, again, tmp_path / f"{name}.svg", ["make"])
    for suffix in (".svg", ".png"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (out / f"{name}{suffix}").read_bytes()


def test_composed_lines_are_dashed_and_named(made: tuple[Race, Path]) -> None:
    race, _ = made
    figure = output.load("p1-time").figure(race)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "Horovod dense, tuned (composed)" in labels and "dslide" in labels
    assert "stopped at its time budget" in labels and "napkinXC PLT, tuned (one point)" in labels
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == ["1 node of 2 cores", "2 nodes of 1 core, 100 Mbit/s", "2 nodes of 1 core, 1 Gbit/s"]
    slow = figure.axes[1]
    dashed = [line for line in slow.lines if line.get_linestyle() == "--" and len(line.get_xdata()) > 3]
    assert len(dashed) == 2
    assert all(min(line.get_xdata()) > 0 for line in dashed)  # step 0 is not on a log axis


def test_page_holds_everything_and_loads_nothing(made: tuple[Race, Path]) -> None:
    race, out = made
    text = (out / "index.html").read_text()
    inner = "".join(html.unescape(part) for part in re.findall(r'srcdoc="([^"]*)"', text))
    outer = re.sub(r'srcdoc="[^"]*"', "", text)
    assert bool(inner) == (chart.html(race) is not None)
    for part in (outer, inner):
        bare = re.sub(r"<script[^>]*>.*?</script>", "<script></script>", part, flags=re.S)
        assert not re.search(r"""\bsrc\s*=|<link|@import|url\(\s*['"]?(?!#)""", bare)
        assert not re.search(r"^\s*<script[^>]*\bsrc\b", part, flags=re.M)
    assert set(re.findall(r"https?://[^\s\"'<>)]+", outer)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert outer.count("<svg") == len(FIGURES)
    for name in ("time-to-target", "accuracy", "second-node", "bytes", "composition", "claims"):
        assert f'id="table-{name}"' in outer


def test_page_opens_with_the_ratio_and_the_second_node(made: tuple[Race, Path]) -> None:
    text = html.unescape((made[1] / "index.html").read_text())
    lead = text[text.index('class="lead"') : text.index("</section>")]
    assert re.search(r"On 2 nodes at 100 Mbit/s, dslide reaches P@1 0\.\d\d in [\d.]+ s: dense Horovod", lead)
    assert "At 100 Mbit/s a second node pays from about 3,600 active output rows" in lead
    assert "Where dslide does not win" in text
    assert "napkinXC PLT, tuned ends at 42.06% P@1, dslide at 41.20%." in text


def test_page_names_failed_systems(made: tuple[Race, Path]) -> None:
    text = (made[1] / "index.html").read_text()
    assert text.count("skipped: napkinxc is not installed (pip install napkinxc)") >= 3  # warning and tables


def test_ids_are_unique_between_figures(made: tuple[Race, Path]) -> None:
    outer = re.sub(r'srcdoc="[^"]*"', "", (made[1] / "index.html").read_text())
    ids = re.findall(r'\bid="([^"]+)"', outer)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', outer)) <= set(ids)


def test_page_of_two_systems_and_one_figure(tmp_path: Path) -> None:
    systems = {
        "dslide": {"system": "dslide_sharded", "label": "dslide", "clusters": ["two"]},
        "horovod-dense": {"system": "horovod_dense", "label": "Horovod dense", "clusters": ["two"]},
    }
    spec = {
        "name": "tiny",
        "title": "A <small> slice",
        "data": "debian-deps",
        "eval_epochs": [1],
        "targets": [0.02],
        "clusters": {"two": {"nodes": 2, "cores": 1, "bandwidth": "1gbit"}},
        "systems": {key: {"epochs": 1, "budget_seconds": 9, **value} for key, value in systems.items()},
        "reports": ["p1-time"],
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(spec))
    cluster = {"nodes": 2, "cores": 1, "throttled": True, "kind": "virtual"}
    meta = {"cluster": cluster, "link": records.link("1gbit")}
    rows = [(0, 0.0, 0, 0.0, 0.0), (12, 1.0, 1500, 0.4, 0.05)]
    records.write_run(tmp_path / "results/runs/dslide/two/seed-0", rows, meta=meta)
    failed = {"reason": "rank 1 was killed"}
    records.write_run(tmp_path / "results/runs/horovod-dense/two/seed-0", [], "error", end=failed, meta=meta)
    common = ["--experiment", str(file), "--results", str(tmp_path / "results")]
    for command in (["figure", "p1-time"], ["page"]):
        out = tmp_path / "out" / ("index.html" if command == ["page"] else "p1-time.svg")
        done = subprocess.run(
            [sys.executable, "-m", "dslide.reporting", *command, *common, "--out", str(out)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "index.html").read_text()
    assert "A &lt;small&gt; slice" in text
    assert text.count('<figure id="') == 1 and 'id="table-' not in text
    assert "Horovod dense on 2 nodes, 1 Gbit/s (error: rank 1 was killed)" in text
    assert "in 0.400 s" in text


def test_page_without_records(tmp_path: Path) -> None:
    file, _ = records.write_experiment(tmp_path)
    (tmp_path / "empty").mkdir()
    race = Race.load(file, tmp_path / "empty")
    for name in FIGURES:
        output.write_figure(name, race, tmp_path / "out" / f"{name}.svg")
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["empty"] is True
    page.write_page(race, tmp_path / "out" / "index.html", "make")
    text = (tmp_path / "out" / "index.html").read_text()
    assert "No run of dslide has reached a target yet." in text and "no record" in text


def test_unreadable_input_is_one_line_and_status_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dslide.reporting",
        "table",
        "claims",
        "--experiment",
        str(tmp_path / "no.yaml"),
    ]
    done = subprocess.run(
        [*command, "--results", str(tmp_path), "--out", str(tmp_path / "t.csv")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "no.yaml" in done.stderr and "Traceback" not in done.stderr
