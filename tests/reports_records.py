"""Record folders for the tests of the reports: shaped like real ones, with curves that a formula makes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MACHINE = {
    "cpu": {"model": "Example CPU 9000", "cores": 2, "allotted": 2, "instructions": ["avx2", "avx512f"]},
    "memory_bytes": 24 * 2**30,
    "kernel": "6.1",
    "core": {"instruction_set": "avx512"},
    "git": {"commit": "0123456789abcdef0123", "dirty": False},
}
DATASET = {"name": "debian-deps", "hash": "0" * 64, "num_features": 51333, "num_labels": 43171, "train_points": 42672,
           "test_points": 8786}  # fmt: skip
EPOCHS = [0, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15]


def write_run(
    folder: Path,
    evals: Sequence[tuple[int, float, int, float, float]],
    status: str = "done",
    *,
    meta: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
    steps: Sequence[float] = (),
) -> None:
    """A run with evaluations (step, epoch, samples, train_seconds, p1), timed steps (seconds) and an end."""
    folder.mkdir(parents=True)
    fields = {"schema_version": 1, "kind": "measured", "created": 0.0, "machine": MACHINE, "dataset": DATASET}
    (folder / "meta.json").write_text(json.dumps({**fields, **(meta or {})}))
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "train_seconds": 0.0}]
    for step, epoch, samples, seconds, p1 in evals:
        events.append({"event": "eval", "step": step, "epoch": epoch, "samples": samples, "train_seconds": seconds,
                       "p1": p1, "p3": p1 * 0.7, "p5": p1 * 0.55, "cpu_seconds": seconds})  # fmt: skip
    events += [{"event": "step", "step": i, "seconds": s, "train_seconds": 0.0} for i, s in enumerate(steps, 1)]
    last = evals[-1][3] if evals else 0.0
    events.append({"event": "end", "status": status, "train_seconds": last, **(end or {})})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def curve(
    speed: float, top: float, slow: float, epochs: float, *, batch: int = 256, start: float = 0.0, wiggle: float = 0.0
) -> list[tuple[int, float, int, float, float]]:
    """Evaluations of a run that makes `speed` samples/s and tends to `top` with `slow` epochs as its scale."""
    points = DATASET["train_points"]
    assert isinstance(points, int)
    rows = []
    for epoch in EPOCHS:
        if epoch <= epochs:
            step = math.ceil(epoch * points / batch)
            samples = min(step * batch, int(max(epoch, 1) * points)) if epoch else 0
            p1 = start + (top - start) * (1 - math.exp(-epoch / slow)) + wiggle * (epoch > 0)
            rows.append((step, epoch, samples, samples / speed, round(p1, 4)))
    return rows


def link(bandwidth: str | None, faithful: bool = True) -> dict[str, Any]:
    """The link part of the meta data."""
    return {"throttled": bandwidth is not None, "bandwidth": bandwidth, "faithful": faithful}


CLUSTERS: dict[str, dict[str, Any]] = {
    "one": {"nodes": 1, "cores": "auto"},
    "two-100mbit": {"nodes": 2, "cores": "auto", "bandwidth": "100mbit"},
    "two-1gbit": {"nodes": 2, "cores": "auto", "bandwidth": "1gbit"},
    "two-unthrottled": {"nodes": 2, "cores": "auto"},
}
ALL = ["one", "two-100mbit", "two-1gbit"]
NET = ["two-100mbit", "two-1gbit"]


def _composed() -> dict[str, Any]:
    return {"curve": "two-unthrottled", "paces": NET, "pace_steps": 20}


SYSTEMS: dict[str, dict[str, Any]] = {
    "dslide": {"system": "dslide_sharded", "label": "dslide", "settings": {"preset": "default"},
               "seeds": [0, 1, 2, 3, 4], "clusters": ALL},
    "slide": {"system": "dslide_sharded", "label": "slide (the papers' algorithm)", "settings": {"preset": "slide"},
              "seeds": [0], "clusters": ALL},
    "tf-full": {"system": "tensorflow_full", "label": "TensorFlow, full softmax, tuned", "clusters": ["one"]},
    "tf-recipe": {"system": "tensorflow_recipe", "label": "TensorFlow, our recipe", "clusters": ["one"]},
    "plt": {"system": "napkinxc_plt", "label": "napkinXC PLT, tuned", "clusters": ["one"]},
    "plt-default": {"system": "napkinxc_plt", "label": "napkinXC PLT, defaults", "clusters": ["one"]},
    "horovod-dense-published": {"system": "horovod_dense", "label": "Horovod dense, as published", "clusters": [],
                                "composed": _composed()},
    "horovod-dense-tuned": {"system": "horovod_dense", "label": "Horovod dense, tuned", "clusters": [],
                            "composed": _composed()},
    "horovod-recipe": {"system": "horovod_recipe", "label": "Horovod, our recipe", "clusters": NET},
}  # fmt: skip

# samples/s on one node, at 100 Mbit/s, at 1 Gbit/s; top P@1, scale in epochs, epochs run
_CURVES: dict[str, tuple[tuple[float, float, float], float, float, float]] = {
    "dslide": ((95_000, 61_000, 112_000), 0.412, 0.55, 6),
    "slide": ((5_200, 7_800, 9_100), 0.305, 1.6, 10),
    "tf-full": ((1_750, 0, 0), 0.403, 0.9, 6),
    "tf-recipe": ((14_500, 0, 0), 0.405, 0.6, 6),
    "horovod-dense-published": ((0, 54, 466), 0.41, 4.6, 4),
    "horovod-dense-tuned": ((0, 54, 466), 0.401, 0.95, 6),
    "horovod-recipe": ((0, 2_900, 9_800), 0.404, 0.6, 6),
}


def write_experiment(root: Path) -> tuple[Path, Path]:
    """A complete experiment under `root`: returns its YAML file and its results folder."""
    experiment, results = root / "default.yaml", root / "results" / "default"
    spec = {"name": "default", "data": "debian-deps", "targets": [0.25, 0.30], "clusters": CLUSTERS, "systems": SYSTEMS}
    experiment.parent.mkdir(parents=True, exist_ok=True)
    experiment.write_text(yaml.safe_dump(spec, sort_keys=False))
    for system, (speeds, top, slow, epochs) in _CURVES.items():
        spec = SYSTEMS[system]
        composed = "composed" in spec
        for cluster, speed in zip(ALL, speeds, strict=True):
            if speed == 0:
                continue
            for seed in spec.get("seeds", [0]):
                start = 0.012 if system == "dslide" else 0.0
                rows = curve(speed * (1 + 0.02 * seed), top, slow, epochs, start=start, wiggle=0.002 * (seed - 2) * (seed > 0))
                bandwidth = CLUSTERS[cluster].get("bandwidth")
                nodes = CLUSTERS[cluster]["nodes"]
                meta = {"kind": "composed" if composed else "measured", "cluster": {"nodes": nodes, "cores": 2 // nodes}}
                samples = rows[-1][2]
                end: dict[str, Any] = {"samples": samples}
                if nodes > 1:
                    meta["link"] = link(bandwidth)
                    each = {"dslide": 288, "slide": 288, "horovod-recipe": 42_000}.get(system, 96_768 * 4)
                    end |= {"payload_bytes": each * samples, "tx_bytes": int(each * samples * 1.05)}
                status = "timeout" if system == "horovod-dense-published" else "done"
                kind = "composed" if composed else "runs"
                write_run(results / kind / system / cluster / f"seed-{seed}", rows, status, meta=meta, end=end)
    write_run(results / "runs/plt/one/seed-0", [(1, 1.0, 42672, 23.0, 0.4206)])
    reason = {"reason": "napkinxc is not installed (pip install napkinxc)"}
    write_run(results / "runs/plt-default/one/seed-0", [], "skipped", end=reason)
    return experiment, results
