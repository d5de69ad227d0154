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
DATASET = {
    "name": "debian-deps",
    "hash": "0" * 64,
    "num_features": 51333,
    "num_labels": 43171,
    "train_points": 42672,
    "test_points": 8786,
}
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
    fields = {"schema_version": 1, "kind": "measured", "created": 0.0, "machine": MACHINE, "data": DATASET}
    (folder / "meta.json").write_text(json.dumps({**fields, **(meta or {})}))
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "train_seconds": 0.0}]
    for step, epoch, samples, seconds, p1 in evals:
        events.append(
            {
                "event": "eval",
                "step": step,
                "epoch": epoch,
                "samples": samples,
                "train_seconds": seconds,
                "p1": p1,
                "p3": p1 * 0.7,
                "p5": p1 * 0.55,
                "cpu_seconds": seconds,
            }
        )
    events += [
        {"event": "step", "step": i, "seconds": s, "train_seconds": 0.0} for i, s in enumerate(steps, 1)
    ]
    last = evals[-1][3] if evals else 0.0
    events.append({"event": "end", "status": status, "train_seconds": last, **(end or {})})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def curve(
    speed: float,
    top: float,
    slow: float,
    epochs: float,
    *,
    batch: int = 256,
    start: float = 0.0,
    wiggle: float = 0.0,
) -> list[tuple[int, float, int, float, float]]:
    """Evaluations of a run that makes `speed` samples/s and tends to `top` with `slow` epochs as its
    scale."""
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


def link(bandwidth: str | None, faithful: bool = True) -> dict[str, Any] | None:
    """The link part of the meta data, as the link check writes it; None for a link without a throttle."""
    if bandwidth is None:
        return None
    rate = {"100mbit": 1e8, "1gbit": 1e9}[bandwidth]
    late = 1.04 if faithful else 1.3
    sizes = [
        {"bytes": 8192, "mode": mode, "ms": 8.3e7 / rate * late, "ideal_ms": 8.3e7 / rate, "verdict": "ok"}
        for mode in ("idle", "stream")
    ]
    return {
        "rate": rate,
        "throttle": {"sent_rate": rate, "sent_burst": 2048},
        "sizes": sizes,
        "rtt_ms": 0.11,
        "lost_packets": 0,
        "congestion_control": "bbr",
        "faithful": faithful,
    }


CLUSTERS: dict[str, dict[str, Any]] = {
    "one": {"nodes": 1, "cores": "auto"},
    "two-100mbit": {"nodes": 2, "cores": "auto", "bandwidth": "100mbit"},
    "two-1gbit": {"nodes": 2, "cores": "auto", "bandwidth": "1gbit"},
    "two-unthrottled": {"nodes": 2, "cores": "auto"},
    "one-core": {"nodes": 1, "cores": 1},
}
ALL = ["one", "two-100mbit", "two-1gbit"]
NET = ["two-100mbit", "two-1gbit"]


def _composed() -> dict[str, Any]:
    return {"curve": "two-unthrottled", "paces": NET, "pace_steps": 20}


SYSTEMS: dict[str, dict[str, Any]] = {
    "dslide": {
        "system": "dslide_sharded",
        "label": "dslide",
        "settings": {"preset": "default"},
        "seeds": [0, 1, 2, 3, 4],
        "clusters": ALL,
    },
    "slide": {
        "system": "dslide_sharded",
        "label": "slide (the papers' algorithm)",
        "settings": {"preset": "slide"},
        "seeds": [0],
        "clusters": ALL,
    },
    "tf-full": {"system": "tensorflow_full", "label": "TensorFlow, full softmax, tuned", "clusters": ["one"]},
    "tf-recipe": {"system": "tensorflow_recipe", "label": "TensorFlow, our recipe", "clusters": ["one"]},
    "plt": {"system": "napkinxc_plt", "label": "napkinXC PLT, tuned", "clusters": ["one"]},
    "plt-default": {"system": "napkinxc_plt", "label": "napkinXC PLT, defaults", "clusters": ["one"]},
    "horovod-dense-published": {
        "system": "horovod_dense",
        "label": "Horovod dense, as published",
        "clusters": [],
        "composed": _composed(),
    },
    "horovod-dense-tuned": {
        "system": "horovod_dense",
        "label": "Horovod dense, tuned",
        "clusters": [],
        "composed": _composed(),
    },
    "horovod-recipe": {"system": "horovod_recipe", "label": "Horovod, our recipe", "clusters": NET},
}

SWEEP = {"system": "dslide", "uniform_extras": [0, 2000, 8000, 32000], "clusters": ["one-core", *NET]}

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
    systems = {key: {"epochs": 6, "budget_seconds": 100, **value} for key, value in SYSTEMS.items()}
    spec = {
        "name": "default",
        "data": "debian-deps",
        "targets": [0.25, 0.30, 0.40],
        "eval_epochs": EPOCHS[1:],
        "clusters": CLUSTERS,
        "systems": systems,
        "sweep": SWEEP,
    }
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
                rows = curve(
                    speed * (1 + 0.02 * seed),
                    top,
                    slow,
                    epochs,
                    start=start,
                    wiggle=0.002 * (seed - 2) * (seed > 0),
                )
                bandwidth = CLUSTERS[cluster].get("bandwidth")
                nodes = CLUSTERS[cluster]["nodes"]
                meta: dict[str, Any] = {
                    "kind": "composed" if composed else "measured",
                    "batch_size": 256,
                    "label": SYSTEMS[system]["label"],
                    "seed": seed,
                }
                meta["cluster"] = {
                    "nodes": nodes,
                    "cores": 2 // nodes,
                    "bandwidth": bandwidth,
                    "kind": "virtual",
                    "throttled": bandwidth is not None,
                    "oversubscribed": False,
                    "note": None,
                }
                samples = rows[-1][2]
                end: dict[str, Any] = {"samples": samples}
                if system in ("dslide", "slide"):
                    config = {"network": {"hidden": 128}, "exchange": {"wire": "int8"}}
                    meta |= {"config": config, "parameters": 12_096_512}
                if composed:
                    median = 256 / speed
                    meta["step_seconds"] = {
                        "median": median,
                        "low": median * 0.98,
                        "high": median * 1.03,
                        "steps": 20,
                    }
                    meta["step_check"] = {"ideal_seconds": median / 1.2, "ratio": 1.2, "plausible": True}
                if (system, cluster) == ("horovod-dense-tuned", "two-1gbit"):
                    meta["check"] = {
                        "step": 167,
                        "step_error": -0.031,
                        "step_within_10_percent": True,
                        "p1_difference": 0.0042,
                        "p1_within_1_point": True,
                    }
                if nodes > 1:
                    meta["link"] = link(bandwidth)
                    each = {"dslide": 280, "slide": 280, "horovod-recipe": 42_000}.get(system, 96_768 * 4)
                    end |= {"payload_bytes": each * samples, "tx_bytes": int(each * samples * 1.05)}
                status = "timeout" if system == "horovod-dense-published" else "done"
                kind = "composed" if composed else "runs"
                write_run(
                    results / kind / system / cluster / f"seed-{seed}", rows, status, meta=meta, end=end
                )
    write_run(results / "runs/plt/one/seed-0", [(1, 1.0, 42672, 23.0, 0.4206)])
    reason = {"reason": "napkinxc is not installed (pip install napkinxc)"}
    write_run(results / "runs/plt-default/one/seed-0", [], "skipped", end=reason)
    write_sweep(results)
    write_paces(results)
    return experiment, results


def write_sweep(results: Path) -> None:
    """Timed steps at several numbers of active rows: at 100 Mbit/s two nodes lose at first, then win."""
    for extras in SWEEP["uniform_extras"]:
        for cluster in SWEEP["clusters"]:
            rows = 1_040 + 0.9 * extras
            alone = 256 * (6e-6 + 3.6e-9 * rows)
            wire = {"one-core": 0.0, "two-100mbit": 2.4e-3, "two-1gbit": 5e-4}[cluster]
            seconds = alone if cluster == "one-core" else alone / 2 + wire
            nodes = CLUSTERS[cluster]["nodes"]
            ranks = [{"active_rows": rows / nodes}] * nodes
            meta = {"batch_size": 256, "cluster": {"nodes": nodes, "cores": 1}}
            folder = results / "sweep" / f"extras-{extras}" / cluster / "seed-0"
            write_run(
                folder, [], meta=meta, end={"active_rows": rows / nodes, "ranks": ranks}, steps=[seconds] * 40
            )


def write_paces(results: Path) -> None:
    """Timed steps of the composed systems."""
    for system, spec in SYSTEMS.items():
        for cluster in (spec.get("composed") or {}).get("paces", []):
            seconds = {"two-100mbit": 4.72, "two-1gbit": 0.55}[cluster]
            meta = {"batch_size": 256, "cluster": {"nodes": 2, "cores": 1}}
            folder = results / "paces" / system / cluster / "seed-0"
            end = {"tx_bytes": 20 * 2 * 4 * 12_096_512 * 102 // 100}
            write_run(folder, [], meta=meta, end=end, steps=[seconds + 0.01 * (i % 3) for i in range(20)])
