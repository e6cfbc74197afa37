"""The line of generated code that allocates a comm buffer.

torch's own line names a CUDA device; ours is for the CPU::

    before   buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    after    buf0 = symcomm_runtime.comm_buffer((64, 64), (64, 1), torch.float32, '0', 71)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

__all__ = ["IMPORT", "RUNTIME", "release", "write_for_cpu"]

RUNTIME = "symcomm_runtime"
IMPORT = f"import symcomm.compile.runtime as {RUNTIME}"

# Generated code is cached on disk and may meet code that another process generated, so numbers begin anywhere.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "little") << 14)


_holders: dict[str, Callable[..., None]] = {}  # who needs the line -> torch's function, before the first of them


def write_for_cpu(holder: str) -> None:
    """Inductor writes the line for CPU tensors, until every holder has released it. Two need it: our lowerings, and
    torch's own lowerings of ``torch.ops.symm_mem`` while these operators take CPU tensors."""
    from torch._inductor.codegen.wrapper import AllocateLine

    from symcomm.backend import versions

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
        args = f"{size}, {stride}, {node.get_dtype()}, {node.get_output_spec().group_name!r}, {next(_numbers)}"
        self.wrapper.add_import_once(IMPORT)
        code.writeline(f"{node.get_name()} = {RUNTIME}.comm_buffer({args})")
        return None

    return allocate
