"""Which ranks share a host, and which ranks of different hosts talk to each other. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence

# The one of a host's ranks that talks to the other hosts. It is the same for every call, so that mismatches are found.
LEADER = 0

# Bytes that travel eagerly, with the arrival messages of hosts: always up to EAGER_MAX from one host to another, and up
# to EAGER_HOST_MAX that leave a host. For so few, an engine's threads and a second trip cost more than the network.
# 2 x 2 ranks at 1 Gbit/s, ms with arrivals and with Gloo as engine: all_reduce of 256 KiB 2.9 and 5.9, of 512 KiB 6.7
# and 7.6; gather of 1 MiB, half of which crosses, 4.5 and 4.7. From 1 MiB on, the leader's copies dominate: all_to_all
# 10 to 13 and 11 to 15.
EAGER_MAX, EAGER_HOST_MAX = 4 << 10, 512 << 10
EAGER_REDUNDANT_MAX = 128 << 10  # bytes that leave a host; an engine would send each host only a part of them


def fits_eager(nbytes: int, hosts: int, is_whole: bool = False, most: int = EAGER_HOST_MAX) -> bool:
    """Whether ``nbytes`` from each host to each other travel with arrivals. ``is_whole``: each host gets the same ones.
    ``most``: the bytes that may leave a host so, which depends on the engine."""
    redundant = nbytes * (hosts - 2) if is_whole else 0
    return nbytes <= EAGER_MAX or (nbytes * (hosts - 1) <= most and redundant <= EAGER_REDUNDANT_MAX)


def split_evenly(count: int, parts: int) -> list[int]:
    """The sizes of ``parts`` pieces of ``count`` elements; they differ by at most one, the larger ones first."""
    size, more = divmod(count, parts)
    return [size + (i < more) for i in range(parts)]


class Layout:
    """``hosts[h]`` are the ranks of host h, ascending; hosts are ordered by their first rank.

    Lane i is the i-th rank of every host; there are as many lanes as the smallest host has ranks. Every rank has at
    least one counterpart on every other host, so that each host has a connection to each rank of the others."""

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int):
        self.hosts = sorted(sorted(ranks) for ranks in hosts)
        self.size = sum(map(len, self.hosts))
        self.host_of = {rank: h for h, ranks in enumerate(self.hosts) for rank in ranks}
        self.local_of = {rank: i for ranks in self.hosts for i, rank in enumerate(ranks)}
        self.rank = rank
        self.host, self.local = self.host_of[rank], self.local_of[rank]
        self.here = self.hosts[self.host]
        self.others = [h for h in range(len(self.hosts)) if h != self.host]
        self.away = [r for h in self.others for r in self.hosts[h]]  # ranks of other hosts, host by host
        self.lanes, self.widest = min(map(len, self.hosts)), max(map(len, self.hosts))
        self.is_even = len({len(ranks) for ranks in self.hosts}) == 1
        self.eager_host_max = EAGER_HOST_MAX
        self.wide_sums = False  # partial sums of small floats cross between hosts in float32

    def fits_eager(self, nbytes: int, is_whole: bool = False) -> bool:
        """Whether so many bytes, from one host to another, travel with arrivals. The same on all ranks."""
        return fits_eager(nbytes, len(self.hosts), is_whole, self.eager_host_max)

    def largest_host_total(self, counts: Sequence[int]) -> int:
        """The largest sum of ``counts[r]`` over the ranks r of a host."""
        return max(sum(counts[r] for r in ranks) for ranks in self.hosts)

    def lane(self, host: int) -> int:
        """The rank of this rank's lane on another host."""
        return self.hosts[host][self.local]

    @property
    def has_lane(self) -> bool:
        return self.local < self.lanes

    def holder(self, host: int, rank: int) -> int:
        """The rank of ``host`` that receives and sends on behalf of ``rank``, which is on another host."""
        return self.hosts[host][self.local_of[rank] % len(self.hosts[host])]

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the other hosts on behalf of its own."""
        return self.local == LEADER

    def leader(self, host: int) -> int:
        return self.hosts[host][LEADER]

    def counterparts(self, host: int) -> list[int]:
        """The ranks of another host that this rank talks to, each of which also talks to this one."""
        mine, theirs = len(self.here), self.hosts[host]
        pairs = [(i % mine, i % len(theirs)) for i in range(max(mine, len(theirs)))]
        return [theirs[j] for i, j in pairs if i == self.local]

    def waves(self, host: int) -> list[list[int]]:
        """The ranks of another host, as many at a time as there are ranks here to hold something for them."""
        ranks, here = self.hosts[host], len(self.here)
        return [ranks[start : start + here] for start in range(0, len(ranks), here)]
