"""For all tests: the environment's programs first on PATH, and markers that say why a test cannot run here.

In CI nothing that `make` installs may be missing: a test that cannot run fails. Only Slurm is left out.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import slurm_cluster

from dslide.bench import cluster

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
hypothesis.settings.register_profile("no seconds", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no seconds")
CI = bool(os.environ.get("CI"))


def _rivals() -> str | None:
    absent = [name for name in ("tensorflow", "horovod") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)} (scripts/install_rivals.sh)" if absent else None


def _slurm() -> str | None:
    return "CI runs without Slurm" if CI else slurm_cluster.missing()


MARKERS: dict[str, Callable[[], str | None]] = {
    "root": cluster.unavailable,
    "rivals": _rivals,
    "slurm": _slurm,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, or in CI fails, a marked test that cannot run here."""
    for name, why_not in MARKERS.items():
        if item.get_closest_marker(name) is None:
            continue
        reason = why_not()
        if reason is None:
            continue
        if CI and name != "slurm":
            pytest.fail(f"cannot run here: {reason}")
        pytest.skip(reason)
