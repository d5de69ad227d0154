"""Two Horovod ranks compute what one rank computes on the same global batches, over MPI and over Gloo."""

import subprocess
import sys
from pathlib import Path

import mpirun
import numpy as np
import pytest

pytestmark = [pytest.mark.rivals, pytest.mark.timeout(600)]
WORKER = Path(__file__).with_name("rivals_worker.py")
CASES = {
    "mpi": ("adam", "adagrad", "recipe-allgather-fp32", "recipe-allreduce-fp32"),
    "gloo": ("recipe-allgather-fp16",),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights by transport: one rank, two over MPI, two over Gloo."""
    made = {}
    environment = mpirun.environment() | {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_CYCLE_TIME": "1"}
    worker = [sys.executable, str(WORKER)]
    launcher = [sys.executable, "-m", "dslide.bench.horovodrun"]
    gloo = [*launcher, "-np", "2", "-H", "localhost:2", "--gloo", "--network-interface", "lo"]
    for name, launcher in (("one", []), ("mpi", ["mpirun", "-n", "2"]), ("gloo", gloo)):
        folder = made[name] = tmp_path_factory.mktemp(name)
        cases = CASES.get(name) or sum(CASES.values(), ())
        command = [*launcher, *worker, str(folder), *cases]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return made


@pytest.mark.parametrize(("transport", "case"), [(t, case) for t, cases in CASES.items() for case in cases])
def test_two_ranks_equal_one(folders: dict[str, Path], transport: str, case: str) -> None:
    one, two = np.load(folders["one"] / f"{case}.npz"), np.load(folders[transport] / f"{case}.npz")
    assert (int(one["size"]), int(two["size"])) == (1, 2)
    assert two["apart"] == 0  # the ranks stay copies of each other
    for name in (n for n in one.files if n.startswith("arr_")):
        moved = np.abs(one[name]).max()
        limit = 5e-3 if "fp16" in case else 2e-4
        np.testing.assert_allclose(two[name], one[name], atol=limit * max(1.0, moved), err_msg=name)


def test_without_horovod_the_run_is_skipped_with_a_remedy() -> None:
    """In a Python that cannot find Horovod, as on a machine that has only dslide."""
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'horovod' else find(n, *a)\n"
        "from dslide.bench import systems\nfrom dslide.bench.spec import RunSpec\n"
        "s = RunSpec(run_id='t', system='horovod_dense', data='x', out='x')\n"
        "print(systems.load('horovod_dense').skip(s))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "horovod is not installed" in done.stdout and "install_rivals.sh" in done.stdout
