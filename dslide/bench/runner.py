"""Inside the sandbox: makes the nodes, checks the link, starts the ranks, and dies with the launcher.

    python -m dslide.bench.runner JOB.json LIFELINE_FD

The launcher holds the other end of the lifeline. When it closes (Ctrl-C, crash, SIGKILL), this process exits
at once; as process 1 of its namespace it takes everything along. Without a sandbox it kills its process
group. Exit status: 0 if all ranks ended well, 1 otherwise, 3 for a link that is off when the run asked to be
refused.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from dslide.bench import cluster, commands, link
from dslide.errors import UserError
from dslide.files import write_atomic

REFUSED = 3
_LINGER_SECONDS = 4.0  # how long the others may take to end after a rank failed


def _follow(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    if os.getpid() != 1:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _make_cluster(job: dict[str, Any], context: dict[str, Any]) -> bool:
    """Nodes and link; writes what came out into the context. False if the link refuses the run."""
    nodes = len(job["sets"])
    cluster.make_nodes(job["sets"])
    rate = job["rate"]
    if rate is None:
        context["link"] = {"rate": None, "congestion_control": cluster.congestion_control()}
        return True
    cache = Path(job["link_cache"])
    if job["link_check"] == "off":
        throttle = link.throttle(nodes, rate, cache)
        context["link"] = {
            "rate": rate,
            "throttle": throttle._asdict(),
            "faithful": None,
            "notes": ["not checked"],
        }
        return True
    print(f"checking the link at {rate / 1e6:g} Mbit/s", flush=True)
    sizes = job["message_sizes"] or [link.DEFAULT_MESSAGE]
    report = link.throttle_and_check(nodes, rate, sizes, cache)
    context["link"] = report
    print(link.summary(report), flush=True)
    return bool(report["faithful"]) or job["link_check"] != "refuse"


def _failed(reports: Path) -> bool:
    return any(json.loads(path.read_text())["returncode"] != 0 for path in reports.glob("rank-*.json"))


def _wait(process: "subprocess.Popen[bytes]", reports: Path) -> int:
    """Waits for the ranks; after one has failed the others get a few seconds."""
    deadline = None
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if deadline is None and _failed(reports):
                deadline = time.monotonic() + _LINGER_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                process.kill()
                return 1


def main() -> int:
    """The command; returns its exit status."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        return _run(job)
    except UserError as error:
        failure = {"rank": None, "reason": str(error), "user_error": True}
    except Exception as error:
        traceback.print_exc()
        failure = {
            "rank": None,
            "reason": f"the launcher failed: {type(error).__name__}: {error}",
            "user_error": False,
        }
    (Path(job["reports"]) / "failure-launcher.json").write_text(json.dumps(failure))
    return 1


def _run(job: dict[str, Any]) -> int:
    threading.Thread(target=_follow, args=(int(sys.argv[2]),), daemon=True).start()
    context_file = Path(job["context"])
    context = json.loads(context_file.read_text())
    refused = False
    if os.getpid() == 1:
        job["env"]["TMPDIR"] = os.environ["TMPDIR"] = str(cluster.prepare_sandbox())
    if job["sets"]:
        refused = not _make_cluster(job, context)
        write_atomic(context_file, json.dumps(context))
    if refused:
        return REFUSED
    write_atomic(Path(job["file"]), json.dumps(job))
    command, env = commands.launch_command(job)
    before = cluster.dropped_packets(len(job["sets"])) if job["sets"] else 0
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    code = _wait(process, Path(job["reports"]))
    if job["sets"]:
        lost = cluster.dropped_packets(len(job["sets"])) - before
        (Path(job["reports"]) / "link.json").write_text(json.dumps({"lost_packets": lost}))
    return 0 if code == 0 and not _failed(Path(job["reports"])) else 1


if __name__ == "__main__":
    sys.exit(main())
