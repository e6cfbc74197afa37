"""Ports for programs that need one as an argument."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port that nobody listens at, and that the kernel gives to no outgoing connection meanwhile."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    while True:
        port = random.SystemRandom().randint(10000, 60000)
        if first <= port <= last and last - first < 45000:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
