"""A slow network in one process: what a host sends reaches the other one late, and no faster than a link allows.

    python -m symcomm.bench.relay MBITS DELAY_MS NAMESPACE=ADDRESS ...

Each network namespace gets a TUN device, ``net0``; packets that leave through it come here, wait in its uplink, and go
to the device of the namespace whose address they carry. The process says "ready" when the devices are there, and ends
when its standard input does. The devices end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

DEVICE = "net0"
TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 1 << 16
QUEUE_SECONDS = 0.05  # how long a packet may wait for the link before it is dropped, as in a router
AT_ONCE = 32  # packets of one device before the next device's turn


class Uplink:
    """One direction of a link. Nothing here looks at a clock: the caller says what time it is, in seconds.

    ``rate``: bytes in a second; ``delay``: from a packet's last byte on the wire until it arrives; ``queue``: the
    seconds a packet may wait for its turn, or it is dropped.
    """

    def __init__(self, rate: float, delay: float, queue: float = QUEUE_SECONDS):
        self.rate, self.delay, self.queue = rate, delay, queue
        self.dropped = 0
        self._free = 0.0  # when the link has sent all accepted packets
        self._flying: deque[tuple[float, bytes]] = deque()  # (when it arrives, packet), in that order

    def send(self, packet: bytes, now: float) -> None:
        begin = max(now, self._free)
        if begin - now > self.queue:
            self.dropped += 1
            return
        self._free = begin + len(packet) / self.rate
        self._flying.append((self._free + self.delay, packet))

    def arrived(self, now: float) -> list[bytes]:
        """The packets that are at the other end by now, each told once."""
        packets = []
        while self._flying and self._flying[0][0] <= now:
            packets.append(self._flying.popleft()[1])
        return packets

    @property
    def next_arrival(self) -> float | None:
        return self._flying[0][0] if self._flying else None


def open_tun(namespace: str) -> int:
    """A device of our own in a network namespace; this thread stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(space, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(space)
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def destination(packet: bytes) -> bytes:
    """The address an IPv4 packet is for; empty for anything else."""
    return packet[16:20] if packet[:1] and packet[0] >> 4 == 4 else b""


def relay(devices: dict[bytes, int], uplinks: dict[int, Uplink], end: int) -> None:
    """Carry packets between ``devices`` (by address) until ``end`` has something to read, or closes."""
    watched = [end, *uplinks]
    while True:
        arrivals = [uplink.next_arrival for uplink in uplinks.values()]
        next_arrival = min((at for at in arrivals if at is not None), default=None)
        wait = None if next_arrival is None else max(0.0, next_arrival - time.monotonic())
        ready = select.select(watched, [], [], wait)[0]  # to the microsecond; poll and epoll count milliseconds
        if end in ready:
            return
        for device in ready:
            for packet in sent(device):
                uplinks[device].send(packet, time.monotonic())
        for uplink in uplinks.values():
            for packet in uplink.arrived(time.monotonic()):
                target = devices.get(destination(packet))
                if target is not None:
                    with contextlib.suppress(OSError):  # its device is down: lost, as on any network
                        os.write(target, packet)


def sent(device: int) -> Iterator[bytes]:
    """Packets that wait at a device, at most ``AT_ONCE``."""
    for _ in range(AT_ONCE):
        try:
            yield os.read(device, LARGEST_PACKET)
        except OSError:  # none, or the device is down
            return


def main() -> None:
    rate, delay = float(sys.argv[1]) * 1e6 / 8, float(sys.argv[2]) / 1e3
    devices: dict[bytes, int] = {}
    for word in sys.argv[3:]:
        namespace, _, address = word.partition("=")
        devices[socket.inet_aton(address)] = open_tun(namespace)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # as a cable needs no processor
    print("ready", flush=True)
    relay(devices, {device: Uplink(rate, delay) for device in devices.values()}, end=0)


if __name__ == "__main__":
    main()
