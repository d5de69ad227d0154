"""Files that are either complete or absent: write beside, fsync, rename. JSON files, read."""

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dslide.errors import UserError


def fsync_dir(folder: Path) -> None:
    """Makes a rename inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The object that a JSON file holds. UserError names the file, where it is broken, and `what` it is."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not JSON: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: {what} is a JSON object")
    return content


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended.

    Their handlers are put off: a mask of signals is a thread's own, and the core's threads would take them.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrived in came[:1]:
            signal.raise_signal(arrived)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file beside `path` that takes its place when the block ends without an exception.

    An OSError of writing (a full disk) carries `path` as its file name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = None
    try:
        with _uninterrupted():  # or the file would be there and nobody know its name
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise type(error)(error.errno, error.strerror, str(path)) from error
            raise
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes `path` so that a reader sees the old content or the new, never a part."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yields a folder beside `path` that takes its place when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = None
    try:
        with _uninterrupted():
            work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        yield work
        for file in work.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)
        with _uninterrupted():  # between the two renames there is neither the old folder nor the new
            _replace_dir(work, path)
    except BaseException:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _replace_dir(work: Path, path: Path) -> None:
    old = None
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        path.replace(old / path.name)
    work.replace(path)
    fsync_dir(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
