"""Rebuilds debian-deps from the package lists of Debian: `python datasets/debian-deps/rebuild.py`.

A package's description, the parts of its name and its section predict the packages that it depends on,
recommends or suggests. Needs apt; the lists go to a private folder (and are kept there), the system's own
stay as they are. README.md beside this file says what comes out and where it came from.
"""

import argparse
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dslide.data import bags

FIELDS = ("Pre-Depends", "Depends", "Recommends", "Suggests")
TOO_COMMON = 0.01  # labels on a larger share of the packages say nothing about one of them
TEST_PERCENT = 20


def update(lists: Path) -> None:
    """Downloads the package lists and the English descriptions into `lists`."""
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    options = (
        f"Dir::State::Lists={lists}",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        "Acquire::Languages=en",
        "Acquire::GzipIndexes=false",
    )
    subprocess.run(["apt-get", "update", *(f"-o{option}" for option in options)], check=True)


def one(lists: Path, pattern: str) -> Path:
    found = sorted(lists.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{lists}: {len(found)} files match {pattern}, expected one")
    return found[0]


def stanzas(path: Path) -> Iterator[dict[str, str]]:
    """The paragraphs of a Debian control file."""
    for block in path.read_text(encoding="utf8").split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in block.split("\n"):
            if line.startswith((" ", "\t")):
                fields[key] += "\n" + line[1:]
            elif line:
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        if fields:
            yield fields


def related(package: dict[str, str]) -> frozenset[str]:
    """The first alternative of everything that the package wants, without version and architecture."""
    clauses = ",".join(package.get(field, "") for field in FIELDS).split(",")
    wanted = (clause.split("|")[0].split() for clause in clauses)
    return frozenset(words[0].split(":")[0].split("(")[0] for words in wanted if words)


def words(package: dict[str, str], description: str) -> Counter[str]:
    counts = Counter(bags.tokens(description))
    counts.update(f"name={part}" for part in re.split(r"[-+.]", package["Package"]) if part)
    counts[f"section={package['Section']}"] += 1
    return counts


def build(packages: Path, translations: Path) -> bags.Bags:
    english = {entry["Description-md5"]: entry["Description-en"] for entry in stanzas(translations)}
    listed = list(stanzas(packages))
    frequency = Counter(name for package in listed for name in related(package))
    common = {name for name, count in frequency.items() if count > TOO_COMMON * len(listed)}
    print(f"{len(listed)} packages; {len(common)} labels dropped: {' '.join(sorted(common))}")
    train, test = [], []
    for package in listed:
        description = english.get(package["Description-md5"], package["Description"])
        source = package.get("Source", package["Package"]).split()[0]
        document = bags.Document(words(package, description), related(package) - common, source)
        (test if zlib.crc32(source.encode()) % 100 < TEST_PERCENT else train).append(document)
    return bags.build(train, test)


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Rebuilds debian-deps from Debian's package lists.")
    parser.add_argument("--lists", type=Path, required=True, help="private folder for the lists")
    parser.add_argument("--no-update", action="store_true", help="take the lists that are there")
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--out", type=Path, default=here / "bags.npz")
    arguments = parser.parse_args()
    lists = arguments.lists.resolve()
    if not arguments.no_update:
        update(lists)
    # "_debian_" leaves the security and update archives out
    stem = f"*_debian_dists_{arguments.suite}"
    release = one(lists, f"{stem}_InRelease").read_text()
    print("release", *re.findall(r"^(?:Codename|Version): (\S+)$", release, re.MULTILINE))
    result = build(
        one(lists, f"{stem}_main_binary-amd64_Packages"), one(lists, f"{stem}_main_i18n_Translation-en")
    )
    bags.save(result, arguments.out)
    sizes = [len(result.arrays[f"{split}_x_lengths"]) for split in ("train", "test")]
    print(f"points {sizes[0]}/{sizes[1]}, features {result.num_features}, labels {result.num_labels}")


if __name__ == "__main__":
    main()
