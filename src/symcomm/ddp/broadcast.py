"""Send many tensors from one rank to all others, packed into few large ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from symcomm.ddp.arguments import group_of
from symcomm.ddp.assign import compute_bucket_assignment_by_size
from symcomm.ddp.timeline import not_compiled
from symcomm.group.buffers import overwrite_all
from symcomm.torch_backend import values

IN_FLIGHT = 2  # packs in flight: one is copied while the other travels, and memory stays bounded


class _Pack:
    """Tensors of one dtype and device, flattened and in flight."""

    def __init__(self, process_group: Any, tensors: list[Any], root: int):
        self._tensors = tensors
        self._is_root = process_group.rank() == root
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat: Any = tensors[0] if alone else None
        if not alone:
            first = tensors[0]
            # Not symmetric memory: a pack is used once, and the arena would keep its pages.
            self._flat = torch.empty(sum(t.numel() for t in tensors), dtype=first.dtype, device=first.device)
            self._parts = list(self._flat.split([t.numel() for t in tensors]))
            if self._is_root:
                for part, tensor in zip(self._parts, tensors, strict=True):
                    part.view(tensor.shape).copy_(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._work = process_group.broadcast([self._flat], options)

    def finish(self) -> None:
        self._work.wait()
        if self._is_root or self._flat is self._tensors[0]:
            return
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))


@not_compiled
def broadcast_coalesced(process_group: Any, tensors: Sequence[Any], buffer_size: int, src: int = 0) -> None:
    """Copy rank ``src``'s tensors into all ranks' ``tensors``. They travel in packs of ``buffer_size`` bytes.

    Raises: what a group's broadcast raises."""
    call = "_broadcast_coalesced"
    group_of(call, process_group)
    buffer_size = values.size(f"{call}: buffer_size", buffer_size)
    values.short(f"{call}: src", src)
    tensors = values.tensors(f"{call}: tensors", tensors)
    if not tensors:
        return
    refusal = overwrite_all(call, "tensors", tensors)
    if refusal is not None:  # only this rank's tensors cannot be overwritten: it still takes part, with copies
        tensors = [tensor.detach().clone() for tensor in tensors]
    packs, _ = compute_bucket_assignment_by_size(tensors, [buffer_size])
    on_their_way: deque[_Pack] = deque()
    with torch.no_grad():
        for indices in packs:
            if len(on_their_way) == IN_FLIGHT:
                on_their_way.popleft().finish()
            on_their_way.append(_Pack(process_group, [tensors[i] for i in indices], src))
        while on_their_way:
            on_their_way.popleft().finish()
    if refusal is not None:
        raise refusal
