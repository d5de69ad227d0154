"""A real Slurm on this machine, without systemd: munged, slurmctld and a slurmd a node, for a test."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "srun", "munged", "munge", "setpriv", "unshare")
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")

CONFIG = """\
ClusterName=dslide
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
SchedulerParameters=sched_interval=1,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
DefMemPerCPU=500
AccountingStorageType=accounting_storage/none
NodeName=node[1-{nodes}] NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=4 RealMemory=8000
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 DefaultTime=5 State=UP
"""


def missing() -> str | None:
    """Why Slurm cannot be started here, or None."""
    if os.geteuid() != 0:
        return "a real Slurm needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return (
            f"a real Slurm needs {', '.join(absent)}: "
            "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge libpmix2"
        )
    return None


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(17000, 30000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


def _until(what: str, ready: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm: {what} not after {seconds:g} s")
        time.sleep(0.2)


def _succeeds(command: str, environment: dict[str, str]) -> bool:
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True).returncode == 0


@contextlib.contextmanager
def slurm(nodes: int = 2) -> Iterator[dict[str, str]]:
    """Yields an environment in which sbatch talks to a Slurm of `nodes` nodes called node1, node2, ..."""
    folder = Path(tempfile.mkdtemp(prefix="dslide-slurm-", dir="/var/tmp"))
    folder.chmod(0o755)
    of_nodes = [f"{kind}-node{n + 1}" for kind in ("spool", "tmp") for n in range(nodes)]
    for name in ("ctld", "log", "munge", *of_nodes):
        (folder / name).mkdir()
    first = _free_ports(nodes + 1)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            folder=folder, nodes=nodes, ctld_port=first, first_port=first + 1, last_port=first + nodes
        )
    )
    hosts = folder / "hosts"
    names = " ".join(f"node{n + 1}" for n in range(nodes))
    hosts.write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {names}\n")
    environment = os.environ | {"SLURM_CONF": str(config)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (folder / "log" / f"{Path(command[0]).name}-{len(daemons)}.out").open("wb")
        daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        daemons.append(daemon)

    made_link = not PMIX.exists() and PMIX.parent.is_dir()
    try:
        if made_link:
            PMIX.symlink_to("libpmix.so.2")
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (key.parent, key):
            shutil.chown(path, "munge", "munge")
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        options = [f"--{option}={folder / 'munge' / file}" for option, file in files.items()]
        start("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "-F", *options)
        key.parent.chmod(0o755)
        socket_file = f"{folder}/munge/socket"
        _until(
            "munge", lambda: _succeeds(f"munge -S {socket_file} -n | unmunge -S {socket_file}", environment)
        )
        start("slurmctld", "-D", "-c")
        for n in range(nodes):
            # A node has its own name, shared memory and hosts file; the rest is this machine's.
            script = (
                f"hostname node{n + 1}; mount --bind {hosts} /etc/hosts; "
                f"mount -t tmpfs -o size=512m shm /dev/shm; exec slurmd -D -N node{n + 1}"
            )
            start("unshare", "--uts", "--ipc", "--mount", "sh", "-c", script)
        _until("idle nodes", lambda: _idle(environment) == nodes)
        yield environment
    except RuntimeError as error:
        outputs = sorted((folder / "log").iterdir())
        logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in outputs)
        raise RuntimeError(f"{error}\n{logs}") from error
    finally:
        _succeeds("timeout 20 scancel --user=root", environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if made_link:
            PMIX.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()
    return int(answer) if answer.isdigit() else 0
