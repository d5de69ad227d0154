"""Is a virtual link a faithful link? Times messages over it against what the rate allows, and tunes the
throttle.

The ideal time of a message is its frames' bits over the rate. Frames: 66 bytes of Ethernet, IP and TCP
headers a segment of 1448 bytes, which is also what the throttle (tbf) counts; preamble, checksum and gap of a
real Ethernet (24 bytes more a frame) are not counted.

A token bucket pays for its wake-ups: with a small burst a fast link comes out too slow, with a large one
short messages pass as if there were no throttle. So `calibrate` keeps the sender's burst small and tries some
sizes of it and higher rates until messages take their time, while a second bucket caps what is long.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dslide.bench import cluster, linkprobe
from dslide.bench.cluster import Throttle
from dslide.files import write_atomic

SEGMENT = 1448
HEADERS = 66
EARLY = 0.9  # a message faster than this part of its ideal time is early
LATE = 1.1  # one slower than this times its ideal time, plus LATE_SECONDS, is late
LATE_SECONDS = 1e-4
SLOW = 1.5e8  # up to this rate (bits/s) a token bucket is faithful as it is
_CHECK_SECONDS = 1.0  # a message that would take longer is tested by its first second's worth
_MODE_SECONDS = 0.3  # time for the repetitions of one message size in one mode
_CACHE_SECONDS = 6 * 3600
_PORT = 5001
_GOOD = 0.5  # part of the tolerance that is good enough to look no further
DEFAULT_MESSAGE = 64_000  # bytes, for systems that do not name their messages


class Sample(NamedTuple):
    mode: str
    bytes: int
    seconds: list[float]


def frame_bytes(payload: int) -> int:
    """Bytes of the frames that carry `payload` bytes of a TCP stream."""
    return payload + HEADERS * -(-payload // SEGMENT)


def ideal_seconds(payload: int, rate: float) -> float:
    """Time of a message on a link of `rate` bits a second, without latency."""
    return frame_bytes(payload) * 8 / rate


def verdict(seconds: float, ideal: float) -> str:
    """ "ok", "early" or "late"."""
    if seconds < EARLY * ideal:
        return "early"
    return "late" if seconds > LATE * ideal + LATE_SECONDS else "ok"


def measure(
    pairs: list[tuple[int, int]], plan: list[tuple[str, int, int]], *, together: bool = False
) -> list[list[Sample]]:
    """Runs the plan from one node to another for each pair at once. Returns a pair's samples, item by item.

    Inside the sandbox only. With `together` all pairs start at the same moment. RuntimeError if a probe
    fails.
    """
    python = [sys.executable, "-I", "-S", str(Path(linkprobe.__file__))]
    start = time.monotonic() + 0.4 if together else 0.0
    running = []
    for number, (source, sink) in enumerate(pairs):
        address, port = cluster.node_address(sink), str(_PORT + number)
        receiver = cluster.in_node(sink, [*python, "receive", address, port])
        sender = cluster.in_node(source, [*python, "send", address, port, repr(start), json.dumps(plan)])
        running.append(
            [
                subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for c in (receiver, sender)
            ]
        )
    results = []
    for processes in running:
        readings = []
        for process in processes:
            out, err = process.communicate(timeout=120)
            if process.returncode != 0:
                raise RuntimeError(f"link probe failed: {err.strip().splitlines()[-1:]}")
            readings.append(json.loads(out))
        received, sent = readings
        results.append(
            [
                Sample(
                    mode,
                    size,
                    s
                    if mode == "echo"
                    else [(b - a) / (count if mode == "stream" else 1) for a, b in zip(s, r, strict=True)],
                )
                for (mode, size, count), s, r in zip(plan, sent, received, strict=True)
            ]
        )
    return results


def _plan(sizes: list[int], rate: float, seconds: float = _MODE_SECONDS) -> list[tuple[str, int, int]]:
    warm = max(1, int(min(1e6, rate / 8 * 0.05)))
    plan: list[tuple[str, int, int]] = [("warm", warm, 1)]
    for size in sizes:
        count = max(1, min(15, int(seconds / ideal_seconds(size, rate))))
        streamed = max(count, int(0.1 / ideal_seconds(size, rate)))
        plan.append(("idle", size, count))
        if count > 1:  # a message of a second is the same in both modes
            plan.append(("stream", size, streamed))
    return plan


def _median(sample: Sample) -> float:
    return statistics.median(sample.seconds)


def tolerance_used(seconds: float, ideal: float) -> float:
    """How far a message's time is from its ideal, in parts of what `verdict` allows."""
    allowed = (1 - EARLY) * ideal if seconds < ideal else (LATE - 1) * ideal + LATE_SECONDS
    return abs(seconds - ideal) / allowed


def _candidates(rate: float) -> list[Throttle]:
    """The throttles that may fit a link, the likeliest first.

    On a fast machine a bucket of 12 KB lets short messages pass before their time; on a slow one wake-ups
    make a smaller one late.
    """
    bursts, excesses = (6144, 12288, 3072), (1.25, 1.35, 1.15, 1.5, 1.05, 1.7, 2.0, 2.5)
    tunings = itertools.product(bursts, excesses)  # on slower links bursts are the same
    return list(dict.fromkeys(Throttle.nominal(rate, excess, burst) for burst, excess in tunings))


def calibrate(nodes: int, rate: float, sizes: Sequence[int] = ()) -> Throttle:
    """Finds the throttle that makes a link behave like `rate` bits/s for messages of `sizes` bytes after
    idle.

    Without sizes: messages of 0.14 to 40 ms. Inside the sandbox only; leaves the links so throttled. Up to
    SLOW nothing needs tuning. Takes up to 10 s above it.
    """
    if rate <= SLOW:
        found = Throttle.nominal(rate)
        cluster.set_rate(nodes, found)
        return found
    sizes = sizes or [int(rate / 8 * seconds) for seconds in (1.4e-4, 3e-4, 2.4e-3, 4e-2)]
    plan = [
        ("warm", int(rate / 8 * 0.01), 1),
        *(line for line in _plan(list(sizes), rate, 0.1) if line[0] == "idle"),
    ]
    candidates = _candidates(rate)
    best = (float("inf"), candidates[0])
    for tried in candidates:
        cluster.set_rate(nodes, tried)
        [samples] = measure([(0, 1)], plan)
        used = max(tolerance_used(_median(s), ideal_seconds(s.bytes, rate)) for s in samples[1:])
        best = min(best, (used, tried))
        if used < _GOOD:
            break
    found = best[1]
    cluster.set_rate(nodes, found)
    return found


def throttle(nodes: int, rate: float, cache: Path | None = None) -> Throttle:
    """Throttles the links as `calibrate` finds, or as it found in the last hours on this boot of the machine.

    `cache` is a folder of such findings; None calibrates always.
    """
    path = None
    if cache is not None and rate > SLOW:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        path = cache / f"{boot}-{rate:.0f}.json"
        kept = _kept(path, rate)
        if kept is not None:
            cluster.set_rate(nodes, kept)
            return kept
    found = calibrate(nodes, rate)
    if path is not None:
        write_atomic(path, json.dumps(found))
    return found


def _kept(path: Path, rate: float) -> Throttle | None:
    """The finding in a file of the last hours; None without one, or if this version wouldn't have written
    it."""
    try:
        if time.time() - path.stat().st_mtime >= _CACHE_SECONDS:
            return None
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return next((candidate for candidate in _candidates(rate) if list(candidate) == fields), None)


def check(nodes: int, rate: float, message_sizes: list[int]) -> dict[str, Any]:
    """Times messages of these sizes (bytes) from node 0 to node 1. Inside the sandbox, links throttled.

    Returns sizes (each with bytes, mode, milliseconds, ideal, verdict), both_ways, rtt_ms, lost_packets,
    congestion_control, faithful and notes.
    """
    notes = ["no latency emulated", f"ideal times count {HEADERS} bytes of headers a segment of {SEGMENT}"]
    longest = max(SEGMENT, int(rate / 8 * _CHECK_SECONDS))
    sizes = sorted({min(max(1, s), longest) for s in message_sizes})
    if any(s > longest for s in message_sizes):
        notes.append(f"longer messages were tested by {longest} bytes")
    lost = cluster.dropped_packets(nodes)
    [samples] = measure([(0, 1)], [*_plan(sizes, rate), ("echo", 1, 50)])
    report = []
    for sample in samples:
        if sample.mode in ("idle", "stream"):
            ideal = ideal_seconds(sample.bytes, rate)
            report.append(_line(sample, ideal))
    both = min(sizes[-1], max(1, int(rate / 8 * _MODE_SECONDS)))
    count = max(1, min(15, int(_MODE_SECONDS / ideal_seconds(both, rate))))
    ways = measure([(0, 1), (1, 0)], [("stream", both, count)], together=True)
    return {
        "rate": rate,
        "sizes": report,
        "both_ways": [_line(way[0], ideal_seconds(both, rate)) for way in ways],
        "rtt_ms": round(_median(samples[-1]) * 1e3, 4),
        "lost_packets": cluster.dropped_packets(nodes) - lost,
        "congestion_control": cluster.congestion_control(),
        "faithful": all(line["verdict"] == "ok" for line in report),
        "notes": notes,
    }


def _line(sample: Sample, ideal: float) -> dict[str, Any]:
    seconds = _median(sample)
    return {
        "bytes": sample.bytes,
        "mode": sample.mode,
        "ms": round(seconds * 1e3, 4),
        "ideal_ms": round(ideal * 1e3, 4),
        "verdict": verdict(seconds, ideal),
    }


def throttle_and_check(
    nodes: int, rate: float, message_sizes: list[int], cache: Path | None = None
) -> dict[str, Any]:
    """Throttles the links to `rate` bits/s and checks them at these message sizes (bytes).

    A link that comes out wrong is checked once more, because other guests of the host come and go; a fast one
    is calibrated for these very sizes before. Returns `check`'s report with `throttle`, the asked rates and
    bursts, and `checks`, how many it took. Inside the sandbox only.
    """
    found = throttle(nodes, rate, cache)
    report, checks = check(nodes, rate, message_sizes), 1
    if not report["faithful"]:
        if rate > SLOW:
            longest = int(rate / 8 * 0.05)
            found = calibrate(nodes, rate, sorted({min(s, longest) for s in message_sizes}))
        report, checks = check(nodes, rate, message_sizes), 2
    return {"throttle": found._asdict(), "checks": checks, **report}


def summary(report: dict[str, Any]) -> str:
    """One line for people: faithful or not, and how each message size came out."""
    sizes = ", ".join(
        f"{line['bytes']} B {line['mode']} {line['ms']:g} ms (ideal {line['ideal_ms']:g}) {line['verdict']}"
        for line in report["sizes"]
    )
    head = "link faithful" if report["faithful"] else "link not faithful"
    return f"{head}: {sizes}; round trip {report['rtt_ms']:g} ms, {report['lost_packets']} packets lost"
