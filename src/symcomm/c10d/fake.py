"""The fake group: every collective returns at once and leaves plausible data behind.

Use it to try out sharding, memory use and graphs of a large job in one process. What arrives "from others" is our own
data; sums leave the input as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.c10d.backend import AnyBackendOptions, Backend
from symcomm.c10d.enums import named
from symcomm.c10d.options import Option, flag, integer, with_half
from symcomm.c10d.works import FakeWork
from symcomm.ops import OPS
from symcomm.torch_backend import versions
from symcomm.torch_backend.arguments import root_of
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.overloads import CALLS, fit, positional


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


def _spread(tensor: Any, places: Sequence[Any]) -> None:
    for place in places:
        place.copy_(tensor)


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

    def name(self) -> str:
        return "fake"

    def _start_coalescing(self) -> None:
        """Nothing to collect."""

    def _end_coalescing(self) -> FakeWork:
        return FakeWork()

    # These write what collectives leave behind; other calls change nothing. They get tensors, then options or plain
    # arguments.

    def _fill_allgather(self, outputs: Any, inputs: Any, *_: Any) -> None:
        _spread(single("all_gather", inputs, "input tensor list"), _pieces(outputs))

    def _fill_allgather_coalesced(self, output_lists: Any, inputs: Any, *_: Any) -> None:
        for k, tensor in enumerate(inputs):
            _spread(tensor, [places[k] for places in output_lists])

    def _fill_all_gather_single(self, output: Any, input: Any, *_: Any) -> None:
        _spread(input, output.chunk(self._size))

    def _fill_all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self._fill_all_gather_single(output, input)

    def _fill_reduce_scatter(self, outputs: Any, inputs: Any, *_: Any) -> None:
        pieces = self._one_each("reduce_scatter", "input_tensors", _pieces(inputs))
        single("reduce_scatter", outputs, "output tensor list").copy_(pieces[self._rank])

    def _fill_reduce_scatter_single(self, output: Any, input: Any, *_: Any) -> None:
        if input.numel() != output.numel() * self._size:
            allowed = f"{self._size} times the {output.numel()} elements of output"
            raise errors.bad_argument("_reduce_scatter_base", "input", f"{input.numel()} elements", allowed)
        output.copy_(input.chunk(self._size)[self._rank])

    def _fill_reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            self._fill_reduce_scatter_single(output, input)

    def _fill_gather(self, outputs: Any, inputs: Any, *rest: Any) -> None:
        if places := self._at_root("gather", "output_tensors", outputs, rest):
            _spread(single("gather", inputs, "input tensor list"), places)

    def _fill_scatter(self, outputs: Any, inputs: Any, *rest: Any) -> None:
        if pieces := self._at_root("scatter", "input_tensors", inputs, rest):
            single("scatter", outputs, "output tensor list").copy_(pieces[self._rank])

    def _fill_alltoall(self, outputs: Any, inputs: Any, *_: Any) -> None:
        places = self._one_each("alltoall", "output_tensors", outputs)
        for place, tensor in zip(places, self._one_each("alltoall", "input_tensors", inputs), strict=True):
            place.copy_(tensor)

    def _fill_all_to_all_single(self, output: Any, input: Any, *_: Any) -> None:
        kept = min(input.numel(), output.numel())
        output.zero_().view(-1)[:kept].copy_(input.reshape(-1)[:kept])

    def _at_root(self, call: str, argument: str, lists: Any, rest: tuple[Any, ...]) -> list[Any]:
        """The root's list of one tensor for each rank; other ranks have none."""
        pieces = _pieces(lists)
        given = next((item for item in rest if item is not None), None)  # options, or the root
        if self._rank == root_of(given):
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


def _operation(name: str, call: str) -> Any:
    """The method for ``call`` by one of its names."""
    fill = getattr(FakeProcessGroup, f"_fill_{call}", None)
    is_message = call in ("send", "recv", "recv_anysource")

    def run(self: FakeProcessGroup, *args: Any, **named: Any) -> FakeWork:
        if call in CALLS:
            fit(call, args, named)
        if self.options.error_on_collective and not is_message:
            raise errors.CallerError(f"FakeProcessGroup: {name} was called, and options.error_on_collective is set.")
        if fill is not None:
            fill(self, *positional(args, named), *named.values())
        return FakeWork()

    return named(run, name)


for _name, _call in (*((op.backend_name, op.torch) for op in OPS), ("allreduce_sparse", "allreduce_sparse")):
    if _call != "gather_single":  # which torch's fake group does not support either
        setattr(FakeProcessGroup, _name, _operation(_name, _call))
