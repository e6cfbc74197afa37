"""Every functional operator: its shape, its eager call, its gradient, its plan and its lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional

from symcomm.collectives import select
from symcomm.collectives.plan import Plan
from symcomm.compile import lowering, shapes
from symcomm.group.buffers import torch_dtypes
from symcomm.torch_backend import versions
from symcomm.types import RedOpType

MakePlan = Callable[[int, int, int, int], Plan]  # rank, world, elements of the input, dtype


@dataclass(frozen=True)
class Entry:
    """One operator. ``eager`` is the method of the group that torch's operator calls."""

    operator: str
    meta: Callable[..., Any]
    eager: str
    gradient: str  # the collective of the backward pass, or why there is none
    plan: MakePlan | None
    lowering: lowering.Lowering
    direct: bool = True  # whether there is a form without copies
    one_shot: bool = False  # whether Inductor's auto_select may choose torch.ops.symm_mem.one_shot_all_reduce
    rule: str = ""  # torch's autograd rule: a function of torch.distributed._functional_collectives

    @property
    def packet(self) -> Any:
        """torch's operator, or None in a version of torch that does not have it."""
        namespace, name = self.operator.split("::")
        return versions.present(getattr(torch.ops, namespace), [name]).get(name)

    @property
    def autograd(self) -> Any:
        return getattr(functional, self.rule, None) if self.rule else None

    def plan_words(self, node: Any, group: Any, counts: Sequence[int], dtype: torch.dtype, direct: bool) -> str:
        """How the core will run it, which is the choice that eager calls make."""
        if self.plan is None or dtype not in torch_dtypes():
            return "by its parts"
        plan = self.plan(group.rank(), group.size(), sum(counts), torch_dtypes()[dtype])
        return "direct" if direct and plan.direct else f"{plan.name} ({plan.why})"


def _all_reduce(rank: int, world: int, count: int, dtype: int) -> Plan:
    return select.all_reduce(rank, world, count, dtype, int(RedOpType.SUM))


def _all_gather(rank: int, world: int, count: int, dtype: int) -> Plan:
    return select.all_gather(rank, world, (count,) * world, dtype)


def _reduce_scatter(rank: int, world: int, count: int, dtype: int) -> Plan:
    return select.reduce_scatter(rank, world, (count // world,) * world, dtype, int(RedOpType.SUM))


def _all_to_all(rank: int, world: int, count: int, dtype: int) -> Plan:
    return select.all_to_all(rank, world, count // world, dtype)


def _broadcast(rank: int, world: int, count: int, dtype: int) -> Plan:
    return select.broadcast(rank, world, count, dtype, 0)


_NONE = "none: torch refuses to differentiate it"
_IN_PLACE = "none: Inductor makes it from the functional one, after gradients are traced"
_C = "_c10d_functional::"
_ENTRIES = (
    Entry(_C + "all_reduce", shapes.same, "allreduce", "all_reduce", _all_reduce, lowering.then_in_place,
          one_shot=True, rule="all_reduce_backward"),
    Entry(_C + "all_reduce_", shapes.same, "allreduce", _IN_PLACE, _all_reduce, lowering.in_place,
          one_shot=True),
    Entry(_C + "all_reduce_coalesced", shapes.same_each, "allreduce_coalesced", "all_reduce_coalesced", _all_reduce,
          lowering.then_in_place, rule="all_reduce_coalesced_backward"),
    Entry(_C + "all_reduce_coalesced_", shapes.same_each, "allreduce_coalesced", _IN_PLACE, _all_reduce,
          lowering.in_place),
    Entry(_C + "all_gather_into_tensor", shapes.all_gather, "all_gather_single_coalesced", "reduce_scatter_tensor",
          _all_gather, lowering.out_of_place, rule="all_gather_into_tensor_backward"),
    Entry(_C + "all_gather_into_tensor_coalesced", shapes.all_gather_each, "all_gather_single_coalesced",
          "reduce_scatter_tensor_coalesced", _all_gather, lowering.out_of_place,
          rule="all_gather_into_tensor_coalesced_backward"),
    Entry(_C + "all_gather_into_tensor_out", shapes.all_gather, "all_gather_single", _IN_PLACE, _all_gather,
          lowering.into),
    Entry(_C + "reduce_scatter_tensor", shapes.reduce_scatter, "reduce_scatter_single_coalesced",
          "all_gather_into_tensor", _reduce_scatter, lowering.out_of_place, rule="reduce_scatter_tensor_backward"),
    Entry(_C + "reduce_scatter_tensor_out", shapes.reduce_scatter, "reduce_scatter_single", _IN_PLACE, _reduce_scatter,
          lowering.unchanged),
    Entry(_C + "reduce_scatter_tensor_coalesced", shapes.reduce_scatter_each, "reduce_scatter_single_coalesced",
          "all_gather_into_tensor_coalesced", _reduce_scatter, lowering.out_of_place,
          rule="reduce_scatter_tensor_coalesced_backward"),
    Entry(_C + "all_to_all_single", shapes.all_to_all, "all_to_all_single", "all_to_all_single", _all_to_all,
          lowering.out_of_place, rule="all_to_all_single_backward"),
    Entry(_C + "broadcast", shapes.same, "broadcast", _NONE, _broadcast, lowering.then_in_place),
    Entry(_C + "broadcast_", shapes.same, "broadcast", _NONE, _broadcast, lowering.in_place),
    Entry(_C + "isend", shapes.sent, "send", _NONE, None, lowering.as_torch_does, direct=False),
    Entry(_C + "irecv", shapes.same, "recv", _NONE, None, lowering.as_torch_does, direct=False),
    Entry(_C + "batch_p2p_ops", shapes.messages, "send", _NONE, None, lowering.as_torch_does, direct=False),
    Entry("_dtensor::shard_dim_alltoall", shapes.shard_dim, "all_to_all_single", "by DTensor's own redistribution",
          _all_to_all, lowering.unchanged, direct=False),
)  # fmt: skip
TABLE = {entry.operator: entry for entry in _ENTRIES}
WAIT = _C + "wait_tensor"  # gives its input once the input's Work has ended; gradients go through a wait of their own
# The same for several tensors, in gradients of coalesced collectives (since torch 2.14). torch's lowering serves it.
WAIT_FOR_ALL = _C + "wait_tensors"
