"""The link check: its arithmetic, and that a throttled link is never faster than its rate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslide.bench import cluster, link
from dslide.bench.spec import allotted_cores


def test_frames_are_counted() -> None:
    assert link.frame_bytes(1448) == 1514 and link.frame_bytes(1449) == 1449 + 132
    assert link.ideal_seconds(1448, 1514 * 8) == 1.0


def test_verdicts() -> None:
    assert link.verdict(0.89, 1.0) == "early"
    assert link.verdict(0.91, 1.0) == link.verdict(1.0999, 1.0) == "ok"
    assert link.verdict(1.1002, 1.0) == "late"
    assert link.verdict(0.0002, 0.0001) == "ok"  # a tenth of a millisecond is allowed to any message
    assert link.verdict(0.00022, 0.0001) == "late"


def test_the_tolerance_is_used_up_where_the_verdict_changes() -> None:
    for ideal in (1e-4, 1.0):
        assert link.tolerance_used(0.9 * ideal, ideal) == pytest.approx(1)
        assert link.tolerance_used(1.1 * ideal + 1e-4, ideal) == pytest.approx(1)
        assert link.tolerance_used(ideal, ideal) == 0


def test_the_summary_names_each_size() -> None:
    line = {"bytes": 38000, "mode": "idle", "ms": 3.1, "ideal_ms": 3.18, "verdict": "ok"}
    report = {"faithful": True, "sizes": [line], "rtt_ms": 0.03, "lost_packets": 0}
    assert link.summary(report).startswith("link faithful: 38000 B idle 3.1 ms (ideal 3.18) ok")


@pytest.mark.parametrize("text", ['{"x":', "[]", "7", "[1e9, 1, 1e9, 65536]", "\xff"])
def test_a_kept_throttle_that_is_damaged_or_of_another_version_is_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    assert link._kept(path, 1e9) is None
    path.write_bytes(text.encode("latin-1"))
    assert link._kept(path, 1e9) is None
    found = cluster.Throttle.nominal(1e9, 1.35, 12288)
    path.write_text(json.dumps(found))
    assert link._kept(path, 1e9) == found
    assert link._kept(path, 2e9) is None
    os.utime(path, (0, 0))  # too long ago
    assert link._kept(path, 1e9) is None


@pytest.mark.root
def test_a_throttled_link_keeps_to_its_rate() -> None:
    """Other work makes a link late, so only the other side is asserted: nothing is faster than the rate."""
    code = f"""
import json
from dslide.bench import cluster, link
cluster.prepare_sandbox()
cluster.make_nodes([[{allotted_cores()[0]}]] * 2)
report = link.throttle_and_check(2, 2e7, [40_000, 10_000_000])
print(json.dumps(report))
"""
    command = cluster.sandbox_command([sys.executable, "-c", code], network=True)
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(result.stdout)
    assert [(line["bytes"], line["mode"]) for line in report["sizes"]] == [
        (40_000, "idle"), (40_000, "stream"), (2_500_000, "idle")
    ]  # fmt: skip
    for line in report["sizes"] + report["both_ways"]:
        assert line["ms"] > 0.85 * line["ideal_ms"], line
        assert line["verdict"] == link.verdict(line["ms"] / 1e3, line["ideal_ms"] / 1e3)
    assert report["faithful"] == all(line["verdict"] == "ok" for line in report["sizes"])
    assert report["lost_packets"] >= 0 and report["rtt_ms"] > 0 and report["congestion_control"]
    assert (
        any("2500000 bytes" in note for note in report["notes"]) and "no latency emulated" in report["notes"]
    )
