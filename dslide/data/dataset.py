"""Data sets for everyone: `load`, `prepare`, `from_files`, the validation split and the order of batches."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dslide.data import bags, format, twin, words
from dslide.data.catalogue import Entry, Pair, catalogue, entry, prepared_folder
from dslide.data.convert import CONVERT_VERSION, convert
from dslide.data.fetch import fetch, present_archive, read_lock, require_room
from dslide.data.format import Points
from dslide.data.layout import Layout, Source
from dslide.data.progress import progress
from dslide.data.text import Text
from dslide.errors import UserError
from dslide.metrics import propensities

log = logging.getLogger(__name__)


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
    propensity: tuple[float, float] = (0.55, 1.5)  # A and B of dslide.metrics.propensities

    def propensities(self) -> NDArray[np.float64]:
        """How likely each label is to be given where it holds, float64 [L], from the training points."""
        counts = np.bincount(self.train.y_indices, minlength=self.num_labels)
        return propensities(counts, len(self.train), *self.propensity)

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
        folder = prepare(name) if row is not None and row.local else folder_of(name)
        data = open_prepared(folder)
        if row is not None and row.propensity is not None:
            data = replace(data, propensity=(row.propensity.a, row.propensity.b))
        return data
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


def prepare_archive(row: Entry, given: Path | None = None, *, download: bool = True) -> Path:
    """Fetches the archive where needed (or takes what is `given`) and converts it where needed.

    Without `download` the archive has to be there: UserError that says how to get it.
    """
    with format.locked(row.prepared):
        if given is None and present_archive(row) is None:
            if _agrees(row):
                return row.prepared  # converted from unpacked files, or the archive was deleted to save space
            if not download:
                raise UserError(f"{row.name} isn't fetched yet; run `dslide data fetch {row.name}`")
        archive = fetch(row, given)
        source = _archive_source(row, archive.sha256)
        if not is_current(row.prepared, source):
            sizes = row.expected.sizes() if row.expected is not None else None
            if row.expected is not None:
                require_room(row, row.prepared.parent, row.expected.prepared_bytes(), "the prepared set")
            _convert_archive(row, archive.path, source, sizes)
            _compare_averages(row)
    return row.prepared


def _compare_averages(row: Entry) -> None:
    """Reports averages that differ from the published ones, which other sizes of splits may explain."""
    meta = format.read_meta(row.prepared)
    if meta is None or row.expected is None:
        return
    train, published = meta["splits"]["train"], row.expected
    for what, found, stated in (
        ("labels", train["label_nnz"], published.labels_per_point),
        ("features", train["nnz"], published.nnz_per_point),
    ):
        average = found / max(train["points"], 1)
        if stated is not None and abs(average - stated) > 0.05 * stated:
            log.warning("%s: %.2f %s a training point, published are %.2f", row.name, average, what, stated)


def _convert_archive(row: Entry, path: Path, source: str, sizes: dict[str, int] | None) -> None:
    def files(split: str | Pair) -> Source:
        if isinstance(split, Pair):
            return Source(Text(path, split.features), Text(path, split.labels))
        return Source(Text(path, split))

    assert row.train is not None
    train, test = files(row.train), None if row.test is None else files(row.test)
    if row.format == "text":
        words.convert(row.prepared, train.points, row.words, name=row.name, source=source, expected=sizes)
        return
    layout = Layout(header=row.header, index_base=row.index_base)
    convert(row.prepared, train, test, name=row.name, source=source, layout=layout, expected=sizes)


def _archive_source(row: Entry, sha256: str) -> str:
    """Source hash of a set that is made from an archive with this sha256."""
    if row.format == "text":
        settings = row.words.model_dump()
        version = f"words {words.WORDS_VERSION}"
        return format.source_hash(archive=sha256, members=row.members, words=settings, version=version)
    layout = asdict(Layout(header=row.header, index_base=row.index_base))
    return format.source_hash(archive=sha256, members=row.members, layout=layout, version=CONVERT_VERSION)


def _agrees(row: Entry) -> bool:
    """Whether what is prepared has the sizes that the catalogue states."""
    try:
        meta = format.read_meta(row.prepared)
    except UserError:
        return False
    return meta is not None and row.expected is not None and format.counts(meta) == row.expected.sizes()


def state(row: Entry) -> str:
    """What this machine has of a set.

    "absent", "fetched" (the archive alone), "prepared", "out of date" (prepared from another archive,
    embedded file or setting, or by another version of dslide), "broken" (can't be read), "embedded" or
    "generated" (needs no network; prepared on first use).
    """
    try:
        meta = format.read_meta(row.prepared)
    except UserError:
        return "broken"
    if row.local:
        if meta is None:
            return "embedded" if row.embedded else "generated"
        return "prepared" if meta["source_hash"] == _local_source(row) else "out of date"
    archive = present_archive(row)
    if meta is None:
        return "absent" if archive is None else "fetched"
    if archive is None:
        return "prepared" if row.expected is None or _agrees(row) else "out of date"
    record = read_lock(row, archive)  # an archive that was placed by hand and never looked at has none
    current = record is not None and meta["source_hash"] == _archive_source(row, record["sha256"])
    return "prepared" if current else "out of date"


def from_files(
    train: str | Path | Source,
    test: str | Path | Source | None = None,
    *,
    layout: Layout | None = None,
    threads: int | None = None,
) -> Dataset:
    """Opens files of points, converted once into a cache that notices when their content changes.

    A path is a file in the XC format; a Source may be other files (dslide.data.convert). UserError with file,
    line and column if a file isn't in the format.
    """
    sources = [
        split if isinstance(split, Source) else Source(Text(Path(split)))
        for split in (train, test)
        if split is not None
    ]
    source = files_source_hash(sources, layout or Layout())
    folder = prepared_folder(f"files-{source[:24]}")
    with format.locked(folder):
        if not is_current(folder, source):
            convert(
                folder,
                sources[0],
                sources[1] if len(sources) > 1 else None,
                name=sources[0].points.path.name,
                source=source,
                layout=layout,
                threads=threads,
            )
    return open_prepared(folder)


def files_source_hash(sources: Sequence[Source], layout: Layout) -> str:
    """Source hash of converted files: their content and how it is read."""
    digests: dict[Path, str] = {}
    for text in (text for source in sources for text in source.texts()):
        try:
            if text.path not in digests:
                digests[text.path] = format.file_sha256(text.path)
        except OSError as error:
            raise UserError(f"{text.path}: {error.strerror}") from None

    def part(text: Text | None) -> list[str] | None:
        return None if text is None else [digests[text.path], text.member or text.path.suffix]

    return format.source_hash(
        files=[[part(s.points), part(s.labels), part(s.rows), s.column] for s in sources],
        layout=asdict(layout),
        version=CONVERT_VERSION,
    )


def _prepare_bags(row: Entry, path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path}: the embedded data set is missing; reinstall, or restore the file")
    assert row.expected is not None
    source = _local_source(row)
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
                expected=row.expected.sizes(),
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
    assert sizes is not None
    source = _local_source(row)
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


def _local_source(row: Entry) -> str:
    """Source hash of an embedded or generated set."""
    if row.bags is not None:
        digest = format.file_sha256(row.bags) if row.bags.is_file() else ""
        return format.source_hash(bags=digest, version=bags.BAGS_VERSION)
    assert row.twin is not None and row.expected is not None
    settings, sizes = row.twin.model_dump(), row.expected.sizes()
    return format.source_hash(twin=settings, sizes=sizes, version=twin.TWIN_VERSION)


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
