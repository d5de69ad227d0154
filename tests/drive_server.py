"""A local HTTP server that plays Google Drive and plain addresses, for DSLIDE_GDRIVE and DSLIDE_MIRROR."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONFIRM = """<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head><body>
<p class="uc-warning-caption">Google Drive can't scan this file for viruses.</p>
<form id="download-form" action="{base}/confirmed" method="get">
<input type="submit" value="Download anyway"/>
<input type="hidden" name="id" value="{id}"><input type="hidden" name="uuid" value="1-2-3">
</form></body></html>"""
QUOTA = """<!DOCTYPE html><html><head><title>Google Drive - Quota exceeded</title></head><body>
<p class="uc-error-caption">Sorry, you can't view or download this file at this time.</p>
<p class="uc-error-subcaption">Too many users have viewed or downloaded this file recently. Please try
accessing the file again later.</p></body></html>""".replace("Please try\n", "Please try ")
ACCESS = """<!DOCTYPE html><html><head><title>Google Drive: Sign-in</title></head><body>
<p>You need access</p><p>Request access, or switch to an account with access.</p></body></html>"""
OTHER = "<html><head><title>Moved house</title></head><body>This page has moved.</body></html>"
PAGES = {"quota": QUOTA, "access": ACCESS, "html": OTHER}


class Drive:
    """What the server gives: `files` by id, or by "host/path" of a plain address; `keys` that it insists on.

    `behaviour`, likewise by id, is one of
    good (unless set) | slow (in small pieces with pauses)
    confirm (asks first, as for files too large to be scanned for viruses)
    quota | access | html: a page instead of the file
    missing (404) | failing (503) | busy-once (503 with Retry-After, then good) | busy-range-once (likewise,
    but only if a part of the file is asked for)
    cut (announces all, sends half, each time) | cut-once | short (half of the file, as if it were all)
    stalled-once (half, then silence until the client gives up)
    cut-no-resume (cut, and answers requests for a range with the whole file)
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self.files: dict[str, bytes] = {}
        self.behaviour: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.gave_up = threading.Event()  # a test's client won't wait any longer


class _Handler(BaseHTTPRequestHandler):
    drive: Drive

    def do_GET(self) -> None:
        drive, parts = self.drive, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        name = query.get("id", parts.path.lstrip("/"))
        drive.requests.append(self.path)
        behaviour = drive.behaviour.get(name, "good")
        if name not in drive.files or behaviour == "missing":
            return self._send(404, b"Not Found")
        if name in drive.keys and parts.path != "/confirmed" and query.get("resourcekey") != drive.keys[name]:
            return self._send(200, ACCESS.encode(), "text/html")
        if behaviour == "failing":
            return self._send(503, b"try later")
        if behaviour == "busy-once" or (behaviour == "busy-range-once" and "Range" in self.headers):
            drive.behaviour[name] = "good"
            return self._send(503, b"try later", headers={"Retry-After": "0"})
        if behaviour == "confirm" and parts.path != "/confirmed":
            return self._send(200, CONFIRM.format(base=drive.base, id=name).encode(), "text/html")
        if behaviour in PAGES:
            return self._send(200, PAGES[behaviour].encode(), "text/html")
        return self._file(name, behaviour)

    def _file(self, name: str, behaviour: str) -> None:
        content, status, headers = self.drive.files[name], 200, {"ETag": f'"{name}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and behaviour != "cut-no-resume":
            begin = int(wanted[1])
            self.drive.ranges.append(self.headers["Range"])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            content, status = content[begin:], 206
        size = len(content)
        if behaviour in ("cut", "cut-once", "short", "stalled-once", "cut-no-resume"):
            content = content[: size // 2]
        if behaviour in ("cut-once", "stalled-once"):
            self.drive.behaviour[name] = "good"
        if behaviour == "cut-no-resume" and wanted:
            content = self.drive.files[name]
        headers["Content-Length"] = str(len(content) if behaviour == "short" else size)
        self._send(status, content, "application/octet-stream", headers, slow=behaviour == "slow")
        if behaviour == "stalled-once":
            self.drive.gave_up.wait(10)
        if len(content) < size:
            self.close_connection = True

    def _send(
        self,
        status: int,
        body: bytes,
        kind: str = "text/plain",
        headers: dict[str, str] | None = None,
        slow: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        pieces = 8 if slow else 1
        for begin in range(0, len(body), -(-len(body) // pieces) or 1):
            self.wfile.write(body[begin : begin + -(-len(body) // pieces)])
            self.wfile.flush()
            if slow:
                time.sleep(0.02)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def drive_server() -> Iterator[Drive]:
    """Runs the server on a free local port until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.drive = Drive(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield handler.drive  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
