"""Reads a call's options for the fast path: whether it blocks, its time-out, root and operation.

torch makes an options object for each call. Reading three attributes takes a microsecond, more than a small operation,
so the core reads them from memory, at offsets that ``install`` finds (see group/torch_layout.py). If it does not find
them, ``read_options`` reads the attributes.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as torch_c10d
from torch._C._distributed_c10d import ReduceOp

from symcomm._core import native
from symcomm.group.request import rooted
from symcomm.group.torch_layout import places_of, pointed_to
from symcomm.ops import CACHED
from symcomm.torch_backend import versions
from symcomm.torch_backend.arguments import redop_of, root_of
from symcomm.torch_backend.profile import is_profiling
from symcomm.types import RedOpType

SLOW, UNKNOWN, ASYNC = native.OPTIONS_SLOW, native.OPTIONS_UNKNOWN, native.OPTIONS_ASYNC

# asyncOp, timeout in ms (-1: not set), number of reduceOp, rootRank, rootTensor: no two fields change alike.
_SAMPLES = (
    (False, -1, 0, 0, 0), (True, 77_777, 4, 3, 1), (True, 5, 7, 900, 31), (False, 123_456_789, 2, 65_537, 0),
    (True, -1, 3, 1, 2), (False, 9, 1, 2, 5), (False, -1, 6, 0, 70_000), (True, 1, 5, 77, 3),
)  # fmt: skip


@functools.cache
def install() -> frozenset[int]:
    """The operations, by number, whose options the core can read from now on. Runs once a process."""
    classes = versions.present(torch_c10d, [op.options for op in CACHED.values()])
    found = {}
    for number, op in CACHED.items():
        name = op.options
        if name in classes and (places := _places(classes[name])) is not None:
            found[number] = (number, classes[name], *places)
    native.use_options(is_profiling, tuple(found.values()))
    return frozenset(found)


@functools.cache
def _places(kind: Any) -> tuple[int, ...] | None:
    """Offsets: of the pointer to the C++ object in the Python one, and of the C++ object's time-out, asyncOp,
    operation, root and root's tensor. -1: these options have no such field."""
    try:
        samples = [(_make(kind, *facts), *facts) for facts in _SAMPLES]
        first = samples[0][0]
        at = object.__basicsize__  # a pointer to the C++ object follows Python's object header
        memory = [pointed_to(options, at) for options, *_ in samples]
    except (OSError, AttributeError, RuntimeError, TypeError):
        return None

    def find(column: int, width: int, is_there: bool = True) -> list[int]:
        if not is_there:
            return [-1]
        answers = [sample[column] % (1 << 8 * width) for sample in samples]
        return places_of(zip(memory, answers, strict=True), width)

    found = [find(2, 8), find(1, 1), find(3, 1, hasattr(first, "reduceOp")), find(4, 8, hasattr(first, "rootRank"))]
    found.append(find(5, 8, hasattr(first, "rootTensor")))
    return None if any(len(places) != 1 for places in found) else (at, *(places[0] for places in found))


def _make(kind: Any, is_async: bool, timeout_ms: int, op: int, root: int, tensor: int) -> Any:
    options = kind()
    options.asyncOp = is_async
    if timeout_ms >= 0:
        options.timeout = timedelta(milliseconds=timeout_ms)
    if hasattr(options, "reduceOp"):
        options.reduceOp = getattr(ReduceOp, RedOpType(op).name)
    if hasattr(options, "rootRank"):
        options.rootRank = root
    if hasattr(options, "rootTensor"):
        options.rootTensor = tensor
    return options


def read_options(call: int, opts: Any) -> tuple[int, Any]:
    """(0, SLOW or ASYNC; ``native.Group.run_cached``'s detail), read from the attributes."""
    if type(opts).__name__ != CACHED[call].options:
        return SLOW, None  # plain arguments instead of options, or what the slow path will refuse
    try:
        if opts.timeout.days >= 0 or is_profiling() or getattr(opts, "rootTensor", 0):  # an unset time-out is -1 ms
            return SLOW, None
        status = ASYNC if opts.asyncOp else 0
    except AttributeError:  # plain arguments instead of options
        return SLOW, None
    if hasattr(opts, "reduceOp") and hasattr(opts, "rootRank"):
        return status, rooted(root_of(opts), redop_of(opts))
    return status, redop_of(opts) if hasattr(opts, "reduceOp") else root_of(opts) if hasattr(opts, "rootRank") else 0
