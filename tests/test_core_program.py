"""Builds the core's own test programs, plain and under each sanitizer, and runs them."""

import os
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cpp"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sanitizer", ["", "address,undefined", "thread"], ids=["plain", "address-undefined", "thread"]
)
def test_core_program(sanitizer: str, tmp_path: Path) -> None:
    """Kernels and parser against references, training with several threads; warnings are errors."""
    level = "-O3" if not sanitizer else "-O1 -g1"
    configure = ["cmake", "-S", str(SOURCE), "-B", str(tmp_path), f"-DDSLIDE_SANITIZE={sanitizer}",
                 f"-DCMAKE_CXX_FLAGS={level}"]  # fmt: skip
    subprocess.run(configure, check=True, capture_output=True, text=True, timeout=120)
    build = subprocess.run(
        ["cmake", "--build", str(tmp_path), "--parallel", str(os.cpu_count() or 1)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert build.returncode == 0, build.stdout[-4000:] + build.stderr[-4000:]
    for program in ("core_test", "reader_fuzz"):
        run = subprocess.run([tmp_path / program], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        assert ", 0 failed" in run.stdout
