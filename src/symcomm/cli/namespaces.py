"""Hosts that are network namespaces of this machine: a switch, a link to each host, and a limit on its speed.

    with Network(hosts=2, mbits=1000) as network:
        network.start(0, ["python", "rank.py"])

Everything is in namespaces of its own; when the last one is gone, so are links and limits. Names carry the process id
of their maker, so that what a killed one has left behind is found and removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from symcomm import errors

__all__ = ["Network", "why_no_namespaces"]

NAME = "symcomm-net"
NETWORK = "10.213.7"  # seen only inside the namespaces
BURST = "64kb"  # what may leave at once; small beside what is measured
QUEUE = "50ms"  # how long a packet may wait before it is dropped


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise errors.ResourceError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_no_namespaces() -> str:
    """Why this machine cannot pretend to be several, as the end of a sentence; empty when it can."""
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


def _sweep() -> None:
    """Remove the namespaces of makers that are gone."""
    for line in _call("ip", "netns", "list").splitlines():
        found = re.match(rf"({NAME}-(\d+)-\S+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            with contextlib.suppress(errors.ResourceError):
                _call("ip", "netns", "del", found[1])


class Network:
    """``mbits``: of each host's link, in each direction; 0: as fast as the kernel is."""

    def __init__(self, hosts: int, mbits: int = 0):
        self.hosts, self.mbits = hosts, mbits
        self._switch = f"{NAME}-{os.getpid()}-switch"
        self._names = [f"{NAME}-{os.getpid()}-{h}" for h in range(hosts)]
        self._made: list[str] = []
        self._started: list[subprocess.Popen] = []

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._add(self._switch)
            _call("ip", "-n", self._switch, "link", "add", "name", "br0", "type", "bridge")
            _call("ip", "-n", self._switch, "link", "set", "br0", "up")
            for host, name in enumerate(self._names):
                self._add(name)
                self._connect(host, name)
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

    def set_link(self, host: int, up: bool) -> None:
        """Pull a host's cable, or put it back."""
        _call("ip", "-n", self._switch, "link", "set", f"port{host}", "up" if up else "down")

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left a host so far, as its network card counts them."""
        text = _call("ip", "netns", "exec", self._names[host], "cat", "/sys/class/net/net0/statistics/tx_bytes")
        return int(text)

    def start(self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> Any:
        """Run a command on a host; it is killed when the network is closed."""
        command = ["ip", "netns", "exec", self._names[host], *words]
        process = subprocess.Popen(command, env=dict(env) if env else None, start_new_session=True, **more)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for name in reversed(self._made):
            for _ in range(20):  # a process that was just killed may still be in there
                with contextlib.suppress(errors.ResourceError):
                    _call("ip", "netns", "del", name)
                    break
                time.sleep(0.05)
        self._made = []
