"""The reference records that the project keeps, <kind>/<system>/<cluster>/seed-<n>/: those of the race in
results/reference/, those of another experiment in results/reference/<experiment>/."""

from __future__ import annotations

from pathlib import Path

from dslide.bench.records import Run, read_run
from dslide.reporting.race import Cluster


def runs(root: Path, *kinds: str, experiments: bool = False) -> list[Run]:
    """The race's reference runs of some kinds ("runs", "composed"), by path; or the other experiments'."""
    folder = root / "results" / "reference"
    place = "*/" if experiments else ""
    files = [f for kind in kinds for f in folder.glob(f"{place}{kind}/*/*/seed-*/meta.json")]
    return [read_run(file.parent) for file in sorted(files)]


def label(run: Run) -> str:
    """What the run's record calls the system."""
    return str(run.meta.get("label") or run.folder.parent.parent.name)


def where(run: Run) -> str:
    """Its cluster shape, for people."""
    cluster = run.meta.get("cluster") or {}
    return Cluster("", int(cluster.get("nodes", 1)), cluster.get("bandwidth"), cluster.get("cores")).shape
