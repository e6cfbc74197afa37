"""What a collective is given, as buffers, or a sentence why that cannot be.

The same for ranks of one host (calls.py) and of several (hierarchical/calls.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import Buffer, read_buffer, read_list, write_buffer, write_list
from symcomm.types import DType, RedOpType, ReduceOp

__all__ = ["Arguments", "check_same_dtype", "to_redop"]


def to_redop(call: str, op: Any) -> tuple[RedOpType, Any]:
    """(operation, factor) of our ReduceOp, torch's, or a name such as "sum"."""
    if type(op) is RedOpType:
        return op, None
    if type(op) is ReduceOp:
        return op.op, op._factor
    try:
        if isinstance(op, str):
            return RedOpType[op.upper()], None
        redop = RedOpType(int(getattr(op, "op", op)))
        return redop, op.__getstate__()[1] if redop is RedOpType.PREMUL_SUM else None  # .factor is new in torch 2.13
    except (KeyError, ValueError, TypeError) as error:
        names = ", ".join(o.name for o in RedOpType)
        refuse = errors.wrong_type if isinstance(error, TypeError) else errors.bad_argument
        raise refuse(call, "op", op, f"one of {names}") from None


def check_same_dtype(call: str, buffers: Sequence[Buffer]) -> DType:
    dtypes = {b.dtype for b in buffers}
    if len(dtypes) > 1:
        labels = ", ".join(sorted(d.label for d in dtypes))
        raise errors.bad_argument(call, "tensors", f"dtypes {labels}", "all of one dtype", "convert them first")
    return buffers[0].dtype


class Arguments:
    """Mixed into CollectiveCalls. Inputs come first in what these return, as in what they become."""

    rank: int
    size: int

    def _of_reduce(self, tensor: Any, root: int, op: Any) -> tuple[Buffer, Buffer, RedOpType]:
        """(what to read, the tensor, the operation)"""
        self._check_root("reduce", root)
        buffer = (write_buffer if self.rank == root else read_buffer)("reduce", "tensor", tensor)
        redop, source = self._reduction("reduce", op, buffer)
        return source, buffer, redop

    def _of_reduce_scatter_single(
        self, call: str, output: Any, input: Any, op: Any
    ) -> tuple[Buffer, Buffer, RedOpType]:
        source, out = read_buffer(call, "input", input), write_buffer(call, "output", output)
        check_same_dtype(call, [source, out])
        self._check_count(call, "input", source.count, out.count * self.size, f"{self.size} times output's")
        redop, source = self._reduction(call, op, source)
        return source, out, redop

    def _of_reduce_scatter(
        self, call: str, output: Any, inputs: Sequence[Any], op: Any
    ) -> tuple[list[Buffer], Buffer, RedOpType]:
        out, pieces = write_buffer(call, "output", output), read_list(call, "inputs", inputs, self.size)
        check_same_dtype(call, [out, *pieces])
        self._check_count(call, "output", out.count, pieces[self.rank].count, f"that of inputs[{self.rank}]")
        return [self._reduction(call, op, piece)[1] for piece in pieces], out, to_redop(call, op)[0]

    def _of_broadcast(self, tensor: Any, root: int) -> Buffer:
        self._check_root("broadcast", root)
        return (read_buffer if self.rank == root else write_buffer)("broadcast", "tensor", tensor)

    def _of_all_gather_single(self, call: str, output: Any, input: Any) -> tuple[Buffer, Buffer]:
        source, out = read_buffer(call, "input", input), write_buffer(call, "output", output)
        check_same_dtype(call, [source, out])
        self._check_count(call, "output", out.count, source.count * self.size, f"{self.size} times input's")
        return source, out

    def _of_all_gather(self, call: str, outputs: Sequence[Any], input: Any) -> tuple[Buffer, list[Buffer]]:
        source, outs = read_buffer(call, "input", input), write_list(call, "outputs", outputs, self.size)
        check_same_dtype(call, [source, *outs])
        self._check_count(call, f"outputs[{self.rank}]", outs[self.rank].count, source.count, "input's")
        return source, outs

    def _of_gather(self, call: str, outputs: Any, input: Any, root: int) -> tuple[Buffer, list[Buffer]]:
        self._check_root(call, root)
        source, is_root = read_buffer(call, "input", input), self.rank == root
        outs = (
            write_list(call, "outputs", outputs, self.size) if is_root else self._refuse_list(call, "outputs", outputs)
        )
        check_same_dtype(call, [source, *outs])
        for k, out in enumerate(outs):
            self._check_count(call, f"outputs[{k}]", out.count, source.count, "input's")
        return source, outs

    def _of_gather_single(self, call: str, output: Any, input: Any, root: int) -> tuple[Buffer, list[Buffer]]:
        """(input, the output in a list, or none where this rank is not the root)"""
        self._check_root(call, root)
        source = read_buffer(call, "input", input)
        if self.rank != root:
            if output is not None:
                raise errors.bad_argument(
                    call, "output", f"a tensor on rank {self.rank}", "given on the root only", "pass None elsewhere"
                )
            return source, []
        out = write_buffer(call, "output", output)
        check_same_dtype(call, [source, out])
        self._check_count(call, "output", out.count, source.count * self.size, f"{self.size} times input's")
        return source, [out]

    def _of_scatter(self, call: str, output: Any, inputs: Any, root: int) -> tuple[list[Buffer], Buffer]:
        self._check_root(call, root)
        out, is_root = write_buffer(call, "output", output), self.rank == root
        sources = read_list(call, "inputs", inputs, self.size) if is_root else self._refuse_list(call, "inputs", inputs)
        check_same_dtype(call, [out, *sources])
        for k, source in enumerate(sources):
            self._check_count(call, f"inputs[{k}]", source.count, out.count, "output's")
        return sources, out

    def _of_all_to_all_single(
        self, call: str, output: Any, input: Any, output_splits: Any, input_splits: Any
    ) -> tuple[Buffer, Buffer, list[int], list[int]]:
        """(input, output, elements to each rank, elements from each rank)"""
        source, out = read_buffer(call, "input", input), write_buffer(call, "output", output)
        check_same_dtype(call, [source, out])
        sent = self._split_counts(call, "input", input, source.count, input_splits)
        got = self._split_counts(call, "output", output, out.count, output_splits)
        if not output_splits and not input_splits:
            self._check_count(call, "output", out.count, source.count, "input's")
        return source, out, sent, got

    def _of_all_to_all(
        self, call: str, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[Buffer], list[Buffer], DType]:
        sources, outs = read_list(call, "inputs", inputs, self.size), write_list(call, "outputs", outputs, self.size)
        return sources, outs, check_same_dtype(call, [*sources, *outs])

    # --- parts of these ---------------------------------------------------------------------------------------

    def _reduction(self, call: str, op: Any, buffer: Buffer) -> tuple[RedOpType, Buffer]:
        """The operation and what to read: for PREMUL_SUM the input times its factor, in a stand-in."""
        redop, factor = to_redop(call, op)
        if not native.reduce_defined(buffer.dtype, redop):
            raise errors.bad_argument(call, "op", redop.name, f"one that is defined for {buffer.dtype.label}")
        if redop is not RedOpType.PREMUL_SUM:
            return redop, buffer
        if factor is None:
            raise errors.bad_argument(call, "op", "PREMUL_SUM without a factor", "made by make_premul_sum(factor)")
        scaled = buffer.owner * factor
        if hasattr(scaled, "to"):
            scaled = scaled.to(buffer.owner.dtype)
        return redop, read_buffer(call, "tensor", scaled)

    def _split_counts(self, call: str, name: str, tensor: Any, count: int, splits: Sequence[int] | None) -> list[int]:
        rows = tensor.shape[0] if len(tensor.shape) else 1
        if not splits:
            if rows % self.size:
                raise errors.bad_argument(
                    call, name, f"{rows} rows", f"divisible by the group's {self.size} ranks", f"give {name}_splits"
                )
            return [count // self.size] * self.size
        if len(splits) != self.size or any(s < 0 for s in splits) or sum(splits) != rows:
            raise errors.bad_argument(
                call,
                f"{name}_splits",
                list(splits),
                f"{self.size} non-negative numbers that add up to {name}'s {rows} rows",
            )
        return [s * (count // rows if rows else 0) for s in splits]

    def _check_root(self, call: str, root: Any) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            refuse = errors.bad_argument if isinstance(root, int) else errors.wrong_type
            raise refuse(call, "root", root, f"a rank of this group, 0 to {self.size - 1}")

    def _check_count(self, call: str, name: str, got: int, expected: int, like: str) -> None:
        if got != expected:
            raise errors.bad_argument(call, name, f"{got} elements", f"{expected} elements ({like})")

    def _refuse_list(self, call: str, name: str, tensors: Any) -> list[Buffer]:
        if tensors:
            raise errors.bad_argument(
                call, name, f"a list on rank {self.rank}", "given on the root only", "pass None elsewhere"
            )
        return []
