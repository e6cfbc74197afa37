"""Finds collectives that torch's pass (fx_passes/reinplace.py) wrongly lets write their input.

::

    before   z = all_reduce(x); u = wait(z); f(u)      after   z = all_reduce_(x); u = wait(z); f(u)

The pass checks that no node reads the input afterwards. On any backend, it misses two cases:

* An input of the graph is overwritten at the end, but the result, which now lies there, is needed afterwards::

    z = all_reduce(x); ...; copy_(x, y); return z

  (The same if the result itself is written there and also returned: that would be one tensor instead of two.)

* The input is the result of another collective's wait, and others use that result too::

    z = all_reduce(x); u = wait(z); v = all_reduce(u); return z, wait(v)

In both cases we lower the operator that was there before, which works on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from symcomm.compile.overlap import collectives_of, is_getitem, is_wait

_WAS_FUNCTIONAL = "symcomm_functional"


def note_functional(graph: Any, ours: Callable[[Any], Any]) -> None:
    """Before torch's passes: mark the collectives that write nothing."""
    for node in collectives_of(graph, ours):
        node.meta[_WAS_FUNCTIONAL] = not node.target._schema.is_mutable


def is_wrong(node: Any) -> bool:
    """Whether a collective wrote nothing before the passes, and must not write its inputs now."""
    if not node.meta.get(_WAS_FUNCTIONAL):
        return False
    given = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return any(_is_needed_elsewhere(node, source) for source in given)


def _is_needed_elsewhere(node: Any, source: Any) -> bool:
    for shown in _shown_by(source):
        if is_wait(shown) and len(shown.args[0].users) > 1:
            return True
        if shown.op in ("placeholder", "get_attr"):
            copies = [user for user in shown.users if user.target is torch.ops.aten.copy_.default]
            written = all(node in _shown_by(copy.args[1]) for copy in copies if copy.args[0] is shown)
            return not written or _leaves_graph(node)
    return False


def _shown_by(node: Any) -> Iterator[Any]:
    """The node, the node that it is a view of, and so on."""
    while isinstance(node, torch.fx.Node):
        yield node
        node = node.args[0] if _passes_on(node) else None


def _leaves_graph(node: Any) -> bool:
    """Whether the graph returns the result, or a view of it."""
    return any(user.op == "output" or (_passes_on(user) and _leaves_graph(user)) for user in node.users)


def _passes_on(node: Any) -> bool:
    """Whether a node gives the memory of its first argument: a wait, one of several results, or a view."""
    if is_wait(node) or is_getitem(node):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    first = node.target._schema.arguments[:1]
    return bool(first and first[0].alias_info is not None and not first[0].alias_info.is_write)
