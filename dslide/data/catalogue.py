"""The catalogue: one entry a data set and version.

`datasets/catalogue.yaml` comes with dslide. A person's own entries are added to it, or replace those of the
same name: from the files `*.yaml` in the folder `catalogue/` of the data root, then from the files or folders
that DSLIDE_CATALOGUE names (several are separated as in PATH). docs/data.md describes an entry for readers.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

import pydantic
import yaml

from dslide.data.twin import Twin
from dslide.data.words import Words
from dslide.errors import UserError
from dslide.paths import content_root, data_root

Sha256 = Annotated[str, pydantic.StringConstraints(pattern="^[0-9a-f]{64}$")]
Inner = Annotated[str, pydantic.StringConstraints(min_length=1)]


class Source(pydantic.BaseModel, extra="forbid", frozen=True):
    """Where an archive can be had: a Google Drive file, an address, a file or folder on this machine."""

    gdrive: str | None = None
    resource_key: str | None = None
    url: str | None = None
    path: Path | None = None  # relative to the catalogue's folder
    note: str = ""

    @pydantic.model_validator(mode="after")
    def _one_place(self) -> "Source":
        if sum(place is not None for place in (self.gdrive, self.url, self.path)) != 1:
            raise ValueError("give one of gdrive, url and path")
        return self


class Expected(pydantic.BaseModel, extra="forbid", frozen=True):
    """What the set must turn out to hold; other sizes end the preparation.

    The averages are of training points, as published; a set that differs from them by more than 5 % is only
    reported.
    """

    train: int
    test: int
    features: int
    labels: int
    labels_per_point: float | None = None
    nnz_per_point: float | None = None

    def sizes(self) -> dict[str, int]:
        """Train and test points, features, labels."""
        return {"train": self.train, "test": self.test, "features": self.features, "labels": self.labels}

    def prepared_bytes(self) -> int:
        """About how much room the prepared set takes; without the averages, how much it takes at least."""
        point = 16 + 8 * (self.nnz_per_point or 0) + 4 * (self.labels_per_point or 0)
        return int((self.train + self.test) * point)


class Propensity(pydantic.BaseModel, extra="forbid", frozen=True):
    """A and B of the propensity model of Jain et al. 2016, table 2, for propensity-scored metrics."""

    a: float
    b: float


class Pair(pydantic.BaseModel, extra="forbid", frozen=True):
    """A split in two files: features and labels."""

    features: Inner
    labels: Inner


class Entry(pydantic.BaseModel, extra="forbid", frozen=True):
    """A data set: `bags` (embedded beside the catalogue), a `twin` (generated), or an archive."""

    name: str = ""
    title: str
    expected: Expected | None = None
    licence: str = ""
    citation: str = ""
    propensity: Propensity | None = None
    bags: Path | None = None
    twin: Twin | None = None
    sources: tuple[Source, ...] = ()
    archive: str = ""  # file name under data_root()/raw/<name>/; default: what the first source calls it
    sha256: Sha256 | None = None  # of the archive, where published
    archive_bytes: int | None = None  # likewise
    train: Inner | Pair | None = None  # files inside of the archive
    test: Inner | Pair | None = None
    format: Literal["xc", "npz", "text"] = "xc"
    index_base: Literal[0, 1] = 0
    header: bool = True
    words: Words = Words()  # of format text

    @pydantic.model_validator(mode="after")
    def _complete(self) -> "Entry":
        if self.local:
            if self.expected is None:
                raise ValueError("an embedded or generated set needs expected")
            return self
        if not self.archive:
            raise ValueError(
                "give bags, or twin, or archive (or a first source with a url or path) and train"
            )
        if PurePosixPath(self.archive).name != self.archive or self.archive.startswith("."):
            raise ValueError(f"archive {self.archive!r} must be a plain file name")
        wanted = Pair if self.format == "npz" else str
        splits = [split for split in (self.train, self.test) if split is not None]
        if self.train is None or not all(isinstance(split, wanted) for split in splits):
            form = "{features: FILE, labels: FILE}" if wanted is Pair else "FILE"
            raise ValueError(f"format {self.format} needs train: {form}, and test alike if there is one")
        if self.format == "text" and self.test is not None:
            raise ValueError("format text has no test: words.train_fraction cuts the one file")
        return self

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named_by_its_source(cls, row: dict[str, object]) -> dict[str, object]:
        sources = row.get("sources")
        if not row.get("archive") and isinstance(sources, list) and sources and isinstance(sources[0], dict):
            first = sources[0]
            place = urlsplit(str(first["url"])).path if first.get("url") else str(first.get("path") or "")
            return {**row, "archive": PurePosixPath(place).name}
        return row

    @property
    def embedded(self) -> bool:
        return self.bags is not None

    @property
    def local(self) -> bool:
        """Whether the set is made without a download."""
        return self.embedded or self.twin is not None

    @property
    def members(self) -> tuple[str, ...]:
        """The files inside of the archive that the set is made from."""
        names: list[str] = []
        for split in (self.train, self.test):
            if isinstance(split, Pair):
                names += [split.features, split.labels]
            elif split is not None:
                names.append(split)
        return tuple(names)

    @property
    def raw(self) -> Path:
        """Where the archive lies once it is fetched, or placed there by hand."""
        return data_root() / "raw" / self.name / self.archive

    @property
    def packed(self) -> Path:
        """Where the inner files lie if they came as something else than the archive (`--from FOLDER`)."""
        return self.raw.parent / "packed.zip"

    @property
    def prepared(self) -> Path:
        """The folder of the prepared set."""
        return prepared_folder(self.name)


def prepared_folder(name: str) -> Path:
    return data_root() / "prepared" / name


def catalogue() -> dict[str, Entry]:
    """All entries by name; UserError if a file is absent or wrong."""
    entries: dict[str, Entry] = {}
    for path in _files():
        entries |= _read(path)
    return entries


def entry(name: str) -> Entry:
    """The entry called `name`; UserError that lists the known ones."""
    entries = catalogue()
    if name not in entries:
        raise UserError(f"no data set called {name!r}; the catalogue has {', '.join(sorted(entries))}")
    return entries[name]


def _files() -> Iterator[Path]:
    yield content_root() / "datasets" / "catalogue.yaml"
    yield from sorted((data_root() / "catalogue").glob("*.yaml"))
    for place in filter(None, os.environ.get("DSLIDE_CATALOGUE", "").split(os.pathsep)):
        path = Path(place)
        yield from sorted(path.glob("*.yaml")) if path.is_dir() else [path]


def _read(path: Path) -> dict[str, Entry]:
    try:
        rows = yaml.load(path.read_text(encoding="utf8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is DSLIDE_CATALOGUE right?") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(rows, dict):
        raise UserError(f"{path}: expected a mapping from names to data sets")
    return {str(name): _entry(path, str(name), row) for name, row in rows.items()}


def _entry(path: Path, name: str, row: object) -> Entry:
    if not name or name.startswith(".") or "/" in name or "#" in name:
        raise UserError(f"{path}: {name!r} can't be a data set's name (it names a folder)")
    if not isinstance(row, dict):
        raise UserError(f"{path}: {name}: expected a mapping")
    try:
        found = Entry.model_validate({**row, "name": name})
    except pydantic.ValidationError as error:
        wrong = (f"{'.'.join([name, *map(str, e['loc'])])}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: {'; '.join(wrong)}; docs/data.md describes an entry") from None
    sources = tuple(
        source if source.path is None else source.model_copy(update={"path": path.parent / source.path})
        for source in found.sources
    )
    bags = None if found.bags is None else path.parent / found.bags
    return found.model_copy(update={"sources": sources, "bags": bags})
