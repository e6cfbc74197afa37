"""Machines whose memory is divided among nodes (NUMA): which ranks are on which node, and the parts that algorithms by
node share.

A node's cores share the link to other nodes. So in algorithms by node each byte crosses it once, to the one rank of a
node that has the *place* for it. The others take it from there.

Sources are combined as the same tree as elsewhere: the ranks of a node, a power of two of them, are a subtree, and so
are aligned powers of two of nodes, whose result the last of them has. This needs partial results that can be stored,
which excludes 16-bit floats, whose sums are rounded once at the end, and averages.

Vocabulary
    place     the number of a rank in its node
    slice     the part of a chunk that the ranks of one place handle
    column    the ranks of one place, of all nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symcomm.collectives.chunks import too_small, up
from symcomm.collectives.limits import LINE, Limits
from symcomm.collectives.plan import FIRST_SIGNAL, At, Reduce, Wait
from symcomm.types import DType, RedOpType

NODE_SLOTS = 2
_STORABLE = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128, *range(DType.FLOAT16)})
_FOLDING = frozenset(RedOpType) - {RedOpType.AVG, RedOpType.PREMUL_SUM}


def can_go_on(dtype: int, redop: int) -> bool:
    """Whether a partial result can be stored and then combined further, with the same bits."""
    return dtype in _STORABLE and redop in _FOLDING


@dataclass(frozen=True)
class Grid:
    """Ranks by node: rank ``node * width + place``."""

    nodes: int
    width: int

    def of(self, rank: int) -> tuple[int, int]:
        """(node, place)"""
        return divmod(rank, self.width)

    def beside(self, rank: int) -> list[int]:
        """The other ranks of its node, starting with the next one, so that ranks read in different orders."""
        node, place = self.of(rank)
        return [node * self.width + (place + k) % self.width for k in range(1, self.width)]

    def column(self, rank: int) -> list[int]:
        """The ranks of its place in the other nodes, starting with the next node."""
        return [(rank + k * self.width) % (self.nodes * self.width) for k in range(1, self.nodes)]

    def before(self, rank: int) -> list[int]:
        """The ranks whose partial results this rank adds to its node's, one after another: those of its place in the
        last nodes of the subtrees that its own node completes. The last node completes all."""
        node, place = self.of(rank)
        found, left = [], node  # `left`: how many nodes are to the left of what is combined
        while left and (left & (node + 1 - left) or node == self.nodes - 1):
            found.append((left - 1) * self.width + place)
            left &= left - 1
        return found

    @property
    def slots(self) -> int:
        """Slots for partial results: one more than the turns after which a node down the line still reads them."""
        late = [rank - peer for rank in range(0, self.nodes * self.width, self.width) for peer in self.before(rank)]
        return NODE_SLOTS - 1 + max(late) // self.width


def grid_of(nodes: Sequence[int], least: int, subtrees: bool) -> Grid | None:
    """The ranks by node (``nodes[r]``: rank r's). None unless the ranks of a node are consecutive, and all nodes have
    equally many, at least ``least``. ``subtrees``: these must also be a power of two, and so a subtree."""
    count = len(set(nodes))
    if count < 2 or min(nodes) < 0 or len(nodes) % count:
        return None
    width = len(nodes) // count
    blocks = [set(nodes[start : start + width]) for start in range(0, len(nodes), width)]
    if width < max(least, 2) or (subtrees and width & (width - 1)):
        return None
    return Grid(count, width) if all(len(block) == 1 for block in blocks) else None


def chunk_in(room: int, nbytes: int, limits: Limits, width: int, lines: int, most: int = 0) -> int:
    """Bytes of a chunk, at most ``room``, whose ``width`` slices start at cache lines. ``lines``: how many a staging
    area needs for the smallest chunk; ``most``: bytes of the largest, chunk_bytes unless given."""
    least = LINE * width
    most = max(min(most or limits.chunk_bytes, room) // least, 1) * least
    if most > room:
        raise too_small(limits.stage_bytes, lines * LINE)
    return up(-(-nbytes // -(-nbytes // most)), least)


def lane_bytes(nbytes: int, limits: Limits, chunks: int, most: int) -> int:
    """Bytes of a chunk, at most ``most``, such that ``chunks`` of them fit in a staging area."""
    return chunk_in(limits.stage_bytes // chunks, nbytes, limits, 1, chunks, max(most, 1))


def wait_for(ranks: Sequence[int]) -> list[Wait]:
    """Wait until each of them has signalled this turn."""
    return [Wait(rank, FIRST_SIGNAL, 1) for rank in ranks]


def combine_by_node(
    targets: tuple[At, ...], partial: At, own: tuple[At, ...], before: Sequence[At], nbytes: int
) -> list[Reduce]:
    """Combine a node's own sources, then what is to their left in the tree, from right to left. ``partial``: where this
    rank keeps what it has so far."""
    sources = [own, *((left, partial) for left in before)]
    places = [*[(partial,)] * len(before), targets]
    return [Reduce(dst, src, nbytes) for dst, src in zip(places, sources, strict=True)]
