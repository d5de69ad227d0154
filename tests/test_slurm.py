"""profiles/slurm against a real Slurm on this machine: two nodes with their own names, a rank on each."""

from pathlib import Path

import pytest
import slurm_cluster
import yaml
from workflow import ROOT, snakemake

from dslide.bench.records import read_run


def tiny_on_slurm(path: Path) -> Path:
    """config/tiny.yaml with two real nodes instead of two virtual ones."""
    values = yaml.safe_load((ROOT / "config" / "tiny.yaml").read_text())
    values["clusters"] = {"two-nodes": {"kind": "slurm", "nodes": 2, "cores": 1}}
    for system in values["systems"].values():
        system["clusters"] = ["two-nodes"]
        if system["system"].startswith("horovod"):
            system["settings"] = system.get("settings", {}) | {"transport": "mpi"}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_tiny_runs_on_two_nodes_of_a_real_slurm(tmp_path: Path) -> None:
    experiment = tiny_on_slurm(tmp_path / "tiny.yaml")
    with slurm_cluster.slurm(nodes=2) as environment:
        done = snakemake(
            tmp_path, experiment, "--profile", str(ROOT / "profiles" / "slurm"), env=environment, timeout=560
        )
        assert done.returncode == 0, done.stdout
    runs = sorted((tmp_path / "results" / "tiny" / "runs").glob("*/two-nodes/seed-0"))
    assert {run.parents[1].name for run in runs} == set(yaml.safe_load(experiment.read_text())["systems"])
    for folder in runs:
        run = read_run(folder)
        assert run.status in ("done", "skipped"), run.reason
        if run.status == "done":
            assert [rank["host"] for rank in run.meta["ranks"]] == ["node1", "node2"]
    assert read_run(tmp_path / "results/tiny/runs/dslide/two-nodes/seed-0").status == "done"
    assert (tmp_path / "reports" / "tiny" / "index.html").is_file()
