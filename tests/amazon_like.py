"""A small archive laid out as Amazon-670K's, and the catalogue that goes with it."""

import zipfile
from pathlib import Path

import numpy as np
import yaml

from dslide.paths import content_root

NAME = "Amazon-670K"
TRAIN, TEST = "Amazon/amazon_train.txt", "Amazon/amazon_test.txt"


def make_amazon_like_zip(
    path: Path,
    points: int = 600,
    test_points: int = 200,
    features: int = 400,
    labels: int = 150,
    seed: int = 0,
) -> dict[str, int]:
    """Writes the archive; returns the counts that its catalogue entry has to expect.

    Learnable: a label has features of its own, and a point those of its one to five labels among noise.
    Like the real one it is sorted by label.
    """
    generator = np.random.default_rng(seed)
    own = generator.integers(0, features, (labels, 6))

    def rows(count: int) -> list[str]:
        lines = []
        for first in np.sort(generator.integers(0, labels, count)):
            size = generator.integers(1, 6)
            more = (first + np.arange(1, size)) % labels  # neighbours come together
            targets = np.unique([first, *more])
            words = np.unique([*own[targets].ravel(), *generator.integers(0, features, 4)])
            values = generator.uniform(0.05, 1.0, len(words))
            pairs = " ".join(f"{word}:{value:.6f}" for word, value in zip(words, values, strict=True))
            lines.append(f"{','.join(map(str, targets))} {pairs}\n")
        return lines

    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, count in ((TRAIN, points), (TEST, test_points)):
            archive.writestr(member, f"{count} {features} {labels}\n{''.join(rows(count))}")
    return {"train": points, "test": test_points, "features": features, "labels": labels}


def write_catalogue(path: Path, expected: dict[str, int]) -> Path:
    """The real catalogue's Amazon-670K with other counts, for DSLIDE_CATALOGUE."""
    row = yaml.safe_load((content_root() / "datasets" / "catalogue.yaml").read_text())[NAME]
    path.write_text(yaml.safe_dump({NAME: {**row, "expected": expected}}))
    return path
