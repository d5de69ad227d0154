"""Virtual nodes: network namespaces on one machine, joined by a bridge, with a rate on both ends of each
link.

Everything is made inside a sandbox, a process with namespaces of its own for the network, mounts, host name
and processes (`sandbox_command`), by whoever is process 1 in it. When that process ends, however it ends, the
kernel takes down the rest: no process, namespace, mount or interface outlives it, and none is ever visible
outside.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

INTERFACE = "eth0"
LAUNCHER = "hvl"  # the sandbox's own host name: mpirun and horovodrun stand on the network too
LAUNCHER_ADDRESS = "10.77.0.250"
_SWITCH = "hvsw"
_HERE = Path("/run/dslide")  # inside the sandbox, on its own tmpfs

# Stands in for ssh: drops its options and the user, before and after the host, and enters the host's
# namespaces. nsenter rather than `ip netns exec`, which remounts /sys.
_AGENT = """#!/bin/sh
options() { n=0; while [ $# -gt 0 ]; do case $1 in
  -[bcDEeFIiJLlmOopQRSWw]) n=$((n + 2)); shift 2;; -*) n=$((n + 1)); shift;; *) break;; esac; done; }
options "$@"; shift $n
host=${1##*@}; shift
options "$@"; shift $n
[ -e @HERE@/cores.$host ] || { echo "no such virtual node: $host" >&2; exit 255; }
exec nsenter --net=/run/netns/$host unshare --uts sh -c 'hostname "$1"; exec taskset -c "$2" sh -c "$3"' \\
  agent "$host" "$(cat @HERE@/cores.$host)" "$*"
"""


def node_name(node: int) -> str:
    """Host name of a virtual node."""
    return f"hv{node}"


def node_address(node: int) -> str:
    """Address of a virtual node; there is room for 200."""
    return f"10.77.0.{11 + node}"


def sandbox_command(command: Sequence[str], *, network: bool) -> list[str]:
    """`command` as process 1 of its own process and mount namespaces, and of a network of its own if asked.

    Without root a user namespace makes this possible where the kernel allows it. SIGKILL of `unshare` kills
    all.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    network_flags = ["--net", "--uts"] if network else []
    flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *user, *network_flags, *flags, *command]


def in_node(node: int, command: Sequence[str]) -> list[str]:
    """`command` in a node's network, for use inside the sandbox."""
    return ["nsenter", f"--net=/run/netns/{node_name(node)}", *command]


def launcher_prefix() -> Path:
    """The folder with the agent, to be first on PATH."""
    return agent().parent


def core_sets(cores: Sequence[int], nodes: int, each: int) -> list[list[int]]:
    """Disjoint sets of `each` cores a node, in order; with too few cores the sets wrap around and overlap."""
    return [[cores[(node * each + i) % len(cores)] for i in range(each)] for node in range(nodes)]


def prepare_sandbox() -> Path:
    """Gives a sandbox its own /run. Returns a folder there for temporary files, which vanishes with the
    sandbox.

    Process ids begin anew in every sandbox, so what one that was killed left in /tmp would confuse MPI in the
    next. RuntimeError outside of a sandbox: this would change the machine.
    """
    if os.getpid() != 1:
        raise RuntimeError("only process 1 of a sandbox may prepare it")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run"], check=True)
    temporary = _HERE / "tmp"
    temporary.mkdir(parents=True)
    return temporary


def make_nodes(sets: Sequence[Sequence[int]]) -> None:
    """Makes one node a core set: namespace, link, address; then the switch, the agent and the names.

    The links have no rate yet: see `set_rate`.
    """
    from pyroute2 import IPRoute, NetNS

    subprocess.run(["hostname", LAUNCHER], check=True)
    with NetNS(_SWITCH) as switch, IPRoute() as own:
        switch.link("add", ifname="br0", kind="bridge")
        bridge = _index(switch, "br0")
        switch.link("set", index=bridge, state="up")
        _up(switch, "lo")
        _up(own, "lo")
        _join(switch, bridge, "pl", own, LAUNCHER_ADDRESS)
        for node in range(len(sets)):
            with NetNS(node_name(node)) as host:
                _up(host, "lo")
                _join(switch, bridge, f"p{node}", host, node_address(node))
    names = [f"{node_address(n)} {node_name(n)}" for n in range(len(sets))]
    hosts = _HERE / "hosts"
    hosts.write_text("\n".join(["127.0.0.1 localhost", f"{LAUNCHER_ADDRESS} {LAUNCHER}", *names]) + "\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    for node, cores in enumerate(sets):
        (_HERE / f"cores.{node_name(node)}").write_text(",".join(map(str, cores)))
    agent().write_text(_AGENT.replace("@HERE@", str(_HERE)))
    agent().chmod(0o755)


def agent() -> Path:
    """The program that stands in for ssh; it is called ssh, since horovodrun looks for that name on PATH."""
    path = _HERE / "bin" / "ssh"
    path.parent.mkdir(exist_ok=True)
    return path


def _index(net: Any, name: str) -> int:
    return int(net.link_lookup(ifname=name)[0])


def _up(net: Any, name: str) -> None:
    net.link("set", index=_index(net, name), state="up")


def _join(switch: Any, bridge: int, port: str, host: Any, address: str) -> None:
    """A link from the bridge's `port` to eth0 of a host's namespace."""
    host.link("add", ifname=INTERFACE, kind="veth", peer={"ifname": port, "net_ns_fd": _SWITCH})
    switch.link("set", index=_index(switch, port), master=bridge, state="up")
    eth0 = _index(host, INTERFACE)
    host.addr("add", index=eth0, address=address, prefixlen=24)
    host.link("set", index=eth0, state="up")


class Throttle(NamedTuple):
    """Rates (bits/s) and bursts (bytes) of a link's two token buckets: where a node sends, and where it
    receives.

    The sender's bucket is small, so that short messages take their time, and may ask for more than the rate,
    since every wake-up of a small bucket costs some 50-100 microseconds. The receiver's is larger and keeps
    to the rate: it caps long transfers, and many senders to one node.
    """

    sent_rate: float
    sent_burst: int
    received_rate: float
    received_burst: int

    @classmethod
    def nominal(cls, rate: float, excess: float = 1.0, burst: int = 6144) -> "Throttle":
        """The throttle of a link of `rate` bits/s whose sender asks for `excess` times as much, from a bucket
        of `burst` bytes at 1 Gbit/s, in proportion to the rate."""
        least = 1600 if rate < 3e7 else 2048  # one frame; on a faster link a little room for late wake-ups
        sent, received = max(least, int(burst * rate / 1e9)), max(4096, int(65536 * rate / 1e9))
        return cls(excess * rate, sent, rate, received)


def set_rate(nodes: int, throttle: Throttle | None) -> None:
    """Throttles every node's link, or with None frees it."""
    from pyroute2 import NetNS
    from pyroute2.netlink.rtnl import TC_H_ROOT

    with NetNS(_SWITCH) as switch:
        for node in range(nodes):
            with NetNS(node_name(node)) as host:
                for net, name in ((host, INTERFACE), (switch, f"p{node}")):
                    index = _index(net, name)
                    if any(q.get_attr("TCA_KIND") == "tbf" for q in net.get_qdiscs(index)):
                        net.tc("del", index=index, parent=TC_H_ROOT)
                    if throttle is not None:
                        queue_ms = max(100, int(8e9 / throttle.received_rate))
                        rate, burst = throttle[:2] if net is host else throttle[2:]
                        # A queue of a megabyte and 100 ms at least: TCP fills it without losses.
                        net.tc(
                            "add",
                            kind="tbf",
                            index=index,
                            rate=int(rate / 8),
                            burst=burst,
                            latency=f"{queue_ms}ms",
                        )


def dropped_packets(nodes: int) -> int:
    """Packets that the links' queues and interfaces dropped so far, all nodes and both ends together."""
    from pyroute2 import NetNS

    total = 0
    with NetNS(_SWITCH) as switch:
        for node in range(nodes):
            with NetNS(node_name(node)) as host:
                for net, name in ((host, INTERFACE), (switch, f"p{node}")):
                    index = _index(net, name)
                    for queue in net.get_qdiscs(index):
                        stats = queue.get_attr("TCA_STATS")
                        total += int(stats["drop"]) if stats else 0
                    counters = net.get_links(index)[0].get_attr("IFLA_STATS64") or {}
                    total += int(counters.get("rx_dropped", 0))
    return total


def congestion_control() -> str:
    """The TCP congestion control of this namespace's new connections."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


@functools.cache
def unavailable(network: bool = True) -> str | None:
    """Why a sandbox (with virtual nodes in it if `network`) cannot be made here, None if it can.

    Tries it: with one node and a rate. Half a second.
    """
    for program in ("unshare", "nsenter", "mount", "hostname", "taskset"):
        if shutil.which(program) is None:
            return f"the program {program} (util-linux) is missing"
    probe = [sys.executable, "-m", "dslide.bench.cluster"] if network else ["true"]
    try:
        result = subprocess.run(
            sandbox_command(probe, network=network), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    who = "root" if os.geteuid() == 0 else "a user without root"
    return f"{who} cannot make it here: {lines[-1]}"


def _probe() -> None:
    prepare_sandbox()
    make_nodes([[0], [0]])
    set_rate(2, Throttle.nominal(1e8))


if __name__ == "__main__":
    _probe()
