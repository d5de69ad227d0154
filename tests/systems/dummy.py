"""A system for the harness's tests: exchanges bytes point to point and misbehaves as told."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Literal

import numpy as np
from pydantic import BaseModel

from dslide.bench.records import Recorder
from dslide.bench.spec import RunSpec
from dslide.errors import UserError

NAME = "dummy"
TITLE = "A dummy"


class Settings(BaseModel, extra="forbid"):
    """What it does."""

    bytes: int = 0  # each way and step
    steps: int = 3
    step_seconds: float = 0.0
    transport: str = "mpi"
    bad_rank: int = 1
    bad: Literal["", "raise", "user", "kill", "hang", "exit", "noend", "skip"] = ""


def skip(spec: RunSpec) -> str | None:
    return "told to skip" if spec.settings.get("bad") == "skip" else None


def launcher(spec: RunSpec) -> str:
    return "mpi" if spec.cluster.nodes > 1 else "local"


def message_sizes(spec: RunSpec) -> list[int]:
    return [max(1, spec.settings.get("bytes", 0))]


def environment(spec: RunSpec) -> dict[str, str]:
    return {"DUMMY": "1"}


def _misbehave(settings: Settings, rank: int) -> None:
    if not settings.bad or rank != min(settings.bad_rank, int(os.environ["DSLIDE_SIZE"]) - 1):
        return
    if settings.bad == "raise":
        raise ValueError("told to raise")
    if settings.bad == "user":
        raise UserError("data.txt:3: told to complain")
    if settings.bad == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.bad == "exit":
        os._exit(7)
    if settings.bad == "hang":
        time.sleep(3600)


def run(spec: RunSpec, recorder: Recorder) -> None:
    settings = Settings.model_validate(spec.settings)
    assert os.environ["DUMMY"] == "1"
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "DSLIDE_THREADS")
    recorder.meta(
        dummy={"affinity": sorted(os.sched_getaffinity(0)), "threads": {v: os.environ[v] for v in variables}}
    )
    recorder.start()
    points = SimpleNamespace(y_indptr=np.arange(5), y_indices=np.zeros(4, np.int32))
    ids = np.tile(np.arange(5, dtype=np.int32), (4, 1))
    out, back = np.zeros(settings.bytes, np.uint8), np.empty(settings.bytes, np.uint8)

    def step() -> None:
        if settings.step_seconds:
            time.sleep(settings.step_seconds)
        if recorder.size > 1 and settings.bytes:
            from mpi4py import MPI

            peer = recorder.rank ^ 1
            MPI.COMM_WORLD.Sendrecv(out, peer, 0, back, peer, 0)

    recorder.evaluation(0, 0, 0.0, ids, None, points)
    if spec.pace_steps:
        recorder.pace(step, warmup=spec.pace_warmup, steps=spec.pace_steps)
    else:
        recorder.clock.start()
        for number in range(settings.steps):
            step()
            if number == 0:
                _misbehave(settings, recorder.rank)
            recorder.heartbeat(number, settings.steps)
        recorder.clock.stop()
        recorder.evaluation(settings.steps, settings.steps, 1.0, ids, None, points)
    if settings.bad != "noend":
        recorder.end("done", payload_bytes=settings.bytes * settings.steps, steps=settings.steps)
