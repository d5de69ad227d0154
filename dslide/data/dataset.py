"""Data sets for everyone: `load`, `prepare`, `from_files`, the validation split and the order of batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dslide.data import bags, format, twin
from dslide.data.catalogue import Entry, catalogue, entry, prepared_folder
from dslide.data.convert import CONVERT_VERSION, Layout, Text, convert
from dslide.data.fetch import fetch
from dslide.data.format import Points
from dslide.data.progress import progress
from dslide.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """A training and a test part; `groups` int32 [len(train)] marks training points that belong together."""

    name: str
    hash: str
    num_features: int
    num_labels: int
    train: Points
    test: Points
    label_names: list[str] | None = None
    groups: NDArray[np.int32] | None = None

    def validation(self, fraction: float = 0.1, seed: int = 0) -> "Dataset":
        """Splits train into a new train and test, so that settings can be chosen without the test set.

        About `fraction` of the points (as whole groups where there are groups) become the new test; from it,
        labels that the new train lacks are dropped, then points without labels. Feature and label ids stay.
        """
        if not 0 < fraction < 1:
            raise UserError(f"validation fraction {fraction}: must lie between 0 and 1")
        groups = np.arange(len(self.train)) if self.groups is None else self.groups
        names, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        order = _permutation(len(names), seed, _VALIDATION)
        held = np.zeros(len(names), bool)
        held[order] = np.cumsum(sizes[order]) <= max(1, round(fraction * len(self.train)))
        if len(names):
            held[order[0]] = True  # a first group larger than the fraction
        if held.all():
            raise UserError(f"{self.name}: too few groups of training points for a validation part")
        train_rows, test_rows = np.flatnonzero(~held[member]), np.flatnonzero(held[member])
        train = self.train.take(train_rows)
        seen = np.zeros(self.num_labels, bool)
        seen[train.y_indices] = True
        return replace(
            self,
            name=f"{self.name}#validation",
            hash=hashlib.sha256(f"{self.hash} validation {fraction} {seed}".encode()).hexdigest(),
            train=train,
            test=self.train.take(test_rows).keep_labels(seen),
            groups=None if self.groups is None else self.groups[train_rows],
        )


def load(name_or_path: str | Path) -> Dataset:
    """Opens a prepared set by its name or folder, memory-mapped; embedded and generated sets are prepared on
    first use.

    UserError if there is no such set, or if it has to be fetched and converted first.
    """
    name = str(name_or_path)
    if Path(name).name == name and not Path(name).is_dir():
        row = catalogue().get(name)
        if row is not None and row.local:
            return open_prepared(prepare(name))
    return open_prepared(folder_of(name_or_path))


def folder_of(name_or_path: str | Path) -> Path:
    """The prepared folder of a name or path; UserError that says what to run if it isn't there."""
    folder, name = Path(name_or_path), str(name_or_path)
    if folder.name == name and not folder.is_dir():
        folder = prepared_folder(name)
        if format.read_meta(folder) is None:
            entries = catalogue()
            if name in entries:
                raise UserError(f"{name} isn't prepared on this machine; run `dslide data prepare {name}`")
            raise UserError(
                f"no data set called {name!r}; the catalogue has {', '.join(sorted(entries))}; "
                "`dslide data convert` prepares files of your own"
            )
    elif format.read_meta(folder) is None:
        raise UserError(f"{folder}: no meta.json, so not a prepared set; `dslide data convert` makes one")
    return folder


def open_prepared(folder: Path) -> Dataset:
    """Opens a folder in the prepared format."""
    meta = format.read_meta(folder)
    if meta is None:
        raise UserError(f"{folder}: no meta.json, so not a prepared set; `dslide data convert` makes one")
    train, test = (format.open_points(folder, split, meta) for split in format.SPLITS)
    groups, labels = folder / "train" / "groups.npy", folder / "labels.txt"
    return Dataset(
        name=meta["name"],
        hash=meta["hash"],
        num_features=meta["num_features"],
        num_labels=meta["num_labels"],
        train=train,
        test=test,
        label_names=labels.read_text(encoding="utf8").split("\n")[:-1] if labels.exists() else None,
        groups=format.open_array(groups, np.int32) if groups.exists() else None,
    )


def prepare(name: str) -> Path:
    """Makes sure that the set is fetched, converted and up to date; returns its folder."""
    row = entry(name)
    if row.bags is not None:
        return _prepare_bags(row, row.bags)
    if row.twin is not None:
        return _prepare_twin(row, row.twin)
    return prepare_archive(row)


def prepare_archive(row: Entry, given: Path | None = None) -> Path:
    """Fetches the archive where needed (or takes the one `given`) and converts it where needed."""
    with format.locked(row.prepared):
        if given is None and not row.raw.exists() and _agrees(row):
            return row.prepared  # converted from unpacked files, or the archive was deleted to save space
        archive = fetch(row, given)
        layout = Layout(header=row.header, index_base=row.index_base)
        train, test = (Text(archive.path, member) for member in (row.train, row.test))
        source = format.source_hash(
            archive=archive.sha256,
            members=[row.train, row.test],
            layout=asdict(layout),
            version=CONVERT_VERSION,
        )
        if not is_current(row.prepared, source):
            convert(
                row.prepared,
                train,
                test,
                name=row.name,
                source=source,
                layout=layout,
                expected=row.expected.model_dump(),
            )
    return row.prepared


def _agrees(row: Entry) -> bool:
    try:
        meta = format.read_meta(row.prepared)
    except UserError:
        return False
    return meta is not None and format.counts(meta) == row.expected.model_dump()


def from_files(
    train: str | Path,
    test: str | Path | None = None,
    *,
    layout: Layout | None = None,
    threads: int | None = None,
) -> Dataset:
    """Opens XC text files, converted once into a cache that notices when their content changes.

    UserError with file, line and column if a file isn't in the format (dslide.data.convert).
    """
    texts = [Text(Path(train)), *([Text(Path(test))] if test is not None else [])]
    source = files_source_hash(texts, layout or Layout())
    folder = prepared_folder(f"files-{source[:24]}")
    with format.locked(folder):
        if not is_current(folder, source):
            convert(
                folder,
                texts[0],
                texts[1] if len(texts) > 1 else None,
                name=Path(train).name,
                source=source,
                layout=layout,
                threads=threads,
            )
    return open_prepared(folder)


def files_source_hash(texts: Sequence[Text], layout: Layout) -> str:
    """Source hash of converted files: their content and how it is read."""
    contents = []
    for text in texts:
        try:
            contents.append(format.file_sha256(text.path))
        except OSError as error:
            raise UserError(f"{text.path}: {error.strerror}") from None
    return format.source_hash(
        files=contents,
        members=[text.member or text.path.suffix for text in texts],
        layout=asdict(layout),
        version=CONVERT_VERSION,
    )


def _prepare_bags(row: Entry, path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path}: the embedded data set is missing; reinstall, or restore the file")
    source = format.source_hash(bags=format.file_sha256(path), version=bags.BAGS_VERSION)
    if is_current(row.prepared, source):
        return row.prepared
    with format.locked(row.prepared):
        if not is_current(row.prepared, source):
            content = bags.read(path)
            with format.writing(
                row.prepared,
                name=row.name,
                source=source,
                labels=content.names("labels"),
                features=content.names("features"),
                expected=row.expected.model_dump(),
            ) as work:
                work.num_features, work.num_labels = content.num_features, content.num_labels
                for split in format.SPLITS:
                    format.write_points(work.folder / split, content.points(split))
                if "train_groups" in content.arrays:
                    groups = content.arrays["train_groups"]
                    format.write_array(work.folder / "train" / "groups.npy", groups)
    return row.prepared


def _prepare_twin(row: Entry, settings: twin.Twin) -> Path:
    sizes = row.expected
    source = format.source_hash(
        twin=settings.model_dump(), sizes=sizes.model_dump(), version=twin.TWIN_VERSION
    )
    if is_current(row.prepared, source):
        return row.prepared
    with format.locked(row.prepared):
        if not is_current(row.prepared, source):
            generator = twin.Generator(settings, sizes.features, sizes.labels)
            with format.writing(row.prepared, name=row.name, source=source) as work, progress() as bar:
                work.num_features, work.num_labels = sizes.features, sizes.labels
                for split in format.SPLITS:
                    twin.write(work.folder / split, split, getattr(sizes, split), generator, bar)
    return row.prepared


def is_current(folder: Path, source: str) -> bool:
    """Whether the folder holds a finished set made from this very source by this version."""
    try:
        meta = format.read_meta(folder)
    except UserError:
        return False
    return meta is not None and meta["source_hash"] == source


_BATCHES, _VALIDATION = 0, 1


def batches(num_points: int, batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """The batch order of every system: row numbers of each batch of an epoch (from 0), the last one shorter.

    A permutation keyed by (seed, epoch), the same on every machine and for every number of ranks.
    """
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size}: must be at least 1")
    order = _permutation(num_points, seed, _BATCHES, epoch)
    for begin in range(0, num_points, batch_size):
        yield order[begin : begin + batch_size]


def _permutation(size: int, seed: int, purpose: int, epoch: int = 0) -> NDArray[np.int64]:
    """Sorts random words of Philox (Salmon et al. 2011): no numpy version's shuffle has a say."""
    mask = 2**64 - 1
    key = np.array([seed & mask, (purpose << 32 | epoch) & mask], np.uint64)
    words = np.random.Philox(key=key).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)
