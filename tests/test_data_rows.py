"""Every row of the catalogue that has to be downloaded, from a local server to a prepared, verified set."""

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from drive_server import drive_server
from small_archives import catalogue_row, expected, small_archive
from typer.testing import CliRunner

from dslide.data import load
from dslide.data.catalogue import catalogue, entry
from dslide.data.cli import app

ROWS = catalogue()
DOWNLOADED = [name for name, row in ROWS.items() if not row.local]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", DOWNLOADED)
def test_a_row_ends_prepared_and_verified(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, archive = ROWS[name], small_archive(ROWS[name])
    changed = {**catalogue_row(name), "expected": expected(row)}
    if row.sha256 is not None:
        changed |= {"sha256": hashlib.sha256(archive).hexdigest(), "archive_bytes": len(archive)}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({name: changed}))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "small.yaml"))
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))
    with drive_server() as drive:
        monkeypatch.setenv("DSLIDE_GDRIVE", drive.base)
        monkeypatch.setenv("DSLIDE_MIRROR", drive.base)
        first = row.sources[0]
        address = urlsplit(first.url or "")
        key = first.gdrive or f"{address.netloc}{address.path}"
        drive.files = {key: archive}
        if first.resource_key is not None:
            drive.keys = {key: first.resource_key}
        assert _state(name) == "absent"
        assert Path(run("fetch", name).strip().splitlines()[-1]).read_bytes() == archive
        assert len(drive.requests) == 1
    assert _state(name) == "fetched"
    assert hashlib.sha256(archive).hexdigest() in run("verify", name)
    assert "all " not in run("verify", name)  # nothing is prepared yet
    run("convert", name)
    assert _state(name) == "prepared"
    assert "files are as they were prepared" in run("verify", name)
    data = load(name)
    sizes = {"train": len(data.train), "test": len(data.test)}
    assert sizes | {"features": data.num_features, "labels": data.num_labels} == expected(row)
    assert entry(name).citation.strip() in " ".join(run("info", name).split())


def _state(name: str) -> str:
    (line,) = (line for line in run("list").splitlines() if line.split()[:1] == [name])
    return next(word for word in ("absent", "fetched", "prepared", "out of date") if f" {word} " in line)


def test_the_documentation_has_every_row() -> None:
    text = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    for name, row in ROWS.items():
        assert row.expected is not None
        train, test, features, labels = (f"{size:,}" for size in row.expected.sizes().values())
        assert f"| {name} | {train} / {test} | {features} | {labels} |" in text


def test_every_row_says_what_it_is() -> None:
    assert {"EURLex-4K", "Amazon-670K", "Text8", "pecos-eurlex-4k", "debian-deps"} <= set(ROWS)
    for name, row in ROWS.items():
        assert row.title and row.licence and row.citation and row.expected is not None, name
        if not row.local:
            assert row.sources and all(source.note for source in row.sources), name
            assert row.propensity is not None, name
    archives = [(row.archive, row.sources) for row in ROWS.values() if not row.local]
    assert len({str(place) for place in archives}) == len(archives)  # no row is a copy of another
