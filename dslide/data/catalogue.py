"""The catalogue: one entry a data set, from `datasets/catalogue.yaml` and, if set, DSLIDE_CATALOGUE."""

import os
from pathlib import Path
from typing import Literal

import pydantic
import yaml

from dslide.data.twin import Twin
from dslide.errors import UserError
from dslide.paths import content_root, data_root


class Source(pydantic.BaseModel, extra="forbid", frozen=True):
    """Where an archive can be had: a Google Drive file or a plain address."""

    gdrive: str | None = None
    resource_key: str | None = None
    url: str | None = None
    note: str = ""

    @pydantic.model_validator(mode="after")
    def _one_place(self) -> "Source":
        if (self.gdrive is None) == (self.url is None):
            raise ValueError("give either gdrive or url")
        return self


class Expected(pydantic.BaseModel, extra="forbid", frozen=True):
    """What the set must turn out to hold; points that differ end the preparation."""

    train: int
    test: int
    features: int
    labels: int


class Entry(pydantic.BaseModel, extra="forbid", frozen=True):
    """A data set: `bags` (embedded beside the catalogue), a `twin` (generated), or an archive."""

    name: str = ""
    title: str
    expected: Expected
    licence: str
    citation: str
    bags: Path | None = None
    twin: Twin | None = None
    sources: tuple[Source, ...] = ()
    archive: str = ""  # file name under data_root()/raw/<name>/
    train: str = ""  # files inside of the archive
    test: str = ""
    format: Literal["xc"] = "xc"
    index_base: Literal[0, 1] = 0
    header: bool = True

    @pydantic.model_validator(mode="after")
    def _complete(self) -> "Entry":
        if not self.local and not (self.archive and self.train and self.test):
            raise ValueError("give bags, or twin, or archive, train and test")
        return self

    @property
    def embedded(self) -> bool:
        return self.bags is not None

    @property
    def local(self) -> bool:
        """Whether the set is made without a download."""
        return self.embedded or self.twin is not None

    @property
    def raw(self) -> Path:
        """Where the archive lies once it is fetched, or placed there by hand."""
        return data_root() / "raw" / self.name / self.archive

    @property
    def prepared(self) -> Path:
        """The folder of the prepared set."""
        return prepared_folder(self.name)


def prepared_folder(name: str) -> Path:
    return data_root() / "prepared" / name


def catalogue() -> dict[str, Entry]:
    """All entries by name; UserError if a file is absent or wrong."""
    entries = _read(content_root() / "datasets" / "catalogue.yaml")
    if "DSLIDE_CATALOGUE" in os.environ:
        entries |= _read(Path(os.environ["DSLIDE_CATALOGUE"]))
    return entries


def entry(name: str) -> Entry:
    """The entry called `name`; UserError that lists the known ones."""
    entries = catalogue()
    if name not in entries:
        raise UserError(f"no data set called {name!r}; the catalogue has {', '.join(sorted(entries))}")
    return entries[name]


def _read(path: Path) -> dict[str, Entry]:
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is DSLIDE_CATALOGUE right?") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(rows, dict):
        raise UserError(f"{path}: expected a mapping from names to data sets")
    try:
        return {name: _entry(path, str(name), row) for name, row in rows.items()}
    except pydantic.ValidationError as error:
        raise UserError(f"{path}: {error}") from None


def _entry(path: Path, name: str, row: object) -> Entry:
    if not name or name.startswith(".") or "/" in name or "#" in name:
        raise UserError(f"{path}: {name!r} can't be a data set's name (it names a folder)")
    if not isinstance(row, dict):
        raise UserError(f"{path}: {name}: expected a mapping")
    found = Entry.model_validate({**row, "name": name})
    return found if found.bags is None else found.model_copy(update={"bags": path.parent / found.bags})
