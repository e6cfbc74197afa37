"""The line of generated code that allocates a comm buffer.

torch's own line names a CUDA device. Ours is for the CPU and otherwise reads the same, because tools look for it::

    before   buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    after    buf0 = empty_strided_p2p((64, 64), (64, 1), torch.float32, 'cpu', group_name='0', alloc_id=71)
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

from symcomm.undo import Switch, Undo, all_of, replace

RUNTIME = "symcomm_runtime"
IMPORT = f"import symcomm.compile.runtime as {RUNTIME}"
_BIND = f"empty_strided_p2p = {RUNTIME}.comm_buffer"  # instead of torch's, which it calls for other devices

# Generated code is cached on disk and may be used beside another process's code, so numbers begin at random.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "little") << 14)

_bound: weakref.WeakSet[Any] = weakref.WeakSet()  # the writers of modules in which the name is bound


def _change_writer() -> Undo:
    from torch._inductor.codegen.wrapper import AllocateLine, PythonWrapperCodegen

    from symcomm.torch_backend import versions

    if not versions.allocates_comm_buffers():
        return all_of()
    return all_of(
        replace(AllocateLine, "_codegen_comm_buffer", _allocate_by(AllocateLine._codegen_comm_buffer)),
        replace(PythonWrapperCodegen, "codegen_free", _free_by(PythonWrapperCodegen.codegen_free)),
    )


_writer = Switch(_change_writer)


def write_for_cpu(holder: str) -> Undo:
    """Make Inductor write the line for CPU tensors, until each holder has undone this. There are two: our lowerings,
    and torch's own lowerings of ``torch.ops.symm_mem`` while these operators take CPU tensors."""
    _writer.on(holder)
    return functools.partial(_writer.off, holder)


def _allocate_by(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wraps torch's function that writes the line, so that it serves both devices."""

    def allocate(self: Any, code: Any) -> None:
        node: Any = self.node
        if node.get_device().type != "cpu":
            return theirs(self, code)
        size, stride = (self.wrapper.codegen_shape_tuple(tuple(n)) for n in (node.get_size(), node.get_stride()))
        names = f"group_name={node.get_output_spec().group_name!r}, alloc_id={next(_numbers)}"
        _bind_name(self.wrapper)
        code.writeline(f"{node.get_name()} = empty_strided_p2p({size}, {stride}, {node.get_dtype()}, 'cpu', {names})")
        return None

    return allocate


def _free_by(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wraps torch's function that frees a buffer after its last use: it asks for other buffers whether they may be
    reused, but not for comm buffers. One that a collective may still write, as nothing in the graph waits for it, is
    kept until the graph's function returns."""

    def free(self: Any, buffer: Any) -> None:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        is_comm = isinstance(buffer, ir.Buffer) and isinstance(buffer.get_output_spec(), ir.CommBufferLayout)
        if not (is_comm and buffer.get_name() in V.graph.never_reuse_buffers):
            theirs(self, buffer)

    return free


def _bind_name(wrapper: Any) -> None:
    """Bind the name, once a module. Imports stand above the header, in which torch binds the name to its own."""
    if wrapper not in _bound:
        _bound.add(wrapper)
        wrapper.add_import_once(IMPORT)
        wrapper.header.writeline(_BIND)
