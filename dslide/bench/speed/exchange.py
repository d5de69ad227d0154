"""The exchange of a training step between ranks: by itself, and within steps that hide it."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from dslide.bench import cluster, commands, link
from dslide.bench.spec import allotted_cores, bits_per_second
from dslide.bench.speed import exchange_steps
from dslide.bench.speed.measure import Row, absent, last_line
from dslide.bench.speed.sizes import Size
from dslide.comm import payload_per_point
from dslide.config import build_config

RANKS = (2, 4)
LINKS = exchange_steps.LINKS
WIRES = ("fp32", "int8")
FIGURE = ("exchange", "points/s")


def exchange(
    size: Size,
    threads: int,
    *,
    source: str | None,
    sets: dict[str, Any],
    only: tuple[str, ...] = LINKS,
    **_: Any,
) -> list[Row]:
    """Points a second that the exchange alone allows, by ranks, link and format; then samples a second of
    whole steps on two nodes (dslide.bench.speed.exchange_steps).

    The bound of a throttled link is its rate over the bytes that a node sends a point; a loopback has none.
    `only`: which of LINKS; a loopback, and steps without a limit, are always measured.
    """
    if commands.program("mpirun") is None:
        return [absent(*FIGURE, "mpirun is missing: pip install 'dslide[mpi]'")]
    reason = cluster.unavailable()
    rows = [] if reason is None else [absent(*FIGURE, f"throttled links: {reason}")]
    quick = size.labels < 10_000
    links = [] if quick or reason is not None else [name for name in LINKS if name in only]
    for ranks in RANKS[:1] if quick else RANKS:
        for bandwidth in (None, *links):
            rows += _alone(size, ranks, bandwidth)
    return rows + _steps(size, source, sets, links, nodes=reason is None)


def _batch(size: Size) -> int:
    return 256 if 256 in size.batches else size.batches[0]


def _alone(size: Size, ranks: int, bandwidth: str | None) -> list[Row]:
    batch = _batch(size)
    request = {
        "module": "dslide.bench.speed.exchange_rank",
        "ranks": ranks,
        "links": [bandwidth] if bandwidth else [],
        "batch": batch,
        "hidden": size.hidden,
        "wires": WIRES,
        "seconds": size.seconds / 2,
    }
    where = f"{ranks} ranks, {bandwidth or 'loopback'}"
    lines = _lines(request, nodes=bandwidth is not None)
    if isinstance(lines, str):
        return [absent(*FIGURE, f"{where}: {lines}")]
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


def _steps(
    size: Size, source: str | None, sets: dict[str, Any], links: list[str], *, nodes: bool
) -> list[Row]:
    batch = _batch(size)
    found = _lines(exchange_steps.request_of(size, source, sets, batch, links), nodes=nodes)
    if isinstance(found, str):
        return [absent("exchange", "samples/s", f"training steps: {found}")]
    return exchange_steps.rows(found, batch, size.hidden, build_config("default", None, sets).wire)


def _lines(request: dict[str, Any], *, nodes: bool) -> list[dict[str, Any]] | str:
    """What the ranks of `request` printed, on virtual nodes or else on this machine; or why nothing."""
    command = [sys.executable, "-m", "dslide.bench.speed.exchange", json.dumps({**request, "nodes": nodes})]
    if nodes:
        command = cluster.sandbox_command(command, network=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return lines if result.returncode == 0 and lines else last_line(result.stderr)


def _launch(request: dict[str, Any]) -> None:
    """Starts the ranks; with `nodes` in the sandbox on virtual nodes, whose links are left as the last of
    `links`. The ranks get every link's throttle."""
    ranks, sets = request["ranks"], []
    request["throttles"] = {}
    if request["nodes"]:
        os.environ["TMPDIR"] = str(cluster.prepare_sandbox())
        os.environ["DSLIDE_INTERFACE"] = cluster.INTERFACE
        cores = allotted_cores()
        sets = cluster.core_sets(cores, ranks, max(1, len(cores) // ranks))
        cluster.make_nodes(sets)
        for name in request["links"]:
            request["throttles"][name] = link.throttle(ranks, bits_per_second(name))
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", request["module"], json.dumps(request)]
        command, env = commands.ranks_here(ranks, 1, command, reports, sets)
        code = subprocess.run(command, env=env, check=False).returncode
    raise SystemExit(code)


if __name__ == "__main__":
    _launch(json.loads(sys.argv[1]))
