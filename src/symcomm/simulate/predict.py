"""Collectives on a cluster: what happens inside the hosts, from their plans, and between them, from rounds.

hierarchical   all_reduce: every host reduce_scatters in shared memory, so each rank has a shard; ranks with the same
               number all_reduce their shards between hosts, all at once; every host all_gathers. The other collectives
               are parts of this. ``direct``, ``ring`` and ``halving`` name what happens between hosts; direct is what
               groups of several hosts do. Large tensors are cut into chunks: while one is on the network, the hosts
               work on others. Hosts meet first; small tensors travel with the messages of the meeting.
flat ring      one ring through all ranks, host by host; only one message a host and round leaves it
flat tree      one binary tree through all ranks, in chunks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from symcomm.errors import bad_argument
from symcomm.hierarchical.topology import fits_eager
from symcomm.simulate import machine as machines
from symcomm.simulate.engines import Engine, find_engine, model_seconds
from symcomm.simulate.host import host_seconds
from symcomm.simulate.machine import Machine
from symcomm.simulate.rounds import (
    Round,
    all_gather_rounds,
    all_reduce_rounds,
    direct_broadcast,
    reduce_scatter_rounds,
    ring,
    told,
    tree,
)
from symcomm.simulate.topology import Link, Topology, parse_topology
from symcomm.simulate.units import bus_factor

HIERARCHICAL = ("hierarchical direct", "hierarchical ring", "hierarchical halving")
ALGORITHMS = {
    "all_reduce": (*HIERARCHICAL, "flat ring", "flat tree"),
    "reduce_scatter": (*HIERARCHICAL, "flat ring"),
    "all_gather": (*HIERARCHICAL, "flat ring"),
    "broadcast": ("hierarchical direct", "hierarchical tree", "flat tree"),
}
COLLECTIVES = tuple(ALGORITHMS)
MOST_CHUNKS = 1 << 12  # of a tree
CHUNK = 4 << 20  # bytes, of hierarchical collectives: fewer would not hide a network's latency
# Ranks that share a core take turns, though most only wait for their host's leader: messages and meetings take (ranks
# per core) to this power times as long. Two hosts of one core, 4 ranks beside 2: 1.4 times as long to meet, 1.6 to
# send.
CROWDING = 0.7
DIRECT_HOSTS = 256  # beyond this, all to all is too many messages to send, and to simulate


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, how they are wired, and which engine costs rounds.

    Raises: BadArgumentError."""

    ranks_per_host: int
    topology: Topology
    machine: Machine = machines.DEFAULT
    engine: str = "model"
    symmetric: bool = False  # tensors live in symmetric memory

    def __post_init__(self) -> None:
        if not isinstance(self.ranks_per_host, int) or self.ranks_per_host < 1:
            raise bad_argument("simulate", "ranks_per_host", self.ranks_per_host, "1 or more")
        find_engine(self.engine)

    @property
    def hosts(self) -> int:
        return self.topology.hosts

    @property
    def network(self) -> Topology:
        """The topology as messages see it: software is slower if ranks share cores."""
        link, crowding = self.topology.link, self.machine.crowding(self.ranks_per_host) ** CROWDING
        slowed = link._replace(message=link.message * crowding, arrival=link.arrival * crowding)
        return replace(self.topology, link=slowed)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Estimate:
    """What one algorithm takes: in shared memory, between hosts, and together."""

    collective: str
    algorithm: str
    nbytes: int
    ranks: int
    seconds: float
    inside: float  # seconds in which hosts work
    between: float  # seconds in which the network does, and hosts meet; the two may overlap
    chunks: int
    messages: int  # rounds of one chunk, one after the other

    @property
    def algbw(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """The same times nccl-tests' factor, comparable across numbers of ranks."""
        return self.algbw * bus_factor(self.collective, self.ranks)


def predict(
    collective: str,
    nbytes: int,
    hosts: int,
    ranks_per_host: int,
    link: Link | Topology | str = "star",
    *,
    algorithm: str = "",
    machine: Machine | None = None,
    cores_per_host: float = 0,
) -> float:
    """Seconds of one call: of ``algorithm``, or of what a group of several hosts does.

    ``link``: what joins each host to one switch, or a topology, or the spec of one (``"star,bandwidth=1Gb/s"``).
    ``cores_per_host``: less than ranks_per_host where ranks share cores, as in hosts that are only emulated.

    Raises: BadArgumentError.
    """
    topology = Topology("star", hosts, link) if isinstance(link, Link) else link
    if isinstance(topology, str):
        topology = parse_topology(topology, hosts)
    if topology.hosts != hosts:
        raise bad_argument("predict", "link", topology, f"a topology of {hosts} hosts")
    found = machine or machines.load()
    cluster = Cluster(ranks_per_host, topology, replace(found, cores=cores_per_host) if cores_per_host else found)
    return estimate(collective, algorithm or "hierarchical direct", nbytes, cluster).seconds


def why_left_out(collective: str, cluster: Cluster) -> dict[str, str]:
    """The algorithms that ``compare`` does not estimate on a cluster with this many hosts, each with the reason."""
    if cluster.hosts <= DIRECT_HOSTS or "hierarchical direct" not in ALGORITHMS[collective]:
        return {}
    return {"hierarchical direct": f"every host to every other is estimated for up to {DIRECT_HOSTS} hosts"}


def compare(collective: str, nbytes: int, cluster: Cluster) -> list[Estimate]:
    """Every algorithm's estimate, in the order of ALGORITHMS, except those that ``why_left_out`` names.

    Raises: BadArgumentError."""
    _check(collective, nbytes)
    left_out = why_left_out(collective, cluster)
    return [estimate(collective, name, nbytes, cluster) for name in ALGORITHMS[collective] if name not in left_out]


def estimate(collective: str, algorithm: str, nbytes: int, cluster: Cluster) -> Estimate:
    _check(collective, nbytes)
    if algorithm not in ALGORITHMS[collective]:
        raise bad_argument("simulate", "algorithm", algorithm, f"one of {', '.join(ALGORITHMS[collective])}")
    if algorithm == "hierarchical direct" and cluster.hosts > DIRECT_HOSTS:
        raise bad_argument("simulate", "hosts", cluster.hosts, f"at most {DIRECT_HOSTS} for {algorithm}")
    kind, way = algorithm.split()
    if kind == "flat":
        rounds = _flat(collective, way, nbytes, cluster)
        between = _rounds_seconds(rounds, nbytes, cluster, find_engine(cluster.engine))
        return Estimate(
            collective, algorithm, nbytes, cluster.ranks, between, 0.0, between, 1, sum(r.times for r in rounds)
        )
    if way == "direct" and travels_along(collective, nbytes, cluster.hosts, cluster.ranks_per_host):
        return _with_arrival(collective, nbytes, cluster)
    return _in_chunks(collective, way, nbytes, cluster)


def travels_along(collective: str, nbytes: int, hosts: int, ranks_per_host: int) -> bool:
    """Whether a group of several hosts sends these bytes with a host's arrival, without its engine."""
    return hosts > 1 and fits_eager(_said(collective, nbytes, hosts), hosts, collective in ("all_reduce", "broadcast"))


def _said(collective: str, nbytes: int, hosts: int) -> int:
    """The bytes that a host sends to another: its ranks' pieces, the pieces of the other's ranks, or all."""
    return -(-nbytes // hosts) if collective in ("all_gather", "reduce_scatter") else nbytes


def _check(collective: str, nbytes: int) -> None:
    if collective not in ALGORITHMS:
        raise bad_argument("simulate", "collective", collective, f"one of {', '.join(ALGORITHMS)}")
    if not isinstance(nbytes, int) or nbytes < 1:
        raise bad_argument("simulate", "bytes", nbytes, "1 or more")


# --- algorithms ------------------------------------------------------------------------------------


def _in_chunks(collective: str, way: str, nbytes: int, cluster: Cluster) -> Estimate:
    """Chunk after chunk: hosts work on the next while the network carries one, so the slower of the two decides.

    Direct uses chunks of a fixed size, as groups do. The others use the best number, because they have many rounds.
    """
    whole = {"all_gather": CHUNK * cluster.ranks, "reduce_scatter": CHUNK * cluster.hosts}.get(collective, CHUNK)
    most = max(1, -(-nbytes // whole)) if cluster.hosts > 1 else 1
    arrival = _arrival(cluster)

    def cut(chunks: int, engine: Engine) -> Estimate:
        first, further, rounds = _hierarchical(collective, way, -(-nbytes // chunks), cluster)
        between = _rounds_seconds(rounds, nbytes, cluster, engine)
        seconds = arrival + first + between + (chunks - 1) * max(further, between)
        return Estimate(
            collective, f"hierarchical {way}", nbytes, cluster.ranks, seconds, first + (chunks - 1) * further,
            arrival + chunks * between, chunks, sum(r.times for r in rounds),
        )  # fmt: skip

    if way != "direct":
        most = min((1 << k for k in range(most.bit_length())), key=lambda n: cut(n, model_seconds).seconds)
    return cut(most, find_engine(cluster.engine))


def _arrival(cluster: Cluster) -> float:
    """Before anything else, hosts tell each other that they have arrived: a small message each way."""
    if cluster.hosts == 1:
        return 0.0
    link = cluster.network.link
    return link.arrival + link.latency * max(len(cluster.topology.route(0, h)) for h in range(1, cluster.hosts))


def _with_arrival(collective: str, nbytes: int, cluster: Cluster) -> Estimate:
    """Few bytes: ranks hand them to their host's leader, which sends them with its arrival and shares the result."""
    ranks, hosts = cluster.ranks_per_host, cluster.hosts
    own = _said(collective, nbytes, hosts)
    reduces = collective in ("all_reduce", "reduce_scatter")
    up, down = ("reduce" if reduces else "gather", nbytes if reduces else own), ("broadcast", nbytes)
    if collective == "reduce_scatter":
        down = ("scatter", own)
    elif collective == "broadcast":
        up = down  # on the root's host; the other hosts' is the last step
    inside = sum(host_seconds(part, size, ranks, cluster.machine, cluster.symmetric) for part, size in (up, down))
    rounds = [told(hosts, own, own * (hosts - 1) if reduces else 0, by_all=collective != "broadcast")]
    carried = _rounds_seconds(rounds, nbytes, cluster, find_engine(cluster.engine))
    between = cluster.network.link.arrival + carried
    return Estimate(collective, "hierarchical direct", nbytes, cluster.ranks, inside + between, inside, between, 1, 1)


def _hierarchical(collective: str, way: str, nbytes: int, cluster: Cluster) -> tuple[float, float, list[Round]]:
    """One chunk: (seconds inside hosts, before and after the network; seconds of the busiest host, which every further
    chunk waits for; rounds between hosts). All ranks of a host send at once, so their messages add up."""
    hosts, shard = cluster.hosts, nbytes / cluster.ranks_per_host

    def inside(part: str, pieces: int = 1) -> float:
        """A part of the collective on ``pieces`` pieces of the tensor, one after the other."""
        whole = host_seconds(part, -(-nbytes // pieces), cluster.ranks_per_host, cluster.machine, cluster.symmetric)
        return pieces * whole

    if collective == "broadcast" and way == "tree":  # one rank a host takes part between hosts
        down = _best_tree(nbytes, cluster, lambda n: tree(hosts, nbytes, n, up=False))
        return inside("broadcast"), inside("broadcast"), down
    parts = hosts if way == "direct" else 1  # direct: what is to go to each host, or came from there, host by host
    if hosts == 1:
        steps, rounds = [inside(collective)], []  # a host alone has a better plan than its two halves
    elif collective == "broadcast":
        steps, rounds = [inside("broadcast"), inside("all_gather")], direct_broadcast(hosts, shard)
    elif collective == "reduce_scatter":
        steps, rounds = [inside("reduce_scatter", parts)], reduce_scatter_rounds(way, hosts, shard)
    elif collective == "all_gather":
        steps, rounds = [inside("all_gather", parts)], all_gather_rounds(way, hosts, shard)
    else:
        steps, rounds = [inside("reduce_scatter"), inside("all_gather")], all_reduce_rounds(way, hosts, shard)
    apart = collective == "broadcast"  # the first host broadcasts, the others gather
    rounds = [replace(r, nbytes=r.nbytes * cluster.ranks_per_host) for r in rounds]
    return sum(steps), max(steps) if apart else sum(steps), rounds


def _flat(collective: str, way: str, nbytes: int, cluster: Cluster) -> list[Round]:
    """The algorithm among all ranks; messages within a host do not use the network."""
    ranks = cluster.ranks

    def placed(rounds: Sequence[Round]) -> list[Round]:
        return [_on_hosts(r, cluster.ranks_per_host) for r in rounds]

    if way == "tree":
        down = _best_tree(nbytes, cluster, lambda n: placed(tree(ranks, nbytes, n, up=False)))
        if collective == "broadcast":
            return down
        return _best_tree(nbytes, cluster, lambda n: placed(tree(ranks, nbytes, n, up=True))) + down
    halves = {"all_reduce": (True, False), "reduce_scatter": (True,), "all_gather": (False,)}[collective]
    return placed([r for combine in halves for r in ring(ranks, nbytes, combine)])


def _on_hosts(messages: Round, ranks_per_host: int) -> Round:
    """Messages between ranks as messages between their hosts, and within them."""
    pairs = [(a // ranks_per_host, b // ranks_per_host) for a, b in messages.pairs]
    leaving = tuple(pair for pair in pairs if pair[0] != pair[1])
    return replace(messages, pairs=leaving, inside=messages.nbytes if len(leaving) < len(pairs) else 0)


def _best_tree(nbytes: int, cluster: Cluster, cut: Callable[[int], list[Round]]) -> list[Round]:
    """The best number of chunks: more fill the pipeline sooner, and cost a message each."""
    best, least, chunks = cut(1), float("inf"), 1
    while chunks <= MOST_CHUNKS:
        rounds = cut(chunks)
        seconds = _rounds_seconds(rounds, nbytes, cluster, model_seconds)
        if seconds > least:
            break  # it falls, then grows
        best, least, chunks = rounds, seconds, chunks * 2
    return best


def _rounds_seconds(rounds: Sequence[Round], nbytes: int, cluster: Cluster, engine: Engine) -> float:
    """Messages between hosts and within them overlap; then what arrived is combined.

    Messages within a host pass through a staging area that fits a cache; the tensor itself may be too large for one.
    """
    machine, ranks, small = cluster.machine, cluster.ranks_per_host, nbytes <= cluster.machine.cache
    total = 0.0
    for r, network in zip(rounds, engine(cluster.network, rounds), strict=True):
        within = combining = 0.0
        if r.inside:
            within = (
                machine.wait(2) + machine.touch(2 * r.inside, ranks, True) + machine.touch(2 * r.inside, ranks, small)
            )
        if r.combined:
            combining = machine.add(r.combined, ranks, small)
        total += r.times * (max(network, within) + combining)
    return total
