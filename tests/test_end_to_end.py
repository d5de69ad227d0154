"""The whole graph on small data: config/tiny.yaml with Horovod on virtual nodes, and config/paper.yaml."""

from pathlib import Path

import pytest
import yaml
from amazon_like import make_amazon_like_zip, write_catalogue
from drive_server import drive_server
from workflow import ROOT, snakemake

from dslide.bench.records import read_run
from dslide.data.catalogue import catalogue


@pytest.mark.root
@pytest.mark.rivals
@pytest.mark.timeout(420)
def test_tiny_from_data_to_page(tmp_path: Path) -> None:
    experiment = ROOT / "config" / "tiny.yaml"
    done = snakemake(tmp_path, experiment, timeout=400)
    assert done.returncode == 0, done.stdout
    results, reports = tmp_path / "results" / "tiny", tmp_path / "reports" / "tiny"
    runs = {path.parents[2].name: read_run(path.parent) for path in results.glob("runs/*/*/*/meta.json")}
    assert {name: (run.status, run.reason) for name, run in runs.items()} == {
        "dslide": ("done", None),
        "horovod-dense": ("done", None),
    }
    sent = {}
    for name, run in runs.items():
        assert [rank["host"] for rank in run.meta["ranks"]] == ["hv0", "hv1"]
        assert run.meta["link"]["rate"] == 1e9
        sent[name] = run.end["tx_bytes"] / run.evals().iloc[-1]["samples"]
        assert run.evals()["step"].iloc[0] == 0
    assert sent["horovod-dense"] > 20 * sent["dslide"] > 0  # what the whole project is about
    assert runs["dslide"].evals()["p1"].iloc[-1] > 0.1  # one label in 5,512 has to be guessed
    for file in ("index.html", "p1-time.svg", "p1-time.png", "p1-time.json"):
        assert (reports / file).stat().st_size > 500, file
    assert "Nothing to be done" in snakemake(tmp_path, experiment).stdout


def small_paper(folder: Path) -> Path:
    """config/paper.yaml with fewer epochs, timed steps and cores."""
    values = yaml.safe_load((ROOT / "config" / "paper.yaml").read_text())
    for cluster in values["clusters"].values():
        cluster |= {"cores": 1, "oversubscribed": True}
    for system in values["systems"].values():
        system["epochs"] = min(system["epochs"], 2)
        if "composed" in system:
            system["composed"] |= {"pace_steps": 3, "paces": ["two-1gbit"]}
    path = folder / "paper.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.root
@pytest.mark.rivals
@pytest.mark.timeout(420)
def test_paper_from_the_download_to_the_page(tmp_path: Path) -> None:
    archive = tmp_path / "Amazon.zip"
    expected = make_amazon_like_zip(archive)
    rows = write_catalogue(tmp_path / "catalogue.yaml", expected)
    with drive_server() as drive:
        for source in catalogue()["Amazon-670K"].sources:
            drive.files[source.gdrive] = archive.read_bytes()
        env = {
            "DSLIDE_GDRIVE": drive.base,
            "DSLIDE_CATALOGUE": str(rows),
            "DSLIDE_DATA": str(tmp_path / "data"),
        }
        done = snakemake(tmp_path, small_paper(tmp_path), env=env, timeout=400)
        assert drive.requests
    assert done.returncode == 0, done.stdout
    results = tmp_path / "results" / "paper"
    for name in ("dslide", "slide"):
        for cluster in ("one", "two-1gbit"):
            run = read_run(results / "runs" / name / cluster / "seed-0")
            assert (run.status, run.reason) == ("done", None)
            assert run.evals()["p1"].iloc[-1] > 3 / expected["labels"]
    composed = read_run(results / "composed" / "horovod-dense-published" / "two-1gbit" / "seed-0")
    assert composed.meta["kind"] == "composed"
    assert (tmp_path / "reports" / "paper" / "index.html").is_file()
