"""Small archives laid out as the published ones: names, nesting and packing of a catalogue entry."""

import functools
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import yaml

from dslide.data.catalogue import Entry, Pair
from dslide.paths import content_root

SIZES = {"train": 30, "test": 12, "features": 20, "labels": 9}
TEXT = b" the cat sat on the mat and the dog sat on the log while the cat saw the dog " * 3


def catalogue_row(name: str) -> dict[str, Any]:
    """The entry as it stands in the catalogue's file."""
    return dict(_rows()[name])


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((content_root() / "datasets" / "catalogue.yaml").read_text()))


def expected(row: Entry) -> dict[str, int]:
    """What an archive made by `small_archive` holds."""
    if row.format != "text":
        return SIZES
    words = TEXT.split()
    cut = int(row.words.train_fraction * len(words))
    ids = len(set(words)) + 1
    return {"train": cut, "test": len(words) - cut, "features": ids, "labels": ids}


def inner_files(row: Entry) -> dict[str, bytes]:
    """Contents of the entry's inner files by their names."""
    generator = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for split, member in (("train", row.train), ("test", row.test)):
        if member is None:
            continue
        if row.format == "text":
            assert isinstance(member, str)
            files[member] = TEXT
            continue
        points, d, n = SIZES[split], SIZES["features"], SIZES["labels"]
        x = scipy.sparse.random(points, d, 0.2, "csr", np.float32, generator)
        y = scipy.sparse.random(points, n, 0.3, "csr", np.float32, generator)
        if isinstance(member, Pair):
            files |= {member.features: npz(x), member.labels: npz(y)}
        else:
            files[member] = xc_text(x, y, row)
    return files


def npz(matrix: scipy.sparse.spmatrix) -> bytes:
    """What `scipy.sparse.save_npz` writes."""
    content = io.BytesIO()
    scipy.sparse.save_npz(content, matrix)
    return content.getvalue()


def xc_text(x: scipy.sparse.csr_matrix, y: scipy.sparse.csr_matrix, row: Entry) -> bytes:
    base, lines = row.index_base, []
    for i in range(x.shape[0]):
        labels = ",".join(str(label + base) for label in np.sort(y[i].indices))
        pairs = (f"{j + base}:{v:.6f}" for j, v in sorted(zip(x[i].indices, x[i].data, strict=True)))
        lines.append(f"{labels} {' '.join(pairs)}\n")
    head = f"{x.shape[0]} {x.shape[1]} {y.shape[1]}\n" if row.header else ""
    return (head + "".join(lines)).encode()


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def tarred(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def small_archive(row: Entry) -> bytes:
    """The archive: other files around the inner ones, as the real ones have."""
    folder = Path(row.members[0]).parent
    files = {str(folder / "README.txt"): b"read me", **inner_files(row)}
    return zipped(files) if row.archive.endswith(".zip") else tarred(files)
