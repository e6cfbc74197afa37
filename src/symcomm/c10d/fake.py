"""The fake group: every collective returns at once and leaves plausible data behind.

For trying out sharding, memory use and graphs of a large job in one process. What arrives "from others" is our own
data; sums leave the input as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.c10d.backend import NEWER_NAMES, AnyBackendOptions, Backend
from symcomm.c10d.options import Option, flag, integer, with_half
from symcomm.c10d.works import FakeWork
from symcomm.torch_backend import versions
from symcomm.torch_backend.arguments import root_of
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.overloads import CALLS, fit, positional

__all__ = ["FakeOptions", "FakeProcessGroup"]


class _FakeOptions(AnyBackendOptions):
    """``FakeProcessGroup.Options``. ``error_on_collective`` finds the collectives a program should not make."""

    __slots__ = ()
    fake_option = Option(0, integer)
    error_on_collective = Option(False, flag)

    def __init__(self) -> None:
        super().__init__()
        self._values["backend"] = "fake"


FakeOptions: Any = with_half(_FakeOptions, versions.fake_options())


def _pieces(lists: Any) -> list[Any]:
    """The inner list of a list of one list, or the list itself."""
    return list(lists[0]) if lists and isinstance(lists[0], (list, tuple)) else list(lists)


class FakeProcessGroup(Backend):
    """A backend whose collectives return at once; made by ``FakeProcessGroup._create_internal(rank, world_size)``.

    What would come from others is this rank's own data, and a sum leaves the input as it is.

    Raises: BadArgumentError for wrong arguments, CallerError for any collective once ``error_on_collective`` is set."""

    Options: Any = FakeOptions

    def __init__(self, *_: Any, **__: Any):
        raise TypeError("FakeProcessGroup: no constructor; call FakeProcessGroup._create_internal(rank, world_size).")

    @classmethod
    def _create_internal(cls, rank: int, world_size: int, options: FakeOptions | None = None) -> FakeProcessGroup:
        if not 0 <= rank < world_size:
            raise errors.bad_argument("FakeProcessGroup", "rank", rank, f"0 to world_size - 1 ({world_size - 1})")
        group = cls.__new__(cls)
        Backend.__init__(group, rank, world_size)
        group.options = options if options is not None else FakeOptions()
        return group

    options: FakeOptions
    supports_splitting = True

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> FakeProcessGroup | None:
        """A fake group of ``ranks``, in this order; None where this rank is not among them."""
        chosen = list(ranks)
        if opts is not None and not isinstance(opts, FakeOptions):
            raise errors.bad_argument("split", "opts", opts, "FakeProcessGroup.Options")
        return self._create_internal(chosen.index(self._rank), len(chosen), opts) if self._rank in chosen else None

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> FakeWork:
        return self._did("allreduce_sparse")

    def name(self) -> str:
        return "fake"

    def _did(self, call: str) -> FakeWork:
        if self.options.error_on_collective:
            raise errors.CallerError(f"FakeProcessGroup: {call} was called, and options.error_on_collective is set.")
        return FakeWork()

    def allreduce(self, tensors: Any, *_: Any, **__: Any) -> FakeWork:
        return self._did("allreduce")

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> FakeWork:
        return self._did("allreduce_coalesced")

    def reduce(self, tensors: Any, *_: Any, **__: Any) -> FakeWork:
        return self._did("reduce")

    def broadcast(self, tensors: Any, *_: Any, **__: Any) -> FakeWork:
        return self._did("broadcast")

    def barrier(self, *_: Any, **__: Any) -> FakeWork:
        return self._did("barrier")

    def allgather(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> FakeWork:
        work = self._did("allgather")
        for place in _pieces(outputs):
            place.copy_(single("all_gather", inputs, "input tensor list"))
        return work

    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> FakeWork:
        work = self._did("allgather_coalesced")
        for places in output_lists:
            for place, tensor in zip(places, inputs, strict=True):
                place.copy_(tensor)
        return work

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> FakeWork:
        work = self._did("_allgather_base")
        for part in output.chunk(self._size):
            part.copy_(input)
        return work

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input)
        return self._did("allgather_into_tensor_coalesced")

    def reduce_scatter(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> FakeWork:
        work = self._did("reduce_scatter")
        pieces = self._one_each("reduce_scatter", "input_tensors", _pieces(inputs))
        single("reduce_scatter", outputs, "output tensor list").copy_(pieces[self._rank])
        return work

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> FakeWork:
        work = self._did("_reduce_scatter_base")
        if input.numel() != output.numel() * self._size:
            allowed = f"{self._size} times the {output.numel()} elements of output"
            raise errors.bad_argument("_reduce_scatter_base", "input", f"{input.numel()} elements", allowed)
        output.copy_(input.chunk(self._size)[self._rank])
        return work

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input)
        return self._did("reduce_scatter_tensor_coalesced")

    def gather(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> FakeWork:
        work = self._did("gather")
        places = self._at_root("gather", "output_tensors", outputs, rest, named)
        for place in places:
            place.copy_(single("gather", inputs, "input tensor list"))
        return work

    def scatter(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> FakeWork:
        work = self._did("scatter")
        pieces = self._at_root("scatter", "input_tensors", inputs, rest, named)
        if pieces:
            single("scatter", outputs, "output tensor list").copy_(pieces[self._rank])
        return work

    def _at_root(self, call: str, argument: str, lists: Any, rest: Any, named: Any) -> list[Any]:
        """The list of one tensor for each rank that only the root has."""
        given = next((item for item in (*rest, *named.values()) if item is not None), None)  # options, or the root
        at_root = self._rank == root_of(given)
        pieces = _pieces(lists)
        if at_root:
            return self._one_each(call, argument, pieces)
        if pieces:
            allowed = "empty on ranks that are not the root"
            raise errors.bad_argument(call, argument, f"{len(pieces)} tensors", allowed)
        return []

    def _one_each(self, call: str, argument: str, pieces: Sequence[Any]) -> list[Any]:
        if len(pieces) != self._size:
            allowed = f"one for each of the {self._size} ranks"
            raise errors.bad_argument(call, argument, f"{len(pieces)} tensors", allowed)
        return list(pieces)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> FakeWork:
        work = self._did("alltoall")
        places = self._one_each("alltoall", "output_tensors", outputs)
        for place, tensor in zip(places, self._one_each("alltoall", "input_tensors", inputs), strict=True):
            place.copy_(tensor)
        return work

    def alltoall_base(
        self, output: Any, input: Any, output_split_sizes: Any = (), input_split_sizes: Any = (), *_: Any, **__: Any
    ) -> FakeWork:
        work = self._did("alltoall_base")
        here, kept = input.reshape(-1), min(input.numel(), output.numel())
        output.zero_().view(-1)[:kept].copy_(here[:kept])
        return work

    def send(self, tensors: Sequence[Any], dstRank: int, tag: int) -> FakeWork:
        return FakeWork()

    def recv(self, tensors: Sequence[Any], srcRank: int, tag: int) -> FakeWork:
        return FakeWork()

    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> FakeWork:
        return FakeWork()

    def _start_coalescing(self) -> None:
        """Nothing to collect."""

    def _end_coalescing(self) -> FakeWork:
        return FakeWork()


def _checked(call: str, method: Any) -> Any:
    @functools.wraps(method)
    def checked(self: FakeProcessGroup, *args: Any, **named: Any) -> FakeWork:
        fit(call, args, named)
        return method(self, *positional(args, named), **named)

    return checked


for _name in (*CALLS, *NEWER_NAMES.values()):
    if _name in vars(FakeProcessGroup):
        _call = next((newer for newer, older in NEWER_NAMES.items() if older == _name), _name)
        setattr(FakeProcessGroup, _name, _checked(_call, vars(FakeProcessGroup)[_name]))
