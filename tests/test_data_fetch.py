"""Downloads, from a local server that plays Google Drive's good and bad answers."""

import io
import json
import multiprocessing
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from amazon_like import NAME, make_amazon_like_zip, write_catalogue
from drive_server import Drive, drive_server
from small_archives import catalogue_row
from typer.testing import CliRunner

from dslide.data import download, fetch, load, prepare
from dslide.data.catalogue import entry
from dslide.data.cli import app
from dslide.data.dataset import prepare_archive, state
from dslide.data.format import file_sha256
from dslide.errors import UserError

ORIGINAL, COPY = (str(source.gdrive) for source in entry(NAME).sources)
KEY = str(entry(NAME).sources[0].resource_key)


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """The server with a small Amazon-670K under both ids, and a data root of its own."""
    archive = tmp_path / "made" / "Amazon.zip"
    expected = make_amazon_like_zip(archive)
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(write_catalogue(tmp_path / "catalogue.yaml", expected)))
    monkeypatch.setattr(download, "RETRIES", 0)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with drive_server() as server:
        monkeypatch.setenv("DSLIDE_GDRIVE", server.base)
        server.files = {ORIGINAL: archive.read_bytes(), COPY: archive.read_bytes()}
        server.keys[ORIGINAL] = KEY
        yield server


def test_amazon_670k_ends_prepared_and_verified(drive: Drive) -> None:
    run = CliRunner().invoke
    with pytest.raises(UserError, match="dslide data prepare Amazon-670K"):
        load(NAME)
    assert run(app, ["prepare", NAME]).exit_code == 0
    verified = run(app, ["verify", NAME])
    assert verified.exit_code == 0 and "as they were prepared" in verified.output
    assert "prepared" in run(app, ["list"]).output
    data = load(NAME)
    assert (len(data.train), len(data.test), data.num_features, data.num_labels) == (600, 200, 400, 150)
    # a second time nothing is downloaded nor written
    requests, written = len(drive.requests), (prepare(NAME) / "meta.json").stat().st_mtime_ns
    assert prepare(NAME).joinpath("meta.json").stat().st_mtime_ns == written
    assert len(drive.requests) == requests


def test_the_resource_key_is_sent(drive: Drive) -> None:
    fetch.fetch(entry(NAME))
    assert len(drive.requests) == 1 and f"resourcekey={KEY}" in drive.requests[0]


def test_the_confirm_page_is_passed(drive: Drive) -> None:
    drive.behaviour[ORIGINAL] = "confirm"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert [request.split("?")[0] for request in drive.requests] == ["/download", "/confirmed"]


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        ("quota", "Quota exceeded.*Too many users.*within 24 hours"),
        ("access", "asks for a sign-in"),
        ("html", "HTML page came instead of the file.*Moved house"),
        ("missing", "404"),
        ("failing", "503"),
        ("cut", "incomplete"),
        ("short", "cut while it was downloaded"),
        ("cut-no-resume", "incomplete"),
    ],
)
def test_a_bad_answer_leads_to_the_next_source(
    drive: Drive, behaviour: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    drive.behaviour[ORIGINAL] = behaviour
    got = fetch.fetch(entry(NAME))
    assert got.path.read_bytes() == drive.files[COPY]
    assert re.search(reason, caplog.text, re.DOTALL)
    record = fetch.read_lock(entry(NAME), got.path)
    assert record is not None and COPY in record["source"]


def test_when_all_fail_the_message_says_what_to_do_by_hand(drive: Drive) -> None:
    drive.behaviour = {ORIGINAL: "quota", COPY: "html"}
    with pytest.raises(UserError) as caught:
        fetch.fetch(entry(NAME))
    message = str(caught.value)
    assert f"https://drive.google.com/file/d/{ORIGINAL}/view?resourcekey={KEY}" in message
    assert f"https://drive.google.com/file/d/{COPY}/view" in message
    assert str(entry(NAME).raw) in message and "--from" in message and "24 hours" in message
    assert not entry(NAME).raw.exists()
    # and that is enough
    entry(NAME).raw.write_bytes(drive.files[COPY])
    assert len(load(prepare(NAME)).train) == 600


def _enlarge(drive: Drive) -> int:
    """Makes the archive larger than what gdown reads at a time; returns half of its size."""
    content = io.BytesIO(drive.files[ORIGINAL])
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr("Amazon/padding", bytes(3 << 20))
    drive.files[ORIGINAL] = content.getvalue()
    return len(content.getvalue()) // 2


def _resumed_at(drive: Drive) -> int:
    (only,) = drive.ranges
    return int(only.removeprefix("bytes=").removesuffix("-"))


def test_a_cut_transfer_is_resumed(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 1)
    half = _enlarge(drive)
    drive.behaviour[ORIGINAL] = "cut-once"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert 0 < _resumed_at(drive) <= half


def test_a_server_that_falls_silent_is_asked_again(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 1)
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    half = _enlarge(drive)
    drive.behaviour[ORIGINAL] = "stalled-once"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    drive.gave_up.set()
    assert 0 < _resumed_at(drive) <= half


def test_a_slow_server_is_waited_for(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 5.0)
    drive.behaviour[ORIGINAL] = "slow"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert len(drive.requests) == 1


def test_a_busy_server_is_asked_again(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 1)
    drive.behaviour[ORIGINAL] = "busy-once"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert len(drive.requests) == 2


def test_what_has_arrived_survives_a_busy_server(drive: Drive) -> None:
    half = _enlarge(drive)
    drive.behaviour = {ORIGINAL: "cut", COPY: "missing"}
    with pytest.raises(UserError):
        fetch.fetch(entry(NAME))
    drive.behaviour[ORIGINAL] = "busy-range-once"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert 0 < _resumed_at(drive) <= half


def test_a_server_that_does_not_resume_is_asked_for_all(drive: Drive) -> None:
    _enlarge(drive)
    drive.behaviour = {ORIGINAL: "cut", COPY: "missing"}
    with pytest.raises(UserError):
        fetch.fetch(entry(NAME))
    drive.behaviour[ORIGINAL] = "cut-no-resume"
    with pytest.raises(UserError, match="incomplete"):
        fetch.fetch(entry(NAME))
    drive.behaviour[ORIGINAL] = "good"
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]


def test_what_does_not_fit_is_not_begun(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    _enlarge(drive)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(UserError, match=r"Amazon-670K: the archive needs about .* GB .*0\.00 GB free"):
        fetch.fetch(entry(NAME))  # the server says how large it is
    rows = {NAME: {**catalogue_row(NAME)}}
    (entry(NAME).raw.parent / "rows.yaml").write_text(yaml.safe_dump(rows))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(entry(NAME).raw.parent / "rows.yaml"))
    requests = len(drive.requests)
    with pytest.raises(UserError, match=r"archive \(0\.21 GB\) with the prepared set \(0\.41 GB\)"):
        fetch.fetch(entry(NAME))  # the real one's sizes, before anything is asked for
    assert len(drive.requests) == requests


def test_a_published_checksum_is_compared(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"train": 600, "test": 200, "features": 400, "labels": 150}
    rows = {NAME: {**catalogue_row(NAME), "expected": counts, "sha256": "0" * 64}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(rows))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "rows.yaml"))
    with pytest.raises(UserError, match=r"the published archive has 000"):
        fetch.fetch(entry(NAME))
    assert not entry(NAME).raw.exists() and not (entry(NAME).raw.parent / "lock.json").exists()


def test_mufin_1_and_napkinxc_dead_links_end_with_instructions_that_suffice(drive: Drive) -> None:
    drive.files = {}
    result = CliRunner().invoke(app, ["fetch", NAME])
    message = str(result.exception)
    assert message.count("404") == 2 and "save the file Amazon.zip as" in message


def test_snakemake_1972_a_corrupt_download_never_passes(drive: Drive) -> None:
    damaged = bytearray(drive.files[ORIGINAL])
    damaged[len(damaged) // 3] ^= 0xFF  # inside of a member: magic bytes, end record and length are right
    drive.files[ORIGINAL] = bytes(damaged)
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[COPY]


def test_pypsa_eur_1675_time_stamps_trigger_nothing(drive: Drive) -> None:
    meta = prepare(NAME) / "meta.json"
    written, requests = meta.stat().st_mtime_ns, len(drive.requests)
    entry(NAME).raw.touch()
    assert prepare(NAME) / "meta.json" == meta
    assert meta.stat().st_mtime_ns == written and len(drive.requests) == requests
    assert state(entry(NAME)) == "prepared"


def test_states(drive: Drive, tmp_path: Path) -> None:
    assert state(entry(NAME)) == "absent"
    with pytest.raises(UserError, match=f"run `dslide data fetch {NAME}`"):
        prepare_archive(entry(NAME), download=False)
    fetch.fetch(entry(NAME))
    assert state(entry(NAME)) == "fetched"
    prepare(NAME)
    assert state(entry(NAME)) == "prepared"
    make_amazon_like_zip(entry(NAME).raw, seed=1)
    entry(NAME).raw.parent.joinpath("lock.json").unlink()
    assert state(entry(NAME)) == "out of date"
    prepare(NAME)
    assert state(entry(NAME)) == "prepared"
    entry(NAME).raw.unlink()  # to save space
    assert state(entry(NAME)) == "prepared"
    (entry(NAME).prepared / "meta.json").write_text("{")
    assert state(entry(NAME)) == "broken"


def test_a_partial_file_of_an_earlier_run_is_resumed(drive: Drive) -> None:
    half = _enlarge(drive)
    drive.behaviour = {ORIGINAL: "cut", COPY: "missing"}
    with pytest.raises(UserError):
        fetch.fetch(entry(NAME))
    drive.behaviour = {COPY: "missing"}
    assert fetch.fetch(entry(NAME)).path.read_bytes() == drive.files[ORIGINAL]
    assert 0 < _resumed_at(drive) <= half
    left = sorted(path.name for path in entry(NAME).raw.parent.iterdir())
    assert left == [".Amazon.zip.lock", "Amazon.zip", "lock.json"]


def test_another_archive_than_recorded_is_refused(drive: Drive, tmp_path: Path) -> None:
    first = fetch.fetch(entry(NAME))
    record = json.loads((entry(NAME).raw.parent / "lock.json").read_text())["Amazon.zip"]
    assert record["sha256"] == first.sha256 and record["bytes"] == first.path.stat().st_size
    good = first.path.read_bytes()
    first.path.unlink()
    make_amazon_like_zip(tmp_path / "other.zip", seed=1)
    other = (tmp_path / "other.zip").read_bytes()
    drive.files[ORIGINAL] = drive.files[COPY] = other
    with pytest.raises(UserError, match=r"recorded on .*lock\.json"):
        fetch.fetch(entry(NAME))
    assert not first.path.exists()
    drive.files[COPY] = good  # another source may still have the one that was recorded
    assert fetch.fetch(entry(NAME)).sha256 == first.sha256
    entry(NAME).raw.write_bytes(other)
    with pytest.raises(UserError, match=r"Amazon\.zip: sha256 .*recorded on .*lock\.json"):
        fetch.fetch(entry(NAME))


def test_an_archive_without_the_inner_files_is_named(drive: Drive, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("elsewhere/train.txt", "0 1 1\n")
    drive.files[ORIGINAL] = drive.files[COPY] = (tmp_path / "odd.zip").read_bytes()
    with pytest.raises(UserError, match=r"has no Amazon/amazon_train\.txt; it contains elsewhere/train\.txt"):
        prepare(NAME)


def test_other_counts_than_the_catalogue_says_are_refused(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"train": 601, "test": 200, "features": 400, "labels": 150}
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(write_catalogue(tmp_path / "wrong.yaml", counts)))
    with pytest.raises(UserError, match="train 600, expected 601"):
        prepare(NAME)
    assert not entry(NAME).prepared.exists()


def test_a_new_archive_is_converted_anew(drive: Drive, tmp_path: Path) -> None:
    before = load(prepare(NAME)).hash
    make_amazon_like_zip(tmp_path / "new.zip", seed=1)
    entry(NAME).raw.parent.joinpath("lock.json").unlink()
    entry(NAME).raw.write_bytes((tmp_path / "new.zip").read_bytes())
    assert load(prepare(NAME)).hash != before


def test_unpacked_files_do_too(drive: Drive, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "made" / "Amazon.zip") as archive:
        archive.extractall(tmp_path)
    files = [
        "--train",
        str(tmp_path / "Amazon/amazon_train.txt"),
        "--test",
        str(tmp_path / "Amazon/amazon_test.txt"),
    ]
    assert CliRunner().invoke(app, ["convert", *files, "--name", NAME]).exit_code == 0
    assert len(load(prepare(NAME)).train) == 600 and drive.requests == []


def _prepare_in_a_process(results: "multiprocessing.Queue[str]") -> None:
    results.put(load(prepare(NAME)).hash)


def _fetch_in_a_process(results: "multiprocessing.Queue[str]") -> None:
    results.put(fetch.fetch(entry(NAME)).sha256)


def test_processes_at_once(drive: Drive) -> None:
    """Two that prepare and one that fetches: one download, one conversion, the same result for all."""
    drive.behaviour[ORIGINAL] = "slow"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    targets = (_prepare_in_a_process, _prepare_in_a_process, _fetch_in_a_process)
    processes = [context.Process(target=target, args=(results,)) for target in targets]
    for process in processes:
        process.start()
    got = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert got == {load(NAME).hash, file_sha256(entry(NAME).raw)}
    assert len(drive.requests) == 1
    np.testing.assert_array_equal(load(NAME).train.x_indptr[:1], [0])
