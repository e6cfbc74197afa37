"""Window: one-sided writes and signals, with arguments checked. memory.py, hosts.py and cuda.py move the bytes."""

from __future__ import annotations

import enum
import itertools
import json
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.group.buffers import torch_dtypes
from symcomm.group.segments import Shortcut
from symcomm.group.work import Timeout, to_ns
from symcomm.memory.hosts import alike
from symcomm.symm_mem.handle import check_rank
from symcomm.types import DType
from symcomm.windows.memory import HostMemory, no_shortcut
from symcomm.windows.works import DONE

if TYPE_CHECKING:
    import torch

_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()  # by group; alike on all ranks


class WindowAccessType(enum.IntEnum):
    """How this rank reaches a peer's memory."""

    UNIFIED = 0  # mapped: loads and stores see what the peer sees
    SEPARATE = 1  # not mapped: puts are visible once the signal after them was taken


@dataclass(slots=True)
class WindowAttr:
    access_type: WindowAccessType = WindowAccessType.UNIFIED


def new_window(group: Any, tensor: torch.Tensor | None = None, kind: type[Window] | None = None) -> Window:
    """See ``ProcessGroup.new_window``. ``kind``: a subclass that wraps works for its own callers.

    Raises: what ``ProcessGroup.new_window`` raises."""
    group.check_usable()
    window = (kind or Window)(group)
    if tensor is not None:
        window.tensor_register(tensor)
    return window


class Window:
    """Made by ``group.new_window()``. All ranks of the group can write one tensor of each rank.

    Sizes, shapes and dtypes may differ between ranks. Deregister a window that you no longer need: until then, or until
    the group ends, its memory stays, because peers may write to it.

    Raises: BadArgumentError, CallerError, CollectiveMismatchError, RankFailedError, DeadlineError."""

    _done: Any = DONE  # returned for an operation that has ended

    def __init__(self, group: Any):
        self.group = group
        self._number = next(_numbers.setdefault(group, itertools.count()))
        self._memory: Any = None
        self._tensor: Any = None
        self._short_put: Shortcut = no_shortcut
        self._short_signal: Shortcut = no_shortcut
        self._short_wait: Shortcut = no_shortcut

    def __repr__(self) -> str:
        state = "without a tensor" if self._memory is None else f"of {self._memory.info['count']} elements here"
        return f"<Window {self._number} {state}, rank {self.group.rank} of {self.group.size}>"

    # --- the tensor -------------------------------------------------------------------------------------------

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Let all ranks write to ``tensor``. Every rank of the group calls it, each with its own tensor.

        A CPU tensor moves into symmetric memory, unless it lies there; it stays the same object with the same values.
        ``owning``: the window keeps the tensor's memory alive. Otherwise the caller must."""
        self.group.check_usable()
        if self._memory is not None:
            raise errors.CallerError(
                "tensor_register: the window has a tensor already; call tensor_deregister first, or use another window."
            )
        memory: Any = None
        refusal: Exception | None = None
        try:
            memory = _memory_for(self.group, tensor, self._number)
        except Exception as error:  # tell the others, which would wait for this rank
            refusal = error
        info = {"window": self._number, "refusal": str(refusal or ""), **(memory.info if memory else {})}
        infos = [json.loads(item) for item in self.group.all_gather_bytes(json.dumps(info).encode())]
        if refusal is not None:
            raise refusal
        _check_cards(self.group, infos)
        self._tensor = tensor.detach() if owning else None
        memory.connect(infos, weakref.ref(tensor if self._tensor is None else self._tensor))
        self._memory = memory
        self._short_put, self._short_signal, self._short_wait = memory.shortcuts()
        self.group.exposed[self._number] = (self._tensor, memory.words)

    def tensor_deregister(self) -> None:
        """End all writes to the tensor. Every rank of the group calls it; earlier puts have then arrived."""
        memory = self._memory_of("tensor_deregister")
        try:
            memory.check_usable("tensor_deregister")
            memory.close()
            memory.changed()
            self.group.exposed.pop(self._number, None)  # on a failed group it stays until all ranks have left
        finally:
            memory.end()
            self._memory = self._tensor = None
            self._short_put = self._short_signal = self._short_wait = no_shortcut

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """A tensor over ``rank``'s memory, which you may read and write."""
        memory = self._registered("map_remote_tensor", "rank", rank)
        if not memory.is_mapped(rank):
            raise errors.CallerError(
                f"map_remote_tensor: rank {rank} is on another host, whose memory cannot be mapped; use put."
            )
        if rank == self.group.rank and self._tensor is None:
            raise errors.CallerError(
                "map_remote_tensor: the window does not own this rank's tensor; register it with owning=True."
            )
        if rank == self.group.rank:
            return self._tensor.detach()  # it shares the version counter, so autograd notices writes
        return memory.tensor_of(rank, self._tensor)

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """How this rank reaches ``peer_rank``'s memory: mapped (UNIFIED) or not (SEPARATE)."""
        memory = self._registered("get_attr", "peer_rank", peer_rank)
        return WindowAttr(WindowAccessType.UNIFIED if memory.is_mapped(peer_rank) else WindowAccessType.SEPARATE)

    # --- one-sided calls --------------------------------------------------------------------------------------

    # ``opts``: torch's PutOptions, SignalOptions and WaitSignalOptions, or ours of these names; only for the timeout.

    def put(
        self,
        tensor: Any,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Any:
        """Write ``tensor`` into ``dst_rank``'s memory, from element ``target_offset_nelems`` on.

        ``dst_rank`` takes no part. It sees the put once it has taken a later signal. You may change ``tensor`` when the
        work has ended; on the CPU, it has when this returns."""
        if opts is None and timeout is None and self._short_put(tensor, dst_rank, target_offset_nelems) == 0:
            return self._done
        memory = self._registered("put", "dst_rank", dst_rank)
        seconds = self._seconds("put", opts, timeout)
        if status := self._put(memory, tensor, dst_rank, target_offset_nelems, seconds):
            raise memory.explain(f"put(dst_rank={dst_rank})", status, dst_rank, seconds)
        return self._done

    def _put(self, memory: Any, tensor: Any, rank: int, offset: int, seconds: float) -> int:
        source, target = memory.source(tensor), memory.infos[rank]
        wanted = DType(target["dtype"])
        if source.dtype != wanted:
            allowed = f"of {wanted.label}, as rank {rank}'s tensor in this window"
            raise errors.bad_argument("put", "tensor", f"a tensor of {source.dtype.label}", allowed, "convert it first")
        try:
            start = operator.index(offset)
        except TypeError:
            start = -1
        room = target["count"] - source.count
        if room < 0:
            allowed = f"one that fits into rank {rank}'s {target['count']} elements"
            raise errors.bad_argument("put", "tensor", f"a tensor of {source.count} elements", allowed)
        if not 0 <= start <= room:
            allowed = f"0 to {room}, since rank {rank}'s window has {target['count']} elements"
            raise errors.bad_argument("put", "target_offset_nelems", offset, allowed)
        return memory.put(source, rank, start, seconds)

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None, timeout: Timeout = None) -> Any:
        """Send ``peer_rank`` a signal. This never waits: the peer counts signals until it takes them."""
        if opts is None and timeout is None and self._short_signal(peer_rank) == 0:
            return self._done
        memory = self._registered("signal", "peer_rank", peer_rank)
        seconds = self._seconds("signal", opts, timeout)
        if status := memory.signal(peer_rank, seconds):
            raise memory.explain(f"signal(peer_rank={peer_rank})", status, peer_rank, seconds)
        return self._done

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None, timeout: Timeout = None) -> Any:
        """Wait for one signal of ``peer_rank`` and take it. That rank's earlier puts have then arrived."""
        if not async_op and opts is None and timeout is None and self._short_wait(peer_rank) == 0:
            return self._done
        memory = self._registered("wait_signal", "peer_rank", peer_rank)
        seconds = self._seconds("wait_signal", opts, timeout)
        if async_op:
            self._short_wait = no_shortcut  # from now on a wait may have to let an earlier one end first
        work = memory.wait_signal(f"wait_signal(peer_rank={peer_rank})", peer_rank, async_op, seconds)
        return self._done if work is None else self._dressed("wait_signal", work, seconds)

    def _dressed(self, call: str, work: Any, seconds: float) -> Any:
        """What the caller gets for one of our works. ``seconds``: the work's time limit."""
        return work

    # --- arguments --------------------------------------------------------------------------------------------

    def _memory_of(self, call: str) -> Any:
        if self._memory is None:
            raise errors.CallerError(f"{call}: the window has no tensor; call tensor_register on every rank first.")
        return self._memory

    def _registered(self, call: str, argument: str, rank: Any) -> Any:
        """The window's memory, if it can be used, and if ``rank`` is one of the group's."""
        memory = self._memory_of(call)
        memory.check_usable(call)
        check_rank(call, argument, rank, self.group.size)
        return memory

    def _seconds(self, call: str, opts: Any, timeout: Timeout) -> float:
        """The time-out in ``timeout``, or in PutOptions and the like (ours or torch's), or the group's."""
        given = getattr(opts, "timeout", None) if timeout is None else timeout
        if given is None or (timeout is None and isinstance(given, timedelta) and given.days < 0):  # unset is -1 ms
            return self.group.timeout
        return to_ns(call, given) / 1e9


def _memory_for(group: Any, tensor: Any, number: int) -> Any:
    """This rank's side of a window into ``tensor``."""
    import torch

    def refuse(what: str, fix: str = "") -> errors.BadArgumentError:
        return errors.bad_argument("tensor_register", "tensor", what, "a dense, contiguous CPU or CUDA tensor", fix)

    if not isinstance(tensor, torch.Tensor):
        raise refuse(type(tensor).__name__)
    if tensor.layout is not torch.strided:
        raise refuse(f"a {tensor.layout} tensor", "use .to_dense() first")
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        raise refuse(f"a view with strides {tuple(tensor.stride())}", "use .contiguous() first")
    if tensor.dtype not in torch_dtypes():
        raise refuse(f"a tensor of {tensor.dtype}", "use .view() to register it as a dtype of numbers")
    if tensor.is_cuda:
        from symcomm.windows.cuda import CudaMemory

        return CudaMemory(group, tensor)
    if not tensor.is_cpu:
        raise refuse(f"a tensor on {tensor.device}")
    if group.spans_hosts:
        from symcomm.windows.hosts import HostsMemory

        return HostsMemory(group, tensor, number)
    return HostMemory(group, group, tensor)


def _check_cards(group: Any, infos: Sequence[dict[str, Any]]) -> None:
    """Raise unless all ranks registered a tensor, with the same window, on the same kind of device."""
    refused = [(r, info["refusal"]) for r, info in enumerate(infos) if info["refusal"]]
    if refused:
        rank, text = refused[0]
        raise errors.CallerError(f"tensor_register on group {group.name!r}: rank {rank} could not take part: {text}")
    for key, words in (("window", "windows (in the order they were made)"), ("device", "kinds of devices")):
        sides = alike([info[key] for info in infos])
        if len(sides) > 1:
            listed = "; ".join(f"rank {format_ranks(ranks)}: {infos[ranks[0]][key]}" for ranks in sides)
            raise errors.CollectiveMismatchError(
                f"tensor_register on group {group.name!r}: the ranks mean different {words}: {listed}."
            )
