"""Starts Snakemake as a person would, in a folder of the test's own."""

import os
import subprocess
from pathlib import Path

from dslide.paths import content_root

ROOT = content_root()
SYSTEMS = Path(__file__).parent / "systems"


def command(folder: Path, experiment: Path, *arguments: str, cores: str = "all") -> list[str]:
    """The command line: the project's Snakefile, results and reports below `folder`."""
    place = ["--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    return ["snakemake", *arguments, *place, "--cores", cores, "--config", f"experiment={experiment}"]


def environment(**extra: str) -> dict[str, str]:
    """The tests' own systems beside the real ones."""
    return os.environ | {"DSLIDE_SYSTEMS": str(SYSTEMS)} | extra


def snakemake(
    folder: Path,
    experiment: Path,
    *arguments: str,
    cores: str = "all",
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; stdout holds both streams."""
    return subprocess.run(
        command(folder, experiment, *arguments, cores=cores),
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
