"""Algorithms between hosts, as rounds of messages.

In a round some hosts send one message each to another, all of the same size; a round is over when all have arrived
and what was received has been combined. Rounds that repeat are one Round with a count.

Vocabulary
    hosts     H of them, numbered 0..H-1; a rank's *shard* is what it has of the tensor after its host's part
    direct    every host sends every other its share of the shard at once; one round, H-1 messages a rank
    ring      host h sends to h+1; H-1 rounds of shard/H for a reduce_scatter, as many for an all_gather
    halving   recursive halving: partners H/2, H/4, ... away exchange half of what is left; log2 H rounds
    doubling  the way back: the same rounds in reverse, for an all_gather
    tree      a binary tree; chunks flow up (reduce) or down (broadcast), all levels busy at once
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

Pairs = tuple[tuple[int, int], ...]
# What each further message adds to one, as long as they are under way together: 4 hosts x 1 rank on 2 cores, 16 KiB,
# three messages of a rank at a time took 1.5 to 1.9 times as long as one of 2 x 2 ranks.
FURTHER = 1 / 3


@dataclass(frozen=True)
class Round:
    """``times`` times: every pair's first host sends ``nbytes`` to its second, who combines ``combined`` of them.

    ``inside``: bytes that each rank meanwhile hands to another rank of its host (algorithms that know no hosts).
    ``sends``: messages that one rank sends in the round, and receives as many; ``one_way``: it does only one of both.
    """

    pairs: Pairs
    nbytes: float
    times: int = 1
    combined: float = 0
    inside: float = 0
    sends: int = 1
    one_way: bool = False

    @property
    def software(self) -> float:
        """Cost for a rank's software, in single messages: messages under way together wait together."""
        both = (1 + (self.sends - 1) * FURTHER) if self.sends else 0.0
        return both / 2 if self.one_way else both


def ring(hosts: int, nbytes: float, combine: bool) -> list[Round]:
    """H-1 rounds; in each, every host passes ``nbytes`` / H to the next."""
    if hosts == 1:
        return []
    pairs = tuple((host, (host + 1) % hosts) for host in range(hosts))
    piece = nbytes / hosts
    return [Round(pairs, piece, hosts - 1, piece if combine else 0)]


def halving(hosts: int, nbytes: float, combine: bool) -> list[Round]:
    """Recursive halving among the largest power of two of the hosts; the other hosts hand theirs in first."""
    power = 1 << (hosts.bit_length() - 1)
    rounds: list[Round] = []
    if extra := hosts - power:
        pairs = tuple((power + k, k) for k in range(extra))
        rounds.append(Round(pairs, nbytes, 1, nbytes if combine else 0))
    distance, left = power // 2, nbytes / 2
    while distance:
        pairs = tuple((host, host ^ distance) for host in range(power))
        rounds.append(Round(pairs, left, 1, left if combine else 0))
        distance, left = distance // 2, left / 2
    return rounds


def reversed_rounds(rounds: list[Round]) -> list[Round]:
    """The way back: the same messages in the opposite direction and order, with nothing to combine."""
    return [Round(tuple((b, a) for a, b in r.pairs), r.nbytes, r.times) for r in reversed(rounds)]


@functools.cache
def _everyone(first: int, hosts: int) -> Pairs:
    return tuple((a, b) for a in range(first, hosts) for b in range(first, hosts) if a != b)


def direct(hosts: int, nbytes: float, combine: bool) -> list[Round]:
    """One round: each host gets its share from all others, or sends its own share to all."""
    if hosts == 1:
        return []
    share = nbytes / hosts
    return [Round(_everyone(0, hosts), share, 1, share * (hosts - 1) if combine else 0, sends=hosts - 1)]


def told(hosts: int, nbytes: float, combined: float, by_all: bool) -> Round:
    """What travels with arrivals, and so costs no message: all hosts, or only the first, tell all others."""
    pairs = _everyone(0, hosts) if by_all else tuple((0, host) for host in range(1, hosts))
    return Round(pairs, nbytes, 1, combined, sends=0)


def direct_broadcast(hosts: int, nbytes: float) -> list[Round]:
    """Host 0 sends each other host a share, and they exchange their shares."""
    if hosts == 1:
        return []
    share = nbytes / (hosts - 1)
    first = Round(tuple((0, host) for host in range(1, hosts)), share, sends=hosts - 1, one_way=True)
    return [first, Round(_everyone(1, hosts), share, sends=hosts - 2)] if hosts > 2 else [first]


def reduce_scatter_rounds(way: str, hosts: int, nbytes: float) -> list[Round]:
    return {"direct": direct, "ring": ring, "halving": halving}[way](hosts, nbytes, True)


def all_gather_rounds(way: str, hosts: int, nbytes: float) -> list[Round]:
    if way == "halving":
        return reversed_rounds(halving(hosts, nbytes, False))
    return {"direct": direct, "ring": ring}[way](hosts, nbytes, False)


def all_reduce_rounds(way: str, hosts: int, nbytes: float) -> list[Round]:
    """reduce_scatter, then all_gather; two hosts that exchange everything need one round."""
    if way == "direct" and hosts == 2:
        return [Round(_everyone(0, 2), nbytes, 1, nbytes)]
    return reduce_scatter_rounds(way, hosts, nbytes) + all_gather_rounds(way, hosts, nbytes)


def tree(hosts: int, nbytes: float, chunks: int, up: bool) -> list[Round]:
    """A binary tree (host h's parent is (h-1)//2), in chunks. When the pipeline is full all edges are busy.

    A chunk takes as many rounds as the tree is deep, and each further chunk one more.
    """
    if hosts == 1:
        return []
    edges = tuple((child, (child - 1) // 2) for child in range(1, hosts))
    pairs = edges if up else tuple((parent, child) for child, parent in edges)
    chunk, depth = nbytes / chunks, math.floor(math.log2(hosts))
    return [Round(pairs, chunk, depth + chunks - 1, 2 * chunk if up else 0)]
