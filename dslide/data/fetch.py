"""Brings a catalogue entry's archive to this machine, checks it, and says what to do by hand if it can't.

gdown does the transfers (resumed, retried with growing pauses, length checked), for plain addresses too;
what it lacks is here: resource keys, a replaceable address (DSLIDE_GDRIVE, for mirrors and tests), pages that
come instead of archives, and the lock record: nobody publishes checksums of these archives, so the sha256 of
the first download is kept in `lock.json` beside it and compared from then on.
"""

import datetime
import html
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gdown
from gdown.download import get_url_from_gdrive_confirmation
from gdown.exceptions import DownloadError
from requests.exceptions import RequestException

from dslide.data.catalogue import Entry, Source
from dslide.data.format import file_sha256, locked
from dslide.data.progress import progress
from dslide.errors import UserError
from dslide.files import write_atomic

GDRIVE = "https://drive.usercontent.google.com"
RETRIES = 5
_TIMEOUT = 60.0  # seconds without a byte
_PAGE = 1 << 20  # a Google Drive page is smaller, an archive isn't HTML


class _Unusable(Exception):
    """What a source gave isn't the archive; the next one may have it."""


@dataclass(frozen=True)
class Archive:
    """A checked archive on disk."""

    path: Path
    sha256: str


def address(source: Source) -> str:
    """Where the source's file is downloaded from."""
    if source.url is not None:
        return source.url
    query = {"id": source.gdrive, "export": "download", "confirm": "t"}
    if source.resource_key:
        query["resourcekey"] = source.resource_key
    return f"{os.environ.get('DSLIDE_GDRIVE', GDRIVE)}/download?{urlencode(query)}"


def page(source: Source) -> str:
    """The address that a person opens in a browser."""
    if source.url is not None:
        return source.url
    key = f"?resourcekey={source.resource_key}" if source.resource_key else ""
    return f"https://drive.google.com/file/d/{source.gdrive}/view{key}"


def fetch(entry: Entry, given: Path | None = None) -> Archive:
    """The entry's archive: the one that is there, else a copy of `given`, else a download from its sources.

    UserError if the archive differs from the one recorded before, or if no source has it (the message then
    says what to download by hand and where to put it).
    """
    if entry.local:
        raise UserError(
            f"{entry.name} is {'embedded' if entry.embedded else 'generated'}: there is nothing to fetch"
        )
    with locked(entry.raw):
        if given is not None:
            with _incoming(entry, "given") as part:
                _copy(given, part)
                return _accept(entry, part, str(given))
        if entry.raw.is_file():
            return _present(entry)
        failures = []
        for source in entry.sources:
            try:
                with _incoming(entry, source.gdrive or str(source.url)) as part:
                    _download(source, part)
                    _check_zip(part)
                    return _accept(entry, part, page(source))
            except _Unusable as error:
                failures.append((source, str(error)))
                _say(f"{entry.name}: {page(source)}: {error}")
        raise UserError(_by_hand(entry, failures))


def read_lock(entry: Entry) -> dict[str, Any] | None:
    """The record {archive, sha256, bytes, source, date} of the entry's archive, None if there is none."""
    path = entry.raw.parent / "lock.json"
    try:
        record = json.loads(path.read_text())
        if record["sha256"] and record["archive"] == entry.archive:
            return dict(record)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(
        f"{path}: not the lock record of {entry.archive}; delete it if the archive is to be trusted"
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def _incoming(entry: Entry, origin: str) -> Iterator[Path]:
    """The path of an incoming file; one folder an origin, so that none is resumed with another's bytes."""
    folder = entry.raw.parent / f".incoming-{re.sub(r'[^A-Za-z0-9_-]', '_', origin)[-60:]}"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / entry.archive
    part.unlink(missing_ok=True)
    yield part
    # not after errors: a partial file is resumed
    for leftover in entry.raw.parent.glob(".incoming-*"):
        shutil.rmtree(leftover)


def _copy(given: Path, part: Path) -> None:
    try:
        if given.is_dir():
            raise UserError(
                f"{given}: a folder; give the archive, or convert unpacked files with "
                "`dslide data convert --train FILE --test FILE --name NAME`"
            )
        _check_zip(given)
        shutil.copyfile(given, part)
    except OSError as error:
        raise UserError(f"{given}: {error.strerror}") from None
    except _Unusable as error:
        raise UserError(f"{given}: {error}") from None


def _download(source: Source, part: Path) -> None:
    url = address(source)
    _say(f"downloading {url}")
    _transfer(url, part)
    text = _html(part)
    if text is None:
        return
    part.unlink()
    if source.gdrive is None:
        raise _Unusable(f"an HTML page came instead of the archive{_title(text)}")
    try:  # the page that warns that large files aren't scanned for viruses
        # gdown looks at single lines, so the form has to be on one
        confirmed = get_url_from_gdrive_confirmation(
            " ".join(text.split()) if "download-form" in text else text
        )
    except DownloadError as error:
        reason = html.unescape(re.sub("<[^>]*>", "", str(error)))
        if "uc-error-subcaption" in text:  # most often: too many people have downloaded the file today
            reason = f"Google Drive refuses: {reason} A quota is lifted within 24 hours."
        else:
            reason = f"an HTML page came instead of the archive{_title(text)}"
        raise _Unusable(reason) from None
    _transfer(confirmed, part)
    text = _html(part)
    if text is not None:
        part.unlink()
        raise _Unusable(f"an HTML page came instead of the archive, twice{_title(text)}")


def _transfer(url: str, part: Path) -> None:
    with progress() as bar, bar.task(part.name, 0) as advance:
        before = 0

        def show(done: int, total: int | None) -> None:
            nonlocal before
            advance(done - before, total or 0)
            before = done

        for attempt in range(2):
            try:
                gdown.download(
                    url=url,
                    output=str(part),
                    quiet=True,
                    use_cookies=False,
                    resume=True,
                    progress=show,
                    timeout=_TIMEOUT,
                    retries=RETRIES,
                )
                return
            except (DownloadError, RequestException, OSError) as error:
                stale = [p for p in part.parent.iterdir() if p.name.endswith(".part")]
                if attempt == 0 and "byte range" in str(error) and stale:
                    for leftover in stale:  # the file has changed, or its server doesn't resume: anew
                        leftover.unlink()
                    continue
                raise _Unusable(str(error).split("\n")[0]) from None


def _html(path: Path) -> str | None:
    """The content if it is an HTML page."""
    if path.stat().st_size > _PAGE:
        return None
    content = path.read_bytes()
    return content.decode("utf8", "replace") if content.lstrip()[:1] == b"<" else None


def _title(text: str) -> str:
    found = re.search(r"<title[^>]*>([^<]*)</title>", text, re.IGNORECASE)
    return f" (titled {html.unescape(found[1]).strip()!r})" if found else ""


def _check_zip(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"PK\x03\x04":
        raise _Unusable(f"not a zip archive: it begins with {magic!r}")
    if not zipfile.is_zipfile(path):
        raise _Unusable("a zip archive without its end: cut while it was downloaded or copied")


def _accept(entry: Entry, part: Path, origin: str) -> Archive:
    digest = file_sha256(part)
    _compare(entry, part, digest)
    if read_lock(entry) is None:
        _record(entry, digest, part.stat().st_size, origin)
    part.replace(entry.raw)
    return Archive(entry.raw, digest)


def _present(entry: Entry) -> Archive:
    digest = file_sha256(entry.raw)
    _compare(entry, entry.raw, digest)
    if read_lock(entry) is None:  # placed there by hand
        try:
            _check_zip(entry.raw)
        except _Unusable as error:
            raise UserError(f"{entry.raw}: {error}; delete it and fetch again") from None
        _record(entry, digest, entry.raw.stat().st_size, "placed by hand")
    return Archive(entry.raw, digest)


def _record(entry: Entry, digest: str, size: int, origin: str) -> None:
    record = {
        "archive": entry.archive,
        "sha256": digest,
        "bytes": size,
        "source": origin,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_atomic(entry.raw.parent / "lock.json", json.dumps(record, indent=2) + "\n")


def _compare(entry: Entry, path: Path, digest: str) -> None:
    record = read_lock(entry)
    if record is not None and record["sha256"] != digest:
        raise UserError(
            f"{path}: sha256 {digest}, but {record['sha256']} was recorded on {record['date']} from "
            f"{record['source']}; if the new archive is to be trusted, delete "
            f"{entry.raw.parent / 'lock.json'} and {entry.raw}"
        )


def _by_hand(entry: Entry, failures: list[tuple[Source, str]]) -> str:
    lines = [f"{entry.name}: no source could be downloaded from."]
    for source, reason in failures:
        lines.append(f"  {source.note or 'source'}: {reason}")
    lines.append("Open one of these addresses in a browser:")
    lines += [f"  {page(source)}" for source in entry.sources]
    lines.append(f"and save the file as\n  {entry.raw}\nor hand over a copy from elsewhere:")
    lines.append(f"  dslide data fetch {entry.name} --from PATH")
    return "\n".join(lines)
