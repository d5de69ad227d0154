"""A run's working folder, and what can be told from it when the ranks have ended."""

import contextlib
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from dslide.bench import machine, records
from dslide.errors import UserError
from dslide.files import fsync_dir, write_atomic

_TAIL_LINES = 40


class RunFolder:
    """The run's working folder, beside its final place: the record, and what the ranks need to start."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.work = self.out.parent / f".{self.out.name}.running"
        shutil.rmtree(self.work, ignore_errors=True)  # of a launcher that was killed
        self.record = self.work / "record"
        self.reports = self.work / "reports"
        self.record.mkdir(parents=True)
        self.reports.mkdir()
        self.spec = self.work / "spec.json"
        self.job = self.work / "job.json"
        self.context = self.work / "context.json"
        self.log = self.record / "log.txt"
        self.log.touch()

    def events(self) -> list[dict[str, Any]]:
        """What was recorded so far."""
        path = self.record / "events.jsonl"
        return records.read_events(path) if path.exists() else []

    def append_end(self, **fields: Any) -> None:
        """An `end` event from outside. An incomplete last line of a dead writer is cut off first."""
        path = self.record / "events.jsonl"
        events = self.events()
        write_atomic(path, "".join(json.dumps(e) + "\n" for e in events))
        seconds = max((e["train_seconds"] for e in events), default=0.0)
        last = max((e.get("step", 0) for e in events), default=0)
        end = {"event": "end", "time": time.time(), "train_seconds": seconds, "step": last, **fields}
        records.append_event(self.record, end)

    def _aside(self) -> Path:
        """Where a record goes that is replaced: one that counts is kept beside, hidden and numbered."""
        with contextlib.suppress(UserError):
            if records.read_run(self.out).status in ("done", "target", "timeout", "diverged"):
                old = len(list(self.out.parent.glob(f".{self.out.name}.replaced-*")))
                return self.out.parent / f".{self.out.name}.replaced-{old + 1}"
        return self.work / "old"

    def append_link(self) -> None:
        """An event with what the links lost while the ranks ran, if the run came so far."""
        path = self.reports / "link.json"
        if path.exists():
            seconds = max((e["train_seconds"] for e in self.events()), default=0.0)
            event = {"event": "link", "time": time.time(), "train_seconds": seconds}
            event |= json.loads(path.read_text())
            records.append_event(self.record, event)

    def publish(self) -> None:
        """Puts the record in its place, complete."""
        (self.record / records.HEARTBEAT).unlink(missing_ok=True)
        meta = self.record / "meta.json"
        if not meta.exists():
            known = json.loads(self.context.read_text())
            head = {"schema_version": records.SCHEMA_VERSION, "kind": "measured", "created": time.time()}
            content = {**head, **known, "machine": machine.capture(), "ranks": []}
            write_atomic(meta, json.dumps(content, indent=1, default=records.plain) + "\n")
        if self.out.exists():
            self.out.replace(self._aside())
        self.record.replace(self.out)
        fsync_dir(self.out.parent)
        shutil.rmtree(self.work, ignore_errors=True)


def _load(reports: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(reports.glob(pattern))]


def diagnose(reports: Path, nodes: bool) -> dict[str, Any]:
    """Which rank failed first and how: reason, and where known rank, node, user_error.

    A rank that was killed comes before ranks that failed in consequence, and one with a Python error before
    one that merely ended.
    """
    ranks = sorted(_load(reports, "rank-*.json"), key=lambda r: r["time"])
    consequences = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGABRT)
    killed = [r for r in ranks if r["returncode"] < 0 and r["returncode"] not in consequences]
    failures = {f["rank"]: f for f in _load(reports, "failure-*.json")}
    other = [r for r in ranks if r["returncode"] != 0]
    if killed:
        first = killed[0]
        name = signal.Signals(-first["returncode"]).name
        how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        first = next((r for r in other if r["rank"] in failures), other[0] if other else {})
        if not first:
            reason = "the ranks could not be started, or ended without a report"
            return failures.get(None, {"reason": reason})
        failure = failures.get(first["rank"])
        how = f"failed: {failure['reason']}" if failure else f"exited with status {first['returncode']}"
        if failure and failure["user_error"]:
            return {
                "reason": failure["reason"],
                "rank": first["rank"],
                "node": first["node"],
                "user_error": True,
            }
    where = f" on {first['node']}" if nodes else ""
    return {"reason": f"rank {first['rank']}{where} {how}", "rank": first["rank"], "node": first["node"]}


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
