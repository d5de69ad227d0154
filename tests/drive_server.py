"""A local HTTP server that plays Google Drive, for DSLIDE_GDRIVE: no test needs the internet."""

import re
import threading
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
SIGN_IN = "<html><head><title>Sign in - Google Accounts</title></head><body>You need access</body></html>"


class Drive:
    """What the server gives: `files` by id, `behaviour` by id ("good" unless set), `keys` that it insists on.

    good | confirm (asks first) | quota | html (a sign-in page) | missing (404) | failing (503) |
    cut (announces all, sends half, each time) | cut-once | short (half of the file, as if it were all)
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self.files: dict[str, bytes] = {}
        self.behaviour: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    drive: Drive

    def do_GET(self) -> None:
        drive, parts = self.drive, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        name = query.get("id", parts.path.rsplit("/", 1)[-1])
        drive.requests.append(self.path)
        behaviour = drive.behaviour.get(name, "good")
        if name not in drive.files or behaviour == "missing":
            return self._send(404, b"Not Found")
        if name in drive.keys and parts.path != "/confirmed" and query.get("resourcekey") != drive.keys[name]:
            return self._send(200, SIGN_IN.encode(), "text/html")
        if behaviour == "failing":
            return self._send(503, b"try later")
        if behaviour == "confirm" and parts.path != "/confirmed":
            return self._send(200, CONFIRM.format(base=drive.base, id=name).encode(), "text/html")
        if behaviour in ("quota", "html"):
            return self._send(200, (QUOTA if behaviour == "quota" else SIGN_IN).encode(), "text/html")
        return self._file(name, behaviour)

    def _file(self, name: str, behaviour: str) -> None:
        content, status, headers = self.drive.files[name], 200, {"ETag": f'"{name}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            begin = int(wanted[1])
            self.drive.ranges.append(self.headers["Range"])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            content, status = content[begin:], 206
        size = len(content)
        if behaviour in ("cut", "cut-once", "short"):
            content = content[: size // 2]
        if behaviour == "cut-once":
            self.drive.behaviour[name] = "good"
        headers["Content-Length"] = str(len(content) if behaviour == "short" else size)
        self._send(status, content, "application/octet-stream", headers)
        if len(content) < size:
            self.close_connection = True

    def _send(
        self, status: int, body: bytes, kind: str = "text/plain", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

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
