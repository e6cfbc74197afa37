"""How hosts are wired: which links a message from one host to another takes.

Specs are ``kind[:shape][,key=value...]``::

    star                                     every host on one switch that never blocks
    ring                                     every host wired to both neighbours; messages go the shorter way round
    torus:8x8x4                              a ring in each dimension; messages go along the first, then the second, ...
    fat-tree:32                              32 hosts a leaf switch, leaves joined by spines
    fat-tree:32x16,oversubscription=2        32 hosts a leaf, 16 leaves a pod; leaves have half the uplinks they need

All of them take the keys ``bandwidth`` (100Gb/s), ``latency`` of a link (1us), ``message``, what sending one and
receiving one costs the host's software (5us), and ``arrival``, what it costs hosts to meet before a collective (100us).

A link has one direction: messages that go both ways do not disturb each other. The parallel links between two levels
of a fat-tree are one link here, as wide as all of them: messages are assumed to be spread evenly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symcomm.errors import bad_argument
from symcomm.simulate.units import parse_bandwidth, parse_seconds

CALL = "simulate"
KINDS = "star, ring, torus:AxB or fat-tree:HOSTS_PER_LEAF[xLEAVES_PER_POD]"


class Link(NamedTuple):
    """What one link can do, and what software adds: to each message, and once to each collective of several hosts.

    Units are bytes a second and seconds. Software's times are for a rank with a core of its own."""

    bandwidth: float = 12.5e9  # 100 Gb/s
    latency: float = 1e-6
    message: float = 5e-6  # assumed, between RDMA (2 us) and TCP (30 us)
    arrival: float = 100e-6  # assumed; hosts of one rank each on two loaded cores took 0.34 ms to meet


class Wire(NamedTuple):
    """One direction of a link: its name, the same in every route that shares it, and its bandwidth."""

    name: tuple[Any, ...]
    bandwidth: float


@dataclass(frozen=True)
class Topology:
    """``route(a, b)``: the wires from host a to host b, which are never the same host."""

    kind: str
    hosts: int
    link: Link
    shape: tuple[int, ...] = ()
    oversubscription: float = 1.0
    route: Callable[[int, int], list[Wire]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        routes = {"star": _star, "ring": _torus, "torus": _torus, "fat-tree": _fat_tree}
        object.__setattr__(self, "route", routes[self.kind](self))


# --- routes ----------------------------------------------------------------------------------------

Route = Callable[[int, int], list[Wire]]


def _star(topology: Topology) -> Route:
    bandwidth = topology.link.bandwidth
    return lambda a, b: [Wire(("up", a), bandwidth), Wire(("down", b), bandwidth)]


def _torus(topology: Topology) -> Route:
    """Dimension by dimension, each the shorter way round."""
    shape, bandwidth = topology.shape or (topology.hosts,), topology.link.bandwidth

    @functools.cache
    def line(axis: int, others: tuple[int, ...], way: int) -> list[Wire]:
        """The wires of one ring, twice round, in the order in which a message meets them."""
        return [Wire((axis, others, way, k % shape[axis]), bandwidth) for k in range(2 * shape[axis])][::way]

    def route(a: int, b: int) -> list[Wire]:
        here, there, wires = _coordinates(a, shape), _coordinates(b, shape), []
        for axis, size in enumerate(shape):
            ahead = (there[axis] - here[axis]) % size
            way, hops = (1, ahead) if ahead <= size - ahead else (-1, size - ahead)
            start = here[axis] if way == 1 else size - 1 - here[axis]
            wires += line(axis, (*here[:axis], *here[axis + 1 :]), way)[start : start + hops]
            here[axis] = there[axis]
        return wires

    return route


def _coordinates(host: int, shape: tuple[int, ...]) -> list[int]:
    """The last dimension counts fastest."""
    found = []
    for size in reversed(shape):
        host, position = divmod(host, size)
        found.append(position)
    return found[::-1]


def _fat_tree(topology: Topology) -> Route:
    """Up to the first switch that both hosts share, and down again."""
    leaf, thinner, bandwidth = topology.shape[0], topology.oversubscription, topology.link.bandwidth
    pod = leaf * topology.shape[1] if len(topology.shape) > 1 else 0
    leaf_width, pod_width = leaf * bandwidth / thinner, pod * bandwidth / thinner

    def route(a: int, b: int) -> list[Wire]:
        up, down = [Wire(("host up", a), bandwidth)], [Wire(("host down", b), bandwidth)]
        if a // leaf != b // leaf:
            up.append(Wire(("leaf up", a // leaf), leaf_width))
            down.append(Wire(("leaf down", b // leaf), leaf_width))
        if pod and a // pod != b // pod:
            up.append(Wire(("pod up", a // pod), pod_width))
            down.append(Wire(("pod down", b // pod), pod_width))
        return up + down[::-1]

    return route


# --- specs -----------------------------------------------------------------------------------------


def parse_topology(spec: str, hosts: int) -> Topology:
    """A spec, for a number of hosts; see the module's text.

    Raises: BadArgumentError."""
    if not isinstance(hosts, int) or hosts < 1:
        raise bad_argument(CALL, "hosts", hosts, "1 or more")
    head, *pairs = [part.strip() for part in spec.split(",")]
    kind, _, text = head.partition(":")
    given = _read_pairs(spec, pairs)
    parsers = {name: parse_bandwidth if name == "bandwidth" else parse_seconds for name in Link._fields}
    link = Link(**{name: parse(CALL, name, given.pop(name)) for name, parse in parsers.items() if name in given})
    thinner = _number(given.pop("oversubscription", "1")) if kind == "fat-tree" else 1.0
    if given:
        allowed = "bandwidth, latency, message, arrival" + (", oversubscription" if kind == "fat-tree" else "")
        raise bad_argument(CALL, "topology", spec, f"{kind} with some of {allowed}", f"{next(iter(given))!r} is none")
    return Topology(kind, hosts, link, _shape(spec, kind, text, hosts), thinner)


def _read_pairs(spec: str, pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value or key in given:
            what = "given twice" if key in given else f"{pair!r} is no key=value"
            raise bad_argument(CALL, "topology", spec, "kind[:shape][,key=value...]", what)
        given[key] = value
    return given


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value >= 1):
        raise bad_argument(CALL, "oversubscription", text, "a number of 1 or more", "2 means half the uplinks")
    return value


def _shape(spec: str, kind: str, text: str, hosts: int) -> tuple[int, ...]:
    sizes = text.split("x") if text else []
    if kind not in ("star", "ring", "torus", "fat-tree") or (kind in ("star", "ring") and text):
        raise bad_argument(CALL, "topology", spec, KINDS)
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise bad_argument(CALL, "topology", spec, KINDS, "a shape is numbers with x between them")
    shape = tuple(map(int, sizes))
    if kind == "torus" and math.prod(shape) != hosts:
        fix = f"choose sizes whose product is {hosts}, such as torus:{'x'.join(map(str, near_cube(hosts, 2)))}"
        raise bad_argument(CALL, "topology", spec, f"a torus of {hosts} hosts", fix)
    if kind == "fat-tree" and not 1 <= len(shape) <= 2:
        raise bad_argument(CALL, "topology", spec, "fat-tree:HOSTS_PER_LEAF or fat-tree:HOSTS_PER_LEAFxLEAVES_PER_POD")
    return shape


def near_cube(hosts: int, dimensions: int) -> tuple[int, ...]:
    """Sizes with that product, as equal as possible."""
    if dimensions == 1:
        return (hosts,)
    root = round(hosts ** (1 / dimensions))
    side = next(n for n in range(max(root, 1), 0, -1) if hosts % n == 0)
    return (side, *near_cube(hosts // side, dimensions - 1))


def resized(topology: Topology, hosts: int) -> Topology:
    """The same kind of network for another number of hosts; a torus keeps its dimensions."""
    shape = near_cube(hosts, len(topology.shape)) if topology.kind == "torus" else topology.shape
    return Topology(topology.kind, hosts, topology.link, shape, topology.oversubscription)
