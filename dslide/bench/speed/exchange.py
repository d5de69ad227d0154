"""The exchange of a training step between ranks, without the step: on loopback and on throttled links."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from dslide.bench import cluster, commands, link
from dslide.bench.spec import allotted_cores, bits_per_second
from dslide.bench.speed.measure import Row, absent, last_line
from dslide.bench.speed.sizes import Size
from dslide.comm import payload_per_point

RANKS = (2, 4)
BANDWIDTHS = (None, "100mbit", "1gbit")
WIRES = ("fp32", "int8")
FIGURE = ("exchange", "points/s")


def exchange(size: Size, threads: int, **_: Any) -> list[Row]:
    """Points a second that the exchange alone allows, by ranks, link and format.

    The bound of a throttled link is its rate over the bytes that a node sends a point; a loopback has none.
    """
    if commands.program("mpirun") is None:
        return [absent(*FIGURE, "mpirun is missing: pip install 'dslide[mpi]'")]
    reason = cluster.unavailable()
    rows = [] if reason is None else [absent(*FIGURE, f"throttled links: {reason}")]
    quick = size.labels < 10_000
    for ranks in RANKS[:1] if quick else RANKS:
        for bandwidth in BANDWIDTHS[:1] if quick or reason is not None else BANDWIDTHS:
            rows += _measure(size, ranks, bandwidth)
    return rows


def _measure(size: Size, ranks: int, bandwidth: str | None) -> list[Row]:
    batch = 256 if 256 in size.batches else size.batches[0]
    request = {
        "ranks": ranks,
        "bandwidth": bandwidth,
        "batch": batch,
        "hidden": size.hidden,
        "wires": WIRES,
        "seconds": size.seconds / 2,
    }
    command = [sys.executable, "-m", "dslide.bench.speed.exchange", json.dumps(request)]
    if bandwidth is not None:
        command = cluster.sandbox_command(command, network=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    where = f"{ranks} ranks, {bandwidth or 'loopback'}"
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or not lines:
        return [absent(*FIGURE, f"{where}: {last_line(result.stderr)}")]
    over = ", more ranks than cores" if ranks > len(allotted_cores()) else ""
    rows = []
    for found in lines:
        times = sorted(found["seconds"])
        a_node = payload_per_point(size.hidden, ranks, found["wire"]) / ranks
        rows.append(
            Row(
                "exchange",
                f"{where}, {found['wire']}, batch {batch}",
                batch / times[len(times) // 2],
                batch / times[-1],
                batch / times[0],
                "points/s",
                len(times),
                bound=bits_per_second(bandwidth) / 8 / a_node if bandwidth else None,
                note=f"{a_node:,.0f} B a point sent by a node{over}",
            )
        )
    return rows


def _launch(request: dict[str, Any]) -> None:
    """Starts the ranks; inside the sandbox on throttled nodes."""
    nodes, sets = request["ranks"], []
    if request["bandwidth"] is not None:
        os.environ["TMPDIR"] = str(cluster.prepare_sandbox())
        cores = allotted_cores()
        sets = cluster.core_sets(cores, nodes, max(1, len(cores) // nodes))
        cluster.make_nodes(sets)
        link.throttle(nodes, bits_per_second(request["bandwidth"]))
    with tempfile.TemporaryDirectory() as reports:
        ranks = [sys.executable, "-m", "dslide.bench.speed.exchange_rank", json.dumps(request)]
        command, env = commands.ranks_here(nodes, 1, ranks, reports, sets)
        code = subprocess.run(command, env=env, check=False).returncode
    raise SystemExit(code)


if __name__ == "__main__":
    _launch(json.loads(sys.argv[1]))
