"""Requests: calls of a group, checked. Wrong arguments are refused here, for all kinds of groups.

A group says how tensors are viewed: as bytes of the host's memory (buffers.py) or of a GPU's (cuda/tensor_views.py).
"""

from __future__ import annotations

import array
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.chunks import starts_of
from symcomm.group.buffers import overwrite_all
from symcomm.group.refusal import settled
from symcomm.ops import BY_NAME, Op
from symcomm.types import DType, RedOpType, ReduceOp


class Views(NamedTuple):
    """How a group looks at tensors: as contiguous bytes, with an address, a count and a dtype (Buffer, TensorView)."""

    read: Callable[[str, str, Any], Any]
    write: Callable[[str, str, Any], Any]
    read_list: Callable[[str, str, Any, int], list[Any]]
    write_list: Callable[[str, str, Any, int], list[Any]]


class Caller(Protocol):
    """What the checks need of a group."""

    rank: int
    size: int
    views: Views


class Request:
    """One call: checked, and ready for a group to execute."""

    __slots__ = (
        "call",
        "dtype",
        "inputs",
        "key",
        "listed",
        "op",
        "outputs",
        "redop",
        "result",
        "root",
        "sizes",
        "writes",
    )

    def __init__(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        result: Sequence[Any] = (),
        sizes: Any = 0,
        dtype: DType = DType.UINT8,
        redop: RedOpType = RedOpType.SUM,
        root: int = 0,
        key: tuple[Any, Any, Any] | None = None,
        call: str = "",
        writes: bool = True,
        listed: bool | None = None,
    ):
        self.op: Op = BY_NAME[name]
        self.listed = self.op.listed if listed is None else listed  # as Op.listed
        self.inputs = inputs  # views that are read
        self.outputs = outputs  # views that are written
        self.result = result  # the tensors that a Work hands out
        # elements of the tensor, or of each rank's piece, or of the piece from each rank to each, which may be Splits
        self.sizes = sizes
        self.dtype = dtype
        self.redop = redop
        self.root = root  # or, of an operation without one, the number of logical shards (shards.py)
        # detail, input and output by which the dispatch cache finds the call again; None: it is not cached
        self.key = None if redop is RedOpType.PREMUL_SUM else key
        self.call = call or name  # what errors name
        self.writes = writes and bool(outputs)  # a broadcast's root only reads its tensor, though it is an output, too

    def counts(self, size: int) -> Sequence[int]:
        """Elements of every piece, flat; one where the tensor has no pieces."""
        sizes = self.sizes
        if self.op.plan == "all_to_all":
            return [sizes] * size * size if isinstance(sizes, int) else [n for row in sizes for n in row]
        return [sizes] if isinstance(sizes, int) else sizes

    @property
    def written(self) -> tuple[Any, ...]:
        """The caller's tensors that the call writes, and that autograd has to know of."""
        is_told = self.writes and not native.keeps_versions()
        return tuple([view.written for view in self.outputs]) if is_told else ()

    @property
    def effects(self) -> int:
        """What calls of this kind do to tensors, as flags for the dispatch cache."""
        return (native.EFFECT_WRITES if self.writes else 0) | (native.EFFECT_COPIES if self.op.copies else 0)

    def ask_autograd(self) -> errors.OutputRefusedError | None:
        """The error to raise in the end where autograd refuses the outputs; the call then writes copies of them."""
        refusal = overwrite_all(self.call, self.op.outputs, self.result) if self.op.copies else None
        if refusal is not None:
            self.outputs, self.writes, self.key = [view.copy() for view in self.outputs], False, None
        return refusal

    def keep_apart(self, rank: int, size: int) -> None:
        """Copy inputs that overlap an output where results would overwrite data that is still to be read.

        An input that is this rank's part of the output, or the reverse, may stay. The core applies the same rule."""
        inputs, outputs, exchanges = self.inputs, self.outputs, self.op.plan == "all_to_all" and size > 1
        if not inputs or not outputs or (inputs[0] is outputs[0] and not exchanges):
            return

        def in_the_way(i: int, source: Any, o: int, out: Any) -> bool:
            if source.address + source.nbytes <= out.address or out.address + out.nbytes <= source.address:
                return False
            if len(inputs) > 1 or len(outputs) > 1:
                is_mine = i == o == rank if exchanges else i | o == rank  # a tensor that is in no list has index 0
                return source.address != out.address or not is_mine
            small, large = sorted((source, out), key=lambda view: view.nbytes)
            return exchanges or small.address != large.address + rank * small.nbytes

        self.inputs = [
            source.copy() if any(in_the_way(i, source, o, out) for o, out in enumerate(outputs)) else source
            for i, source in enumerate(inputs)
        ]


def addresses_of(views: Sequence[Any], counts: Sequence[int], listed: bool | None) -> list[int]:
    """The addresses of a rank's pieces: tensors of a list, or one after the other in a single tensor."""
    if listed or not views:
        return [view.address for view in views]
    return [views[0].address + start * views[0].dtype.itemsize for start in starts_of(counts)]


def to_redop(call: str, op: Any) -> tuple[RedOpType, Any]:
    """(operation, factor) of our ReduceOp, torch's, or a name such as "sum"."""
    if type(op) is RedOpType:
        return op, None
    if type(op) is ReduceOp:
        return op.op, op.factor if op.op is RedOpType.PREMUL_SUM else None
    try:
        if isinstance(op, str):
            return RedOpType[op.upper()], None
        redop = RedOpType(operator.index(getattr(op, "op", op)))  # int() would take 3.5
        return redop, op.__getstate__()[1] if redop is RedOpType.PREMUL_SUM else None  # .factor is new in torch 2.13
    except (KeyError, ValueError, TypeError) as error:
        names = ", ".join(o.name for o in RedOpType)
        refuse = errors.wrong_type if isinstance(error, TypeError) else errors.bad_argument
        raise refuse(call, "op", op, f"one of {names}") from None


_NAMED = {name: op for op in RedOpType if op is not RedOpType.PREMUL_SUM for name in (op.name, op.name.lower())}


def plain_op(op: Any) -> Any:
    """An operation that was given by name, or is torch's, as the dispatch cache knows it; anything else as it is."""
    if type(op) is RedOpType:
        return op
    if type(op) is str:
        return _NAMED.get(op, op)
    try:
        redop, factor = to_redop("", op)
    except errors.SymcommError:
        return op
    return redop if factor is None else op


# --- reductions ------------------------------------------------------------------------------------------------------


def all_reduce(group: Caller, tensor: Any, op: Any) -> Request:
    view = group.views.write("all_reduce", "tensor", tensor)
    redop, source = reduction_of(group, "all_reduce", op, view)
    return Request("all_reduce", [source], [view], [tensor], view.count, view.dtype, redop, key=(redop, tensor, tensor))


def reduce(group: Caller, tensor: Any, root: int, op: Any) -> Request:
    check_root(group, "reduce", root)
    is_root = group.rank == root
    view = (group.views.write if is_root else group.views.read)("reduce", "tensor", tensor)
    redop, source = reduction_of(group, "reduce", op, view)
    outputs, key = [view] if is_root else [], (rooted(root, redop), tensor, tensor)
    return Request("reduce", [source], outputs, [tensor], view.count, view.dtype, redop, root, key)


def reduce_scatter_single(group: Caller, output: Any, input: Any, op: Any) -> Request:
    call = "reduce_scatter_single"
    source, out = group.views.read(call, "input", input), group.views.write(call, "output", output)
    dtype = _same_dtype(call, [source, out])
    _check_count(call, "input", source.count, out.count * group.size, f"{group.size} times output's")
    redop, source = reduction_of(group, call, op, source)
    sizes = (out.count,) * group.size
    return Request(call, [source], [out], [output], sizes, dtype, redop, key=(redop, input, output))


def reduce_scatter(group: Caller, output: Any, inputs: Any, op: Any) -> Request:
    call = "reduce_scatter"
    out, pieces = group.views.write(call, "output", output), group.views.read_list(call, "inputs", inputs, group.size)
    dtype = _same_dtype(call, [out, *pieces])
    _check_count(call, "output", out.count, pieces[group.rank].count, f"that of inputs[{group.rank}]")
    reductions = [reduction_of(group, call, op, piece) for piece in pieces]
    redop, sources = reductions[0][0], [source for _, source in reductions]
    sizes = tuple([piece.count for piece in pieces])
    return Request(call, sources, [out], [output], sizes, dtype, redop, key=(redop, inputs, output))


# --- copies ----------------------------------------------------------------------------------------------------------


def broadcast(group: Caller, tensor: Any, root: int) -> Request:
    check_root(group, "broadcast", root)
    view = (group.views.read if group.rank == root else group.views.write)("broadcast", "tensor", tensor)
    key, writes = (root, tensor, tensor), group.rank != root
    return Request(
        "broadcast", [view], [view], [tensor], view.count, view.dtype, root=root, key=key, writes=writes
    )  # fmt: skip


def all_gather_single(group: Caller, output: Any, input: Any) -> Request:
    call = "all_gather_single"
    source, out = group.views.read(call, "input", input), group.views.write(call, "output", output)
    dtype = _same_dtype(call, [source, out])
    _check_count(call, "output", out.count, source.count * group.size, f"{group.size} times input's")
    sizes = (source.count,) * group.size
    return Request(call, [source], [out], [output], sizes, dtype, key=(0, input, output))


def all_gather(group: Caller, outputs: Any, input: Any) -> Request:
    call = "all_gather"
    source, outs = group.views.read(call, "input", input), group.views.write_list(call, "outputs", outputs, group.size)
    dtype = _same_dtype(call, [source, *outs])
    _check_count(call, f"outputs[{group.rank}]", outs[group.rank].count, source.count, "input's")
    sizes = tuple([out.count for out in outs])
    return Request(call, [source], outs, outputs, sizes, dtype, key=(0, input, outputs))


def gather(group: Caller, outputs: Any, input: Any, root: int) -> Request:
    call = "gather"
    check_root(group, call, root)
    source = group.views.read(call, "input", input)
    outs = _at_root(group, call, root, "outputs", outputs, group.views.write_list, group.size)
    dtype = _same_dtype(call, [source, *outs])
    for k, out in enumerate(outs):
        _check_count(call, f"outputs[{k}]", out.count, source.count, "input's")
    sizes, key = (source.count,) * group.size, (root, input, outputs)
    return Request(call, [source], outs, outputs or [], sizes, dtype, root=root, key=key)


def gather_single(group: Caller, output: Any, input: Any, root: int) -> Request:
    call = "gather_single"
    check_root(group, call, root)
    source = group.views.read(call, "input", input)
    outs = _at_root(group, call, root, "output", output, group.views.write)
    dtype, result = _same_dtype(call, [source, *outs]), [output] if outs else []
    for out in outs:
        _check_count(call, "output", out.count, source.count * group.size, f"{group.size} times input's")
    sizes, key = (source.count,) * group.size, (root, input, output)
    return Request(call, [source], outs, result, sizes, dtype, root=root, key=key)


def scatter(group: Caller, output: Any, inputs: Any, root: int) -> Request:
    call = "scatter"
    check_root(group, call, root)
    out = group.views.write(call, "output", output)
    sources = _at_root(group, call, root, "inputs", inputs, group.views.read_list, group.size)
    dtype = _same_dtype(call, [out, *sources])
    for k, source in enumerate(sources):
        _check_count(call, f"inputs[{k}]", source.count, out.count, "output's")
    sizes, key = (out.count,) * group.size, (root, inputs, output)
    return Request(call, sources, [out], [output], sizes, dtype, root=root, key=key, listed=True)


def scatter_single(group: Caller, output: Any, input: Any, root: int) -> Request:
    """To the other ranks it is a scatter: only the root knows whether its pieces are one tensor."""
    call = "scatter_single"
    check_root(group, call, root)
    out = group.views.write(call, "output", output)
    sources = _at_root(group, call, root, "input", input, group.views.read)
    dtype = _same_dtype(call, [out, *sources])
    for source in sources:
        _check_count(call, "input", source.count, out.count * group.size, f"{group.size} times output's")
    sizes, key = (out.count,) * group.size, (root, input, output)
    return Request(
        "scatter", sources, [out], [output], sizes, dtype, root=root, key=key, call=call, listed=group.rank != root
    )


# --- all to all ------------------------------------------------------------------------------------------------------

Agree = Callable[["Splits"], Any]  # returns the elements from each rank to each, or the Splits to agree on later


class Splits:
    """Sizes of an all_to_all on which ranks have yet to agree. ``mine``: elements to each rank, then from each."""

    def __init__(self, call: str, sent: Sequence[int], got: Sequence[int]):
        self.call = call
        self.mine = array.array("q", [*sent, *got])

    def agreed(self, everyone: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The elements from each rank to each, out of what all ranks said: a rank's piece of a peer's input lies behind
        the pieces before it."""
        width = len(self.mine)
        return check_splits(self.call, [everyone[start : start + width] for start in range(0, len(everyone), width)])


def all_to_all_single(
    group: Caller, output: Any, input: Any, output_splits: Any, input_splits: Any, agree: Agree
) -> Request:
    call = "all_to_all_single"
    source, out = group.views.read(call, "input", input), group.views.write(call, "output", output)
    dtype = _same_dtype(call, [source, out])
    sent = _split_counts(group, call, "input", input, source.count, input_splits)
    got = _split_counts(group, call, "output", output, out.count, output_splits)
    if output_splits or input_splits:
        return Request(call, [source], [out], [output], agree(Splits(call, sent, got)), dtype)
    _check_count(call, "output", out.count, source.count, "input's")
    return Request(call, [source], [out], [output], sent[0], dtype, key=(0, input, output))


def all_to_all(group: Caller, outputs: Any, inputs: Any, agree: Agree) -> Request:
    call = "all_to_all"
    sources = group.views.read_list(call, "inputs", inputs, group.size)
    outs = group.views.write_list(call, "outputs", outputs, group.size)
    dtype = _same_dtype(call, [*sources, *outs])
    matrix = agree(Splits(call, [s.count for s in sources], [o.count for o in outs]))
    return Request(call, sources, outs, outputs, matrix, dtype)


def barrier(_: Caller) -> Request:
    return Request("barrier", [], [], [], None, key=(0, None, None))


def check_splits(call: str, everyone: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The elements from each rank to each. ``everyone``: what each rank sends, then what it expects; refused where two
    ranks disagree."""
    size = len(everyone)
    for i in range(size):
        for j in range(size):
            if everyone[i][j] != everyone[j][size + i]:
                raise settled(
                    errors.BadArgumentError(
                        f"{call}: rank {i} sends {everyone[i][j]} elements to rank {j}, "
                        f"which expects {everyone[j][size + i]}; make input and output splits agree."
                    )
                )
    return tuple(tuple(row[:size]) for row in everyone)


# --- parts of these --------------------------------------------------------------------------------------------------


def rooted(root: Any, op: Any) -> Any:
    """Root and operation as one number, or None where they are not numbers."""
    return root << 8 | op if type(root) is int and type(op) is RedOpType else None


def check_root(group: Caller, call: str, root: Any) -> None:
    if not isinstance(root, int) or not 0 <= root < group.size:
        refuse = errors.bad_argument if isinstance(root, int) else errors.wrong_type
        raise refuse(call, "root", root, f"a rank of this group, 0 to {group.size - 1}")


def reduction_of(group: Caller, call: str, op: Any, view: Any) -> tuple[RedOpType, Any]:
    """(the operation, the view to read): for PREMUL_SUM, the input times its factor, in a temporary tensor."""
    redop, factor = to_redop(call, op)
    if not native.reduce_defined(view.dtype, redop):
        raise errors.bad_argument(call, "op", redop.name, f"one that is defined for {view.dtype.label}")
    if redop is not RedOpType.PREMUL_SUM:
        return redop, view
    if factor is None:
        raise errors.bad_argument(call, "op", "PREMUL_SUM without a factor", "made by make_premul_sum(factor)")
    return redop, group.views.read(call, "tensor", _scaled(view.owner, factor))


def _scaled(tensor: Any, factor: Any) -> Any:
    """In the tensor's own dtype, whatever the factor's."""
    scaled = tensor * factor
    if hasattr(scaled, "to"):
        return scaled.to(tensor.dtype)
    import numpy as np

    return np.asarray(scaled, dtype=tensor.dtype)


def _same_dtype(call: str, views: Sequence[Any]) -> DType:
    dtypes = {view.dtype for view in views}
    if len(dtypes) > 1:
        labels = ", ".join(sorted(d.label for d in dtypes))
        raise errors.bad_argument(call, "tensors", f"dtypes {labels}", "all of one dtype", "convert them first")
    return views[0].dtype


def _split_counts(
    group: Caller, call: str, name: str, tensor: Any, count: int, splits: Sequence[int] | None
) -> list[int]:
    rows = tensor.shape[0] if len(tensor.shape) else 1
    if not splits:
        if rows % group.size:
            allowed = f"divisible by the group's {group.size} ranks"
            raise errors.bad_argument(call, name, f"{rows} rows", allowed, f"give {name}_splits")
        return [count // group.size] * group.size
    if len(splits) != group.size or any(s < 0 for s in splits) or sum(splits) != rows:
        allowed = f"{group.size} non-negative numbers that add up to {name}'s {rows} rows"
        raise errors.bad_argument(call, f"{name}_splits", list(splits), allowed)
    return [s * (count // rows if rows else 0) for s in splits]


def _check_count(call: str, name: str, got: int, expected: int, like: str) -> None:
    if got != expected:
        raise errors.bad_argument(call, name, f"{got} elements", f"{expected} elements ({like})")


def _at_root(
    group: Caller, call: str, root: int, name: str, given: Any, view: Callable[..., Any], *length: int
) -> list[Any]:
    """The views of a list or a tensor that only the root gives; none elsewhere."""
    if group.rank == root:
        views = view(call, name, given, *length)
        return views if length else [views]
    if given is not None and (not length or given):
        what = f"{'a list' if length else 'a tensor'} on rank {group.rank}"
        raise errors.bad_argument(call, name, what, "given on the root only", "pass None elsewhere")
    return []
