"""What: CPU tensors of 16 KiB and more lie in this rank's arena; only with SYMCOMM_HEAP.
Why: peers read and write them in place, so even programs that know nothing of symmetric tensors profit.
Versions: those whose Allocator has the methods and results that we know (torch 2.10 to 2.15); on any other, tensors
stay ordinary, and a warning says so.
Undo: new tensors are torch's own again; existing ones stay where they are until they are freed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from symcomm.undo import Undo

_CPU = 0  # c10::DeviceType
_GET = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"
_SET = "_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh"
_IS_SIMPLE = "_ZNK3c109Allocator18is_simple_data_ptrERKNS_7DataPtrE"
_REPORTER = (
    "_ZN3c1025profiledCPUMemoryReporterEv",
    "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm",
    "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv",
)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    try:
        return ctypes.cast(library[symbol], ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def _allocator_functions(library: ctypes.CDLL) -> tuple[Any, Any]:
    """torch's functions that return and replace the allocator of CPU tensors."""
    get, choose = library[_GET], library[_SET]
    get.argtypes, get.restype = [ctypes.c_void_p], ctypes.c_void_p
    choose.argtypes, choose.restype = [ctypes.c_int8, ctypes.c_void_p, ctypes.c_uint8], None
    cpu = ctypes.c_int8(_CPU)
    return lambda: get(ctypes.byref(cpu)), lambda allocator: choose(_CPU, allocator, 0)


def apply() -> Undo:
    from symcomm._core import native
    from symcomm.errors import ResourceError
    from symcomm.memory import shared_heap
    from symcomm.memory.arena import current_arena

    def ordinary(why: str) -> Undo:
        shared_heap.say_ordinary(why)
        return lambda: None

    try:
        current_arena()  # with the heap in it
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        current, choose = _allocator_functions(library)
    except (OSError, AttributeError, ResourceError) as error:
        return ordinary(str(error).rstrip("."))
    if not shared_heap.is_open():
        return lambda: None
    theirs = current()
    reporter = [_address(library, symbol) for symbol in _REPORTER]
    ours = native.wrap_allocator(theirs, _address(library, _IS_SIMPLE), *reporter)
    if ours is None:
        return ordinary(f"torch {torch.__version__} has an allocator that we do not know")
    shared_heap.serve_from(shared_heap.least_bytes() or shared_heap.LEAST_BYTES)
    choose(ours)
    if current() != ours:
        return ordinary("another allocator has been given to torch, with a higher priority")
    shared_heap.note_served(True)

    def undo() -> None:
        choose(theirs)
        shared_heap.note_served(False)

    return undo
