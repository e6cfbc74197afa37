"""Hosts that are network namespaces of this machine, and a network between them.

    with Network(hosts=2, mbits=1000) as network:  # a switch, a link to each host, and a limit on its speed
        network.start(0, ["python", "rank.py"])
    with SlowNetwork(hosts=2, mbits=100, round_trip_ms=50) as network:  # far from each other: see relay.py
        ...

Everything is in namespaces of its own; when the last one is gone, so are links and limits. Names carry the process id
of their maker, so that what a killed one has left behind is found and removed by the next.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from symcomm import errors
from symcomm.bench.plans import running
from symcomm.bench.relay import TUN
from symcomm.bench.run import Tick

NAME = "symcomm-net"
NETWORK = "10.213.7"  # seen only inside the namespaces
PORT = "29600"  # the same
CARDS = Path("/proc/self/net/dev")  # of the reader's namespace, whatever is mounted where
BURST = "16kb"  # what may leave at once; small beside what is measured
QUEUE = "50ms"  # how long a packet may wait before it is dropped
START_DEADLINE = 30.0
PACKET = 9000  # bytes, on slow networks: each costs the relay some microseconds


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise errors.ResourceError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_no_namespaces() -> str:
    """Why this machine cannot pretend to be several, as the end of a sentence; empty if it can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    probe = f"{NAME}-{os.getpid()}-probe"
    try:
        _call("ip", "netns", "add", probe)
        try:
            _call("ip", "-n", probe, "link", "add", "name", "end0", "type", "veth", "peer", "name", "end1")
            _call("tc", "-n", probe, "qdisc", "add", "dev", "end0", "root", "tbf", "rate", "1gbit", "burst", BURST,
                  "latency", QUEUE)  # fmt: skip
        finally:
            _call("ip", "netns", "del", probe)
    except errors.ResourceError as error:
        return str(error)
    return ""


def why_no_slow_network() -> str:
    """The same for a network with delay."""
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"{TUN}: {error.strerror}"
    return why_no_namespaces()


def carried() -> list[int]:
    """Bytes that this process's host has sent and received over its link so far; zeros if it has none."""
    for line in CARDS.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "net0":
            return [int(counts.split()[8]), int(counts.split()[0])]
    return [0, 0]


def _sweep() -> None:
    """Remove namespaces whose maker is gone."""
    for line in _call("ip", "netns", "list").splitlines():
        found = re.match(rf"({NAME}-(\d+)-\S+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            with contextlib.suppress(errors.ResourceError):
                _call("ip", "netns", "del", found[1])


Made = TypeVar("Made", bound="_Hosts")
Figures = TypeVar("Figures")


class _Hosts(abc.ABC):
    """Namespaces, and the processes in them. A subclass connects them."""

    def __init__(self, hosts: int, mbits: int):
        self.mbits = mbits
        self._names = [f"{NAME}-{os.getpid()}-{h}" for h in range(hosts)]
        self._made: list[str] = []
        self._started: list[subprocess.Popen[Any]] = []

    @abc.abstractmethod
    def _connect_all(self) -> None:
        """Give each host a device ``net0`` with its address. What is started or added here goes with the rest."""

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def __enter__(self: Made) -> Made:
        _sweep()
        try:
            for name in self._names:
                self._add(name)
            self._connect_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, name: str) -> None:
        _call("ip", "netns", "add", name)
        self._made.append(name)
        _call("ip", "-n", name, "link", "set", "lo", "up")

    def start(self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> Any:
        """Run a command on a host; it is killed when the network is closed."""
        command = ["ip", "netns", "exec", self._names[host], *words]
        process = subprocess.Popen(command, env=dict(env) if env else None, start_new_session=True, **more)
        self._started.append(process)
        return process

    def run_ranks(
        self, ranks: int, module: str, workload: Any, seconds: float, tick: Tick,
        kind: Callable[..., Figures], seen: Callable[[list[Figures]], None], call: str = "symcomm bench",
    ) -> list[Figures]:  # fmt: skip
        """Run ``module`` as ``ranks`` ranks on each host; returns what they found. The first rank writes lines: lists
        of rows become figures of that ``kind``, of which ``seen`` gets all so far; ``tick`` gets the other lines. Ranks
        that say nothing for ``seconds`` are ended, and the error says where they are."""
        found: list[Figures] = []
        world = ranks * len(self._names)
        common = {
            "MASTER_ADDR": self.address(0), "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "net0",
            "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }  # fmt: skip
        with running(
            f"{call}: the ranks", module, workload, world, common, (seconds, seconds), "after {}".format,
            lambda rank, words, **how: self.start(rank // ranks, words, **how),
        ) as lines:  # fmt: skip
            for line in lines:
                if line.startswith("["):
                    found += [kind(**row) for row in json.loads(line)]
                    seen(found)
                else:
                    tick(line.strip())
        return found

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._started:
            process.wait(10)
        for name in reversed(self._made):
            for _ in range(20):  # a process that was just killed may still be in there
                with contextlib.suppress(errors.ResourceError):
                    _call("ip", "netns", "del", name)
                    break
                time.sleep(0.05)
        self._made = []


class Network(_Hosts):
    """``mbits``: of each host's link, in each direction; 0: as fast as the kernel is."""

    def __init__(self, hosts: int, mbits: int = 0):
        super().__init__(hosts, mbits)
        self._switch = f"{NAME}-{os.getpid()}-switch"

    def _connect_all(self) -> None:
        self._add(self._switch)
        _call("ip", "-n", self._switch, "link", "add", "name", "br0", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host, name in enumerate(self._names):
            self._connect(host, name)

    def _connect(self, host: int, name: str) -> None:
        """A cable from the host to the switch, slowed down at both ends."""
        port = f"port{host}"
        _call(
            "ip", "-n", name, "link", "add", "name", "net0", "type", "veth", "peer", "name", port, "netns", self._switch
        )
        _call("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "net0")
        _call("ip", "-n", self._switch, "link", "set", port, "master", "br0")
        for space, device in ((name, "net0"), (self._switch, port)):
            _call("ip", "-n", space, "link", "set", device, "up")
            if self.mbits:
                _call("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.mbits}mbit",
                      "burst", BURST, "latency", QUEUE)  # fmt: skip


class SlowNetwork(_Hosts):
    """Hosts far from each other. ``mbits``: that each can send; ``round_trip_ms``: there and back, half each way.

    A program carries the packets (this needs no kernel module); it ends with this process, whatever becomes of it.
    """

    def __init__(self, hosts: int, mbits: int, round_trip_ms: float):
        super().__init__(hosts, mbits)
        self.round_trip_ms = round_trip_ms

    def _connect_all(self) -> None:
        places = [f"{name}={self.address(host)}" for host, name in enumerate(self._names)]
        relay = subprocess.Popen(
            [sys.executable, "-m", "symcomm.bench.relay", str(self.mbits), str(self.round_trip_ms / 2), *places],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        self._started.append(relay)
        assert relay.stdout is not None and relay.stderr is not None
        if not select.select([relay.stdout], [], [], START_DEADLINE)[0]:
            raise errors.deadline("SlowNetwork: starting the relay", START_DEADLINE)
        if relay.stdout.readline() != "ready\n":
            raise errors.ResourceError(f"SlowNetwork: the relay failed: {relay.stderr.read().strip()[-500:]}")
        for host, name in enumerate(self._names):
            _call("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "net0")
            _call("ip", "-n", name, "link", "set", "net0", "mtu", str(PACKET), "up")
