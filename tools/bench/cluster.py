"""An emulated cluster on one machine: network namespaces as nodes, rate-limited links between them, ranks as processes.

Each node is a namespace with a network interface ``eth0``; they are joined by a bridge in a namespace of its own, the
switch. ``tc tbf`` limits each interface in both directions, with a queue that drops nothing, as the lossless networks
of training clusters do. Ranks of a node talk over its loopback interface, so interface counters tell bytes by link
class. Processors and memory are shared: only the network is emulated.

Needs root, ``ip`` and ``tc`` (iproute2) and ``setpriv`` (util-linux). Names carry the process id and start time of the
run: namespaces of a run that was killed are removed by the next one.

A command is started once per rank with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
GLOO_SOCKET_IFNAME set, as torchrun would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MASTER_PORT = 29_500
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"flexd-(\d+)-(\d+)-\w+")
_COMMAND_SECONDS = 20.0
_KILL_SECONDS = 10.0
_TOOLS = ("ip", "tc", "setpriv")


class ClusterError(Exception):
    """The network could not be set up, or a rank failed."""


def why_not() -> str | None:
    """Describe what this machine lacks; None if a cluster can be emulated."""
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if os.geteuid() != 0:
        return "needs root"
    return f"needs {', '.join(missing)} (iproute2, util-linux)" if missing else None


def torchrun_variables(
    rank: int, nodes: int, local_ranks: int, master: tuple[str, int], interface: str
) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, and the interface for gloo."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_ranks),
        "WORLD_SIZE": str(nodes * local_ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "GLOO_SOCKET_IFNAME": interface,
    }


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that all nodes together sent, headers included: ``inter`` over the network, ``intra`` inside nodes."""

    inter: int
    intra: int

    def __sub__(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(self.inter - before.inter, self.intra - before.intra)


class Cluster:
    """A context manager: the network is there inside, and gone with all of its processes afterwards.

    Args:
        nodes: 1 to 250.
        ranks: of each node.
        rate_mbit: 10^6 bits a second of each interface, in each direction, headers included; None: no limit.
        burst_kib: what an idle interface may send above the rate. Small beside the messages that are measured, not
            smaller than ``mtu``; segments above it are cut up, which costs processor time.
        mtu: bytes of a packet; 9,000 is what clusters call jumbo frames.

    Raises:
        ClusterError: the machine cannot do it, or a command failed.
    """

    def __init__(
        self,
        nodes: int,
        ranks: int,
        *,
        rate_mbit: float | None = None,
        burst_kib: int = 16,
        mtu: int = 1500,
    ) -> None:
        if not (1 <= nodes <= 250 and ranks >= 1 and mtu <= burst_kib * 1024):
            raise ClusterError(f"{nodes} nodes x {ranks} ranks, mtu {mtu}, burst {burst_kib} KiB")
        if (reason := why_not()) is not None:
            raise ClusterError(f"cannot emulate a cluster: {reason}")
        self.nodes, self.ranks = nodes, ranks
        self.mtu, self.burst_kib = mtu, burst_kib
        self._rate_mbit = rate_mbit
        self._limited = False
        own = f"flexd-{os.getpid()}-{_start_time(os.getpid())}"
        self.namespaces = tuple(f"{own}-n{node}" for node in range(nodes))
        self._switch = f"{own}-sw"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def __enter__(self) -> Cluster:
        remove_leftovers()
        try:
            self._build()
            self.limit(self._rate_mbit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def limit(self, rate_mbit: float | None) -> None:
        """Changes the rate of all interfaces, both directions; None: no limit. Raises ClusterError."""
        ports = [f"p{node}" for node in range(self.nodes)]
        for namespace, devices in [*((name, ["eth0"]) for name in self.namespaces), (self._switch, ports)]:
            lines = []
            for device in devices:
                if rate_mbit is not None:
                    tbf = f"tbf rate {rate_mbit}mbit burst {self.burst_kib}kb limit 64mb"
                    lines.append(f"qdisc replace dev {device} root {tbf}")
                elif self._limited:
                    lines.append(f"qdisc del dev {device} root")
            if lines:
                _run("tc", "-n", namespace, "-batch", "-", given="\n".join(lines))
        self._limited = rate_mbit is not None

    def sent(self) -> LinkBytes:
        """So far, by the interface counters."""
        inter = intra = 0
        for name in self.namespaces:
            for link in json.loads(_run("ip", "-n", name, "-json", "-stats", "link", "show")):
                count = int(link["stats64"]["tx"]["bytes"])
                if link["ifname"] == "lo":
                    intra += count
                else:
                    inter += count
        return LinkBytes(inter, intra)

    def environment(self, rank: int) -> dict[str, str]:
        return torchrun_variables(rank, self.nodes, self.ranks, (self.address(0), MASTER_PORT), "eth0")

    def start(self, command: Sequence[str], **popen: Any) -> list[subprocess.Popen[bytes]]:
        """One process a rank, by rank; they are killed when this process ends, however it does.

        Args:
            popen: further arguments of ``subprocess.Popen``.
        """
        ranks = range(self.world_size)
        return [self.start_in(rank // self.ranks, command, self.environment(rank), **popen) for rank in ranks]

    def start_in(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], **popen: Any
    ) -> subprocess.Popen[bytes]:
        """One process in a node."""
        words = ["setpriv", "--pdeathsig", "KILL", "--", "ip", "netns", "exec", self.namespaces[node], *command]
        process = subprocess.Popen(words, env={**os.environ, **environment}, **popen)
        self._processes.append(process)
        return process

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _batch(self._switch, [f"link add br0 mtu {self.mtu} type bridge", "link set br0 up"])
        for node, name in enumerate(self.namespaces):
            _run("ip", "netns", "add", name)
            peer = f"peer name p{node} mtu {self.mtu} netns {self._switch}"
            inside = ["link set lo up", f"link add eth0 mtu {self.mtu} type veth {peer}"]
            _batch(name, [*inside, f"addr add {self.address(node)}/24 dev eth0", "link set eth0 up"])
            _batch(self._switch, [f"link set p{node} master br0", f"link set p{node} up"])
            _run("ip", "netns", "exec", name, "sh", "-c", _TCP)

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(_KILL_SECONDS)
        self._processes.clear()
        for name in (*self.namespaces, self._switch):
            _remove_namespace(name)


_TCP = """
cd /proc/sys/net/ipv4
if grep -qw cubic tcp_available_congestion_control; then echo cubic > tcp_congestion_control; fi
echo 0 > tcp_slow_start_after_idle
echo 1 > tcp_no_metrics_save
"""
# A model of the path (BBR) would probe a link that is switched between rates for seconds; a training network does not
# slow down after the idle half of a step.


def remove_leftovers() -> list[str]:
    """Names of the namespaces removed: those of runs that are no more."""
    names = sorted(path.name for path in _NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []
    stale = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _remove_namespace(name)
            stale.append(name)
    return stale


def _remove_namespace(name: str) -> None:
    """With its processes: they would keep it alive without a name. Nothing happens if there is none."""
    if not (_NAMESPACES / name).exists():
        return
    for pid in _run("ip", "netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        _run("ip", "netns", "del", name)
    except ClusterError:
        # Another run found the same leftover.
        if (_NAMESPACES / name).exists():
            raise


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process began: with the id it names a process for good. None: no such one."""
    try:
        # The command's name, in brackets, may hold spaces and brackets itself.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _batch(namespace: str, lines: Sequence[str]) -> None:
    _run("ip", "-n", namespace, "-batch", "-", given="\n".join(lines))


def _run(*command: str, given: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)}: no answer in {_COMMAND_SECONDS:g} s") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} {given}: {done.stderr.strip()}")
    return done.stdout
