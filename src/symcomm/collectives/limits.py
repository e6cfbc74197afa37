"""Limits: the sizes at which algorithms change, and how much of a tensor moves at once."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

LINE = 64  # shards and slots start at cache lines; every element size divides it
SLOTS = 3  # of a stream, see chunks.py
ANY_EXTRA = 1 << 40
NO_BYTES = 1 << 62  # more than a tensor has
X86 = platform.machine() == "x86_64"


@dataclass(frozen=True)
class Limits:
    """The sizes at which algorithms change. All ranks of a group must use the same.

    Measured means: float32 sum, two ranks on two Neoverse N1 cores, best of many, shared machine.
    """

    stage_bytes: int = 2 << 20  # one half of a rank's staging area
    chunk_bytes: int = 256 << 10  # what one turn moves per rank; measured: 128 to 512 KiB alike, 64 KiB 6 % slower
    one_shot_bytes: int = 32 << 10  # all_reduce, reduce: up to here one-shot; measured: at 64 KiB both take 23 us
    # ... and as long as a rank reads at most so many bytes more than by two-shot; on 16 x86-64 cores, all_reduce
    # is as fast either way at 4 KiB with 4 ranks, 1 KiB with 8; reduce, where only the root reads, at 16 KiB with 8.
    one_shot_extra: int = 8 << 10
    root_extra: int = 96 << 10
    direct_bytes: int = 4 << 10  # from here on symmetric tensors take part without copies; measured: 0.8, 1.3 us there
    two_rank_variant: str = "two_shot"  # all_reduce of more, 2 ranks; or "one_shot"; measured at 1 MiB: 8.1, 5.8 GB/s
    # From so many bytes and ranks on, ranks of an all_to_all or all_gather, and a scatter's root, lend their pieces:
    # peers read them by system call, see _core/exec/cma.h. Measured on x86-64; a Neoverse N1 core moves
    # 5 GB/s that way, 10 by staging. `symcomm bench attach` finds a machine's own (group/calibration.py).
    attach_bytes: int = 64 << 10 if X86 else NO_BYTES
    attach_gather_bytes: int = 128 << 10 if X86 else NO_BYTES
    attach_scatter_bytes: int = 128 << 10
    attach_ranks: int = 2 if X86 else 4
    # With at most so many ranks, an all_to_all attaches even for tensors beyond the cache, although copies would use
    # non-temporal stores, and the kernel does not. On 16 x86-64 cores, 64 MiB: 4 ranks as fast either way, 8 lose 22 %.
    attach_large_ranks: int = 4
    nodes: tuple[int, ...] = ()  # each rank's NUMA node, -1 if it is not bound to one; () if all are on one
    # With at least so many ranks on each node, collectives go by node, from so many bytes on: all_reduce, all_gather
    # and broadcast; and reduce_scatter. All three are simulated (docs/how-to/simulate.md), not yet measured.
    node_ranks: int = 4
    node_bytes: int = 256 << 10
    node_scatter_bytes: int = 8 << 20

    def on_nodes(self, nodes: Sequence[int]) -> Limits:
        """Limits for ranks on these nodes. If all are on one node, nodes do not matter."""
        return replace(self, nodes=tuple(nodes) if len(set(nodes)) > 1 else ())

    def crowded(self) -> Limits:
        """Limits for more ranks than cores, where a turn costs several switches between processes: the largest chunks
        that fit three times, and one-shot however much a rank must read. Measured, 4 ranks on 2 cores: 16 MiB
        all_gather 11 ms to 6, all_reduce 15 to 12; lending gains from pieces of 256 KiB on, in an all_gather never."""
        return replace(
            self,
            chunk_bytes=max(self.chunk_bytes, self.stage_bytes // SLOTS // LINE * LINE),
            one_shot_extra=ANY_EXTRA,
            root_extra=ANY_EXTRA,
            attach_bytes=max(self.attach_bytes, 256 << 10),
            attach_gather_bytes=NO_BYTES,
            attach_scatter_bytes=max(self.attach_scatter_bytes, 256 << 10),
        )
