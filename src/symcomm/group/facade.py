"""The calls of every kind of group: one method each, whatever executes it.

A blocking collective of a kind seen before is found in the group's dispatch cache and is one call of the core. Any
other is checked and becomes a request (request.py), which the group's executor runs: on one host (executor.py), across
hosts (symcomm.hierarchical), or on a GPU's streams (symcomm.cuda). Messages go to the group's Messenger.
"""

from __future__ import annotations

import array
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

from symcomm import errors
from symcomm.group import request
from symcomm.group.buffers import (
    in_turn,
    overwrite_all,
    read_buffer,
    read_list,
    write_buffer,
    write_list,
)
from symcomm.group.executor import Executor
from symcomm.group.failure import call_site
from symcomm.group.p2p import ANY_SOURCE, Message
from symcomm.group.refusal import Refusals
from symcomm.group.request import Request, Views, plain_op, rooted
from symcomm.group.state import GroupState
from symcomm.group.work import Batch, Timeout
from symcomm.ops import numbers_of
from symcomm.types import DType, RedOpType

HOST_VIEWS = Views(read_buffer, write_buffer, read_list, write_list)
SUM = RedOpType.SUM
_ALL_REDUCE, _REDUCE, _BROADCAST, _BARRIER = numbers_of("all_reduce", "reduce", "broadcast", "barrier")
_REDUCE_SCATTER_SINGLE, _REDUCE_SCATTER = numbers_of("reduce_scatter_single", "reduce_scatter")
_ALL_GATHER_SINGLE, _ALL_GATHER = numbers_of("all_gather_single", "all_gather")
_GATHER, _GATHER_SINGLE, _SCATTER = numbers_of("gather", "gather_single", "scatter")
[_ALL_TO_ALL_SINGLE] = numbers_of("all_to_all_single")


class Messenger(Protocol):
    """A group's messages."""

    def send(self, tensor: Any, peer: int, tag: int, timeout: Timeout) -> None: ...

    def recv(self, tensor: Any, peer: int, tag: int, timeout: Timeout) -> int: ...

    def isend(self, tensor: Any, peer: int, tag: int) -> Any: ...

    def irecv(self, tensor: Any, peer: int, tag: int) -> Any: ...

    def batch(self, messages: Sequence[Message]) -> list[Any]: ...


class GroupCalls:
    """The calls that all groups have. A group owns an executor and messages."""

    rank: int
    size: int
    name: str
    state: GroupState
    executor: Executor
    views: Views = HOST_VIEWS
    # (call, root or op, input, output, async_op, name) -> 0 or a work; a failure; or -1: the core knows no such call
    _call_seen: Callable[..., Any]

    @property
    @abstractmethod
    def messages(self) -> Messenger: ...

    def _go_on(
        self, status: Any, ask: Callable[..., Request], args: tuple[Any, ...], async_op: Any, timeout: Timeout
    ) -> Any:
        """Finish a call after the core: hand over its work, say how it failed there (``status`` above 0), or make it
        here. ``ask`` makes a request of the arguments."""
        if type(status) is not int:
            return status
        if status > 0:
            raise self.state.fail_with_status(status, ask.__name__, call_site(2), None)
        with Refusals(self):
            return self.executor.execute(ask(self, *args), async_op, timeout)

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank makes no call, and why."""
        self.executor.refuse(error)

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks, in place.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_ALL_REDUCE, op, tensor, tensor, async_op, "all_reduce")
            if status == -1 and type(op) is not RedOpType:
                op = plain_op(op)
                status = call_seen(_ALL_REDUCE, op, tensor, tensor, async_op, "all_reduce")
        return self._go_on(status, request.all_reduce, (tensor, op), async_op, timeout) if status else None

    def reduce(self, tensor: Any, root: int = 0, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks into ``root``'s; the others' stay as they are.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        detail = root << 8 | op if type(root) is int and type(op) is RedOpType else None  # rooted(), inlined
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_REDUCE, detail, tensor, tensor, async_op, "reduce")
            if status == -1 and type(op) is not RedOpType:
                op = plain_op(op)
                status = call_seen(_REDUCE, rooted(root, op), tensor, tensor, async_op, "reduce")
        return self._go_on(status, request.reduce, (tensor, root, op), async_op, timeout) if status else None

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``input`` is one piece per rank, one after the other; rank k gets the combination of all k-th pieces.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_REDUCE_SCATTER_SINGLE, op, input, output, async_op, "reduce_scatter_single")
            if status == -1 and type(op) is not RedOpType:
                op = plain_op(op)
                status = call_seen(_REDUCE_SCATTER_SINGLE, op, input, output, async_op, "reduce_scatter_single")
        return (
            self._go_on(status, request.reduce_scatter_single, (output, input, op), async_op, timeout)
            if status
            else None
        )

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Like reduce_scatter_single, with a list of pieces; they may differ in size.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_REDUCE_SCATTER, op, inputs, output, async_op, "reduce_scatter")
            if status == -1 and type(op) is not RedOpType:
                op = plain_op(op)
                status = call_seen(_REDUCE_SCATTER, op, inputs, output, async_op, "reduce_scatter")
        return self._go_on(status, request.reduce_scatter, (output, inputs, op), async_op, timeout) if status else None

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Every rank's ``tensor`` becomes ``root``'s.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_BROADCAST, root, tensor, tensor, async_op, "broadcast")
        return self._go_on(status, request.broadcast, (tensor, root), async_op, timeout) if status else None

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``output`` becomes all ranks' ``input``, one after the other.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_ALL_GATHER_SINGLE, 0, input, output, async_op, "all_gather_single")
        return self._go_on(status, request.all_gather_single, (output, input), async_op, timeout) if status else None

    def all_gather(self, outputs: Sequence[Any], input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``outputs[k]`` becomes rank k's ``input``; sizes may differ between ranks.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_ALL_GATHER, 0, input, outputs, async_op, "all_gather")
        return self._go_on(status, request.all_gather, (outputs, input), async_op, timeout) if status else None

    def gather(
        self, outputs: Sequence[Any] | None, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``outputs[k]`` becomes rank k's ``input``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_GATHER, root, input, outputs, async_op, "gather")
        return self._go_on(status, request.gather, (outputs, input, root), async_op, timeout) if status else None

    def gather_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``output`` becomes all ranks' ``input``, one after the other; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_GATHER_SINGLE, root, input, output, async_op, "gather_single")
        return self._go_on(status, request.gather_single, (output, input, root), async_op, timeout) if status else None

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Rank k's ``output`` becomes ``root``'s ``inputs[k]``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_SCATTER, root, inputs, output, async_op, "scatter")
        return self._go_on(status, request.scatter, (output, inputs, root), async_op, timeout) if status else None

    def scatter_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Like scatter, from one tensor: ``root``'s ``input`` is one piece per rank, one after the other.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_SCATTER, root, input, output, async_op, "scatter_single")
        return self._go_on(status, request.scatter_single, (output, input, root), async_op, timeout) if status else None

    # --- all to all -------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None, async_op: bool = False, timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        """Piece k of ``input`` goes to rank k; ``output`` collects what came, in rank order.

        Splits count rows of dimension 0, as in torch; without them the pieces are equal.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if output_splits is None and input_splits is None and timeout is None:
            call_seen = self._call_seen
            status = call_seen(_ALL_TO_ALL_SINGLE, 0, input, output, async_op, "all_to_all_single")
        if not status:
            return None
        args = (output, input, output_splits, input_splits, partial(self.executor.agree, bool(async_op), timeout))
        return self._go_on(status, request.all_to_all_single, args, async_op, timeout)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from rank k; sizes may differ.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        args = (outputs, inputs, partial(self.executor.agree, bool(async_op), timeout))
        return self._go_on(-1, request.all_to_all, args, async_op, timeout)

    # --- several at once --------------------------------------------------------------------------------------

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """all_reduce of several tensors, of any dtypes.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            tensors = _listed("all_reduce_coalesced", "tensors", tensors)
            refusal = overwrite_all("all_reduce_coalesced", "tensors", tensors)
            ours = tensors if refusal is None else [t.detach().clone() for t in tensors]
        work = self._in_order((partial(self.all_reduce, t, op) for t in ours), tensors, async_op, timeout)
        if refusal is not None:
            raise refusal
        return work

    def all_gather_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """all_gather_single of several pairs.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            pairs = _pairs("all_gather_coalesced", outputs, inputs)
        return self._in_order([partial(self.all_gather_single, *pair) for pair in pairs], outputs, async_op, timeout)

    def all_gather_lists(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``outputs[r][k]`` becomes rank r's ``inputs[k]``."""
        with Refusals(self):
            calls = [partial(self.all_gather, [one[k] for one in outputs], t) for k, t in enumerate(inputs)]
            results = [t for one in outputs for t in one]
        return self._in_order(calls, results, async_op, timeout)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], op: Any = SUM, async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        """reduce_scatter_single of several pairs.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            pairs = _pairs("reduce_scatter_coalesced", outputs, inputs)
        calls = [partial(self.reduce_scatter_single, *pair, op) for pair in pairs]
        return self._in_order(calls, outputs, async_op, timeout)

    def _in_order(self, calls: Iterable[Callable[..., Any]], results: Any, async_op: bool, timeout: Timeout) -> Any:
        """Make these calls one after the other. A group runs operations in order, and none after one that failed or was
        refused, so the last work speaks for all."""
        calls = iter(calls)
        if (first := next(calls, None)) is None:
            return self.barrier(async_op, timeout)
        at_once = Batch() if async_op is True else async_op
        last = in_turn(partial(call, async_op=at_once, timeout=timeout) for call in chain([first], calls))
        if last is not None:
            last.results = list(results)
        return last

    # --- the rest ---------------------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Return once every rank has come.

        Raises: CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        status = -1
        if timeout is None:
            call_seen = self._call_seen
            status = call_seen(_BARRIER, 0, None, None, async_op, "barrier")
        return self._go_on(status, request.barrier, (), async_op, timeout) if status else None

    def all_gather_bytes(self, item: bytes, timeout: Timeout = None) -> list[bytes]:
        """All ranks' bytes, of any length, in rank order."""
        call = "all_gather_bytes"
        with Refusals(self):
            gather = self.executor.all_gather_array
            lengths = gather(call, array.array("q", [len(item)]), DType.INT64, timeout)
            everyone = gather(call, array.array("B", item), DType.UINT8, timeout, tuple(lengths))
        ends = [sum(lengths[: r + 1]) for r in range(self.size)]
        return [everyone[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]

    # --- messages ---------------------------------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Returns once ``tensor`` may be changed again.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        self.messages.send(tensor, peer, tag, timeout)

    def recv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0, timeout: Timeout = None) -> int:
        """Fill ``tensor`` from ``peer`` (or from the first rank that sends); returns the sender's rank.

        Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""
        return self.messages.recv(tensor, peer, tag, timeout)

    def isend(self, tensor: Any, peer: int, tag: int = 0) -> Any:
        """Start a send; ``wait()`` before changing ``tensor``.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return self.messages.isend(tensor, peer, tag)

    def irecv(self, tensor: Any, peer: int = ANY_SOURCE, tag: int = 0) -> Any:
        """Start a receive; ``wait()`` before reading ``tensor``.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return self.messages.irecv(tensor, peer, tag)

    def batch(self, messages: Sequence[Message]) -> list[Any]:
        """Start several sends and receives at once.

        Raises: BadArgumentError, GroupUnusableError; ``wait()`` raises RankFailedError, DeadlineError."""
        return self.messages.batch(messages)


def _listed(call: str, name: str, tensors: Any) -> Sequence[Any]:
    if isinstance(tensors, (list, tuple)):
        return tensors
    if not isinstance(tensors, (str, bytes, bytearray)):
        with contextlib.suppress(TypeError):
            return list(tensors)
    raise errors.wrong_type(call, name, tensors, "a list of tensors")


def _pairs(call: str, outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    outputs, inputs = _listed(call, "outputs", outputs), _listed(call, "inputs", inputs)
    if len(outputs) != len(inputs):
        raise errors.bad_argument(call, "outputs", f"{len(outputs)} tensors", f"as many as inputs ({len(inputs)})")
    return list(zip(outputs, inputs, strict=True))
