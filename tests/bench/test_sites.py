"""Sites far from each other: the relay's link, the network made of it, and `symcomm bench sites`."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from symcomm.bench import relay
from symcomm.bench import sites as bench_sites
from symcomm.bench.namespaces import SlowNetwork, why_no_slow_network
from symcomm.bench.sites import SitesMeasurement, SitesWorkload
from symcomm.cli import bench, command

HOSTS = [bytes([10, 0, 0, number]) for number in (1, 2)]
SENT = "/sys/class/net/net0/statistics/tx_bytes"  # bytes that have left a host, as its network card counts them

_why_not = functools.cache(why_no_slow_network)


@contextmanager
def slow_network(mbits: int, round_trip_ms: float) -> Iterator[SlowNetwork]:
    if reason := _why_not():
        pytest.skip(f"sites: {reason}")
    with SlowNetwork(2, mbits, round_trip_ms) as made:
        yield made


def packet(target: bytes, number: int, size: int = 100) -> bytes:
    """As much of IPv4 as the relay looks at, and a number."""
    head = bytes([0x45]) + bytes(15) + target
    return head + number.to_bytes(4, "big") + bytes(size - len(head) - 4)


# --- one direction, without a clock ------------------------------------------------------------------------------


def test_packets_arrive_in_order_after_the_delay():
    link = relay.Uplink(rate=1000.0, delay=0.5)
    assert link.next_arrival is None and link.arrived(1e9) == []
    link.send(b"a" * 10, now=100.0)
    link.send(b"b" * 20, now=100.0)  # begins when the first is on the wire
    assert link.next_arrival == pytest.approx(100.51)
    assert link.arrived(100.5) == []
    assert link.arrived(100.52) == [b"a" * 10]
    assert link.next_arrival == pytest.approx(100.53)
    link.send(b"c", now=200.0)  # an idle link saves nothing up
    assert link.arrived(100.54) == [b"b" * 20]
    assert link.next_arrival == pytest.approx(200.501)
    assert link.arrived(201.0) == [b"c"] and link.dropped == 0


def test_no_more_bytes_arrive_than_the_rate_allows():
    """Twice as much is sent as fits, for ten seconds: the link is always busy, the rest is dropped at the queue."""
    link = relay.Uplink(rate=1e6, delay=0.02, queue=0.05)
    arrived = []
    for tick in range(20_000):
        link.send(packet(HOSTS[0], tick, 1000), now=tick / 2000)
        arrived += link.arrived(tick / 2000)
    assert 9_900 <= len(arrived) <= 10_000
    assert 9_900 <= link.dropped <= 10_000
    numbers = [int.from_bytes(p[20:24], "big") for p in arrived]
    assert numbers == sorted(set(numbers))


def test_a_burst_that_fits_the_queue_is_not_dropped():
    link = relay.Uplink(rate=1e6, delay=0.0, queue=0.0505)
    for number in range(60):
        link.send(packet(HOSTS[0], number, 1000), now=0.0)
    assert len(link.arrived(1.0)) == 51 and link.dropped == 9  # 50 wait, one is on its way


# --- the relay, with sockets for devices -------------------------------------------------------------------------


def test_the_relay_carries_both_ways_and_loses_nothing():
    ends, devices = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in HOSTS), strict=True)
    stop_reading, stop = os.pipe()
    for device in devices:
        device.setblocking(False)
    by_address = {address: device.fileno() for address, device in zip(HOSTS, devices, strict=True)}
    uplinks = {device.fileno(): relay.Uplink(rate=1e8, delay=0.02) for device in devices}
    thread = threading.Thread(target=relay.relay, args=(by_address, uplinks, stop_reading))
    thread.start()
    try:
        begun = time.monotonic()
        for number in range(200):
            for end, target in zip(ends, reversed(HOSTS), strict=True):
                end.send(packet(target, number))
        ends[0].send(packet(bytes([10, 0, 0, 9]), 0))  # nobody has that address
        ends[0].send(b"\x60 not IPv4")
        for end, address in zip(ends, HOSTS, strict=True):
            end.settimeout(20)
            assert [end.recv(1000) for _ in range(200)] == [packet(address, number) for number in range(200)]
        assert time.monotonic() - begun >= 0.02
        assert all(uplink.dropped == 0 for uplink in uplinks.values())
    finally:
        os.close(stop)
        thread.join(20)
        os.close(stop_reading)
    assert not thread.is_alive()


# --- the network -------------------------------------------------------------------------------------------------

TALK = """
import socket, sys, time
if sys.argv[1] == "wait":
    server = socket.create_server((sys.argv[2], 5000))
    print("ready", flush=True)
    link, _ = server.accept()
else:
    link = socket.create_connection((sys.argv[2], 5000), 20)
link.settimeout(20)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
if sys.argv[1] == "wait":
    while len(byte := link.recv(1)) and byte != b"!":
        link.sendall(byte)
else:
    for _ in range(3):
        begun = time.perf_counter()
        link.sendall(b"?")
        link.recv(1)
        trips.append(time.perf_counter() - begun)
    link.sendall(b"!")
data = bytes(range(256)) * 4000
begun = time.perf_counter()
link.sendall(data)
link.shutdown(socket.SHUT_WR)
got = b""
while piece := link.recv(1 << 20):
    got += piece
print(min(trips, default=0.0), time.perf_counter() - begun, got == data)
"""


def test_a_round_trip_takes_what_was_asked_and_both_ways_carry():
    with slow_network(mbits=100, round_trip_ms=40) as net:
        words = [sys.executable, "-c", TALK]
        there = net.start(1, [*words, "wait", net.address(1)], stdout=subprocess.PIPE, text=True)
        assert there.stdout.readline() == "ready\n"
        here = net.start(0, [*words, "call", net.address(1)], stdout=subprocess.PIPE, text=True)
        (trip, seconds, same), (_, _, same_there) = (p.communicate(timeout=30)[0].split() for p in (here, there))
        assert same == same_there == "True"
        assert 0.040 <= float(trip) < 1.0
        assert float(seconds) >= 1_024_000 / (100e6 / 8)  # no faster than the link
        counts = [net.start(host, ["cat", SENT], stdout=subprocess.PIPE, text=True) for host in range(2)]
        assert all(int(p.communicate(timeout=30)[0]) >= 1_024_000 for p in counts)
        processes = [psutil.Process(p.pid) for p in net._started if p.poll() is None]
        assert len(processes) == 1  # the relay
    assert not processes[0].is_running()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"symcomm-net-{os.getpid()}-" not in listed


def test_the_relay_ends_with_its_maker_even_if_that_is_killed():
    if reason := _why_not():
        pytest.skip(f"sites: {reason}")
    script = (
        "import time; from symcomm.bench.namespaces import SlowNetwork; net = SlowNetwork(2, 100, 5).__enter__();"
        "print(net._started[0].pid, flush=True); time.sleep(60)"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    carrier = psutil.Process(int(maker.stdout.readline()))
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=20)
    psutil.wait_procs([carrier], timeout=20)
    assert not carrier.is_running()
    with slow_network(mbits=100, round_trip_ms=5):  # sweeps up what the killed one left
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"symcomm-net-{maker.pid}-" not in listed


# --- the benchmark -----------------------------------------------------------------------------------------------


def cli(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench.app, ["sites", *args])
    return result.exit_code, result.output


def test_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[SitesWorkload] = []

    def stand_in(workload: SitesWorkload, *_: object) -> list[SitesMeasurement]:
        asked.append(workload)
        return [
            SitesMeasurement("plain", [(0, 0.0, 5.0), (40, 20.0, 3.0), (80, 40.0, 2.1)], 320_000_000),
            SitesMeasurement("diloco", [(0, 0.0, 5.0), (100, 10.0, 2.2)], 20_500_000),
            SitesMeasurement("topk", [(0, 0.0, 5.0), (160, 32.0, 2.5)], 9_000_000),
        ]

    monkeypatch.setattr(bench_sites, "run_sites_bench", stand_in)
    path = tmp_path / "sites.json"
    code, output = cli("--markdown", "--json", str(path))
    assert code == 0 and asked == [SitesWorkload()] and asked[0].ranks == 1, output
    assert "2 sites x 1 ranks, 100 Mbit/s, round trip 50 ms" in output
    assert "| plain DDP | 40.0 | 1.00x | 80 | 500 | 320.0 | 2.10 |" in output
    assert "| DiLoCo | 10.0 | 4.00x | 100 | 100 | 20.5 | 2.20 |" in output
    assert "to a loss of 2.4" in output
    assert "| top 2 % | not in 32.0 | - | 160 | 200 | 9.0 | 2.50 |" in output
    saved = json.loads(path.read_text())
    assert saved["rows"][0]["curve"][-1] == [80, 40.0, 2.1] and saved["plan"]["target"] == 2.4
    code, output = cli("--quick", "--ranks", "2")
    assert (
        code == 0 and asked[1] == SitesWorkload(2, **bench_sites.QUICK) and re.search(r"DiLoCo +10\.0 +4\.00x", output)
    )
    code, output = cli("--ranks", "0")
    assert code == command.REFUSED and "1 or more for sites" in output


def test_every_method_trains_across_sites():
    """A tiny model, two steps: all methods begin and judge alike, and differ in what they send."""
    if reason := _why_not():
        pytest.skip(f"sites: {reason}")
    workload = SitesWorkload(
        round_trip_ms=4.0, width=32, layers=1, context=16, batch=2, every=1, period=2, limit=2, target=0.0
    )  # fmt: skip
    ticks: list[str] = []
    found = {f.method: f for f in bench_sites.run_sites_bench(workload, ticks.append)}
    assert list(found) == list(workload.methods) and len(ticks) == workload.turns
    assert len({f.curve[0][2] for f in found.values()}) == 1
    assert all(f.steps == 2 and f.seconds > 0 and 0 < f.loss < f.curve[0][2] * 2 for f in found.values())
    # One meeting is half of two steps' gradients; int8 is a quarter.
    assert found["diloco-int8"].sent < found["diloco"].sent < found["plain"].sent
    assert found["int8"].sent < found["plain"].sent
