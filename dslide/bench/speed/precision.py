"""What the number formats of weights and wire cost and save, in whole runs: accuracy, speed, memory."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dslide.bench import commands
from dslide.bench.speed.measure import Row, last_line
from dslide.bench.speed.sizes import Size
from dslide.config import merge
from dslide.errors import UserError

BENCH = "precision"
SEEDS = 3
DATA = "debian-deps"  # without --data: on generated points nothing can be learnt
# (name, ranks, settings); ranks of one machine, unthrottled, share its threads.
FORMATS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("weights float32", 1, {"precision": "float32"}),
    ("weights bfloat16", 1, {"precision": "bfloat16"}),
    ("2 ranks, wire fp32", 2, {"wire": "fp32"}),
    ("2 ranks, wire bf16", 2, {"wire": "bf16"}),
    ("2 ranks, wire int8", 2, {"wire": "int8"}),
    ("2 ranks, wire int8, weights bfloat16", 2, {"wire": "int8", "precision": "bfloat16"}),
)
FIGURES = (
    ("P@1", "%", lambda result: 100 * result["p1"]),
    ("P@5", "%", lambda result: 100 * result["p5"]),
    ("training", "samples/s", lambda result: result["samples_per_second"]),
    ("memory", "bytes a parameter", lambda result: result["bytes_per_parameter"]),
    ("sent", "bytes a sample", lambda result: result["bytes_sent"] / result["samples"]),
)


def precision(size: Size, threads: int, *, source: str | None, sets: dict[str, Any], **_: Any) -> list[Row]:
    """Complete runs of every format with the same seeds: the median over seeds and the range.

    Each run is a process of its own (`dslide train`), so that its memory is its own.
    """
    quick = size.labels < 10_000 and source is None
    formats, seeds = (FORMATS[:2], 1) if quick else (FORMATS, SEEDS)
    if commands.program("mpirun") is None:
        formats = tuple(format_ for format_ in formats if format_[1] == 1)
    rows = []
    for name, ranks, settings in formats:
        overrides = merge(merge(sets, settings), {"epochs": 0.2, "eval_epochs": [0.2]} if quick else {})
        results = [
            _train(source or DATA, ranks, max(1, threads // ranks), merge(overrides, {"seed": seed}))
            for seed in range(seeds)
        ]
        for figure, unit, value_of in FIGURES:
            values = sorted(value_of(result) for result in results)
            if values[-1] > 0:  # one rank sends nothing
                middle = statistics.median(values)
                rows.append(Row(BENCH, f"{name}: {figure}", middle, values[0], values[-1], unit, seeds))
    return rows


def _train(source: str, ranks: int, threads: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """The result of one run that is not kept; UserError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(overrides))
        command = [
            sys.executable,
            "-m",
            "dslide",
            "train",
            "--data",
            source,
            "--json",
            "--config",
            str(config),
        ]
        command += ["--out", str(Path(folder) / "run"), "--threads", str(threads)]
        env = {**os.environ, **commands.thread_variables(threads)}
        if ranks > 1:
            command, env = commands.ranks_here(ranks, threads, command, folder)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(f"bench precision: a run on {source} failed: {last_line(done.stderr)}")
        return json.loads(done.stdout)  # type: ignore[no-any-return]
