"""One rank of the exchange benchmark, under mpirun; rank 0 prints a line of JSON a format."""

import json
import sys
import time
from typing import Any

import numpy as np

from dslide import comm as comms
from dslide.comm import Exchange, cuts
from dslide.network import STATE_BLOCK


def one_step(exchange: Exchange, rows: int, lse: np.ndarray) -> None:
    """All that a training step of `rows` points exchanges; the buffers hold what they hold."""
    whole = slice(0, rows)
    exchange.gather(rows)
    exchange.start_normalise(lse[:rows], whole)
    exchange.finish_normalise(whole)
    exchange.scatter(whole)
    exchange.collect(rows)


def run(request: dict[str, Any]) -> None:
    """Times steps of each format for about the seconds asked for."""
    comm = comms.world()
    rows, lse = request["batch"], np.zeros(request["batch"], np.float32)
    for wire in request["wires"]:
        exchange = Exchange(comm, cuts(request["hidden"], comm.size, STATE_BLOCK), wire, rows)
        exchange.own(rows)[:] = np.random.default_rng(comm.rank).standard_normal(exchange.own(rows).shape)
        begin = time.perf_counter()
        for _ in range(3):
            one_step(exchange, rows, lse)
        pace = comm.agree((time.perf_counter() - begin) / 3)
        steps = int(comm.bcast(min(2000, max(5, int(request["seconds"] / pace)))))
        seconds = []
        comm.barrier()
        for _ in range(steps):
            begin = time.perf_counter()
            one_step(exchange, rows, lse)
            seconds.append(time.perf_counter() - begin)
        if comm.rank == 0:
            print(json.dumps({"wire": wire, "seconds": seconds}), flush=True)
        comm.barrier()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
