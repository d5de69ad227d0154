"""Training steps of two nodes over links: how much of the exchange each way of hiding it hides.

A node has one core and one thread. All ways, links and one rank alone take turns in one run, a group of steps
each, so that what else the machine does meets all of them. The bound of a link is the smaller of the speed
without a limit and the link's rate over the frames of the bytes that a node sends a point.

    mpirun -n 2 python -m dslide.bench.speed.exchange_steps REQUEST      the ranks that measure
"""

import dataclasses
import json
import sys
from statistics import median
from typing import Any

from dslide import comm as comms
from dslide.bench import cluster
from dslide.bench.link import ideal_seconds
from dslide.bench.spec import bits_per_second
from dslide.bench.speed.measure import Row
from dslide.bench.speed.sizes import Size, generated
from dslide.bench.speed.training import Setting, ready
from dslide.comm import LocalComm, payload_per_point
from dslide.config import merge
from dslide.data import Dataset, load
from dslide.trainer import Trainer

NODES = 2
LINKS = ("1gbit", "100mbit", "10mbit")
FREE, ALONE = "no limit", "one rank"
WAYS: dict[str, dict[str, Any]] = {
    "whole batches": {"parts": 1},
    "halves": {"parts": 2},
    "thirds": {"parts": 3},
    "one step late": {"stale_after": 0},
}
ROUNDS = 5


def rows(found: list[dict[str, Any]], batch: int, hidden: int, wire: str) -> list[Row]:
    """The figures of what the ranks measured: lines of `_rank`, in any order."""
    speed = {(line["link"], line["way"]): median(line["rates"]) for line in found}
    free = max((rate for (link, way), rate in speed.items() if link == FREE and way != ALONE), default=None)
    sent = payload_per_point(hidden, NODES, wire) / NODES
    made = []
    for line in found:
        link, way, rates = line["link"], line["way"], line["rates"]
        bound, note = None, None
        if link in LINKS and free is not None:
            bound = min(free, batch / ideal_seconds(int(batch * sent), bits_per_second(link)))
        if way != ALONE:
            seen = f"{line['bytes']:,.1f} B seen on the interface, " if line["bytes"] else ""
            note = f"a sample and node: {seen}{line['payload']:,.1f} B of payload"
        made.append(
            Row(
                "exchange",
                f"{NODES} ranks, {link}, {wire}, batch {batch}, {way}"
                if way != ALONE
                else f"{ALONE}, batch {batch}",
                speed[link, way],
                min(rates),
                max(rates),
                "samples/s",
                len(rates),
                bound=bound,
                rival=speed.get((FREE, ALONE)) if way != ALONE else None,
                rival_name=ALONE if way != ALONE else None,
                note=note,
            )
        )
    return made


def _trainer(request: dict[str, Any], dataset: Dataset, comm: LocalComm, way: dict[str, Any]) -> Trainer:
    sets = merge(request["sets"], {"exchange": way})
    default = Setting("exchange", "default", {})
    trainer = ready(dataset, default, request["batch"], 1, request["hidden"], sets, comm)
    trainer._steps(10)  # rows come into the cache, messages find their buffers
    return trainer


def _group(trainer: Trainer, seconds: float) -> tuple[float, float, float]:
    """Some steps: samples a second; bytes on the interface and of payload that a sample takes."""
    comm, clock = trainer.comm, trainer.recorder.clock

    def timed(steps: int) -> float:
        before = clock.seconds
        clock.start()
        trainer._steps(trainer.step + steps)
        clock.stop()
        return clock.seconds - before

    steps = max(10, round(seconds / comm.bcast(timed(5)) * 5))
    payload, seen, samples = comm.payload_bytes, clock.tx_bytes, trainer.samples
    took = timed(steps)
    samples = trainer.samples - samples
    return samples / took, (clock.tx_bytes - seen) / samples, (comm.payload_bytes - payload) / samples


def _rank(request: dict[str, Any]) -> None:
    """Measures; rank 0 prints a line of JSON a way and link. `throttles`: of each link, as
    dslide.bench.cluster.Throttle; none without virtual nodes."""
    comm = comms.world()
    size = Size(**{**request["size"], "batches": tuple(request["size"]["batches"])})
    dataset = load(request["source"]) if request["source"] else generated(size)
    trainers = {way: _trainer(request, dataset, comm, exchange) for way, exchange in WAYS.items()}
    alone = _trainer(request, dataset, LocalComm(), {}) if comm.rank == 0 else None
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(request["rounds"]):
        for link, throttle in {FREE: None, **request["throttles"]}.items():
            if comm.rank == 0 and request["throttles"]:
                cluster.set_rate(comm.size, None if throttle is None else cluster.Throttle(*throttle))
            for way, trainer in trainers.items():
                found.setdefault((link, way), []).append(_group(trainer, request["seconds"]))
        if alone is not None:
            found.setdefault((FREE, ALONE), []).append(_group(alone, request["seconds"]))
        comm.rest()
    if comm.rank == 0:
        for (link, way), groups in found.items():
            line: dict[str, Any] = {"link": link, "way": way, "rates": [group[0] for group in groups]}
            line |= {"bytes": median(g[1] for g in groups), "payload": median(g[2] for g in groups)}
            print(json.dumps(line), flush=True)


def request_of(
    size: Size, source: str | None, sets: dict[str, Any], batch: int, links: list[str]
) -> dict[str, Any]:
    """What `_rank` is asked for, the throttles aside, which the sandbox finds for `links`."""
    return {
        "module": __name__,
        "size": dataclasses.asdict(size),
        "source": source,
        "sets": sets,
        "batch": batch,
        "hidden": size.hidden,
        "links": links,
        "ranks": NODES,
        "rounds": ROUNDS,
        "seconds": size.seconds / 8,
    }


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
