"""Archives, by their content rather than their name: zip, tar (also compressed), one compressed file, one
file.

A catalogue entry names the files that it needs ("members"). They are found by their path in the archive or,
where somebody has packed them anew, by their name alone if only one file is called so.
"""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from dslide.data.progress import Advance, progress
from dslide.errors import UserError

COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ": ".xz"}
# What reading a damaged or absent file raises.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
_CHUNK = 1 << 20


class Unreadable(UserError):
    """A sound archive that Python can't unpack: it may be large, so it is kept for other programs."""


class Unusable(Exception):
    """A file isn't the archive that was asked for; another source may have it."""


def expected_kind(name: str) -> str:
    """What a file called `name` should be: "zip", "tar", "tar.gz" or alike, ".gz" or alike, "" (plain)."""
    name = name.lower()
    for short in (".tgz", ".tbz2", ".txz"):
        name = name.replace(short, f".tar.{short[2:]}")
    *_, before, last = ["", "", *PurePosixPath(name).suffixes]
    if last == ".zip":
        return "zip"
    if last == ".tar" or (before == ".tar" and last in COMPRESSED):
        return f"tar{last if last in COMPRESSED else ''}"
    return last if last in COMPRESSED else ""


def kind(path: Path) -> str:
    """What the file is by its content, named as in `expected_kind`; an `.npz` is a plain file, no archive."""
    with path.open("rb") as file:
        head = file.read(8)
    if path.suffix != ".npz" and head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"  # is_zipfile looks at the end, and takes a tar archive of npz files for one
    try:
        if tarfile.is_tarfile(path):
            return f"tar{_compression(head)}"
    except DAMAGED:  # a compressed file that is cut; is_tarfile catches TarError alone
        pass
    return _compression(head)


def _compression(head: bytes) -> str:
    return next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), "")


def check(path: Path, name: str, members: Sequence[str]) -> None:
    """Unusable unless the file is what `name` promises, complete, undamaged (CRCs) and has the members.

    This reads it all: what a server cut short must never be recorded as the set's archive.
    """
    with path.open("rb") as file:
        head = file.read(16)
    wanted, found = expected_kind(name), kind(path)
    if wanted == "zip" and found == "zip" and not zipfile.is_zipfile(path):
        raise Unusable("a zip archive without its end: cut while it was downloaded or copied")
    if wanted.startswith("tar") and wanted == f"tar{found}":
        raise Unusable("a tar archive that can't be read: cut while it was downloaded or copied")
    if wanted != found and wanted:
        what = f"{wanted.lstrip('.')} {'file' if wanted in COMPRESSED else 'archive'}"
        raise Unusable(f"not a {what}: it begins with {head[:8]!r}")
    try:
        with progress() as bar, bar.task(f"checking {name}", 0) as advance:
            if wanted.startswith("tar"):
                _read_tar(path, members, advance)
            else:
                for member in members:
                    with open_member(path, member) as (stream, _):
                        while block := stream.read(_CHUNK):
                            advance(len(block))
    except DAMAGED as error:
        raise Unusable(f"{error}: cut or damaged while it was downloaded or copied") from None
    except Unreadable:
        raise
    except UserError as error:
        raise Unusable(str(error).removeprefix(f"{path}: ")) from None


def _read_tar(path: Path, members: Sequence[str], advance: Advance) -> None:
    """Reads a tar archive once from its beginning to its end, then on to gzip's checksum."""
    names = []
    with open_file(path) as (whole, _), tarfile.open(fileobj=whole, mode="r|") as archive:
        for entry in archive:
            if entry.isfile():
                names.append(str(PurePosixPath(entry.name)))
                stream = archive.extractfile(entry)
                assert stream is not None
                while block := stream.read(_CHUNK):
                    advance(len(block))
        while whole.read(_CHUNK):
            pass
    for member in members:
        locate(path, names, member)


@contextmanager
def open_member(path: Path, member: str) -> Iterator[tuple[BinaryIO, int]]:
    """A file in the archive as a stream of bytes, and its size (0: unknown); UserError if it isn't there.

    A file that is no archive holds one member, whatever that is called.
    """
    with ExitStack() as stack:
        found = kind(path)
        if found == "zip":
            archive = stack.enter_context(zipfile.ZipFile(path))
            inner = archive.getinfo(locate(path, archive.namelist(), member))
            try:
                stream = stack.enter_context(archive.open(inner))
            except (NotImplementedError, RuntimeError) as error:  # Deflate64, passwords
                raise Unreadable(
                    f"{path}: {error} (type {inner.compress_type}); unpack it with another program and give "
                    "the folder with --from"
                ) from None
            yield cast(BinaryIO, stream), inner.file_size
        elif found.startswith("tar"):
            tar = stack.enter_context(tarfile.open(path))
            entry = _find_in_tar(path, tar, member)
            unpacked = tar.extractfile(entry)
            assert unpacked is not None
            yield cast(BinaryIO, stack.enter_context(unpacked)), entry.size
        else:
            yield stack.enter_context(open_file(path))


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The content of a file, plain or compressed, as a stream of bytes, and its size (0: unknown)."""
    with path.open("rb") as file:
        found = path.suffix if path.suffix in COMPRESSED else _compression(file.read(8))
        if found in COMPRESSED:
            with COMPRESSED[found](path) as stream:
                yield cast(BinaryIO, stream), 0
        else:
            file.seek(0)
            yield file, path.stat().st_size


def _find_in_tar(path: Path, tar: tarfile.TarFile, member: str) -> tarfile.TarInfo:
    """Stops at an exact match: going on, and back to it, would unpack a compressed archive twice."""
    seen = {}
    for entry in tar:
        if entry.isfile():
            name = str(PurePosixPath(entry.name))  # without "./"
            if name == member:
                return entry
            seen[name] = entry
    return seen[locate(path, list(seen), member)]


def locate(path: Path, names: Sequence[str], member: str) -> str:
    """The name under which the archive has `member`; UserError that lists what it has instead."""
    if member in names:
        return member
    last = PurePosixPath(member).name
    same = [name for name in names if PurePosixPath(name).name == last]
    if len(same) == 1:
        return same[0]
    some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if same:
        raise UserError(f"{path}: has no {member}, and several files called {last}: {', '.join(same[:8])}")
    raise UserError(f"{path}: has no {member}; it contains {some or 'nothing'}")


def find(place: Path, member: str) -> Path | None:
    """A member among the unpacked files in a folder: under its path or a part of it, also compressed."""
    parts = PurePosixPath(member).parts
    for begin in range(len(parts)):
        for suffix in ("", *COMPRESSED):
            file = place.joinpath(*parts[begin:-1], parts[-1] + suffix)
            if file.is_file():
                return file
    return None


def pack(target: Path, members: Sequence[tuple[str, Path, str]]) -> None:
    """Writes a zip archive, not compressed, of (member, file or archive that has it, its name there).

    The same content gives the same bytes.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive, progress() as bar:
        for member, place, inner in members:
            with (
                open_member(place, inner) as (stream, size),
                archive.open(zipfile.ZipInfo(member), "w", force_zip64=True) as out,
                bar.task(f"packing {member}", size) as advance,
            ):
                while block := stream.read(_CHUNK):
                    out.write(block)
                    advance(len(block))
