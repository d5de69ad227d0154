"""Brings one file from one source to this machine, and recognises the pages that come instead of it.

gdown does the transfers (resumed, length checked, retried after lost connections), for plain addresses too.
What it lacks is here: resource keys, replaceable addresses, waiting for a server that is busy, Google Drive's
refusals.

    DSLIDE_GDRIVE   replaces https://drive.usercontent.google.com
    DSLIDE_MIRROR   a plain address https://host/path is asked for as DSLIDE_MIRROR/host/path
"""

import html
import logging
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import gdown
from gdown.download import get_url_from_gdrive_confirmation
from gdown.exceptions import DownloadError
from requests.exceptions import HTTPError, RequestException

from dslide.data.archive import Unusable
from dslide.data.catalogue import Source
from dslide.data.progress import progress

GDRIVE = "https://drive.usercontent.google.com"
RETRIES = 5
PAUSE = 2.0  # seconds before the first retry of a busy server; doubled each time
TIMEOUT = 60.0  # seconds without a byte
_BUSY = (429, 500, 502, 503, 504)
_LONGEST_PAUSE = 60.0
_PAGE = 1 << 20  # a Google Drive page is smaller, and an archive isn't HTML

log = logging.getLogger(__name__)


def address(source: Source) -> str:
    """Where the source's file is downloaded from."""
    if source.url is not None:
        mirror, parts = os.environ.get("DSLIDE_MIRROR"), urlsplit(source.url)
        if mirror is None:
            return source.url
        return f"{mirror.rstrip('/')}/{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")
    query = {"id": source.gdrive, "export": "download", "confirm": "t"}
    if source.resource_key:
        query["resourcekey"] = source.resource_key
    return f"{os.environ.get('DSLIDE_GDRIVE', GDRIVE)}/download?{urlencode(query)}"


def page(source: Source) -> str:
    """The address that a person opens in a browser."""
    if source.gdrive is None:
        return str(source.url or source.path)
    key = f"?resourcekey={source.resource_key}" if source.resource_key else ""
    return f"https://drive.google.com/file/d/{source.gdrive}/view{key}"


def download(source: Source, part: Path, announced: Callable[[int], None]) -> None:
    """Downloads the source's file to `part`, going on where an earlier attempt at the same file ended.

    `announced` is told the file's size as soon as the server does; what it raises ends the transfer. Unusable
    if the file can't be had, or if a page came instead of it; what arrived of a cut transfer stays, to be
    resumed.
    """
    url = address(source)
    log.warning("downloading %s", url)
    _transfer(url, part, announced)
    text = _html(part)
    if text is None:
        return
    part.unlink()
    if source.gdrive is None:
        raise Unusable(f"an HTML page came instead of the file{_title(text)}")
    refusal = _refusal(text)
    if refusal is not None:
        raise Unusable(refusal)
    try:  # the page that warns that large files aren't scanned for viruses
        # gdown looks at single lines, so the form has to be on one
        url = get_url_from_gdrive_confirmation(" ".join(text.split()) if "download-form" in text else text)
    except DownloadError:
        raise Unusable(f"an HTML page came instead of the file{_title(text)}") from None
    _transfer(url, part, announced)
    text = _html(part)
    if text is not None:
        part.unlink()
        raise Unusable(_refusal(text) or f"an HTML page came instead of the file, twice{_title(text)}")


def _refusal(text: str) -> str | None:
    """Why Google Drive doesn't give the file, in our words; None for another page."""
    title = _title(text)
    if "Quota exceeded" in title or "uc-error-subcaption" in text:
        found = re.search(r'uc-error-subcaption">(.*?)</p>', text, re.DOTALL)
        said = (
            " ".join(re.sub("<[^>]*>", "", html.unescape(found[1])).split()) if found else "no reason given."
        )
        return f"Google Drive refuses{title}: {said} A quota is lifted within 24 hours."
    if re.search(r"You need (access|permission)|Request access|ServiceLogin|Sign in - Google", text):
        return f"Google Drive asks for a sign-in{title}: its owner no longer shares the file with everybody"
    return None


def _transfer(url: str, part: Path, announced: Callable[[int], None]) -> None:
    with progress() as bar, bar.task(part.name, 0) as advance:
        before = 0

        def show(done: int, total: int | None) -> None:
            nonlocal before
            if before == 0 and total:
                announced(total - done)
            advance(done - before, total or 0)
            before = done

        refused = 0
        for attempt in range(RETRIES + 3):
            try:
                gdown.download(
                    url=url,
                    output=str(part),
                    quiet=True,
                    use_cookies=False,
                    resume=True,
                    progress=show,
                    timeout=TIMEOUT,
                    retries=RETRIES,
                )
                return
            except HTTPError as error:
                response = error.response
                if attempt < RETRIES and response is not None and response.status_code in _BUSY:
                    _pause(attempt, response.status_code, response.headers.get("Retry-After", ""))
                    continue
                raise Unusable(str(error)) from None
            except (DownloadError, RequestException, OSError) as error:
                stale = [file for file in part.parent.iterdir() if file.name.endswith(".part")]
                if "byte range" in str(error) and stale and refused < 2:
                    refused += 1
                    if refused == 1:  # gdown says so of a busy server's answer, too
                        _pause(attempt, 0, "")
                        continue
                    for leftover in stale:  # the file has changed, or its server doesn't resume: anew
                        leftover.unlink()
                    continue
                raise Unusable(str(error).split("\n")[0]) from None
        raise Unusable("the server has refused too often")


def _pause(attempt: int, status: int, asked: str) -> None:
    """Waits as long as the server asks, or longer each time; with jitter: clients must not form herds."""
    seconds = float(asked) if asked.isdigit() else PAUSE * 2**attempt * random.uniform(0.5, 1.0)
    seconds = min(seconds, _LONGEST_PAUSE)
    log.warning("%s; trying again in %.0f s", f"HTTP {status}" if status else "not resumed", seconds)
    time.sleep(seconds)


def _html(path: Path) -> str | None:
    """The content if it is an HTML page."""
    if path.stat().st_size > _PAGE:
        return None
    content = path.read_bytes()
    if re.match(rb"\s*<(!doctype|html|head|\?xml)", content, re.IGNORECASE) is None:
        return None
    return content.decode("utf8", "replace")


def _title(text: str) -> str:
    found = re.search(r"<title[^>]*>([^<]*)</title>", text, re.IGNORECASE)
    return f" (titled {html.unescape(found[1]).strip()!r})" if found else ""
