"""Lowers functional operators to Inductor's IR, if the group is ours and the tensors are on the CPU.

There are two independent choices for each collective: whether its input is made in symmetric memory (buffers.py), and
whether it is one call that blocks or a launch and a wait (overlap.py). torch's own lowering makes the launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import clone
from torch._inductor.virtualized import V
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from symcomm.compile import buffers, options, overlap, reinplaced, report
from symcomm.compile.codegen import IMPORT, RUNTIME
from symcomm.torch_backend.torch_patches.functional_collectives import our_group_of

Lowering = Callable[..., Any]  # (entry, torch's lowering, *what the operator takes)


def group_of(node: Any) -> Any:
    """The group of ours that a node of an FX graph communicates on, or None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace not in ("_c10d_functional", "_dtensor"):
        return None
    given = node.kwargs.get("group_name")
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        given = value if argument.name == "group_name" else given
    if isinstance(given, torch.fx.Node) and given.op == "get_attr":  # graphs of make_fx hold the group itself
        given = getattr(node.graph.owning_module, str(given.target), None)
    try:
        return our_group_of(given) if isinstance(given, (str, ProcessGroup)) else None
    except RuntimeError:
        return None  # no group has that name here, and torch's lowering needs none


def name_groups(graph: Any) -> None:
    """Replace groups of ours by their names: graphs of make_fx hold the groups themselves."""
    for node in graph.nodes:
        held = [value for value in node.args if isinstance(value, torch.fx.Node) and value.op == "get_attr"]
        group = group_of(node) if held else None
        for value in held:
            if group is not None and getattr(graph.owning_module, str(value.target), None) is group:
                node.args = tuple(group.group_name if one is value else one for one in node.args)


class BlockingKernel(ir._CollectiveKernel):
    """A collective that has ended when the next line runs. Only the called function's name is not torch's."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.python_kernel_name = f"{RUNTIME}.{self.op_overload._schema.name.split('::')[1]}"

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once(IMPORT)
        wrapper.generate_extern_kernel_alloc(self)


@contextlib.contextmanager
def kept_until_awaited(node: Any) -> Iterator[None]:
    """Entered while a collective is lowered; keeps its tensors' memory. Inductor reuses memory after its last use,
    which is the wait. If the graph does not wait, its caller may, and until then peers read and write these tensors."""
    before = len(V.graph.operations)
    yield
    if overlap.is_awaited(node) or overlap.blocks(node, group_of):
        return
    for made in V.graph.operations[before:]:
        if isinstance(made, (ir._CollectiveKernel, ir.MultiOutput)):
            V.graph.never_reuse_buffers.update([made.get_name(), *(given.get_name() for given in made.inputs)])


# --- lowerings --------------------------------------------------------------------------------------------------------


def in_place(entry: Any, theirs: Lowering, inputs: Any, *args: Any) -> Any:
    """all_reduce_, broadcast_ and the coalesced one: the result lies where the input was."""
    node = V.graph.current_node
    if reinplaced.is_wrong(node):
        return then_in_place(entry, theirs, inputs, *args)
    boxes = [ir.ExternKernel.require_contiguous(box) for box in _listed(inputs)]
    return _run_in_place(entry, theirs, node, node.target, boxes, _sources(node), _like(inputs, boxes), args)


def then_in_place(entry: Any, theirs: Lowering, inputs: Any, *args: Any) -> Any:
    """all_reduce, broadcast: work on a copy, which the kernel that makes the input writes directly."""
    node = V.graph.current_node
    boxes = []
    for box in map(clone, _listed(inputs)):
        if not overlap.blocks(node, group_of):  # as in torch: fused with other kernels, the launch would wait for them
            box.realize()
            V.graph.no_fuse_buffer_names.add(box.get_name())
        boxes.append(ir.ExternKernel.require_contiguous(box))
    operator = getattr(torch.ops._c10d_functional, node.target._opname.rstrip("_") + "_").default
    sources = [None] * len(boxes)  # only we have the copies
    return _run_in_place(entry, _launch_in_place, node, operator, boxes, sources, _like(inputs, boxes), args)


def _launch_in_place(operator: Any, inputs: Any, *args: Any) -> Any:
    kernel: Any = ir._AllReduce_Kernel if "all_reduce_" in str(operator) and not isinstance(inputs, list) else None
    (kernel or ir._CollectiveKernel).create_inplace(operator, inputs, *args)
    return inputs


def _run_in_place(
    entry: Any,
    launch: Lowering,
    node: Any,
    operator: Any,
    boxes: list[Any],
    sources: Sequence[Any],
    result: Any,
    args: tuple[Any, ...],
) -> Any:
    group = group_of(node)
    reasons = [_realize(entry, box, source, group) for box, source in zip(boxes, sources, strict=True)]
    blocking = overlap.blocks(node, group_of)
    if blocking:
        BlockingKernel.create_inplace(operator, result, *args)
    elif launch is _launch_in_place:
        launch(operator, result, *args)
    else:
        result = launch(result, *args)
    note(entry, node, group, boxes, reasons, blocking, boxes[0].get_name())
    return pytree.tree_map(buffers.whole_view, result) if buffers.leaves_graph(node) else result


def out_of_place(entry: Any, theirs: Lowering, inputs: Any, *args: Any) -> Any:
    """all_gather, reduce_scatter, all_to_all: the input may be symmetric; the result is new."""
    node = V.graph.current_node
    group = group_of(node)
    boxes = [ir.ExternKernel.require_contiguous(box) for box in _listed(inputs)]
    reasons = [_realize(entry, box, source, group) for box, source in zip(boxes, _sources(node), strict=True)]
    blocking = overlap.blocks(node, group_of)
    given = _like(inputs, boxes)
    if blocking:
        made = BlockingKernel.create_out_of_place(node.target, given, *args)
        result = pytree.tree_map(ir.TensorBox.create, made)
    else:
        result = theirs(given, *args)
    note(entry, node, group, boxes, reasons, blocking, _listed(result)[0].get_name())
    return result


def into(entry: Any, theirs: Lowering, input: Any, *args: Any, out: Any) -> Any:
    """all_gather_into_tensor_out, which bucketing makes: the input is this rank's part of the result."""
    node = V.graph.current_node
    blocking = overlap.blocks(node, group_of)
    if blocking:
        BlockingKernel.create_inplace(node.target, input, *args, out=out)
    reason = "it lies inside another value"
    note(entry, node, group_of(node), [input], [reason], blocking, out.get_name())
    return out if blocking else theirs(input, *args, out=out)


def unchanged(entry: Any, theirs: Lowering, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch lowers it; only the input may become symmetric."""
    node = V.graph.current_node
    group = group_of(node)
    boxes = [ir.ExternKernel.require_contiguous(box) for box in _listed(inputs)]
    reasons = [_realize(entry, box, source, group) for box, source in zip(boxes, _sources(node), strict=False)]
    note(entry, node, group, boxes, reasons, False, boxes[0].get_name())
    return theirs(_like(inputs, boxes), *args, **kwargs)


def as_torch_does(entry: Any, theirs: Lowering, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """For messages, which have neither a form without copies nor one that blocks."""
    return theirs(inputs, *args, **kwargs)


def wait(theirs: Lowering, box: Any) -> Any:
    """A collective that blocked needs no wait. If the result leaves the graph here, it is not copied."""
    node = V.graph.current_node
    source = node.args[0]
    if overlap.is_getitem(source):
        source = source.args[0]
    blocked = group_of(source) is not None and overlap.blocks(source, group_of)
    result = box if blocked else theirs(box)
    return buffers.whole_view(result) if buffers.leaves_graph(node) and group_of(source) is not None else result


# --- parts ------------------------------------------------------------------------------------------------------------


def _listed(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


def _like(inputs: Any, boxes: list[Any]) -> Any:
    return boxes if isinstance(inputs, (list, tuple)) else boxes[0]


def _sources(node: Any) -> list[Any]:
    return _listed(node.args[0])


def _realize(entry: Any, box: Any, source: Any, group: Any) -> str:
    if not options.current().zero_copy:
        return "switched off"
    return buffers.realize(box, source, group.group_name, entry.direct)


def note(entry: Any, node: Any, group: Any, boxes: list[Any], reasons: list[str], blocking: bool, name: str) -> None:
    sizes = [box.get_numel() for box in boxes]
    known = all(getattr(size, "is_number", True) for size in sizes)
    first = boxes[0]
    nbytes = sum(int(n) * box.get_dtype().itemsize for n, box in zip(sizes, boxes, strict=True)) if known else None
    reason = next(filter(None, reasons), "")
    report.note(
        report.Record(
            op=node.target._opname,
            shape=tuple(int(s) if getattr(s, "is_number", True) else str(s) for s in first.get_size()),
            dtype=str(first.get_dtype()).removeprefix("torch."),
            nbytes=nbytes,
            group=f"{group.group_name!r} ({group.size()} ranks)",
            plan=entry.plan_words(node, group, [int(n) for n in sizes], first.get_dtype(), not reason) if known else "",
            zero_copy=not reason,
            reason=reason,
            wait="blocks" if blocking else "launch and wait",
            name=name,
        )
    )
