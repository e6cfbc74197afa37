"""What a described cluster would take: plans that are walked, wires that are shared, steps that overlap."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from symcomm.cli.main import app
from symcomm.errors import BadArgumentError
from symcomm.hierarchical import pipelined
from symcomm.memory.limits import format_bytes
from symcomm.simulate import Cluster, Link, Topology, compare, ddp_step, fsdp_step, parse_topology, predict
from symcomm.simulate import machine as machines
from symcomm.simulate.calibrate import CALL, CASES, calibrate, fit, fit_link, fitted_sizes
from symcomm.simulate.engines import find_engine, model_seconds
from symcomm.simulate.host import SETTLED, host_seconds, plans_for, plans_seconds
from symcomm.simulate.predict import ALGORITHMS, CHUNK, CROWDING, estimate
from symcomm.simulate.rounds import (
    Round,
    all_gather_rounds,
    all_reduce_rounds,
    direct_broadcast,
    reduce_scatter_rounds,
    tree,
)
from symcomm.simulate.topology import resized
from symcomm.simulate.units import format_time, parse_bandwidth, parse_bytes, parse_seconds

pytestmark = [pytest.mark.without_torch, pytest.mark.long]

# A machine whose numbers make sums easy: a byte that is touched takes a nanosecond, waits nothing.
PLAIN = machines.Machine("plain", call=0, meet=0, peer=0, cached=1e9, memory=1e9, host_memory=1e30)
WAITS = dataclasses.replace(PLAIN, meet=1e-3, cached=1e30, memory=1e30)
LINK = Link(bandwidth=1e9, latency=1e-6, message=0, arrival=0)

# --- one host: plans ---------------------------------------------------------------------------------------


def test_a_small_all_reduce_is_what_its_steps_touch():
    """One-shot, 2 ranks: stage my tensor (read, write), meet, combine two sources into the output: five touches."""
    assert plans_for("all_reduce", 4096, 2)[0].name == "one-shot"
    assert host_seconds("all_reduce", 4096, 2, PLAIN) == pytest.approx(5 * 4096e-9)
    assert host_seconds("all_reduce", 4096, 2, WAITS) == pytest.approx(1e-3)


def test_symmetric_tensors_are_combined_where_they_lie():
    """Direct: each of 4 ranks reads its quarter from all, and writes it to all: twice the tensor."""
    nbytes = 64 << 10
    assert host_seconds("all_reduce", nbytes, 4, PLAIN, symmetric=True) == pytest.approx(2 * nbytes * 1e-9)
    assert host_seconds("all_reduce", nbytes, 4, WAITS, symmetric=True) == pytest.approx(2e-3)  # arrive, finish


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_long_loops_are_played_in_part(collective, ranks, monkeypatch):
    plans = plans_for(collective, 8 << 20, ranks)
    quick = plans_seconds(plans, 8 << 20, machines.DEFAULT)
    monkeypatch.setattr("symcomm.simulate.host.SETTLED", 10**6)
    assert quick == pytest.approx(plans_seconds(plans, 8 << 20, machines.DEFAULT), rel=0.02)
    assert SETTLED == 8


# Times of 2 ranks on 2 idle cores, from BENCHMARKS.md, in microseconds. Those of CASES made DEFAULT; these did not.
MEASURED = [
    ("all_reduce", 1 << 20, False, 105.4), ("all_reduce", 16 << 20, False, 2002), ("all_reduce", 64 << 20, False, 8445),
    ("all_gather", 64 << 20, False, 5661), ("reduce_scatter", 1 << 20, False, 81.64),
    ("reduce_scatter", 64 << 20, False, 6382), ("broadcast", 1 << 20, False, 62.39),
    ("broadcast", 64 << 20, False, 4876), ("reduce", 1 << 20, False, 89.78), ("reduce", 64 << 20, False, 6965),
    ("all_reduce", 1 << 20, True, 49.87), ("all_reduce", 64 << 20, True, 4710),
    ("reduce_scatter", 1 << 20, True, 40.73), ("reduce_scatter", 64 << 20, True, 4240),
]  # fmt: skip


@pytest.mark.parametrize(("collective", "nbytes", "symmetric", "us"), MEASURED)
def test_plans_that_were_not_fitted_are_predicted(collective, nbytes, symmetric, us):
    assert host_seconds(collective, nbytes, 2, machines.DEFAULT, symmetric) * 1e6 == pytest.approx(us, rel=0.25)


def test_more_ranks_than_cores_take_turns():
    crowded = dataclasses.replace(PLAIN, cores=2)
    assert host_seconds("all_reduce", 1 << 20, 4, crowded) > 2 * host_seconds("all_reduce", 1 << 20, 4, PLAIN)


def test_a_hosts_memory_is_shared():
    narrow = dataclasses.replace(PLAIN, host_memory=2e9)
    nbytes = 64 << 20
    assert host_seconds("all_gather", nbytes, 2, narrow) == pytest.approx(host_seconds("all_gather", nbytes, 2, PLAIN))
    assert host_seconds("all_gather", nbytes, 8, narrow) > 2 * host_seconds("all_gather", nbytes, 8, PLAIN)


@pytest.mark.parametrize("symmetric", [False, True])
def test_memory_of_another_node_is_far(symmetric):
    """All that takes time is reading across: of a flat all_reduce eight times as much as of one by node."""
    free = dataclasses.replace(PLAIN, cached=1e30, memory=1e30)
    divided = dataclasses.replace(free, nodes=2, between=1e9)
    nbytes, nodes = 64 << 20, (0,) * 8 + (1,) * 8
    assert host_seconds("all_reduce", nbytes, 16, free, symmetric) < 1e-6
    flat = plans_seconds(plans_for("all_reduce", nbytes, 16), nbytes, divided, symmetric)
    assert flat == pytest.approx(8 * nbytes * 1e-9, rel=0.02)  # each way, between the nodes at 1 GB/s
    by_node = host_seconds("all_reduce", nbytes, 16, divided, symmetric)
    assert by_node == plans_seconds(plans_for("all_reduce", nbytes, 16, nodes), nbytes, divided, symmetric)
    assert by_node == pytest.approx(nbytes * 1e-9, rel=0.05)


NODES = ([], ["--numa-nodes", "2"])


def test_nodes_of_a_machine():
    with pytest.raises(ValueError, match="nodes must be more than 0, got 0"):
        dataclasses.replace(PLAIN, nodes=0)
    told = [
        CliRunner().invoke(app, ["simulate", "--hosts", "1", "--ranks-per-host", "16", *more, "--json"])
        for more in NODES
    ]
    seconds = [json.loads(result.output)["found"][0]["seconds"] for result in told]
    assert seconds[0] < seconds[1]
    assert json.loads(told[1].output)["machine"]["nodes"] == 2


# --- wires -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hosts", "one", "other", "hops"),
    [
        ("star", 4, 0, 3, 2),
        ("ring", 8, 0, 3, 3),
        ("ring", 8, 0, 6, 2),
        ("torus:4x4", 16, 0, 15, 2),
        ("torus:4x4", 16, 0, 10, 4),
        ("torus:2x3x4", 24, 0, 23, 3),
        ("fat-tree:4", 16, 0, 3, 2),
        ("fat-tree:4", 16, 0, 4, 4),
        ("fat-tree:4x2", 16, 0, 4, 4),
        ("fat-tree:4x2", 16, 0, 8, 6),
    ],
)
def test_routes(spec, hosts, one, other, hops):
    topology = parse_topology(spec, hosts)
    there, back = topology.route(one, other), topology.route(other, one)
    assert len(there) == len(back) == hops
    assert not set(there) & set(back)  # a link has one wire for each direction
    assert len(topology.route(one, other)) == hops


@pytest.mark.parametrize(("shape", "hosts"), [((), 7), ((3, 4), 12), ((2, 3, 4), 24)])
def test_a_torus_route_walks_from_neighbour_to_neighbour(shape, hosts):
    """Messages to a neighbour take one wire; a route is the wires between neighbours on its way."""
    topology = Topology("torus" if shape else "ring", hosts, Link(), shape)
    single = {}
    for a in range(hosts):
        for b in range(hosts):
            if a != b and len(topology.route(a, b)) == 1:
                single.setdefault(topology.route(a, b)[0], []).append((a, b))
    for a in range(hosts):
        for b in range(hosts):
            here = {a}
            for wire in topology.route(a, b) if a != b else []:
                here = {end for begin, end in single[wire] if begin in here}
            assert b in here


def max_min_seconds(topology: Topology, pairs, nbytes: float) -> float:
    """Max-min fair sharing, played: raise all rates together, freeze those whose wire is full, until all are done."""
    left, now = {k: nbytes for k in range(len(pairs))}, 0.0
    while left:
        rates, room, open_ = {}, {}, set(left)
        for k in left:
            for wire in topology.route(*pairs[k]):
                room[wire] = wire.bandwidth
        while open_:
            users = {w: [k for k in open_ if w in topology.route(*pairs[k])] for w in room}
            tight = min((w for w in room if users[w]), key=lambda w: room[w] / len(users[w]))
            share = room[tight] / len(users[tight])
            for k in users[tight]:
                rates[k] = share
                open_.discard(k)
                for wire in topology.route(*pairs[k]):
                    room[wire] -= share
        step = min(left[k] / rates[k] for k in left)
        now += step
        left = {k: n - rates[k] * step for k, n in left.items() if n - rates[k] * step > 1e-9 * nbytes}
    return now


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(["star", "ring", "torus:3x4", "fat-tree:4,oversubscription=2", "fat-tree:2x3"]),
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=12),
)
def test_the_busiest_wire_decides_what_fair_sharing_gives(spec, pairs):
    pairs = tuple(pair for pair in pairs if pair[0] != pair[1])
    if pairs:
        topology = dataclasses.replace(parse_topology(spec, 12), link=Link(1e9, 0, 0, 0))
        got = model_seconds(topology, [Round(pairs, 1e6)])[0]
        assert got == pytest.approx(max_min_seconds(topology, pairs, 1e6))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mesh", "topology must be star, ring, torus:AxB or fat-tree"),
        ("star:4", "topology must be star, ring"),
        ("torus", "a torus of 16 hosts, got 'torus'; choose sizes whose product is 16, such as torus:4x4"),
        ("torus:3x4", "such as torus:4x4"),
        ("torus:4xfour", "numbers with x between them"),
        ("fat-tree", "fat-tree:HOSTS_PER_LEAF or"),
        ("fat-tree:2x2x2", "fat-tree:HOSTS_PER_LEAF or"),
        ("fat-tree:0", "numbers with x between them"),
        ("star,bandwidth", "'bandwidth' is no key=value"),
        ("star,latency=1us,latency=2us", "given twice"),
        ("star,bandwidth=fast", "bandwidth must be a rate such as 100Gb/s (bits) or 12.5GB/s (bytes), got 'fast'"),
        ("star,bandwidth=0Gb/s", "bandwidth must be a rate"),
        ("star,latency=3", "latency must be a time such as 500ns"),
        ("star,oversubscription=2", "'oversubscription' is none"),
        ("fat-tree:4,oversubscription=0.5", "oversubscription must be a number of 1 or more"),
        ("fat-tree:4,oversubscription=nan", "oversubscription must be a number of 1 or more"),
    ],
)
def test_bad_specs_get_one_sentence(spec, words):
    with pytest.raises(BadArgumentError) as info:
        parse_topology(spec, 16)
    assert words in str(info.value) and "\n" not in str(info.value)


def test_specs_say_what_links_do():
    found = parse_topology(
        "fat-tree:8x4,bandwidth=400Gb/s, latency=500ns, message=2us, arrival=9us, oversubscription=4", 64
    )
    assert (found.kind, found.hosts, found.shape, found.oversubscription) == ("fat-tree", 64, (8, 4), 4.0)
    assert found.link == pytest.approx((50e9, 500e-9, 2e-6, 9e-6))
    assert found.route(0, 8)[1].bandwidth == 8 * 50e9 / 4
    assert resized(parse_topology("torus:4x4", 16), 32).shape == (4, 8)
    with pytest.raises(BadArgumentError, match="hosts must be 1 or more, got 0"):
        parse_topology("star", 0)


# --- between hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 6, 8, 13, 64])
@pytest.mark.parametrize("way", ["direct", "ring", "halving"])
def test_rounds_move_what_an_algorithm_must(hosts, way):
    """Every host sends (H-1)/H of the tensor; in halving those beyond a power of two hand in all of theirs instead."""
    sent = [0.0] * hosts
    for r in reduce_scatter_rounds(way, hosts, 1.0):
        assert all(a != b for a, b in r.pairs)
        for a, _ in r.pairs:
            sent[a] += r.nbytes * r.times
    group = hosts if way != "halving" else 1 << (hosts.bit_length() - 1)
    assert sent == pytest.approx([(group - 1) / group if h < group else 1.0 for h in range(hosts)])
    received = [0.0] * hosts
    for r in all_gather_rounds(way, hosts, 1.0):
        assert r.combined == 0
        for _, b in r.pairs:
            received[b] += r.nbytes * r.times
    assert received == pytest.approx(sent)


def test_halving_takes_few_rounds_and_a_ring_many():
    assert sum(r.times for r in reduce_scatter_rounds("halving", 1024, 1.0)) == 10
    assert sum(r.times for r in reduce_scatter_rounds("ring", 1024, 1.0)) == 1023
    assert sum(r.times for r in reduce_scatter_rounds("direct", 64, 1.0)) == 1
    assert tree(8, 1.0, 4, up=True)[0].times == 3 + 4 - 1
    (swap,) = all_reduce_rounds("direct", 2, 1.0)
    assert (swap.nbytes, swap.combined, swap.pairs) == (1.0, 1.0, ((0, 1), (1, 0)))
    first, second = direct_broadcast(5, 1.0)
    assert first.nbytes == second.nbytes == 0.25 and len(second.pairs) == 4 * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_an_all_reduce_between_hosts_of_one_rank(algorithm):
    """Nothing inside hosts, free combining: 2 (H-1)/H of the tensor over each link, as the books say."""
    free = dataclasses.replace(PLAIN, cached=1e30, memory=1e30)
    cluster = Cluster(1, Topology("star", 8, Link(1e9, 0, 0, 0)), free)
    got = estimate("all_reduce", algorithm, 8_000_000, cluster)
    assert got.inside == 0
    if algorithm == "flat tree":  # a parent receives from two children: twice the tensor up, and twice down
        assert got.seconds == pytest.approx(4 * 8e-3, rel=0.01)
    else:
        assert got.seconds == pytest.approx(2 * 7 / 8 * 8e-3)
        assert got.busbw == pytest.approx(1e9)


def test_a_hosts_link_carries_every_ranks_shard():
    free = dataclasses.replace(PLAIN, cached=1e30, memory=1e30)
    one, eight = (Cluster(r, Topology("star", 8, Link(1e9, 0, 0, 0)), free) for r in (1, 8))
    for algorithm in ALGORITHMS["all_reduce"][:3]:
        found = [estimate("all_reduce", algorithm, 8 << 20, c) for c in (one, eight)]
        assert found[0].between == pytest.approx(found[1].between)


def test_chunks_hide_the_hosts_behind_the_network():
    """Direct, 4 MiB at a time: the first chunk's work in the hosts, and from then on the slower of the two."""
    cluster = Cluster(2, Topology("star", 2, Link(1e9, 0, 0, 0)), PLAIN)
    found = estimate("all_reduce", "hierarchical direct", 16 << 20, cluster)
    chunk = sum(host_seconds(part, 4 << 20, 2, PLAIN) for part in ("reduce_scatter", "all_gather"))
    network = (4 << 20) / 1e9 + PLAIN.add(2 << 20, 2, False)
    assert found.chunks == 4
    assert (found.inside, found.between) == pytest.approx((4 * chunk, 4 * network))
    assert found.seconds == pytest.approx(chunk + network + 3 * max(chunk, network))
    for name in ALGORITHMS["all_reduce"][:3]:
        found = estimate("all_reduce", name, 256 << 20, cluster)
        assert max(found.inside, found.between) <= found.seconds <= found.inside + found.between


def test_everybody_to_everybody_has_a_limit():
    cluster = Cluster(8, parse_topology("star", 257))
    assert "hierarchical direct" not in [e.algorithm for e in compare("all_gather", 1 << 20, cluster)]
    with pytest.raises(BadArgumentError, match="hosts must be at most 256 for hierarchical direct, got 257"):
        estimate("all_gather", "hierarchical direct", 1 << 20, cluster)


def test_one_host_alone_is_its_own_plan():
    cluster = Cluster(4, parse_topology("star", 1))
    found = compare("all_reduce", 1 << 20, cluster)[0]
    assert found.between == 0 and found.messages == 0
    assert found.seconds == host_seconds("all_reduce", 1 << 20, 4, machines.DEFAULT)


def test_oversubscription_slows_what_leaves_the_leaf():
    fair, thin = (Cluster(8, parse_topology(f"fat-tree:8,oversubscription={n}", 64)) for n in (1, 4))
    halving = [estimate("all_reduce", "hierarchical halving", 1 << 28, c).between for c in (fair, thin)]
    ring = [estimate("all_reduce", "hierarchical ring", 1 << 28, c).between for c in (fair, thin)]
    assert halving[1] > 2 * halving[0]
    assert ring[1] < 1.01 * ring[0]  # one message a leaf: there is room


def test_predict():
    seconds = predict("all_reduce", 64 << 20, 2, 2, Link(125e6, 50e-6, 30e-6), machine=machines.DEFAULT)
    wire = 64 * (1 << 20) / 125e6  # each host sends the tensor once
    assert wire < seconds < 1.2 * wire
    assert predict("all_reduce", 64 << 20, 2, 2, "star,bandwidth=1Gb/s", machine=machines.DEFAULT) < 1.1 * seconds
    slow = predict("all_reduce", 64 << 20, 2, 2, LINK, machine=machines.DEFAULT, cores_per_host=1)
    assert slow > predict("all_reduce", 64 << 20, 2, 2, LINK, machine=machines.DEFAULT)
    flat = predict("all_reduce", 64 << 20, 2, 2, LINK, machine=machines.DEFAULT, algorithm="flat ring")
    assert flat > predict("all_reduce", 64 << 20, 2, 2, LINK, machine=machines.DEFAULT)
    with pytest.raises(BadArgumentError, match="a topology of 3 hosts"):
        predict("all_reduce", 8, 3, 2, parse_topology("star", 2))
    with pytest.raises(
        BadArgumentError, match="must be one of hierarchical direct, hierarchical tree, flat tree, got 'flat ring'"
    ):
        predict("broadcast", 8, 2, 2, LINK, algorithm="flat ring")
    with pytest.raises(BadArgumentError, match="bytes must be 1 or more"):
        predict("all_reduce", 0, 2, 2, LINK)


# --- hosts that were measured ------------------------------------------------------------------------------

# Milliseconds of an all_reduce between two hosts of one core each, 1 Gbit/s, as `symcomm bench hosts` measured them on
# a quiet machine: by ranks a host.
HOSTS = {
    2: {4 << 10: 0.84, 64 << 10: 1.34, 256 << 10: 3.34, 1 << 20: 14.55, 8 << 20: 80.83, 32 << 20: 309.18},
    3: {4 << 10: 0.99, 64 << 10: 1.53, 256 << 10: 3.95, 1 << 20: 15.12, 8 << 20: 81.20, 32 << 20: 297.47},
    4: {4 << 10: 1.22, 64 << 10: 1.89, 256 << 10: 4.45, 1 << 20: 18.20, 8 << 20: 86.61, 32 << 20: 338.37},
}


@pytest.mark.parametrize(("ranks", "nbytes"), [(ranks, nbytes) for ranks in HOSTS for nbytes in HOSTS[ranks]])
def test_three_figures_predict_the_others(ranks, nbytes):
    how = {"machine": machines.DEFAULT, "cores_per_host": 1}
    fitted = {n: HOSTS[2][n] / 1e3 for n in (4 << 10, 1 << 20, 32 << 20)}
    link = fit_link(fitted, 2, 2, **how)
    exact = ranks == 2 and nbytes in fitted
    got = predict("all_reduce", nbytes, 2, ranks, link, **how) * 1e3
    assert got == pytest.approx(HOSTS[ranks][nbytes], rel=0.001 if exact else 0.2)


def test_sizes_are_those_of_groups_of_several_hosts():
    assert CHUNK == pipelined.CHUNK


def test_hosts_meet_first_and_small_tensors_travel_along():
    """Free hosts: the arrival, two links' latency, and what a host tells the others over its link; then messages."""
    free = dataclasses.replace(PLAIN, cached=1e30, memory=1e30)
    cluster = Cluster(2, Topology("star", 3, Link(1e9, 1e-5, 1e-3, 1e-2)), free)

    def seconds(collective: str, nbytes: int, cluster: Cluster = cluster) -> float:
        return estimate(collective, "hierarchical direct", nbytes, cluster).seconds

    assert seconds("all_reduce", 4096) == pytest.approx(10.02e-3 + 2 * 4096e-9)  # to two hosts
    assert seconds("all_gather", 3072) == pytest.approx(10.02e-3 + 2 * 1024e-9)
    assert seconds("broadcast", 4096) == pytest.approx(10.02e-3 + 2 * 4096e-9)
    two = (1 + 1 / 3) * 1e-3  # messages at a time
    assert seconds("reduce_scatter", 3072) == pytest.approx(10.02e-3 + 2 * 1024e-9)
    third = 512 << 10
    assert seconds("reduce_scatter", 3 * third) == pytest.approx(10.04e-3 + two + 2e-9 * third)
    assert seconds("all_gather", 3 * third) == pytest.approx(10.04e-3 + two + 2e-9 * third)
    assert seconds("broadcast", 2 * third) == pytest.approx(10.06e-3 + two / 2 + 1e-3 + 3e-9 * third)
    alone = Cluster(2, Topology("star", 1, Link(arrival=1.0)), free)
    assert seconds("all_reduce", 4096, alone) < 1e-9


def test_software_takes_longer_where_ranks_share_cores():
    free = dataclasses.replace(PLAIN, cached=1e30, memory=1e30, switch=0.0, cores=1)
    link = Link(1e30, 0, message=1e-3, arrival=1e-2)
    one, four = (Cluster(ranks, Topology("star", 2, link), free).network.link for ranks in (1, 4))
    assert (one.message, one.arrival) == (1e-3, 1e-2)
    assert (four.message, four.arrival) == pytest.approx((4**CROWDING * 1e-3, 4**CROWDING * 1e-2))


def bench_file(path, ranks, seconds, hosts=2, cores=2):
    """As `symcomm bench hosts --json` writes it."""
    rows = [
        {"collective": c, "nbytes": n, "side": side, "ms": s * 1e3 if side == "ours" else 1.0}
        for (c, n), s in seconds.items()
        for side in ("ours", "gloo")
    ]
    found = {"machine": {"cores": cores}, "plan": {"hosts": hosts, "ranks": ranks}, "rows": rows}
    path.write_text(json.dumps(found))
    return str(path)


def test_check_compares_with_what_was_measured(tmp_path, monkeypatch):
    """Figures that the model itself has made, one of which is wrong by half."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    true = Link(100e6, 0, 1e-3, 2e-3)
    files = []
    for ranks in (2, 4):
        cases = [(c, n) for c in ("all_reduce", "broadcast") for n in (4096, 65536, 1 << 20, 32 << 20)]
        how = {"machine": machines.DEFAULT, "cores_per_host": 1}
        seconds = {(c, n): predict(c, n, 2, ranks, true, **how) for c, n in cases} | {("barrier", 0): 1.0}
        if ranks == 4:
            seconds["broadcast", 65536] *= 2
        files.append(bench_file(tmp_path / f"{ranks}.json", ranks, seconds))
    out = ask("--check", files[0], "--check", files[1])
    assert out.exit_code == 0, out.output
    assert "link: 0.8 Gb/s, arrival 2.00 ms, message 1.00 ms" in out.output
    assert out.output.count("fitted\n") == 3 and out.output.count("1.00x") == 15
    worst = "worst: 0.50x (broadcast of 64 KiB, 2 x 4 ranks); 12 of 13 that were not fitted are within 20 %"
    assert worst in out.output
    found = json.loads(ask("--check", files[1], "--json").output)
    assert len(found["rows"]) == 8 and sum(row["fitted"] for row in found["rows"]) == 3
    assert found["link"]["bandwidth"] == pytest.approx(100e6, rel=1e-3)


def test_check_refuses_what_is_no_measurement(tmp_path):
    assert "cannot be read" in ask("--check", str(tmp_path / "none.json")).output
    (tmp_path / "other.json").write_text('{"rows": []}')
    out = ask("--check", str(tmp_path / "other.json"))
    assert out.exit_code == 2 and "write it with `symcomm bench hosts --json FILE`" in out.output
    out = ask("--check", bench_file(tmp_path / "few.json", 2, {("all_gather", 65536): 1.0}))
    assert out.exit_code == 2 and "of two sizes or more that an engine carries, got []" in out.output


# --- SimGrid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["star", "fat-tree:4,oversubscription=3", "torus:3x4", "ring"])
def test_simgrid_agrees(spec):
    """An independent simulator plays the same rounds; what it knows of max-min sharing is its own."""
    pytest.importorskip("simgrid", reason="SimGrid is not installed: see docs/how-to/simulate.md")
    topology = parse_topology(spec, 12)
    ways = [r for way in ("ring", "halving", "direct") for r in reduce_scatter_rounds(way, 12, 1e8)]
    rounds = [*ways, *tree(12, 1e8, 4, up=True)]
    assert find_engine("simgrid")(topology, rounds) == pytest.approx(model_seconds(topology, rounds), rel=2e-3)


def test_simgrid_that_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadArgumentError, match=r"needs SimGrid, which is not installed; install 'symcomm\[simulate\]'"):
        Cluster(8, parse_topology("star", 4), engine="simgrid")


# --- training ----------------------------------------------------------------------------------------------


def test_ddp_hides_what_it_can():
    cluster = Cluster(8, parse_topology("star", 16))
    fast, slow = (ddp_step(1 << 30, seconds, 25 << 20, cluster) for seconds in (10.0, 0.001))
    assert fast.collectives == slow.collectives == 41
    last = min(e.seconds for e in compare("all_reduce", (1 << 30) % (25 << 20), cluster))
    assert fast.exposed == pytest.approx(last)  # only the last bucket, which is full when there is nothing left
    assert slow.exposed == pytest.approx(slow.communication, rel=0.01)
    assert fast.efficiency > 0.99 > 0.1 > slow.efficiency
    one = ddp_step(1 << 30, 10.0, 1 << 30, cluster)
    assert one.exposed == pytest.approx(one.communication)  # one bucket hides nothing


def test_fsdp_gathers_one_unit_ahead():
    cluster = Cluster(8, parse_topology("star", 16))
    fast, slow = (fsdp_step(1 << 30, seconds, 128 << 20, cluster) for seconds in (100.0, 1e-6))
    assert fast.collectives == 3 * 8 - 1
    gather, scatter = (
        min(e.seconds for e in compare(name, 128 << 20, cluster)) for name in ("all_gather", "reduce_scatter")
    )
    assert fast.exposed == pytest.approx(gather + scatter)  # the first gather, the last scatter
    assert slow.exposed == pytest.approx(slow.communication, rel=0.01)
    with pytest.raises(BadArgumentError, match="bucket_bytes must be 1 or more"):
        ddp_step(8, 1.0, 0, cluster)


# --- units, machines, the command --------------------------------------------------------------------------


def test_units():
    assert [parse_bytes("c", "a", t) for t in ("8", "64K", "1.5GiB", "2gb")] == [8, 65536, 3 << 29, 2 << 30]
    assert [parse_bandwidth("c", "a", t) for t in ("100Gb/s", "12.5GB/s", "1gbps")] == [12.5e9, 12.5e9, 125e6]
    assert parse_seconds("c", "a", "1.5ms") == 1.5e-3
    assert [format_bytes(n) for n in (8, 1 << 20, 3 << 29)] == ["8 B", "1 MiB", "1.5 GiB"]
    assert [format_time(s) for s in (1e-7, 1.5e-6, 0.0234, 1.2, 120)] == [
        "0.10 us",
        "1.50 us",
        "23.4 ms",
        "1.20 s",
        "120 s",
    ]
    for text in ("", "K", "-1", "0", "1X"):
        with pytest.raises(BadArgumentError, match="such as 8, 64K"):
            parse_bytes("c", "a", text)


def test_calibration_finds_the_machine_that_was_measured():
    true = dataclasses.replace(machines.DEFAULT, cached=31e9, memory=9e9, meet=2e-6, call=0.0)
    measured = {(c, n): host_seconds(c, n, 2, true) for c, n, _ in CASES} | {("barrier", 0): 2e-6, CALL: 2e-6}
    found = fit(machines.DEFAULT, measured)
    for name in ("cached", "memory", "meet", "call"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)


@pytest.mark.parametrize(("hosts", "cores"), [(2, 0), (3, 1), (8, 0), (3, 2 / 3)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_three_calls_make_a_link(hosts, cores, collective):
    true, how = Link(125e6, 0, 80e-6, 200e-6), {"machine": machines.DEFAULT, "cores_per_host": cores}
    sizes = (8, 4096, 1100 << 10, 4 << 20, 64 << 20)
    measured = {n: predict(collective, n, hosts, 2, true, **how) for n in sizes}
    assert fitted_sizes(sizes, 2, 2) == [8, 1100 << 10, 64 << 20]
    assert fit_link(measured, hosts, 2, collective=collective, **how) == pytest.approx(true, rel=1e-3)


def test_two_calls_make_a_link_whose_messages_hold_the_arrival():
    true, how = Link(125e6, 0, 80e-6, 200e-6), {"machine": machines.DEFAULT}
    measured = {n: predict("all_reduce", n, 2, 2, true, **how) for n in ((512 << 10) + 4, 64 << 20)}
    found = fit_link(measured, 2, 2, **how)
    assert found.arrival == 0 and found.message == pytest.approx(280e-6, rel=0.1)
    with pytest.raises(
        BadArgumentError, match=r"measured must be of two sizes or more that an engine carries, got \[8, 64\]"
    ):
        fit_link({64: 1.0, 8: 1.0}, 2, 2)
    with pytest.raises(BadArgumentError, match="measured must be bytes and seconds of more than 0"):
        fit_link({8192: 1.0, 16384: 0.0}, 2, 2)


@pytest.mark.parametrize("cores", [2, 4])
def test_calibrate_measures_and_is_kept(tmp_path, monkeypatch, cores):
    """With four cores it also learns what a host's memory gives to all of them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("symcomm.simulate.calibrate.REPETITIONS", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machines.load() is machines.DEFAULT
    machine = calibrate(seconds=0.01, mode="threads")
    assert 0 < machine.meet < 10 and math.isfinite(machine.memory)
    assert (machine.host_memory != machines.DEFAULT.host_memory) == (cores == 4)
    assert machines.save(machine) == tmp_path / "symcomm" / "machine.json"
    assert machines.load() == machine
    assert [file.name for file in (tmp_path / "symcomm").iterdir()] == ["machine.json"]


def test_a_machine_is_loaded_from_a_path_of_either_kind(tmp_path):
    file = machines.save(PLAIN, str(tmp_path / "machine.json"))
    assert machines.load(str(file)) == machines.load(file) == PLAIN
    with pytest.raises(BadArgumentError, match=r"nowhere cannot be read .*; name a file that --calibrate wrote\.$"):
        machines.load("/nowhere")


def test_a_bad_machine_file_is_refused(tmp_path):
    file = tmp_path / "machine.json"
    with pytest.raises(BadArgumentError, match="cannot be read"):
        machines.load(file)
    for text in ("nonsense", "[]", '{"name": "x"}', json.dumps(dataclasses.asdict(PLAIN) | {"memory": 0})):
        file.write_text(text)
        with pytest.raises(BadArgumentError, match=r"does not describe a machine .*--calibrate"):
            machines.load(file)


def ask(*args: str):
    return CliRunner().invoke(app, ["simulate", *args], env={"COLUMNS": "100"})


def test_the_table_names_the_fastest():
    out = ask("all_reduce", "--hosts", "64", "--bytes", "64K,64M", "--topology", "fat-tree:8,oversubscription=2")
    assert out.exit_code == 0, out.output
    assert out.output.count("fastest") == 2
    assert "512 ranks: 64 hosts of 8; fat-tree:8, oversubscription 2, 100 Gb/s" in out.output
    assert all(name in out.output for name in ALGORITHMS["all_reduce"])


def test_json_and_steps():
    found = json.loads(ask("ddp", "--hosts", "4", "--model-bytes", "100M", "--compute-ms", "50", "--json").output)
    assert found["found"][0]["kind"] == "ddp" and found["found"][0]["collectives"] == 4
    assert found["found"][0]["seconds"] == pytest.approx(0.05 + found["found"][0]["exposed"])
    found = json.loads(ask("all_gather", "--bytes", "1M", "--json").output)
    assert [e["algorithm"] for e in found["found"]] == list(ALGORITHMS["all_gather"])
    assert "fsdp" not in ask("fsdp").output and "efficiency" in ask("fsdp").output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["all_to_none"], "symcomm simulate: WHAT must be one of all_reduce"),
        (["--bytes", "lots"], "--bytes must be a number of bytes"),
        (["--topology", "cube"], "topology must be star"),
        (["--engine", "guess"], "--engine must be one of model"),
        (["--ranks-per-host", "0"], "ranks_per_host must be 1 or more"),
        (["--plot", "out.gif"], "--plot must be a file that ends in .png or .svg"),
        (["--plot", "nodir/out.svg"], "--plot must be a file in a folder that exists, got 'nodir/out.svg'; make "),
        (["--machine", "/nowhere/x.json"], "symcomm simulate: /nowhere/x.json cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_code_2(args, words):
    out = ask(*args)
    assert out.exit_code == 2 and words in out.output and "Traceback" not in out.output


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra symcomm[plot]")
    monkeypatch.setattr("symcomm.cli.simulate.SWEEP", [8, 64, 16384])
    out = ask("all_gather", "--bytes", "1M", "--topology", "torus:4x4", "--plot", str(tmp_path / "out.svg"))
    assert out.exit_code == 0, out.output
    drawn = (tmp_path / "out.svg").read_text()
    assert "<!-- 16,384 -->" in drawn and "is estimated for" in drawn
    reason = "every host to every other is estimated for up to 256 hosts"
    assert f"the line of hierarchical direct ends at 64 ranks: {reason}." in out.output
    assert "left out" not in out.output, "not at 16 hosts"
    large = ask("all_gather", "--hosts", "512", "--bytes", "1M")
    assert f"hierarchical direct is left out: {reason}" in large.output
    found = json.loads(ask("all_gather", "--hosts", "512", "--bytes", "1M", "--json").output)
    assert found["left_out"] == {"hierarchical direct": reason}
    out = ask("ddp", "--plot", str(tmp_path / "out.png"))
    assert out.exit_code == 0 and (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"
