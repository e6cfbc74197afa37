"""Which of torch's graph passes run on graphs with our collectives, and how.

torch has these passes, switched off. This file decides when each pays with collectives in shared memory. What a user
has switched on stays on.

Bucketing (fx_passes/bucketing.py), for collectives of up to cost.bucket_bytes() that follow one another::

    before   x = all_reduce(a); y = all_reduce(b)      after   z = all_reduce(cat(a, b)); x, y = split(z)

Overlap (comms.py, on the scheduler's nodes), when some collective does not block (overlap.py)::

    before   f(a); t = all_gather(b); wait(t); g(t); h(c)    after   t = all_gather(b); f(a); h(c); wait(t); g(t)

Matmuls in pieces (fx_passes/micro_pipeline_tp.py)::

    before   A = all_gather(a); wait(A); C = A @ B           after   A, C = fused_all_gather_matmul(a, B)
    before   C = A @ B; c = reduce_scatter(C); wait(c)       after   c = fused_matmul_reduce_scatter(A, B)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import config

from symcomm import symm_mem
from symcomm.compile import cost, options, overlap, reinplaced, report
from symcomm.compile.lowering import group_of, name_groups
from symcomm.torch_backend.symm_reduce import PIECES_FROM
from symcomm.undo import replace

# What torch calls the setting -> the operator that it joins.
_BUCKETING = {
    "all_reduces": "all_reduce",
    "all_gathers": "all_gather_into_tensor",
    "reduce_scatters": "reduce_scatter_tensor",
}


def settings_for(graph: Any) -> dict[str, Any]:
    """Inductor's settings for one graph; nothing for one without collectives of ours."""
    found = overlap.collectives_of(graph, group_of)
    if not found:
        return {}
    chosen = options.current()
    wanted: dict[str, Any] = {}
    if chosen.bucket and _sizes_are_known(found):
        for kind, operator in _BUCKETING.items():
            if getattr(config, f"bucket_{kind}_fx") == "none" and _may_be_joined(found, operator):
                wanted[f"bucket_{kind}_fx"] = "all"
                wanted[f"bucket_{kind}_fx_bucket_size_determinator"] = _bucket_mb
    if _wants_overlap(found) and not config.reorder_for_compute_comm_overlap:
        wanted["reorder_for_compute_comm_overlap"] = True
        wanted["reorder_for_compute_comm_overlap_passes"] = ["raise_comms", "sink_waits", _look]
    if _wants_fusing(found) and not config._micro_pipeline_tp:
        wanted["_micro_pipeline_tp"] = True
    return wanted


def _sizes_are_known(found: dict[Any, Any]) -> bool:
    """Whether all sizes are known. Ranks with different example sizes would join different collectives, and wait for
    each other in vain."""
    values = [n.meta.get("val") for node in found for n in node.all_input_nodes]
    return not any(isinstance(size, torch.SymInt) for v in values for size in getattr(v, "shape", ()))


def _may_be_joined(found: dict[Any, Any], operator: str) -> bool:
    """Whether torch can join the operator's collectives. It joins all that the graph waits for, and fails if anything
    but one wait uses a result; but a graph may return a result before its wait."""
    awaited = [node for node in found if node.target._opname == operator and overlap.waits_of(node)]
    return all(len(node.users) == 1 for node in awaited)


def _bucket_mb(_: int) -> float:
    return cost.bucket_bytes() / 2**20


def _wants_overlap(found: dict[Any, Any]) -> bool:
    """Whether some collective of the graph may be a launch and a wait."""
    chosen = options.current()
    if chosen.overlap is not None or chosen.block is not None:
        return chosen.overlap is not False and chosen.block is not True
    return any(cost.has_idle_cores(group.size()) for group in found.values())


def _wants_fusing(found: dict[Any, Any]) -> bool:
    chosen = options.current().fuse
    if chosen is not None:
        return chosen
    ranks = next(iter(found.values())).size()
    gathers = [n for n in found if "all_gather" in n.target._opname or "reduce_scatter" in n.target._opname]
    largest = max((cost.tensor_bytes(node.meta.get("val")) for node in gathers), default=0)
    return largest >= PIECES_FROM and cost.has_idle_cores(ranks)


@contextlib.contextmanager
def applied(graph: Any) -> Iterator[None]:
    """Applies a graph's settings while it is compiled."""
    name_groups(graph)
    overlap.await_once(graph, group_of)
    reinplaced.note_functional(graph, group_of)
    wanted = settings_for(graph)
    before = len(overlap.collectives_of(graph, group_of))
    with contextlib.ExitStack() as stack:
        if wanted:
            stack.enter_context(config.patch(wanted))
        if wanted.get("_micro_pipeline_tp"):
            symm_mem.install()
            # The pass asks for NCCL, the only backend with these operators when it was written.
            stack.callback(replace(dist, "is_nccl_available", lambda: True))
        yield
    _tell(graph, before)


def _tell(graph: Any, before: int) -> None:
    """Report what became of the collectives that the passes removed."""
    fused = [node for node in graph.nodes if str(node.target).startswith("symm_mem.fused_")]
    for node in fused:
        report.note(_fused_record(node))
    joined = before - len(fused) - len(overlap.collectives_of(graph, group_of))
    if joined > 0:
        report.say(f"{joined} of the graph's {before} collectives were joined with others")


def _fused_record(node: Any) -> report.Record:
    value = node.args[0].meta.get("val")
    shape = tuple(size if isinstance(size, int) else str(size) for size in getattr(value, "shape", ()))
    known = all(isinstance(size, int) for size in shape)
    return report.Record(
        op=node.target._opname,
        shape=shape,
        dtype=str(getattr(value, "dtype", "")).removeprefix("torch."),
        nbytes=cost.tensor_bytes(value) if known else None,
        group=repr(node.args[-1]),
        plan=f"with its matmul: in pieces from {PIECES_FROM} bytes on, where there is a core for it",
        zero_copy=False,
        reason="the operator has its own buffers",
        wait="beside the matmul",
    )


def _look(nodes: list[Any]) -> list[Any]:
    """The last pass: changes nothing, and reports what the others did."""
    from torch._inductor.utils import contains_collective, contains_wait

    launched: dict[str, int] = {}
    kernels = 0
    for node in nodes:
        if contains_collective(node):
            for name in (b.get_name() for b in node.node.inputs) if node.node is not None else ():
                launched[name] = kernels
            launched[node.get_name()] = kernels
            for name in node.get_buffer_names():
                launched[name] = kernels
        elif contains_wait(node):
            name = node.node.inputs[0].get_name()
            if name in launched:
                report.placed(name, kernels - launched[name])
        else:
            kernels += 1
    return nodes
