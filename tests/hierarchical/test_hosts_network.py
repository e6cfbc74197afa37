"""Hosts with a network between them: namespaces of this machine, real cables (veth), real launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from symcomm.bench.hosts import (
    HostsMeasurement,
    HostsWorkload,
    as_table,
    expected_bytes,
    pick_collectives,
    run_hosts_bench,
    to_json,
)
from symcomm.bench.namespaces import why_no_namespaces
from symcomm.cli import bench
from tests.support.namespaces import network

pytestmark = pytest.mark.long

SCRIPT = """
import os, sys, time
import torch
import symcomm
from symcomm import errors

group = symcomm.init(timeout=60)
x = torch.full((300_000,), 1.0 + group.rank)
group.all_reduce(x)
assert (x == 10.0).all() and [len(ranks) for ranks in group.layout.hosts] == [2, 2], group
print("summed", flush=True)
try:
    while True:
        group.all_reduce(x)
        group.barrier()
        time.sleep(0.02)
except errors.RankFailedError as error:
    print("failed", group.rank, sorted(error.ranks), error, flush=True)
    try:
        group = group.shrink(timeout=3, quorum=int(os.environ["QUORUM"]) or None)
    except errors.NoQuorumError as error:
        print("ended", sorted(error.ranks), flush=True)
    else:
        x = torch.ones(3)
        group.all_reduce(x)
        print("went on", group.global_ranks, x.tolist(), group.spans_hosts, flush=True)
"""


@pytest.mark.parametrize(("fault", "quorum"), [("pulled", 0), ("deaf", 0)], ids=["pulled", "one way"])
def test_two_nodes_and_a_cable_that_breaks(fault: str, quorum: int, tmp_path):
    """`symcomm run` on two hosts; each side then names the ranks of the other, long before the deadline of 60 s, and
    only the one with rank 0 goes on, unless both are asked to. It is the same where only one direction is broken."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "SYMCOMM_HOST_TIMEOUT": "2", "OMP_NUM_THREADS": "1"}
    env["SYMCOMM_TOKEN"] = "a token of both nodes"
    env["QUORUM"] = str(quorum)
    texts = [tmp_path / f"out{host}" for host in range(2)]
    with network(2) as net:
        nodes = [
            net.start(
                host,
                [
                    sys.executable, "-m", "symcomm", "run", "-n", "2", "--nnodes", "2", "--node-rank", str(host),
                    "--rdzv-endpoint", f"{net.address(0)}:29400", str(script),
                ],
                env, stdout=text.open("w"), stderr=subprocess.STDOUT, cwd=tmp_path,
            )
            for host, text in enumerate(texts)
        ]  # fmt: skip
        _until(lambda: all(t.read_text().count("summed") == 2 for t in texts), texts)
        net.set_link(1, up=False) if fault == "pulled" else net.deafen(1)
        begun = time.monotonic()
        _until(lambda: all(t.read_text().count("failed") >= 2 for t in texts), texts)
        assert time.monotonic() - begun < 30
        assert [node.wait(30) for node in nodes] == [0, 0], "\n".join(t.read_text() for t in texts)
    for host, text in enumerate(texts):
        other = [2, 3] if host == 0 else [0, 1]
        lines = [line for line in text.read_text().splitlines() if "failed" in line]
        assert len(lines) == 2 and all(f"{other} " in line for line in lines), text.read_text()
        went_on = text.read_text().count(f"went on {[2 * host, 2 * host + 1]} [2.0, 2.0, 2.0] False")
        assert went_on == (2 if host == 0 or quorum else 0), text.read_text()
        assert went_on or text.read_text().count("ended [0, 1") == 2, text.read_text()
        assert f"host {1 - host} (" in lines[0] and "cannot be reached any more" in lines[0]


def _until(condition, texts, seconds: float = 80.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        told = "\n".join(f"--- {t.name}\n{t.read_text()}" for t in texts)
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def test_networks_are_cleaned_up():
    with network(2) as net:
        assert net.start(0, ["true"]).wait(10) == 0
        sleeper = net.start(1, ["sleep", "600"])
    assert sleeper.poll() is not None
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"symcomm-net-{os.getpid()}-" not in listed


def test_the_benchmark_says_what_the_wire_allows():
    """Two hosts x 4 ranks: a ring over 8 ranks sends 1.75 times the tensor out of each host, ours once."""
    workload = HostsWorkload(ranks=4, sizes=(1 << 20,))
    assert expected_bytes("ours", "all_reduce", 1 << 20, 2, 4) == 1 << 20
    assert expected_bytes("gloo", "all_reduce", 1 << 20, 2, 4) == 1.75 * 2**20
    found = [
        HostsMeasurement("all_reduce", 1 << 20, "ours", 1.1 * 2**20, [0.010, 0.020, 0.012]),
        HostsMeasurement("all_reduce", 1 << 20, "gloo", 1.8 * 2**20, [0.024, 0.018]),
        HostsMeasurement("barrier", 0, "ours", 650.0, [0.001]),
        HostsMeasurement("barrier", 0, "gloo", 1160.0, [0.002]),
    ]
    title, _, rows = as_table(found, workload)
    assert title == "2 hosts x 4 ranks, 1000 Mbit/s each"
    assert rows[0] == ["all_reduce", "1 MiB", "12.00", "21.00", "1.75x", "1.75x", "1.10 x size", "1.80 x size", "70%"]
    assert rows[1] == ["barrier", "", "1.00", "2.00", "2.00x", "-", "650 B", "1160 B", "-"]
    written = to_json(found, workload)["rows"]
    assert [r["fastest_ms"] for r in written] == [10.0, 18.0, 1.0, 2.0]
    assert [r["expected"] for r in written] == [1 << 20, 1.75 * 2**20, None, None]


@pytest.mark.parametrize(
    ("collective", "ours", "gloo"),
    [
        ("all_reduce", 4 / 3, 5 / 3), ("reduce_scatter", 2 / 3, 5 / 3), ("all_gather", 2 / 3, 5 / 6),
        ("broadcast", 1, 4), ("reduce", 4 / 3, 3 / 2), ("gather", 2 / 3, 2 / 3), ("scatter", 2 / 3, 2 / 3),
        ("all_to_all", 4 / 3, 4 / 3),
    ],
)  # fmt: skip
def test_what_three_hosts_must_move(collective, ours, gloo):
    """Of three hosts x 2 ranks: as a real run's network cards counted, less 4 % of headers."""
    assert [expected_bytes(side, collective, 6 << 20, 3, 2) for side in ("ours", "gloo")] == pytest.approx(
        [ours * (6 << 20), gloo * (6 << 20)]
    )
    assert expected_bytes("ours", collective, 6 << 20, 1, 2) == 0


def test_every_collective_moves_what_it_must():
    """A real run on both sides: values are right, and the network card counts what algorithms say, and headers."""
    if reason := why_no_namespaces():
        pytest.skip(f"several hosts: {reason}")
    workload = HostsWorkload(2, rounds=3, steps=1, sizes=(4 << 10, 1 << 20), collectives=pick_collectives("all"))
    ticks: list[str] = []
    found = run_hosts_bench(workload, ticks.append)
    assert 3 * len(found) == len(ticks) == workload.turns == 3 * 2 * (8 * 2 + 1)
    assert {f.collective for f in found} == set(workload.collectives) and all(min(f.turns) > 0 for f in found)
    for f in found:
        if f.nbytes == 1 << 20:
            wanted = expected_bytes(f.side, f.collective, f.nbytes, 2, 2)
            assert 0.95 * wanted < f.sent < 1.4 * wanted, (f, wanted)


def test_which_collectives(monkeypatch):
    asked = []
    monkeypatch.setattr("symcomm.bench.hosts.run_hosts_bench", lambda workload, *_: asked.append(workload) or [])
    for words in ([], ["--collectives", "all_gather, barrier"], ["--collectives", "all"]):
        out = CliRunner().invoke(bench.app, ["hosts", "--quick", *words])
        assert out.exit_code == 0 and "all values were right" in out.output
    names = [workload.collectives for workload in asked]
    assert names[:2] == [("all_reduce",), ("all_gather", "barrier")] and len(names[2]) == 9
    out = CliRunner().invoke(bench.app, ["hosts", "--collectives", "all_reduce,p2p"])
    assert out.exit_code == 2 and "--collectives must be one of all_reduce" in out.output and "'p2p'" in out.output
