"""Brings a catalogue entry's archive to this machine, checks it, and says what to do by hand if it can't.

Nobody publishes checksums of most of these archives. So the sha256 of the first one that arrives is written
to the set's own lock record, `lock.json` beside it, and compared from then on; a published one is in the
catalogue.
"""

import datetime
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslide.data import archive, download
from dslide.data.archive import Unusable
from dslide.data.catalogue import Entry, Source
from dslide.data.download import page
from dslide.data.format import file_sha256, locked
from dslide.errors import UserError
from dslide.files import write_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Archive:
    """A checked archive on disk."""

    path: Path
    sha256: str


def fetch(entry: Entry, given: Path | None = None) -> Archive:
    """The entry's archive: the one that is there, else from `given`, else from the first source that has it.

    `given` is a copy of the archive, or the inner files in any other packing: a folder, another kind of
    archive, one of the files itself (the others are looked for beside it). UserError if the archive differs
    from the one recorded before, if the disk is too small, or if no source has it (the message then says what
    to download by hand and where to put it).
    """
    if entry.local:
        raise UserError(
            f"{entry.name} is {'embedded' if entry.embedded else 'generated'}: there is nothing to fetch"
        )
    with locked(entry.raw):
        if given is not None:
            try:
                return _take(entry, given)
            except Unusable as error:
                raise UserError(f"{given}: {error}") from None
        present = present_archive(entry)
        if present is not None:
            return _present(entry, present)
        _room_for(entry)
        failures = []
        for source in entry.sources:
            try:
                return _take(entry, source.path) if source.path is not None else _download(entry, source)
            except Unusable as error:
                failures.append((source, str(error)))
                log.warning("%s: %s: %s", entry.name, page(source), error)
        raise UserError(_by_hand(entry, failures))


def present_archive(entry: Entry) -> Path | None:
    """The file that the entry's set is made from, if it is on this machine."""
    return next((path for path in (entry.raw, entry.packed) if path.is_file()), None)


def read_lock(entry: Entry, path: Path) -> dict[str, Any] | None:
    """The record {sha256, bytes, source, date} of the archive at `path`, None if there is none."""
    return _read_locks(entry).get(path.name)


def _read_locks(entry: Entry) -> dict[str, dict[str, Any]]:
    path = _lock_file(entry)
    try:
        records = json.loads(path.read_text())
        if all(record["sha256"] and record["date"] and record["source"] for record in records.values()):
            return dict(records)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise UserError(f"{path}: not a lock record; delete it if the archive beside it is to be trusted")


def _lock_file(entry: Entry) -> Path:
    return entry.raw.parent / "lock.json"


@contextmanager
def _incoming(entry: Entry, name: str, origin: str) -> Iterator[Path]:
    """The path of an incoming file; one folder an origin, so that none is resumed with another's bytes."""
    folder = entry.raw.parent / f".incoming-{re.sub(r'[^A-Za-z0-9_-]', '_', origin)[-60:]}"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / name
    part.unlink(missing_ok=True)
    yield part
    # not after errors: a partial file is resumed
    for leftover in entry.raw.parent.glob(".incoming-*"):
        shutil.rmtree(leftover)


def _download(entry: Entry, source: Source) -> Archive:
    with _incoming(entry, entry.archive, source.gdrive or str(source.url)) as part:
        download.download(source, part, lambda size: require_room(entry, part.parent, size, "the archive"))
        try:
            archive.check(part, entry.archive, entry.members)
            return _accept(entry, part, entry.raw, page(source))
        except Unusable:
            part.unlink(missing_ok=True)  # whole, but wrong: not to be resumed
            raise


def _take(entry: Entry, given: Path) -> Archive:
    """Copies what a person has; as it is if it is the archive, else packed anew."""
    try:
        if given.is_dir() and (given / entry.archive).is_file():
            given = given / entry.archive
        if given.is_file() and archive.kind(given) == archive.expected_kind(entry.archive) != "":
            require_room(entry, entry.raw.parent, given.stat().st_size, "the archive")
            archive.check(given, entry.archive, entry.members)
            with _incoming(entry, entry.archive, "given") as part:
                shutil.copyfile(given, part)
                return _accept(entry, part, entry.raw, str(given))
        found = _unpacked(entry, given)
        if entry.raw.is_file():
            raise Unusable(f"{entry.raw} is there already; delete it if these files are to be used instead")
        size = sum({place: place.stat().st_size for _, place, _ in found}.values())
        require_room(entry, entry.raw.parent, size, "the inner files")
        with _incoming(entry, entry.packed.name, "given") as part:
            archive.pack(part, found)
            return _accept(entry, part, entry.packed, str(given))
    except archive.DAMAGED as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise Unusable(reason or f"{error}: cut or damaged") from None


def _unpacked(entry: Entry, given: Path) -> list[tuple[str, Path, str]]:
    """Where each inner file is: (member, file or archive, name there)."""
    if not given.exists():
        raise Unusable("No such file or directory")
    if given.is_file():
        if archive.kind(given).startswith(("zip", "tar")):
            return [(member, given, member) for member in entry.members]
        if len(entry.members) == 1:
            return [(entry.members[0], given, "")]
    folder = given if given.is_dir() else given.parent
    found = [(member, archive.find(folder, member)) for member in entry.members]
    missing = [member for member, place in found if place is None]
    if missing and given.is_file():
        raise Unusable(f"neither {entry.archive} nor beside {', '.join(missing)}")
    if missing:
        raise Unusable(f"the folder has neither {entry.archive} nor {', '.join(missing)}")
    return [(member, place, "") for member, place in found if place is not None]


def _accept(entry: Entry, part: Path, target: Path, origin: str) -> Archive:
    """Records an archive that has arrived, moves it to its place; Unusable if it isn't the recorded one."""
    digest = file_sha256(part)
    wrong = _mismatch(entry, target, digest)
    if wrong is not None:
        raise Unusable(wrong)
    _record(entry, target, part, digest, origin)
    part.replace(target)
    if target == entry.raw:
        entry.packed.unlink(missing_ok=True)  # the archive itself is better than what was packed in its place
    return Archive(target, digest)


def _present(entry: Entry, path: Path) -> Archive:
    digest = file_sha256(path)
    wrong = _mismatch(entry, path, digest)
    if wrong is not None:
        raise UserError(f"{path}: {wrong}")
    if read_lock(entry, path) is None:  # placed there by hand
        try:
            archive.check(path, path.name, entry.members)
        except Unusable as error:
            raise UserError(f"{path}: {error}; delete it and fetch again") from None
        _record(entry, path, path, digest, "placed by hand")
    return Archive(path, digest)


def _record(entry: Entry, target: Path, file: Path, digest: str, origin: str) -> None:
    records = _read_locks(entry)
    if target.name in records:
        return
    records[target.name] = {
        "sha256": digest,
        "bytes": file.stat().st_size,
        "source": origin,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_atomic(_lock_file(entry), json.dumps(records, indent=2) + "\n")


def _mismatch(entry: Entry, target: Path, digest: str) -> str | None:
    """What is wrong with an archive of this sha256, None if nothing is."""
    if target == entry.raw and entry.sha256 not in (None, digest):
        return f"sha256 {digest}, but the published archive has {entry.sha256}: damaged, or another version"
    record = read_lock(entry, target)
    if record is None or record["sha256"] == digest:
        return None
    return (
        f"sha256 {digest}, but {record['sha256']} was recorded on {record['date']} from {record['source']}; "
        f"if the new archive is to be trusted, delete {_lock_file(entry)} and {target}"
    )


def require_room(entry: Entry, folder: Path, size: int, what: str) -> None:
    """UserError with the numbers unless the disk of `folder` has `size` bytes free."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(
            f"{entry.name}: {what} needs about {size / 1e9:.2f} GB on the disk of {folder}, which has "
            f"{free / 1e9:.2f} GB free; make room, or set DSLIDE_DATA to a folder on a larger disk"
        )


def _room_for(entry: Entry) -> None:
    """Room for the archive and the prepared set, as far as the catalogue tells, before a download begins."""
    prepared = entry.expected.prepared_bytes() if entry.expected is not None else 0
    archived = entry.archive_bytes or prepared // 2  # text is 13 bytes a feature, of which zip leaves a third
    if archived + prepared:
        what = f"the archive ({archived / 1e9:.2f} GB) with the prepared set ({prepared / 1e9:.2f} GB)"
        require_room(entry, entry.raw.parent, archived + prepared, what)


def _by_hand(entry: Entry, failures: list[tuple[Source, str]]) -> str:
    lines = [f"{entry.name}: no source has given the archive."]
    for source, reason in failures:
        lines.append(f"  {source.note or page(source)}: {reason}")
    if entry.sources:
        lines.append("Open one of these addresses in a browser:")
        lines += [f"  {page(source)}" for source in entry.sources]
    lines.append(f"and save the file {entry.archive} as\n  {entry.raw}")
    lines.append("or hand over what you have (the archive, or a folder with the files in it):")
    lines.append(f"  dslide data fetch {entry.name} --from PATH")
    return "\n".join(lines)
