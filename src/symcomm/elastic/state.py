"""A copy of the training state that can be restored, or sent to other ranks.

It takes the state of anything with ``state_dict()`` and ``load_state_dict()`` apart into tensors and the rest. It
copies tensors, and sends them through symmetric memory. It pickles the rest, only between ranks of one job.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from symcomm import symm_mem
from symcomm.group.process_group import ProcessGroup

Stateful = Any  # has state_dict() and load_state_dict()
PIECE_BYTES = 32 << 20  # of tensors sent at a time: limits the size of the buffer


@dataclass(frozen=True)
class _Slot:
    """Stands for the tensor at ``index`` of a list."""

    index: int


def take_apart(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers with slots instead of tensors; the tensors go to the list."""
    if isinstance(thing, torch.Tensor):
        tensors.append(thing.detach())
        return _Slot(len(tensors) - 1)
    if isinstance(thing, Mapping):
        return {key: take_apart(value, tensors) for key, value in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(take_apart(value, tensors) for value in thing)
    return copy.deepcopy(thing)


def put_together(thing: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(thing, _Slot):
        return tensors[thing.index].clone()
    if isinstance(thing, dict):
        return {key: put_together(value, tensors) for key, value in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(put_together(value, tensors) for value in thing)
    return copy.deepcopy(thing)


class Snapshot:
    """The state of ``things`` at one moment. A later snapshot reuses its memory.

    Raises: RankFailedError, DeadlineError from ``send``."""

    def __init__(self, things: Mapping[str, Stateful]):
        self.things = things
        self._tensors: list[torch.Tensor] = []
        self._rest: Any = None

    def take(self) -> None:
        found: list[torch.Tensor] = []
        rest = {name: take_apart(thing.state_dict(), found) for name, thing in self.things.items()}
        if [(t.shape, t.dtype, t.device) for t in found] == [(t.shape, t.dtype, t.device) for t in self._tensors]:
            if found:
                torch._foreach_copy_(self._tensors, found)
        else:
            self._tensors = [t.clone() for t in found]
        self._rest = rest

    def put_back(self) -> None:
        for name, thing in self.things.items():
            thing.load_state_dict(put_together(self._rest[name], self._tensors))

    def send(self, group: ProcessGroup, root: int, extra: Any = None) -> Any:
        """Make every rank's snapshot that of rank ``root``; returns root's ``extra``. This restores nothing yet, and a
        failure leaves every snapshot as it was."""
        is_root = group.rank == root
        told = b""
        if is_root:
            shapes = [(t.shape, t.dtype) for t in self._tensors]
            told = pickle.dumps((self._rest, shapes, extra))
        rest, shapes, extra = pickle.loads(group.all_gather_bytes(told)[root])
        tensors = self._tensors if is_root else [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        _broadcast(group, root, tensors)
        if not is_root:
            self._rest, self._tensors = rest, tensors
        return extra


def _broadcast(group: ProcessGroup, root: int, tensors: list[torch.Tensor]) -> None:
    """Piece by piece through one buffer of symmetric memory, whatever dtype or device the tensors have."""
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    buffer = symm_mem.empty(max((min(t.numel(), PIECE_BYTES) for t in flat), default=0), dtype=torch.uint8)
    for data in flat:
        for piece in data.split(PIECE_BYTES):
            part = buffer[: piece.numel()]
            if group.rank == root:
                part.copy_(piece)
            group.broadcast(part, root)
            if group.rank != root:
                piece.copy_(part)
