"""Gradients travel as int8 or fp8, with a scale for each block.

Each rank owns one share of a bucket. Quantised shares go to their owners (all-to-all), which add them up in float32, as
a tree over ranks; the quantised means go to all ranks (all-gather). Every rank, the owner too, uses the gathered means,
so all hold the same bits. A rank sends 2 (n - 1) / n times the quantised bytes, as in an all-reduce of them.
"""

# No postponed annotations in modules with hooks: DDP compares a hook's annotations with the types themselves.
from typing import Any

import torch
import torch.distributed as dist

from symcomm.collectives.tree import combine
from symcomm.ddp.hooks._exchange import all_gather, all_to_all, when_done
from symcomm.ddp.hooks._state import HookState, at_least, callbacks_only_compute, one_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_BYTES = 4  # a float32
TINIEST = torch.finfo(torch.float32).tiny


class BlockCodec:
    """Rows of numbers <-> rows of bytes: one scale for at most ``block`` numbers (None: for a row), then the values.

    A block with an infinity or a NaN becomes all NaN: it is seen, not hidden. A block of zeros, or of numbers so small
    that their scale is no normal float32, becomes zero.
    """

    def __init__(self, dtype: torch.dtype, block: int | None):
        self.dtype = dtype
        self.block = block

    def shape(self, count: int, world: int) -> tuple[int, int]:
        """(blocks in a share, numbers in a block) for ``count`` numbers in ``world`` shares, padded at the end."""
        share = max(1, -(-count // world))
        blocks = -(-share // (self.block or share))
        return blocks, -(-share // blocks)  # blocks of one length, a little shorter than asked for, need less padding

    def row_bytes(self, count: int, world: int) -> int:
        blocks, block = self.shape(count, world)
        return blocks * (SCALE_BYTES + block)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """(rows, blocks, block) numbers -> (rows, bytes)."""
        scales = values.abs().amax(2, keepdim=True).div_(LARGEST[self.dtype]).float()
        scales.masked_fill_(~scales.isfinite(), torch.nan)
        scales.masked_fill_(scales < TINIEST, 0.0)  # its inverse could be infinite
        inverses = torch.where(scales > 0, 1 / scales, 0.0)
        codes = values * inverses
        codes = (codes.round_() if self.dtype == torch.int8 else codes).to(self.dtype)
        return torch.cat([scales.squeeze(2).view(torch.uint8), codes.view(torch.uint8).flatten(1)], 1)

    def unpack(self, rows: torch.Tensor, blocks: int, dtype: torch.dtype) -> torch.Tensor:
        """(rows, bytes) -> (rows, blocks, block) numbers."""
        split = blocks * SCALE_BYTES
        scales = rows[:, :split].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = rows[:, split:].clone(memory_format=torch.contiguous_format).view(self.dtype)
        return codes.view(len(rows), blocks, -1).to(dtype) * scales.unsqueeze(2)


def quantised_mean(
    flat: torch.Tensor, codec: BlockCodec, group: Any, feedback: bool
) -> tuple[Any, torch.Tensor | None]:
    """Start to average ``flat`` over the ranks: a future of the mean, and what this rank left out (for ``feedback``).

    This waits for the first exchange and lets the second run on. If it waited for neither, ranks could start the
    exchanges of two buckets in different orders.
    """
    count, world, rank = flat.numel(), group.size(), group.rank()
    blocks, block = codec.shape(count, world)
    dtype = flat.dtype
    values = torch.nn.functional.pad(flat, (0, world * blocks * block - count)).view(world, blocks, block)
    sent = codec.pack(values)
    received = codec.unpack(all_to_all(sent, group), blocks, dtype)
    mean = combine(torch.add, received.split(1)) / world
    mine = codec.pack(mean)
    work, rows = all_gather(mine, group)
    future = when_done(work, lambda: codec.unpack(rows, blocks, dtype).view(-1)[:count])
    if not feedback:
        return future, None
    left_out = values - codec.unpack(sent, blocks, dtype)
    # The mean is rounded too. Its owner makes up for that, for all ranks, in its own next contribution.
    left_out[rank].add_((mean - codec.unpack(mine, blocks, dtype))[0], alpha=world)
    return future, left_out.view(-1)[:count]


class BlockwiseState(HookState):
    """State of :func:`blockwise_hook`.

    ``dtype``: torch.int8 or torch.float8_e4m3fn. ``block``: how many neighbours share a scale, at most; None: one scale
    for each rank's share of a bucket.

    Raises: BadArgumentError.
    """

    def __init__(
        self, dtype: torch.dtype = torch.int8, block: int | None = 256, process_group: Any = None, **options: Any
    ):
        super().__init__(process_group, **options)
        one_of("BlockwiseState", "dtype", dtype, tuple(LARGEST))
        if block is not None:
            at_least("BlockwiseState", "block", block, 1)
        self.codec = BlockCodec(dtype, block)

    def wire_bytes(self, bucket: Any, world: int) -> int:
        return 2 * (world - 1) * self.codec.row_bytes(bucket.buffer().numel(), world)

    def exchange(self, bucket: Any, flat: torch.Tensor) -> Any:
        buffer = bucket.buffer()
        future, left_out = quantised_mean(flat, self.codec, self.process_group, self.error_feedback)
        if left_out is not None:
            self._residuals.keep(bucket, left_out)
        return future.then(lambda ended: buffer.copy_(ended.value()))


@callbacks_only_compute
def blockwise_hook(state: BlockwiseState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits: about a quarter of the bytes of float32.

    Raises: what a group's collectives raise."""
    return state.average(bucket)
