"""Decides whether a value can be made straight in symmetric memory, and if not, says why.

::

    before   buf0 = empty_strided_cpu(...)           after   buf0 = comm_buffer(...)
             kernel(..., out=buf0)                           kernel(..., out=buf0)
             all_reduce_(buf0)    copies buf0                all_reduce_(buf0)    peers read buf0 where it is

torch's comm_lowering realizes a value as a comm buffer. This file first checks that this would be right, of use on a
CPU, and not slower.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import comm_lowering, config, ir
from torch._inductor.virtualized import V

from symcomm.collectives.select import DEFAULT
from symcomm.compile.overlap import is_getitem
from symcomm.torch_backend import versions


def realize(box: Any, source: Any, group_name: str, direct: bool = True) -> str:
    """Have a value made in symmetric memory. Returns "" if it will be, otherwise why not.

    ``source`` is the FX node that makes the value; ``direct``: whether the collective has a form without copies.
    """
    if not direct:
        return "this collective has no form without copies"
    if not versions.allocates_comm_buffers():
        return "this version of torch has few values that can be made there"
    if not getattr(box.get_numel(), "is_number", True):
        return "its size is symbolic"
    nbytes = int(box.get_numel()) * box.get_dtype().itemsize
    if nbytes < DEFAULT.direct_bytes:
        return f"{nbytes} bytes < direct_bytes {DEFAULT.direct_bytes}: copying is faster"
    if config.cpp_wrapper:
        return "the C++ wrapper allocates its buffers itself"
    box.realize()
    buffer = _buffer_of(box)
    reason = _why_not(box, buffer)
    if not reason and source is not None and leaves_graph(source):
        reason = "it is a result of the graph too"  # torch copies results, so nothing would be gained
    if not reason:
        comm_lowering.realize_as_comm_buffer(box, ir.CommBufferType.SYMM_MEM, group_name)
    return reason


def _buffer_of(box: Any) -> Any:
    """TensorBox -> views -> StorageBox -> buffer."""
    data = box.data
    while not isinstance(data, ir.Buffer):
        data = data.unwrap_view() if isinstance(data, ir.BaseView) else data.data
    return data


def _why_not(box: Any, buffer: Any) -> str:
    layout = buffer.get_output_spec()
    if isinstance(buffer, ir.InputBuffer) or buffer.get_name() in V.graph.graph_inputs:
        return "it is an input of the graph"
    if buffer.get_name() in V.graph.constants:
        return "it is a constant"
    if isinstance(box.data, ir.BaseView) and not _covers(box, buffer):
        return "it is a view of a part of another value"
    if isinstance(layout, ir.NonOwningLayout):
        return "it lies inside another value"
    if not buffer.should_allocate():
        return f"{getattr(buffer, 'python_kernel_name', None) or type(buffer).__name__} allocates it"
    if isinstance(layout, ir.CommBufferLayout):
        return ""
    if not isinstance(layout, (ir.FixedLayout, ir.FlexibleLayout)):
        return "it is written where another value was"
    return ""


def _covers(box: Any, buffer: Any) -> bool:
    """Whether a view shows all of a buffer, in its order."""
    if not isinstance(box.data, ir.ReinterpretView):
        return False
    offset = V.graph.sizevars.simplify(box.data.layout.offset)
    return offset == 0 and V.graph.sizevars.statically_known_equals(box.get_numel(), buffer.get_numel())


def leaves_graph(node: Any) -> bool:
    """Whether the graph returns the node's result, or one of several, as it is."""
    return any(user.op == "output" or (is_getitem(user) and leaves_graph(user)) for user in node.users)


def whole_view(box: Any) -> Any:
    """The same tensor as a view of its buffer, if that is a comm buffer.

    torch copies comm buffers that leave a graph, because its own must not be seen outside, but it lets views through.
    Ours may leave: runtime.comm_buffer reuses memory only when no tensor has it any more. A result that leaves before
    its wait must not be copied, since it is not complete yet.
    """
    if not isinstance(box.data, ir.StorageBox) or not isinstance(box.data.data.get_output_spec(), ir.CommBufferLayout):
        return box
    layout = box.get_layout()
    plain = ir.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride, layout.offset)
    return ir.TensorBox(ir.ReinterpretView(data=box.data, layout=plain))
