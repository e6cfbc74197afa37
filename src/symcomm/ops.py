"""The one table of operations: what each is called, here and by PyTorch, and what it takes.

Whoever needs a list of operations, or the name that somebody else has for one, takes it from here: groups, torch's
backend, ``c10d``, hooks.
"""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """One operation. Parameters that hold tensors have other names in our methods and in PyTorch's."""

    name: str  # the method of our groups
    torch: str  # that of torch.distributed.ProcessGroup
    op_type: str  # the member of PyTorch's OpType
    inputs: str = ""
    outputs: str = ""
    torch_inputs: str = ""
    torch_outputs: str = ""
    older: str = ""  # what torch 2.10 to 2.13 and backends call it, where that differs
    alias: str = ""  # another name that torch has for it
    hook: str = ""  # the member of PyTorch's HookOpName, where that is not the OpType's
    plan: str = ""  # the function of symcomm.collectives that writes its plan
    number: int = -1  # under which the core's dispatch cache knows it
    rooted: bool = False
    reduces: bool = False
    listed: bool | None = None  # whether a rank's pieces are a list of tensors; None: there are none
    copies: bool = False  # whether autograd sees an in-place copy into its outputs, as on torch's Gloo (see buffers.py)

    @property
    def backend_name(self) -> str:
        return self.older or self.torch

    @property
    def options(self) -> str:
        """PyTorch's class of options for it."""
        return _OPTIONS[self.plan]

    @property
    def hook_name(self) -> str:
        return self.hook or self.op_type.lstrip("_")


_OPTIONS = {
    "all_reduce": "AllreduceOptions", "reduce": "ReduceOptions", "reduce_scatter": "ReduceScatterOptions",
    "broadcast": "BroadcastOptions", "all_gather": "AllgatherOptions", "gather": "GatherOptions",
    "scatter": "ScatterOptions", "all_to_all": "AllToAllOptions", "barrier": "BarrierOptions",
}  # fmt: skip
_PAIR = ("input", "output", "input", "output")
_PAIRS = ("inputs", "outputs", "inputs", "outputs")
_IN_PLACE = ("tensor", "", "tensors", "")
_TORCH_LISTS = ("input_tensors", "output_tensors")

OPS = (
    Op("all_reduce", "allreduce", "ALLREDUCE", *_IN_PLACE, plan="all_reduce", number=0, reduces=True),
    Op("all_reduce_coalesced", "allreduce_coalesced", "ALLREDUCE_COALESCED", "tensors", "", "tensors", reduces=True),
    Op("reduce", "reduce", "REDUCE", *_IN_PLACE, plan="reduce", number=1, rooted=True, reduces=True),
    Op(
        "reduce_scatter_single", "reduce_scatter_single", "_REDUCE_SCATTER_BASE", *_PAIR, "_reduce_scatter_base",
        plan="reduce_scatter", number=2, reduces=True, listed=False, copies=True,
    ),
    Op(
        "reduce_scatter", "reduce_scatter", "REDUCE_SCATTER", "inputs", "output", *_TORCH_LISTS,
        plan="reduce_scatter", number=11, reduces=True, listed=True, copies=True,
    ),
    Op(
        "reduce_scatter_coalesced", "reduce_scatter_single_coalesced", "REDUCE_SCATTER_TENSOR_COALESCED", *_PAIRS,
        "reduce_scatter_tensor_coalesced", reduces=True,
    ),
    Op("broadcast", "broadcast", "BROADCAST", *_IN_PLACE, plan="broadcast", number=3, rooted=True),
    Op(
        "all_gather_single", "all_gather_single", "_ALLGATHER_BASE", *_PAIR, "_allgather_base",
        plan="all_gather", number=4, listed=False, copies=True,
    ),
    Op(
        "all_gather", "allgather", "ALLGATHER", "input", "outputs", *_TORCH_LISTS,
        plan="all_gather", number=6, listed=True, copies=True,
    ),
    Op(
        "all_gather_coalesced", "all_gather_single_coalesced", "COALESCED", *_PAIRS,
        "allgather_into_tensor_coalesced", hook="ALLGATHER_INTO_TENSOR_COALESCED",
    ),
    Op(
        "all_gather_lists", "allgather_coalesced", "ALLGATHER_COALESCED",
        "inputs", "outputs", "input_list", "output_lists",
    ),
    Op(
        "gather", "gather", "GATHER", "input", "outputs", *_TORCH_LISTS,
        plan="gather", number=7, rooted=True, listed=True, copies=True,
    ),
    Op(
        "gather_single", "gather_single", "GATHER", *_PAIR, alias="gather_into_tensor",
        plan="gather", number=10, rooted=True, listed=False, copies=True,
    ),
    Op(
        "scatter", "scatter", "SCATTER", "inputs", "output", *_TORCH_LISTS,
        plan="scatter", number=8, rooted=True, listed=True,
    ),
    Op(
        "all_to_all", "alltoall", "ALLTOALL", "inputs", "outputs", *_TORCH_LISTS,
        plan="all_to_all", listed=True, copies=True,
    ),
    Op(
        "all_to_all_single", "all_to_all_single", "ALLTOALL_BASE", *_PAIR, "alltoall_base",
        plan="all_to_all", number=5, listed=False,
    ),
    Op("send", "send", "SEND", "tensor", "", "tensors"),
    Op("recv", "recv", "RECV", "", "tensor", "", "tensors"),
    Op("recv_anysource", "recv_anysource", "RECVANYSOURCE", "", "tensor", "", "tensors", hook="RECV"),
    Op("barrier", "barrier", "BARRIER", plan="barrier", number=9),
)  # fmt: skip
BY_NAME = {op.name: op for op in OPS}
BY_TORCH_NAME = {op.torch: op for op in OPS}
# Of torch.ops.c10d, by the method of a group that calls it. Those left out have none that returns tensors.
_NO_OPERATOR = ("gather_single", "send", "recv", "recv_anysource", "barrier")
OPERATORS = {op.torch: f"{op.backend_name}_" for op in OPS if op.name not in _NO_OPERATOR}
CACHED = {op.number: op for op in OPS if op.number >= 0}


def numbers_of(*names: str) -> tuple[int, ...]:
    """Those under which the dispatch cache knows operations."""
    return tuple([BY_NAME[name].number for name in names])
