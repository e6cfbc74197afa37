"""The line of generated code that allocates a comm buffer.

torch's own line names a CUDA device; ours is for the CPU, and reads the same, since tools look for it::

    before   buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    after    buf0 = empty_strided_p2p((64, 64), (64, 1), torch.float32, 'cpu', group_name='0', alloc_id=71)
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

RUNTIME = "symcomm_runtime"
IMPORT = f"import symcomm.compile.runtime as {RUNTIME}"
_BIND = f"empty_strided_p2p = {RUNTIME}.comm_buffer"  # in the place of torch's; other devices' lines go on to that

# Generated code is cached on disk and may meet code that another process generated, so numbers begin anywhere.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "little") << 14)


_bound: weakref.WeakSet[Any] = weakref.WeakSet()  # writers of modules that have the name
_holders: dict[str, Callable[..., None]] = {}  # who needs the line -> torch's function, before the first of them


def write_for_cpu(holder: str) -> None:
    """Inductor writes the line for CPU tensors, until every holder has released it. Two need it: our lowerings, and
    torch's own lowerings of ``torch.ops.symm_mem`` while these operators take CPU tensors."""
    from torch._inductor.codegen.wrapper import AllocateLine

    from symcomm.torch_backend import versions

    if versions.allocates_comm_buffers() and holder not in _holders:
        theirs = next(iter(_holders.values()), AllocateLine._codegen_comm_buffer)
        _holders[holder] = theirs
        AllocateLine._codegen_comm_buffer = _allocate_by(theirs)


def release(holder: str) -> None:
    from torch._inductor.codegen.wrapper import AllocateLine

    theirs = _holders.pop(holder, None)
    if theirs is not None and not _holders:
        AllocateLine._codegen_comm_buffer = theirs


def _allocate_by(theirs: Callable[..., None]) -> Callable[..., None]:
    """What writes that line, for both devices."""

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


def _bind_name(wrapper: Any) -> None:
    """Once a module. Imports stand above the header, in which torch binds the name to its own."""
    if wrapper not in _bound:
        _bound.add(wrapper)
        wrapper.add_import_once(IMPORT)
        wrapper.header.writeline(_BIND)
