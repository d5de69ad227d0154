"""The reference records that the project keeps:
results/reference/<experiment>/<kind>/<system>/<cluster>/seed-<n>/."""

from __future__ import annotations

from pathlib import Path

from dslide.bench.records import Run, read_run
from dslide.reporting.race import Cluster


def runs(root: Path, *kinds: str) -> list[Run]:
    """The reference runs of some kinds ("runs", "composed"), by path."""
    files = [
        f for kind in kinds for f in (root / "results" / "reference").glob(f"**/{kind}/*/*/seed-*/meta.json")
    ]
    return [read_run(file.parent) for file in sorted(files)]


def label(run: Run) -> str:
    """What the run's record calls the system."""
    return str(run.meta.get("label") or run.folder.parent.parent.name)


def where(run: Run) -> str:
    """Its cluster shape, for people."""
    cluster = run.meta.get("cluster") or {}
    return Cluster("", int(cluster.get("nodes", 1)), cluster.get("bandwidth"), cluster.get("cores")).shape
