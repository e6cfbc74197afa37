"""The collectives of every kind of group: one method each, whatever executes it.

A blocking call of a kind seen before is found in the group's dispatch cache and is one call of the core. Any other is
checked, becomes a request (request.py), and is executed: on one host (local.py), across hosts (symcomm.hierarchical),
or on a GPU's streams (symcomm.cuda).
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group import request
from symcomm.group.buffers import (
    Buffer,
    in_turn,
    overwrite_all,
    read_buffer,
    read_list,
    write_buffer,
    write_list,
)
from symcomm.group.refusal import Refusals
from symcomm.group.request import Request, Views
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


class Collectives:
    """What all groups have in common for their callers. A group provides ``execute`` and the dispatch cache."""

    rank: int
    size: int
    name: str
    views: Views = HOST_VIEWS
    timeout_ns: int
    # (call, root or op, input, output) -> 0, a failure, or -1: the core knows no such call
    _run_cached: Callable[..., int] = native.run_uncached
    execute: Callable[[Request, bool, Timeout], Any]
    raise_failure: Callable[[int, str], None]
    refuse: Callable[[Exception], None]  # tells the others that this rank makes no call, and why; see refusal.py

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks, in place.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_ALL_REDUCE, op, tensor, tensor)
            if status >= 0:
                return self.raise_failure(status, "all_reduce") if status else None
            if (plain := request.plain_op(op)) is not op:
                return Collectives.all_reduce(self, tensor, plain)
        with Refusals(self):
            return self.execute(request.all_reduce(self, tensor, op), async_op, timeout)

    def reduce(self, tensor: Any, root: int = 0, op: Any = SUM, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Combine ``tensor`` over all ranks into ``root``'s; the others' stay as they are.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            # request.rooted(), of which a call would take a tenth of this one's time
            detail = root << 8 | op if type(root) is int and type(op) is RedOpType else None
            status = self._run_cached(_REDUCE, detail, tensor, tensor)
            if status >= 0:
                return self.raise_failure(status, "reduce") if status else None
            if (plain := request.plain_op(op)) is not op:
                return Collectives.reduce(self, tensor, root, plain)
        with Refusals(self):
            return self.execute(request.reduce(self, tensor, root, op), async_op, timeout)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``input`` is one piece per rank, one after the other; rank k gets the combination of all k-th pieces.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_REDUCE_SCATTER_SINGLE, op, input, output)
            if status >= 0:
                return self.raise_failure(status, "reduce_scatter_single") if status else None
            if (plain := request.plain_op(op)) is not op:
                return Collectives.reduce_scatter_single(self, output, input, plain)
        with Refusals(self):
            return self.execute(request.reduce_scatter_single(self, output, input, op), async_op, timeout)

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: Any = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Like reduce_scatter_single, with a list of pieces; they may differ in size.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_REDUCE_SCATTER, op, inputs, output)
            if status >= 0:
                return self.raise_failure(status, "reduce_scatter") if status else None
            if (plain := request.plain_op(op)) is not op:
                return Collectives.reduce_scatter(self, output, inputs, plain)
        with Refusals(self):
            return self.execute(request.reduce_scatter(self, output, inputs, op), async_op, timeout)

    # --- copies -----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Everybody's ``tensor`` becomes ``root``'s.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_BROADCAST, root, tensor, tensor)
            if status >= 0:
                return self.raise_failure(status, "broadcast") if status else None
        with Refusals(self):
            return self.execute(request.broadcast(self, tensor, root), async_op, timeout)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``output`` becomes all ranks' ``input``, one after the other.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_ALL_GATHER_SINGLE, 0, input, output)
            if status >= 0:
                return self.raise_failure(status, "all_gather_single") if status else None
        with Refusals(self):
            return self.execute(request.all_gather_single(self, output, input), async_op, timeout)

    def all_gather(self, outputs: Sequence[Any], input: Any, async_op: bool = False, timeout: Timeout = None) -> Any:
        """``outputs[k]`` becomes rank k's ``input``; sizes may differ between ranks.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_ALL_GATHER, 0, input, outputs)
            if status >= 0:
                return self.raise_failure(status, "all_gather") if status else None
        with Refusals(self):
            return self.execute(request.all_gather(self, outputs, input), async_op, timeout)

    def gather(
        self, outputs: Sequence[Any] | None, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``outputs[k]`` becomes rank k's ``input``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_GATHER, root, input, outputs)
            if status >= 0:
                return self.raise_failure(status, "gather") if status else None
        with Refusals(self):
            return self.execute(request.gather(self, outputs, input, root), async_op, timeout)

    def gather_single(
        self, output: Any, input: Any, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """At ``root``, ``output`` becomes all ranks' ``input``, one after the other; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_GATHER_SINGLE, root, input, output)
            if status >= 0:
                return self.raise_failure(status, "gather_single") if status else None
        with Refusals(self):
            return self.execute(request.gather_single(self, output, input, root), async_op, timeout)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int = 0, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Rank k's ``output`` becomes ``root``'s ``inputs[k]``; the others pass None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_SCATTER, root, inputs, output)
            if status >= 0:
                return self.raise_failure(status, "scatter") if status else None
        with Refusals(self):
            return self.execute(request.scatter(self, output, inputs, root), async_op, timeout)

    # --- all to all -------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None, async_op: bool = False, timeout: Timeout = None,
    ) -> Any:  # fmt: skip
        """Piece k of ``input`` goes to rank k; ``output`` collects what came, in rank order.

        Splits count rows of dimension 0, as in torch; without them the pieces are equal.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if output_splits is None and input_splits is None and async_op is False and timeout is None:
            status = self._run_cached(_ALL_TO_ALL_SINGLE, 0, input, output)
            if status >= 0:
                return self.raise_failure(status, "all_to_all_single") if status else None
        with Refusals(self):
            agree = partial(self._agree_on_splits, timeout)
            checked = request.all_to_all_single(self, output, input, output_splits, input_splits, agree)
            return self.execute(checked, async_op, timeout)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from rank k; sizes may differ.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            checked = request.all_to_all(self, outputs, inputs, partial(self._agree_on_splits, timeout))
            return self.execute(checked, async_op, timeout)

    def _agree_on_splits(self, timeout: Timeout, call: str, sent: Sequence[int], got: Sequence[int]) -> Any:
        """Everybody's split sizes, so that each rank knows where in a peer's input its piece lies."""
        everyone = self._all_gather_array(call, array.array("q", [*sent, *got]), DType.INT64, timeout)
        width = 2 * self.size
        return request.check_splits(call, [everyone[width * r : width * (r + 1)] for r in range(self.size)])

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
            calls = [partial(self.all_reduce, t, op) for t in ours]
        work = self._in_order(calls, tensors, async_op, timeout)
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

    def _in_order(self, calls: Sequence[Callable[..., Any]], results: Any, async_op: bool, timeout: Timeout) -> Any:
        """Operations of a group run in order, and after one that fails or is refused the rest does not, so the last
        work speaks for all."""
        if not calls:
            return self.barrier(async_op, timeout)
        at_once = Batch() if async_op is True else async_op
        last = in_turn([partial(call, async_op=at_once, timeout=timeout) for call in calls])
        if last is not None:
            last.results = list(results)
        return last

    # --- the rest ---------------------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Return once every rank has come.

        Raises: CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        if async_op is False and timeout is None:
            status = self._run_cached(_BARRIER, 0, None, None)
            if status >= 0:
                return self.raise_failure(status, "barrier") if status else None
        with Refusals(self):
            return self.execute(request.barrier(), async_op, timeout)

    def all_gather_bytes(self, item: bytes, timeout: Timeout = None) -> list[bytes]:
        """Everybody's bytes, of any length, in rank order."""
        call = "all_gather_bytes"
        with Refusals(self):
            lengths = self._all_gather_array(call, array.array("q", [len(item)]), DType.INT64, timeout)
            everyone = self._all_gather_array(call, array.array("B", item), DType.UINT8, timeout, tuple(lengths))
        ends = [sum(lengths[: r + 1]) for r in range(self.size)]
        return [everyone[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]

    def _all_gather_array(
        self, call: str, mine: array.array[Any], dtype: DType, timeout: Timeout, sizes: tuple[int, ...] | None = None
    ) -> array.array[Any]:
        """Everybody's array, one after the other; ``sizes``: their lengths, where they differ."""
        sizes = sizes or (len(mine),) * self.size
        everyone = array.array(mine.typecode, bytes(mine.itemsize * sum(sizes)))
        source, out = (Buffer(a.buffer_info()[0], len(a), dtype, a) for a in (mine, everyone))
        asked = Request("all_gather_single", [source], [out], [], sizes, dtype, call=call)
        self.execute(asked, False, timeout)
        return everyone


def _listed(call: str, name: str, tensors: Any) -> Sequence[Any]:
    if isinstance(tensors, (list, tuple)):
        return tensors
    try:
        return list(tensors)
    except TypeError:
        raise errors.wrong_type(call, name, tensors, "a list of tensors") from None


def _pairs(call: str, outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    outputs, inputs = _listed(call, "outputs", outputs), _listed(call, "inputs", inputs)
    if len(outputs) != len(inputs):
        raise errors.bad_argument(call, "outputs", f"{len(outputs)} tensors", f"as many as inputs ({len(inputs)})")
    return list(zip(outputs, inputs, strict=True))
