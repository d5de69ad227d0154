"""Virtual nodes: what they are, and that nothing of them is ever seen outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslide.bench import cluster
from dslide.bench.spec import allotted_cores, bits_per_second, resolve_cores
from dslide.errors import UserError

_INSIDE = """
import json, subprocess, sys, time
from dslide.bench import cluster
cluster.prepare_sandbox()
cluster.make_nodes([[{core}], [{core}]])
cluster.set_rate(2, cluster.Throttle.nominal(1e7))
"""


def inside(code: str) -> list[str]:
    """A command that makes two nodes in a sandbox and runs `code` in it."""
    setup = _INSIDE.format(core=allotted_cores()[0])
    return cluster.sandbox_command([sys.executable, "-c", setup + code], network=True)


def test_bandwidths() -> None:
    assert bits_per_second("100mbit") == 1e8 and bits_per_second("2.5Gbit") == 2.5e9
    for wrong in ("100", "100mb", "mbit", "-1mbit", "0mbit"):
        with pytest.raises(ValueError, match="write it like"):
            bits_per_second(wrong)


def test_cores_are_divided_by_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dslide.bench.spec.allotted_cores", lambda: list(range(16)))
    assert resolve_cores(2, "auto") == (8, False)
    assert resolve_cores(3, "auto") == (5, False)
    assert resolve_cores(1, 4) == (4, False)
    with pytest.raises(UserError, match="want 18 cores, this machine allots 16"):
        resolve_cores(2, 9)
    with pytest.raises(UserError, match="oversubscribed"):
        resolve_cores(17, "auto")
    assert resolve_cores(2, 9, oversubscribed=True) == (9, True)
    assert resolve_cores(17, "auto", oversubscribed=True) == (1, True)


def test_affinity_is_what_counts_as_the_machine() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from dslide.bench.spec import resolve_cores; print(resolve_cores(1, 'auto'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "(1, False)\n"


def test_core_sets_are_disjoint_where_there_are_enough() -> None:
    assert cluster.core_sets([2, 3, 5, 7], 2, 2) == [[2, 3], [5, 7]]
    assert cluster.core_sets([0, 1], 3, 1) == [[0], [1], [0]]


def test_only_a_sandbox_may_be_changed() -> None:
    with pytest.raises(RuntimeError, match="process 1 of a sandbox"):
        cluster.prepare_sandbox()


def test_a_throttle_keeps_a_small_burst() -> None:
    slow, fast = cluster.Throttle.nominal(1e8), cluster.Throttle.nominal(1e9, 1.5)
    assert slow.sent_rate == slow.received_rate == 1e8 and slow.sent_burst == 2048
    assert fast.sent_rate == 1.5e9 and fast.received_rate == 1e9 and fast.sent_burst < fast.received_burst
    assert cluster.Throttle.nominal(1e9, burst=3072).sent_burst == 3072
    assert cluster.Throttle.nominal(1e6).sent_burst > 1514  # a frame must fit


def test_without_the_programs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None if name == "nsenter" else "/bin/x")
    reason = cluster.unavailable.__wrapped__()
    assert reason is not None and "nsenter" in reason


@pytest.mark.root
def test_the_agent_enters_a_node() -> None:
    code = """
ssh = str(cluster.agent())
command = 'hostname; taskset -pc $$; cat /etc/hosts; echo "two  spaces"; grep -c eth0 /proc/net/dev'
for call in ([ssh, "-x", "-o", "A=b", "root@hv1", "-o", "C=d", command], [ssh, "hv7", "true"]):
    result = subprocess.run(call, capture_output=True, text=True)
    print(json.dumps([result.returncode, result.stdout, result.stderr]))
"""
    result = subprocess.run(inside(code), capture_output=True, text=True, timeout=60, check=True)
    there, nowhere = (json.loads(line) for line in result.stdout.splitlines())
    assert there[0] == 0 and there[1].startswith("hv1\n"), there
    assert f"affinity list: {allotted_cores()[0]}\n" in there[1]
    assert there[1].endswith("10.77.0.11 hv0\n10.77.0.12 hv1\ntwo  spaces\n1\n")
    assert nowhere == [255, "", "no such virtual node: hv7\n"]


@pytest.mark.root
def test_nothing_of_it_is_seen_outside() -> None:
    before = Path("/proc/self/mountinfo").read_text(), Path("/etc/hosts").read_text(), os.uname().nodename
    code = "print(cluster.congestion_control(), cluster.dropped_packets(2));"
    code += "print(len(open('/proc/net/dev').readlines()))"
    result = subprocess.run(inside(code), capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split()[1:] == ["0", "4"]  # two lines of heading, lo, eth0
    after = Path("/proc/self/mountinfo").read_text(), Path("/etc/hosts").read_text(), os.uname().nodename
    assert after == before


def _with_mark(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in text:
                found.append(int(folder.name))
    return found


def _networks(pids: list[int]) -> set[str]:
    """Network namespaces of processes, this one's aside."""
    return {os.readlink(f"/proc/{p}/ns/net") for p in pids} - {os.readlink("/proc/self/ns/net")}  # noqa: PTH115


@pytest.mark.root
def test_sigkill_of_unshare_takes_everything_down(tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    code = f"""
for node in (0, 1):
    command = cluster.in_node(node, ["setsid", "sh", "-c", "echo up; exec sleep 1000"])
    assert subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline() == b"up\\n"
print("ready {mark}", flush=True)
time.sleep(1000)
"""
    environment = {**os.environ, "MARK": mark}
    process = subprocess.Popen(inside(code), stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == f"ready {mark}\n"
    spaces = _networks(_with_mark(mark))
    assert len(spaces) == 3  # the launcher's and the nodes'
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    deadline = time.monotonic() + 20
    while _with_mark(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _with_mark(mark) == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not any(space in mounts for space in spaces)
