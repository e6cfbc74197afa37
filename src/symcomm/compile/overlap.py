"""Which collectives run beside kernels, and which block.

::

    before   t = all_reduce_(a)            nothing else to do     after   all_reduce_(a)      one call that blocks
             wait(t)                                                      ...
             use(t)

    before   t = all_reduce_(a)            something else to do   after   t = all_reduce_(a)
             wait(t)                                                      other()
             use(t); other()                                              wait(t); use(t)

A launch and a wait cost more than a call that blocks. So for each collective we ask how much work neither needs it nor
is needed by it. torch moves launches up and waits down (comms.raise_comms, comms.sink_waits), on the scheduler's nodes,
after kernels are fused. passes.py switches that on for graphs in which some collective does not block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from symcomm.compile import cost, options

# Operators for which runtime.py has a blocking call. Messages, and calls that torch has joined, have none.
_CAN_BLOCK = {"all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"}
_CAN_BLOCK |= {"all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_"}
_CAN_BLOCK |= {"all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"}

_decisions: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()  # by FX graph


def is_wait(node: Any) -> bool:
    return node.op == "call_function" and node.target is torch.ops._c10d_functional.wait_tensor.default


def is_getitem(node: Any) -> bool:
    """Whether a node takes one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def waits_of(node: Any) -> list[Any]:
    """The waits for a collective's results."""
    found = []
    for user in node.users:
        if is_wait(user):
            found.append(user)
        elif is_getitem(user):
            found += [wait for wait in user.users if is_wait(wait)]
    return found


def is_awaited(node: Any) -> bool:
    """Whether the graph waits for every result of a collective."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return _has_wait(node)
    taken = {user.args[1]: user for user in node.users if is_getitem(user)}
    return all(place in taken and _has_wait(taken[place]) for place in range(len(value)))


def _has_wait(node: Any) -> bool:
    return any(is_wait(user) or "wait_tensors" in str(user.target) for user in node.users)


def await_once(graph: Any, ours: Callable[[Any], Any]) -> None:
    """Keep one wait for each result of our collectives: values of a graph never change, so all waits give the same.

    ::

        before   t = all_reduce(a); u = wait(t); f(u); v = wait(t); g(v)      after   t = all_reduce(a); u = wait(t)
                                                                                      f(u); g(u)

    torch's passes assume that there is one: bucketing raises if there are two.
    """
    for node in collectives_of(graph, ours):
        first: dict[Any, Any] = {}  # result -> its wait
        for wait in sorted(waits_of(node)):
            kept = first.setdefault(wait.args[0], wait)
            if kept is not wait:
                wait.replace_all_uses_with(kept)
                graph.erase_node(wait)


def collectives_of(graph: Any, ours: Callable[[Any], Any]) -> dict[Any, Any]:
    """The collectives on groups of ours: node -> group."""
    return {node: group for node in graph.nodes if (group := ours(node)) is not None}


def blocks(node: Any, ours: Callable[[Any], Any]) -> bool:
    """Whether this collective is one call that blocks."""
    decided = _decisions.get(node.graph)
    if decided is None or node not in decided:
        found = collectives_of(node.graph, ours)
        decided = _decisions[node.graph] = {n: _blocks(n, group) for n, group in found.items()}
    return decided.get(node, False)


def _blocks(node: Any, group: Any) -> bool:
    if node.target._opname not in _CAN_BLOCK:
        return False
    if _is_copied_at_the_end(node):
        return True
    if not waits_of(node):  # another graph waits
        return False
    chosen = options.current()
    if chosen.block is not None:
        return chosen.block
    if chosen.overlap is False or (chosen.overlap is None and not cost.has_idle_cores(group.size())):
        return True
    nbytes = sum(cost.tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes)
    gain = min(cost.collective_us(nbytes, group.size()), _independent_us(node))
    return gain <= (0.0 if chosen.overlap else cost.HANDOFF_US)


def _is_copied_at_the_end(node: Any) -> bool:
    """Whether the graph returns a result before its wait and has to copy it, since its strides are not those of
    Inductor's buffers. Such a result must be complete when the graph returns."""
    results = [node, *(user for user in node.users if is_getitem(user))]
    leaves = [one for one in results if any(user.op == "output" for user in one.users)]
    values = [one.meta.get("val") for one in leaves]
    return any(isinstance(value, torch.Tensor) and not value.is_contiguous() for value in values)


def _independent_us(node: Any) -> float:
    """The time of all kernels that neither need the collective's result nor are needed for it."""
    tied = _reached([node], lambda n: n.all_input_nodes) | _reached(waits_of(node), lambda n: n.users)
    return sum(cost.kernel_us(n) for n in node.graph.nodes if n not in tied and not is_wait(n))


def _reached(start: Iterable[Any], step: Callable[[Any], Iterable[Any]]) -> set[Any]:
    seen, open_ = set(start), list(start)
    while open_:
        for neighbour in step(open_.pop()):
            if neighbour not in seen:
                seen.add(neighbour)
                open_.append(neighbour)
    return seen
