"""What the rivals need before they run: their settings, whether they are installed, and their environment.

Nothing here imports a rival's framework: the launcher reads it too.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from dslide.bench.spec import RunSpec

REMEDY = "run scripts/install_rivals.sh (or `make`), which installs it"

# glibc gives large blocks back to the kernel after every step and gets them again page by page: kept, and in
# large pages, a full-softmax step takes two thirds of the time.
TENSORFLOW_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# Horovod looks for finished gradients every millisecond, and warns about (and then ends) a rank that hangs.
HOROVOD_ENVIRONMENT = {
    **TENSORFLOW_ENVIRONMENT,
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
}


def missing(package: str) -> str | None:
    """Why `package` cannot be used, with the remedy, or None. For Horovod its compiled part counts too."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return f"{package} is not installed; {REMEDY}"
    if package == "horovod" and not any((Path(found.origin).parent / "tensorflow").glob("mpi_lib*.so")):
        return f"horovod was built without TensorFlow; {REMEDY}"
    return None


def one_node(spec: RunSpec) -> str | None:
    """Why a system of one process cannot run by `spec`, or None."""
    return None if spec.cluster.nodes == 1 else f"runs on one node, not on {spec.cluster.nodes}"


class FullSettings(BaseModel, extra="forbid"):
    """Settings of full softmax; the defaults are TensorFlow's Adam and the papers' initialisation."""

    hidden: int = Field(default=128, ge=1)
    optimizer: Literal["adam", "adagrad"] = "adam"
    lr: float = Field(default=1e-3, gt=0)
    eps: float = Field(default=1e-7, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    initial_accumulator: float = Field(default=0.1, ge=0, description="Adagrad's, of the output layer")
    initial_accumulator_input: float = Field(default=0.1, ge=0, description="Adagrad's, of the input layer")
    schedule: Literal["linear", "constant"] = "constant"
    init_std: float | None = Field(
        default=None, gt=0, description="of both layers; None: 2 / sqrt(fan in + fan out)"
    )


class RecipeSettings(BaseModel, extra="forbid"):
    """The recipe's settings; the defaults are dslide's own."""

    hidden: int = Field(default=128, ge=1)
    lr: float = Field(default=0.1, gt=0)
    eps: float = Field(default=1e-8, ge=0)
    initial_accumulator: float = Field(default=1e-7, ge=0, description="of the output rows")
    initial_accumulator_input: float = Field(default=1e-8, ge=0, description="of the input rows")
    schedule: Literal["linear", "constant"] = "linear"
    extras: int = Field(
        default=0, ge=0, description="uniform negatives a batch beside the batch's own labels"
    )
    logq: bool = True
    slope: float = Field(default=0.4, ge=0, le=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    init_std: float = Field(default=0.05, gt=0)
    class_mean_init: bool = True
    weight_labels: bool = True
