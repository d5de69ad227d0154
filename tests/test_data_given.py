"""What a person already has, and sets of one's own: `--from PATH`, and catalogue files of one's own."""

import bz2
import gzip
import lzma
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_archives import SIZES, catalogue_row, expected, inner_files, small_archive, tarred, zipped
from typer.testing import CliRunner

from dslide.data import fetch, load, prepare
from dslide.data.catalogue import catalogue, entry
from dslide.data.cli import app
from dslide.data.dataset import state
from dslide.errors import UserError

NAMES = ("EURLex-4K", "Text8", "pecos-eurlex-4k")


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue's rows with the sizes of small archives, and a data root of its own."""
    rows = {}
    for name in NAMES:
        rows[name] = {**catalogue_row(name), "expected": expected(entry(name))}
        rows[name].pop("sha256", None)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(rows))
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "small.yaml"))
    monkeypatch.setenv("DSLIDE_DATA", str(tmp_path / "data"))


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def bare(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files without their folders; PECOS's X and Y keep different names so."""
    return {Path(name).name: content for name, content in files.items()}


PACKINGS = {
    "EURLex-4K": ["archive", "archive-in-folder", "unpacked", "bare", "gzipped", "one-file", "tar", "zip"],
    "Text8": ["archive", "unpacked", "one-file", "tar.xz", "bare-zip"],
    "pecos-eurlex-4k": ["archive", "unpacked", "one-file", "tar", "zip"],
}


@pytest.mark.parametrize(
    "name, packing", [(name, packing) for name, packings in PACKINGS.items() for packing in packings]
)
def test_ann_benchmarks_457_560_what_a_person_has_replaces_the_download(
    name: str, packing: str, tmp_path: Path
) -> None:
    row, files, place = entry(name), inner_files(entry(name)), tmp_path / "have"
    place.mkdir()
    given = {
        "archive": lambda: lay(place, {"renamed.bin": small_archive(row)}) / "renamed.bin",
        "archive-in-folder": lambda: lay(place, {row.archive: small_archive(row)}),
        "unpacked": lambda: lay(place, files),
        "bare": lambda: lay(place, bare(files)),
        "gzipped": lambda: lay(
            place, {f"{member}.gz": gzip.compress(data) for member, data in files.items()}
        ),
        "one-file": lambda: lay(place, bare(files)) / Path(row.members[0]).name,
        "tar": lambda: (
            lay(place, {"a.tar": tarred({f"./{m}": data for m, data in files.items()}, "w")}) / "a.tar"
        ),
        "tar.xz": lambda: lay(place, {"a.tar.xz": tarred(files, "w:xz")}) / "a.tar.xz",
        "zip": lambda: lay(place, {"a.zip": zipped(files)}) / "a.zip",
        "bare-zip": lambda: lay(place, {"a.zip": zipped(bare(files))}) / "a.zip",
    }[packing]()
    result = CliRunner().invoke(app, ["prepare", name, "--from", str(given)])
    assert result.exit_code == 0, result.exception
    assert state(entry(name)) == "prepared"
    assert CliRunner().invoke(app, ["verify", name]).exit_code == 0
    shutil.rmtree(place)  # it was copied
    # whatever the packing, the same set
    (tmp_path / "plain").mkdir()
    reference = load(name).hash
    shutil.rmtree(tmp_path / "data")
    fetch.fetch(entry(name), lay(tmp_path / "plain", files))
    assert load(prepare(name)).hash == reference


@pytest.mark.parametrize("opener", [gzip.compress, bz2.compress, lzma.compress])
def test_one_compressed_file(opener: Any, tmp_path: Path) -> None:
    (tmp_path / "my text").write_bytes(opener(inner_files(entry("Text8"))["text8"]))
    fetch.fetch(entry("Text8"), tmp_path / "my text")
    assert len(load(prepare("Text8")).train) == expected(entry("Text8"))["train"]


@pytest.mark.parametrize(
    "files, given, reason",
    [
        ({}, "absent", "No such file"),
        (
            {"page.zip": b"<html>not an archive</html>"},
            "page.zip",
            "neither Eurlex.zip nor beside Eurlex/eurlex_tr",
        ),
        (
            {"a/b.txt": b"1"},
            "a",
            r"the folder has neither Eurlex\.zip nor Eurlex/eurlex_train\.txt, Eurlex/eur",
        ),
        ({"eurlex_train.txt": b"0 1 1\n"}, "eurlex_train.txt", "nor beside Eurlex/eurlex_test.txt"),
        (
            {"a.zip": zipped({"x/y.txt": b"1"})},
            "a.zip",
            r"has no Eurlex/eurlex_train\.txt; it contains x/y\.txt",
        ),
        (
            {"a.zip": zipped({"a/eurlex_train.txt": b"", "b/eurlex_train.txt": b""})},
            "a.zip",
            "several files called",
        ),
        ({"a.zip": zipped({"eurlex_train.txt": b"1" * 999})[:-40]}, "a.zip", "without its end"),
        (
            {"eurlex_train.txt.gz": gzip.compress(b"0 1 1\n" * 99)[:-9], "eurlex_test.txt": b"0 1 1\n"},
            "eurlex_test.txt",
            "cut or damaged",
        ),
        ({"a.tar.gz": tarred({"eurlex_train.txt": b"1" * 9999})[:-30]}, "a.tar.gz", "cut or damaged"),
    ],
)
def test_what_is_not_the_set_is_refused(
    files: dict[str, bytes], given: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{given}: .*{reason}"):
        fetch.fetch(entry("EURLex-4K"), lay(tmp_path / "have", files) / given)
    assert state(entry("EURLex-4K")) == "absent"


def test_a_cut_tar_is_refused(tmp_path: Path) -> None:
    whole = small_archive(entry("pecos-eurlex-4k"))
    for end in (len(whole) - 9, len(whole) // 2, 40):
        (tmp_path / "eurlex-4k.tar.gz").write_bytes(whole[:end])
        with pytest.raises(UserError, match="cut"):
            fetch.fetch(entry("pecos-eurlex-4k"), tmp_path / "eurlex-4k.tar.gz")


def test_a_compression_that_python_lacks_is_said_and_the_file_kept(tmp_path: Path) -> None:
    row = entry("EURLex-4K")
    content = bytearray(small_archive(row))
    for magic, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # where a header names the compression
        for at in re.finditer(re.escape(magic), bytes(content)):
            content[at.start() + offset] = 9  # Deflate64, which Windows takes for large files
    (tmp_path / "Eurlex.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"type 9.*unpack it with another program"):
        fetch.fetch(row, tmp_path / "Eurlex.zip")
    assert (tmp_path / "Eurlex.zip").exists() and state(row) == "absent"


def test_the_archive_itself_comes_before_what_was_packed(tmp_path: Path) -> None:
    row = entry("EURLex-4K")
    unpacked = lay(tmp_path / "have", inner_files(row))
    assert fetch.fetch(row, unpacked).path == row.packed
    lay(tmp_path, {"Eurlex.zip": small_archive(row)})
    assert fetch.fetch(row, tmp_path / "Eurlex.zip").path == row.raw == fetch.present_archive(row)
    assert not row.packed.exists()
    with pytest.raises(UserError, match=r"Eurlex\.zip is there already; delete it"):
        fetch.fetch(row, unpacked)


def test_a_name_that_is_embedded_or_generated_needs_no_archive(tmp_path: Path) -> None:
    for name in ("debian-deps", "amazon-670k-twin-20k"):
        with pytest.raises(UserError, match="there is nothing to fetch"):
            fetch.fetch(entry(name), tmp_path)


OWN = """
mine:
  title: files of my own
  sources: [{path: files}]
  archive: mine.zip
  train: train.txt
  test: test.txt
  index_base: 1
  header: false
words:
  title: a text of my own
  sources: [{path: files/corpus.txt}]
  format: text
  train: corpus.txt
  words: {window: 1, min_count: 2, tokens: words, train_fraction: 0.5}
"""


@pytest.mark.parametrize("way", ["data root", "file", "folder"])
def test_sets_of_ones_own_need_a_file_alone(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "catalogue" if way == "data root" else tmp_path / "own"
    lay(
        folder,
        {"mine.yaml": OWN.encode(), "files/corpus.txt": "The cat sat. The cat, the dog! Ünder".encode()},
    )
    lay(folder, {"files/train.txt": b"1,2 1:1 3:2\n 2:1\n", "files/test.txt": b"3 3:1\n"})
    if way != "data root":
        place = folder if way == "folder" else folder / "mine.yaml"
        monkeypatch.setenv("DSLIDE_CATALOGUE", os.pathsep.join([os.environ["DSLIDE_CATALOGUE"], str(place)]))
    assert {"mine", "words", "EURLex-4K"} <= set(catalogue())
    listed = CliRunner().invoke(app, ["list"]).output
    assert "files of my own" in listed and "?" in listed  # nobody has said how large it is
    mine = load(prepare("mine"))
    assert (len(mine.train), len(mine.test), mine.num_features, mine.num_labels) == (2, 1, 3, 3)
    words = load(prepare("words"))
    assert words.label_names == ["<unk>", "the", "cat"]
    assert words.train.x_indices.tolist() == [1, 2, 0, 1] and words.test.x_indices.tolist() == [2, 1, 0, 0]
    assert words.train.y_indices.tolist() == [2, 0, 1, 1, 2, 0]


@pytest.mark.parametrize(
    "row, reason",
    [
        ("{}", "mine.title: Field required"),
        ("{title: t, train: a}", "mine: .*give bags, or twin, or archive"),
        ("{title: t, archive: a.zip}", "format xc needs train: FILE"),
        ("{title: t, archive: a.zip, train: a, format: npz}", "needs train: {features: FILE, labels: FILE}"),
        ("{title: t, archive: a.zip, train: {features: a, labels: b}}", "format xc needs train: FILE"),
        ("{title: t, archive: a.zip, train: a, test: b, format: text}", "train_fraction cuts"),
        ("{title: t, archive: ../a.zip, train: a}", "plain file name"),
        (
            "{title: t, archive: a.zip, train: a, sources: [{url: x, path: y}]}",
            r"mine\.sources\.0: .*give one of",
        ),
        ("{title: t, archive: a.zip, train: a, sha256: abc}", r"mine\.sha256"),
        ("{title: t, archive: a.zip, train: a, words: {window: 0}}", r"mine\.words\.window"),
        ("{title: t, archive: a.zip, train: a, colour: red}", r"mine\.colour"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_key(
    row: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.yaml").write_text(f"mine: {row}\n")
    monkeypatch.setenv("DSLIDE_CATALOGUE", str(tmp_path / "wrong.yaml"))
    with pytest.raises(UserError, match=rf"wrong\.yaml: .*{reason}.*docs/data\.md"):
        catalogue()


def test_wrong_sizes_never_become_the_set(tmp_path: Path) -> None:
    files = inner_files(entry("EURLex-4K"))
    wrong = {"train": SIZES["train"] + 1, **{key: SIZES[key] for key in ("test", "features", "labels")}}
    rows = {"EURLex-4K": {**catalogue_row("EURLex-4K"), "expected": wrong}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(rows))
    fetch.fetch(entry("EURLex-4K"), lay(tmp_path / "have", files))
    with pytest.raises(UserError, match="train 30, expected 31: not the set that the catalogue describes"):
        prepare("EURLex-4K")
    assert not entry("EURLex-4K").prepared.exists()
