"""Runs one spec: takes the machine, makes the cluster, starts the ranks, watches them, and publishes the
record.

Nothing of a run lives in this process, so a record comes out whatever happens to the ranks: a rank that dies
is named in the `end` event, a run that gives no sign of life is ended, and Ctrl-C takes everything down.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dslide.bench import cluster, commands, records, runner, systems
from dslide.bench.outcome import RunFolder, diagnose, tail
from dslide.bench.spec import RunSpec, allotted_cores
from dslide.errors import UserError
from dslide.files import write_atomic

_SAY_SECONDS = 5.0
# Variables of an MPI or a Slurm job around this process, which would confuse the one that it starts.
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PRRTE_", "HYDRA_")
# Lines that only the log gets: they say nothing about a run, come with every one, and cannot be turned off.
_NOISE = (b"absl::InitializeLog", b"oneDNN custom operations", b"plm:ssh: Warning: setpgid")
_PREFIX = re.compile(rb"^\[\d+\]<std(out|err)>:")  # horovodrun's


def say(text: str) -> None:
    """A line for the person who watches."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Holds this user's right to measure on this machine; waits for it, and says so."""
    path = Path(tempfile.gettempdir()) / f"dslide-{os.getuid()}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another measured run to end (lock {path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM (Snakemake, Slurm) as Ctrl-C, so that it too leaves nothing behind; and Ctrl-C itself, which no
    shell's `&` may switch off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _ignore_further_interrupts() -> None:
    """For the moment that it takes to publish an interrupted record."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _context(
    spec: RunSpec, system: ModuleType, sets: list[list[int]], note: str | None, how: str
) -> dict[str, Any]:
    virtual = spec.cluster.kind == "virtual"
    namespaces = spec.cluster.nodes > 1 and virtual and note is None
    return {
        **spec.model_dump(
            mode="json", exclude={"out", "cluster", "stall_seconds", "grace_seconds", "exclusive"}
        ),
        "title": system.TITLE,
        "cluster": {
            **spec.cluster.model_dump(mode="json"),
            "namespaces": namespaces,
            "throttled": namespaces and spec.cluster.rate is not None,
            "core_sets": sets,
            "note": note,
        },
        "launcher": how,
        "link": None,
    }


def _job(
    spec: RunSpec, system: ModuleType, folder: RunFolder, sets: list[list[int]], nodes: bool, how: str
) -> dict[str, Any]:
    env = {
        **commands.thread_variables(spec.cluster.cores),
        **commands.MPI_ENVIRONMENT,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
        "DSLIDE_CONTEXT": str(folder.context),
        "DSLIDE_REPORTS": str(folder.reports),
        "DSLIDE_INTERFACE": cluster.INTERFACE if nodes else "",
        **(system.environment(spec) if hasattr(system, "environment") else {}),
    }
    sizes = system.message_sizes(spec) if nodes and spec.cluster.rate is not None else []
    return {
        "file": str(folder.job),
        "kind": spec.cluster.kind,
        "hostfile": None if spec.cluster.hostfile is None else str(spec.cluster.hostfile.absolute()),
        "launcher": how,
        "mpi": how != "local",
        "ranks": spec.cluster.nodes,
        "sets": sets if nodes else [],
        "pins": sets if spec.cluster.kind == "virtual" else None,
        "env": env,
        "command": [sys.executable, "-m", "dslide.bench.worker", str(folder.spec)],
        "reports": str(folder.reports),
        "context": str(folder.context),
        "rate": spec.cluster.rate,
        "link_check": spec.link_check,
        "link_cache": str(Path(tempfile.gettempdir()) / f"dslide-{os.getuid()}-link"),
        "message_sizes": sorted(set(sizes)),
    }


def _environment(spec: RunSpec) -> dict[str, str]:
    foreign = (*_FOREIGN, "SLURM_") if spec.cluster.kind == "virtual" else _FOREIGN
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


class _Watch:
    """Copies the ranks' output to the log and to stderr, and knows when there was a sign of life."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._said = self._sign = time.monotonic()
        self._seen = 0.0

    def follow(self, stream: Any) -> None:
        """Runs in a thread until the stream ends."""
        with self._folder.log.open("ab") as log:
            for line in iter(stream.readline, b""):
                log.write(line)
                log.flush()
                self._sign = time.monotonic()
                if not any(noise in line for noise in _NOISE):
                    sys.stderr.buffer.write(_PREFIX.sub(b"", line))
                    sys.stderr.buffer.flush()
                    self._said = self._sign

    def quiet_seconds(self) -> float:
        """How long there was no output, event or heartbeat; now and then says how far the run is."""
        record = self._folder.record
        files = [record / "events.jsonl", record / records.HEARTBEAT]
        seen = max((f.stat().st_mtime for f in files if f.exists()), default=0.0)
        if seen > self._seen:
            self._seen, self._sign = seen, time.monotonic()
        if time.monotonic() - self._said > _SAY_SECONDS:
            self._said = time.monotonic()
            self._tell(record / records.HEARTBEAT)
        return time.monotonic() - self._sign

    def _tell(self, heartbeat: Path) -> None:
        with contextlib.suppress(OSError, ValueError):  # absent, or just being written
            beat = json.loads(heartbeat.read_text())
            say(f"{self._name}: step {beat['step']}/{beat['steps']}, {beat['train_seconds']:.1f} s")


def _watch(
    process: "subprocess.Popen[bytes]", lifeline: int, folder: RunFolder, spec: RunSpec
) -> tuple[int, str | None]:
    """Until the ranks end, stall, or take too long. Returns the exit status and why they were ended."""
    watch = _Watch(folder, spec.run_id)
    thread = threading.Thread(target=watch.follow, args=(process.stdout,), daemon=True)
    thread.start()
    wall = spec.budget_seconds + spec.grace_seconds
    began = time.monotonic()
    reason = None
    try:
        while process.poll() is None:
            time.sleep(0.1)
            if watch.quiet_seconds() > spec.stall_seconds:
                reason = f"no event, heartbeat or output for {spec.stall_seconds:g} s"
            elif time.monotonic() - began > wall:
                reason = f"ran longer than its budget and grace, {wall:g} s on the wall clock"
            if reason is not None:
                break
    finally:
        os.close(lifeline)  # the runner and all below it end at once
        process.wait()
        thread.join(timeout=5)
    return process.returncode, reason


def _start(job_file: Path, spec: RunSpec, nodes: bool) -> tuple["subprocess.Popen[bytes]", int]:
    """Starts the runner, in a sandbox where there is one; returns it and the lifeline's end to hold."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "dslide.bench.runner", str(job_file), str(read_end)]
    if nodes or (spec.cluster.kind == "virtual" and cluster.unavailable(network=False) is None):
        command = cluster.sandbox_command(command, network=nodes)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[read_end],
            env=_environment(spec),
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
    finally:
        os.close(read_end)
    return process, write_end


def _close(folder: RunFolder, code: int, reason: str | None, nodes: bool) -> int:
    """Writes the `end` event if the ranks could not. Returns the exit status: 0, or 2 for bad input."""
    end = next((e for e in folder.events() if e["event"] == "end"), None)
    if end is not None and reason is None:
        if code != 0:
            say(f"the ranks ended their records and then failed: {diagnose(folder.reports, nodes)['reason']}")
        return 0
    if code == runner.REFUSED and reason is None:
        fields: dict[str, Any] = {"reason": "link not faithful: the run was to be refused"}
    else:
        fields = diagnose(folder.reports, nodes) if reason is None else {"reason": reason}
    user_error = fields.pop("user_error", False)
    folder.append_end(status="error", **fields, log_tail=tail(folder.log))
    say(f"error: {fields['reason']}")
    return 2 if user_error else 0


def _place(spec: RunSpec, how: str) -> tuple[list[list[int]], bool, str | None]:
    """Core sets of the nodes, whether there are virtual nodes, and why not where they were asked for."""
    if spec.cluster.kind != "virtual":
        return [], False, None
    cores = allotted_cores()
    want = spec.cluster.nodes * spec.cluster.cores
    if want > len(cores) and not spec.cluster.oversubscribed:
        raise UserError(
            f"run {spec.run_id}: {want} cores asked for, this machine allots {len(cores)}; ask for fewer, or "
            "set cluster.oversubscribed (the run and its figure then say so)"
        )
    sets = cluster.core_sets(cores, spec.cluster.nodes, spec.cluster.cores)
    if spec.cluster.nodes == 1 or how == "local":
        return sets, False, None
    note = cluster.unavailable()
    if note is not None:
        note = f"no virtual nodes ({note}): unthrottled ranks on one machine"
        say(note)
    return sets, note is None, note


def launch(spec: RunSpec) -> int:
    """Runs a spec and publishes its record in `spec.out`.

    Returns 0 if there is a record, also of a run that failed (its status says so); 2 if its input was bad;
    130 after Ctrl-C, with a record of status `interrupted`. UserError for a spec that cannot be run at all.
    """
    system = systems.load(spec.system)
    systems.settings(system, spec)
    how = system.launcher(spec)
    if how not in systems.LAUNCHERS:
        raise UserError(f"{system.__file__}: launcher {how!r} is none of {systems.LAUNCHERS}")
    if how == "local" and spec.cluster.nodes > 1:
        raise UserError(f"run {spec.run_id}: system {spec.system} runs on one node, not {spec.cluster.nodes}")
    sets, nodes, note = _place(spec, how)
    folder = RunFolder(spec.out)
    try:
        own = spec.model_copy(update={"out": folder.record})
        folder.spec.write_text(own.dump())
        write_atomic(folder.record / "spec.json", spec.model_copy(update={"out": Path(spec.out.name)}).dump())
        context = _context(spec, system, sets, note, how)
        folder.context.write_text(json.dumps(context))
        skipped = system.skip(spec)
        if skipped is not None:
            folder.append_end(status="skipped", reason=skipped)
            folder.publish()
            say(f"{spec.run_id} skipped: {skipped}")
            return 0
        folder.job.write_text(json.dumps(_job(spec, system, folder, sets, nodes, how)))
        with _signals_interrupt(), machine_lock() if spec.exclusive else contextlib.nullcontext():
            process, lifeline = _start(folder.job, spec, nodes)
            code, reason = _watch(process, lifeline, folder, spec)
        status = _close(folder, code, reason, nodes)
        folder.append_link()
    except KeyboardInterrupt:
        _ignore_further_interrupts()
        folder.append_end(status="interrupted", reason="interrupted")
        folder.publish()
        say(f"{spec.run_id} interrupted")
        return 130
    except BaseException:
        shutil.rmtree(folder.work, ignore_errors=True)
        raise
    folder.publish()
    return status
