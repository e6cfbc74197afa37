"""Windows into CPU tensors of ranks that share a host: a put is one copy into the peer's memory and nothing more."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer, read_buffer, torch_dtypes
from symcomm.group.failure import explain_peer
from symcomm.group.segments import Segment, Shortcut, TensorRef, owner_of
from symcomm.symm_mem.on_cpu import mapped_storage
from symcomm.symm_mem.symmetrize import symmetrize
from symcomm.types import DType
from symcomm.windows.works import SignalWork

if TYPE_CHECKING:
    import torch


def no_shortcut(*_: Any) -> int | None:
    """The shortcut of windows whose calls always check their arguments."""
    return None


def _place(group: Any, tensor: torch.Tensor) -> None:
    """Move a tensor's storage into this rank's symmetric memory, unless it is there already."""

    def refuse(what: str, fix: str) -> errors.BadArgumentError:
        return errors.bad_argument("tensor_register", "tensor", f"memory of {what}", "this rank's own", fix)

    address = tensor.untyped_storage().data_ptr()
    owner = owner_of(group, address) if address else None
    if owner is not None and owner != group.rank:
        raise refuse(f"rank {owner}", "register a tensor of this rank's own")
    if owner is None:
        symmetrize(tensor, grads=False)
        address = tensor.untyped_storage().data_ptr()
        if address and owner_of(group, address) != group.rank:
            raise refuse("another rank", "register it in the thread that made the group")


class AnyMemory:
    """One window's memory on all ranks of a ProcessGroup, of any kind. ``infos``: each rank's facts about its own."""

    group: Any
    device: Any
    infos: Sequence[dict[str, Any]] = ()
    tensor: TensorRef  # this rank's

    def changed(self) -> None:
        """Tell autograd that puts have changed this rank's tensor."""
        native.change_tensors(self.tensor())

    def shortcuts(self) -> tuple[Shortcut, Shortcut, Shortcut]:
        """put, signal and wait_signal for arguments that need no check. The last one may be used until the first
        asynchronous wait."""
        return no_shortcut, no_shortcut, no_shortcut

    def is_mapped(self, rank: int) -> bool:
        return True

    def tensor_of(self, rank: int, keeps: Any) -> torch.Tensor:
        """A tensor over a rank's memory, with its shape and dtype; it holds ``keeps``."""
        import torch

        info = self.infos[rank]
        dtype, shape = DType(info["dtype"]), tuple(info["shape"])
        storage = self._storage_of(rank, max(info["count"] * dtype.itemsize, 1), keeps)
        strides = torch._prims_common.make_contiguous_strides_for(shape)
        return torch.empty(0, dtype=getattr(torch, dtype.label), device=self.device).set_(storage, 0, shape, strides)

    @abstractmethod
    def _storage_of(self, rank: int, nbytes: int, keeps: Any) -> torch.UntypedStorage: ...

    def explain(self, what: str, status: int, peer: int, seconds: float) -> errors.SymcommError:
        return explain_peer(self.group, what, status, peer, seconds)


class HostMemory(AnyMemory):
    """A window's memory in CPU tensors of this host."""

    device = "cpu"

    def __init__(self, group: Any, local: Any, tensor: torch.Tensor):
        """``local``: the ProcessGroup of this host's ranks."""
        self.group = group
        _place(local, tensor)
        self._segment = Segment(local, tensor.data_ptr(), tensor.numel(), torch_dtypes()[tensor.dtype])
        self.words = self._segment.words
        self._last: dict[int, SignalWork] = {}  # by rank: the last asynchronous wait for its signals
        self.info = {"device": "cpu", "shape": list(tensor.shape), **self._segment.info}

    def connect(self, infos: Sequence[dict[str, Any]], tensor: TensorRef) -> None:
        self.infos, self.tensor = infos, tensor
        self._segment.connect(infos, tensor)

    def shortcuts(self) -> tuple[Shortcut, Shortcut, Shortcut]:
        return self._segment.shortcuts()

    def check_usable(self, call: str) -> None:
        self.group.check_usable()

    def close(self) -> None:
        """Return once all puts have ended: they have when all ranks have arrived here."""
        self.group.barrier()

    def end(self) -> None:
        """Called once, at the end, whether ``close`` succeeded or not."""

    # --- puts -------------------------------------------------------------------------------------------------

    def source(self, tensor: Any) -> Buffer:
        return read_buffer("put", "tensor", tensor)

    def put(self, source: Buffer, rank: int, offset: int, seconds: float) -> int:
        """The caller has checked the arguments."""
        return self._segment.write(rank, offset * source.dtype.itemsize, source.address, source.nbytes)

    def _storage_of(self, rank: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
        return mapped_storage(self._address_of(rank), nbytes, (self._segment, keeps))

    def _address_of(self, rank: int) -> int:
        return self._segment.address_of(rank)

    # --- signals ----------------------------------------------------------------------------------------------

    def signal(self, rank: int, seconds: float) -> int:
        return self._segment.signal(rank)

    def wait_signal(self, what: str, rank: int, async_op: bool, seconds: float) -> SignalWork | None:
        """Wait, or return a work if ``async_op``. Waits for the same rank end in order."""
        before = self._last.get(rank)
        if before is not None and before.is_completed():
            del self._last[rank]
            before = None
        if before is None and not async_op:
            if status := self.take(rank, math.ceil(seconds * 1e9)):
                raise self.explain(what, status, rank, seconds)
            return None
        work = self._last[rank] = SignalWork(self, what, rank, seconds, before)
        if async_op:
            return work
        work.wait()
        return None

    def take(self, peer: int, timeout_ns: int) -> int:
        return self._segment.wait_signal(peer, timeout_ns)
