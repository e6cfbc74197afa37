"""Names and ports: ranks meet at MASTER_ADDR, often the host's own name, and slow DNS delays that."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from symcomm.observe.health import FAIL, OK, WARN, Finding

SLOW = 0.2  # seconds
DEADLINE = 12.0


def look_up(name: str, seconds: float = DEADLINE) -> tuple[float, list[str] | None, str]:
    """(seconds, addresses or None, what went wrong). A resolver has no deadline, so a thread waits for it."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)}))
        except OSError as error:
            answer.append(error)

    begun = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    took = time.monotonic() - begun
    if not answer:
        return took, None, f"no answer within {seconds:g} s"
    return (took, answer[0], "") if isinstance(answer[0], list) else (took, None, str(answer[0]))


def host_name() -> Finding:
    name = socket.gethostname()
    took, addresses, problem = look_up(name)
    fix = f"add a line `127.0.0.1 {name}` to /etc/hosts, or set MASTER_ADDR to an address"
    if addresses is None:
        return Finding("host name", WARN, f"{name!r} is not known ({problem}, after {took:.2g} s)", fix)
    found = f"{name!r} is {', '.join(addresses[:3])} (found in {took * 1000:.0f} ms)"
    return Finding("host name", OK, found) if took < SLOW else Finding("host name", WARN, f"{found}: slow", fix)


def meeting_place() -> Finding:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host:
        return Finding("MASTER_ADDR", OK, "not set: `symcomm run` finds one")
    took, addresses, problem = look_up(host)
    found = f"{host}:{port or '?'}"
    if addresses is None:
        return Finding("MASTER_ADDR", FAIL, f"{found} is not known ({problem})", "set it to an address")
    if took >= SLOW:
        return Finding("MASTER_ADDR", WARN, f"{found} took {took:.1f} s to look up", "use an address instead of a name")
    return Finding("MASTER_ADDR", OK, f"{found} is {addresses[0]}")


def loopback() -> Finding:
    """Ranks of one host meet at a port of the loopback address."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            server.settimeout(5)
            client.settimeout(5)
            begun = time.monotonic()
            client.connect(server.getsockname())
            server.accept()[0].close()
            took = time.monotonic() - begun
    except OSError as error:
        fix = "bring the loopback interface up: ip link set lo up"
        return Finding("loopback", FAIL, f"a connection to 127.0.0.1 failed ({error})", fix)
    return Finding("loopback", OK, f"connected in {took * 1e6:.0f} us")


def port_range() -> Finding:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return Finding("ports", OK, "the kernel does not say which it hands out")
    if high - low < 1000:
        return Finding(
            "ports", WARN, f"only {high - low + 1} for outgoing connections", "sysctl net.ipv4.ip_local_port_range"
        )
    return Finding("ports", OK, f"{low} to {high} for outgoing connections")


CHECKS = (("host name", host_name), ("MASTER_ADDR", meeting_place), ("loopback", loopback), ("ports", port_range))
