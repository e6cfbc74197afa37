"""Lets torch.compile trace the operators of torch.ops.symm_mem that return what they write.

AOTAutograd turns every traced program into a graph without writes, and refuses operators whose result shares memory
with an argument. On CPU tensors these operators have a form without writes::

    before   y = two_shot_all_reduce_(x)             after   y = one_shot_all_reduce(x)      x is y from here on

Both run the group's own all_reduce here, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symcomm import errors

_WRITE = ("one_shot_all_reduce_out", "two_shot_all_reduce_", "two_shot_all_reduce_out")


def _rule(name: str) -> Callable[..., Any]:
    def without_writes(
        ctx: Any, input: Any, reduce_op: str, group_name: str, out: Any = None, output: Any = None
    ) -> Any:
        written = next((tensor for tensor in (out, output) if tensor is not None), input)
        if not input.is_cpu:
            raise errors.CallerError(f"torch.ops.symm_mem.{name}: torch.compile can trace it on CPU tensors only.")
        inner = ctx.unwrap_tensors(input)
        with ctx.redispatch_to_next():
            result = torch.ops.symm_mem.one_shot_all_reduce(inner, reduce_op, group_name)
        ctx.replace(written, result)
        ctx.commit_update(written)
        ctx.sync(written)
        return written

    return without_writes


def register(known: set[str]) -> Callable[[], None]:
    """Give torch the rules for those operators that this version has. Returns the function that undoes it."""
    changed: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for name in known.intersection(_WRITE):
        operator = getattr(torch.ops.symm_mem, name).default
        tables = (operator.python_key_table, operator.py_kernels, operator.functorch_table)
        if any(tables):
            continue  # torch, or another library, has a rule already
        changed += [(table, dict(table)) for table in (*tables, operator._dispatch_cache)]
        operator.py_functionalize_impl(_rule(name))

    def undo() -> None:
        for table, before in changed:
            table.clear()
            table.update(before)

    return undo
