"""How the speed of a training step moves with threads, ranks, batch and hidden units, one at a time.

The default recipe; ranks have a thread each and exchange over loopback. Where cores run out, a projection
stands beside the measured ranks, for P nodes with a core each, joined by links of W bytes a second:

    step = C(P) + B b(P) / W + 3 (P - 1) c

C(P): seconds that a rank computes, measured with the shard of one of P ranks alone on a core, packing and
unpacking of what it would exchange included. b(P): bytes that a node sends a point
(dslide.comm.payload_per_point / P), B points a batch. c: seconds a message, measured between two ranks with
messages of one point; a step has three exchanges with P - 1 peers each. Nothing overlaps.

    mpirun -n P python -m dslide.bench.speed.scaling REQUEST      the ranks that measure
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import numpy as np

from dslide import comm as comms
from dslide.bench import commands
from dslide.bench.records import Recorder
from dslide.bench.spec import allotted_cores, bits_per_second
from dslide.bench.speed.exchange_rank import one_step
from dslide.bench.speed.measure import Row, absent, last_line
from dslide.bench.speed.sizes import Size, generated
from dslide.comm import Exchange, LocalComm, cuts, payload_per_point
from dslide.config import TrainConfig, build_config, merge
from dslide.data import Dataset, load
from dslide.network import STATE_BLOCK
from dslide.step import TRIAL_STEPS
from dslide.trainer import Trainer

BENCH = "scaling"
BATCH = 256
REPEATS = 5
SAMPLES = 256_000  # a figure's: a second or more
AXES = ("threads", "ranks", "batch", "hidden")
RANKS, LINKS = (1, 2, 4, 8), ("100mbit", "1gbit")
BATCHES, HIDDEN = (64, 128, 256, 512, 1024, 2048, 4096), (64, 128, 256, 512, 1024)
OVERSUBSCRIBED = "more ranks than cores"
PROJECTION = (
    "projected ranks: seconds a step = C(P) + B b(P) / W + 3 (P - 1) c; C: a shard's computation alone on a "
    "core, b: bytes that a node sends a point, W: the link's bytes a second, c: seconds a message"
)


def scaling(
    size: Size,
    threads: int,
    *,
    dataset: Dataset,
    source: str | None,
    sets: dict[str, Any],
    only: tuple[str, ...] = AXES,
    **_: Any,
) -> list[Row]:
    """Samples a second; cases "threads 2", "batch 64", "hidden 512", "ranks 4", "ranks 4, projected, 1gbit".

    `only`: which of AXES.
    """
    quick = size.labels < 10_000
    numbers = {
        "threads": sorted({*(2**i for i in range(threads.bit_length())), threads}),
        "batch": [n for n in BATCHES if n <= size.points],
        "hidden": list(HIDDEN[:2] if quick else HIDDEN),
    }
    base = {"threads": threads, "batch": BATCH, "hidden": size.hidden}
    rows = []
    for axis in (axis for axis in AXES if axis in only):
        for number in numbers.get(axis, ()):
            config = _config(sets, **{**base, axis: number})
            rows.append(_row(f"{axis} {number}", config, _step_seconds(config, dataset, LocalComm())))
    return rows + (
        _ranks(RANKS[:2] if quick else RANKS, size, dataset, source, sets) if "ranks" in only else []
    )


def step_seconds(compute: float, node_bytes: float, bandwidth: float, ranks: int, message: float) -> float:
    """The projection: seconds of a step of `ranks` nodes (formula above).

    compute: C(P), seconds. node_bytes: B b(P), bytes that a node sends a step. bandwidth: W, bytes a second,
    math.inf without a limit. message: c, seconds.
    """
    return compute + node_bytes / bandwidth + 3 * (ranks - 1) * message


class _ShardAlone(LocalComm):
    """Rank 0 of several of which the others are absent: nothing arrives, the buffers keep zeros."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def _config(sets: dict[str, Any], *, threads: int, batch: int, hidden: int) -> TrainConfig:
    protocol = {"batch_size": batch, "epochs": 1e6, "threads": threads, "network": {"hidden": hidden}}
    return build_config("default", None, merge(protocol, sets))


def _step_seconds(config: TrainConfig, dataset: Dataset, comm: LocalComm) -> list[float]:
    """Seconds a step on the slowest rank, means of REPEATS groups of steps; empty on other ranks than 0."""
    recorder = Recorder.of(comm, None)
    steps = REPEATS if dataset.num_labels < 10_000 else max(2 * REPEATS, SAMPLES // config.batch_size)
    points = len(dataset.train) // config.batch_size * config.batch_size  # whole batches
    dataset = dataclasses.replace(dataset, train=dataset.train.take(np.arange(points)))
    Trainer(config, dataset, comm, recorder).time_steps(TRIAL_STEPS + 3, steps)
    seconds = [event["seconds"] for event in recorder.events if event["event"] == "step"]
    return [float(group.mean()) for group in np.array_split(seconds, REPEATS) if len(group)]


def _row(case: str, config: TrainConfig, seconds: list[float], note: str | None = None) -> Row:
    value, low, high = (
        config.batch_size / second for second in (median(seconds), max(seconds), min(seconds))
    )
    return Row(BENCH, case, value, low, high, "samples/s", len(seconds), note=note)


def _ranks(
    counts: tuple[int, ...], size: Size, dataset: Dataset, source: str | None, sets: dict[str, Any]
) -> list[Row]:
    """Measured ranks, a shard's computation alone, the time of a message, and the projections."""
    if commands.program("mpirun") is None:
        return [absent(BENCH, "samples/s", "ranks: mpirun is missing: pip install 'dslide[mpi]'")]
    request = {"size": dataclasses.asdict(size), "source": source, "sets": sets}
    config = _config(sets, threads=1, batch=BATCH, hidden=size.hidden)
    rows, shards, message = [], {}, None
    for ranks in counts:
        found = _launch(ranks, request)
        if "failed" in found:
            rows.append(absent(BENCH, "samples/s", f"ranks {ranks}: {found['failed']}"))
            continue
        over = f", {OVERSUBSCRIBED}" if ranks > len(allotted_cores()) else ""
        rows.append(_row(f"ranks {ranks}{over}", config, found["seconds"]))
        if ranks == 2:
            message = sorted(found["messages"])
    for ranks in counts:
        shards[ranks] = _step_seconds(config, dataset, _ShardAlone(ranks))
        rows.append(_row(f"ranks {ranks}, a shard's computation alone", config, shards[ranks]))
    if message is None:
        return rows
    low, middle, high = message[0], median(message), message[-1]
    rows.append(
        Row(BENCH, "seconds a message", middle, low, high, "s", len(message), note="two ranks, loopback")
    )
    return rows + [
        _projected(ranks, link, config, seconds, middle)
        for link in (None, *LINKS)
        for ranks, seconds in shards.items()
    ]


def _projected(ranks: int, link: str | None, config: TrainConfig, shard: list[float], message: float) -> Row:
    sent = BATCH * payload_per_point(config.network.hidden, ranks, config.wire) / ranks
    bandwidth = bits_per_second(link) / 8 if link else float("inf")
    seconds = [step_seconds(second, sent, bandwidth, ranks, message) for second in shard]
    note = f"{sent:,.0f} bytes a node and step"
    return _row(f"ranks {ranks}, projected, {link or 'no limit'}", config, seconds, note)


def _launch(ranks: int, request: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of `_rank` printed, or {"failed": why}."""
    command = [sys.executable, "-m", "dslide.bench.speed.scaling", json.dumps(request)]
    with tempfile.TemporaryDirectory() as reports:
        command, env = commands.ranks_here(ranks, 1, command, reports)
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    line = next((line for line in result.stdout.splitlines() if line.startswith("{")), None)
    if result.returncode != 0 or line is None:
        return {"failed": last_line(result.stderr)}
    return dict(json.loads(line))


def _rank(request: dict[str, Any]) -> None:
    size = Size(**{**request["size"], "batches": tuple(request["size"]["batches"])})
    dataset = load(request["source"]) if request["source"] else generated(size)
    config = _config(request["sets"], threads=1, batch=BATCH, hidden=size.hidden)
    comm = comms.world()
    seconds = _step_seconds(config, dataset, comm)
    messages = _message_seconds(comm, size.hidden, config.wire) if comm.size > 1 else []
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds, "messages": messages}), flush=True)


def _message_seconds(comm: LocalComm, hidden: int, wire: str) -> list[float]:
    """Seconds a message: medians of 20 steps' exchanges of one point, a third of each, over the peers."""
    exchange, lse = Exchange(comm, cuts(hidden, comm.size, STATE_BLOCK), wire, 1), np.zeros(1, np.float32)
    found = []
    for _ in range(6):
        times = []
        for _ in range(20):
            comm.barrier()
            begin = time.perf_counter()
            one_step(exchange, 1, lse)
            times.append(time.perf_counter() - begin)
        found.append(median(times) / (3 * (comm.size - 1)))
    return found[1:]


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
