"""The address at which other hosts reach this one.

SYMCOMM_ADDRESS says it (an address or an interface); else the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME
names; else the address from which this host reaches the meeting place, MASTER_ADDR; else the one of its default route.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from symcomm import errors

LOOPBACK = "127.0.0.1"
GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address() -> str:
    """An address of this machine that other hosts can reach."""
    said = os.environ.get("SYMCOMM_ADDRESS", "")
    if said:
        return _of_interface(said) or _resolved(said)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in os.environ.get(variable, "").split(","):
            if address := _of_interface(name.strip()):
                return address
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):  # the last stands for "anywhere else"
        address = _towards(target) if target else ""
        if address and not address.startswith("127."):
            return address
    return LOOPBACK


def _of_interface(name: str) -> str:
    """The IPv4 address of an interface; empty if there is none."""
    if not name or len(name) > 15:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _resolved(said: str) -> str:
    try:
        return socket.gethostbyname(said)
    except OSError as error:
        raise errors.bad_argument(
            "groups across hosts", "SYMCOMM_ADDRESS", said, "an address or an interface of this machine"
        ) from error


def _towards(target: str) -> str:
    """The address that packets to ``target`` leave from. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(place)
            return sock.getsockname()[0]
    return ""
