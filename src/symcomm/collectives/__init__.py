"""Collectives as plans: pure functions that write what each rank copies, combines and waits for.

    plan.py       the vocabulary: spaces, steps, plans, and how they are encoded for the C core
    limits.py     where one algorithm takes over from another
    chunks.py     cutting tensors into pieces and chunks, and turns into loops
    tree.py       the order in which values of ranks are combined
    all_reduce.py, reduce_scatter.py, ...   one file per family, one function per algorithm
    nodes.py      machines of several NUMA nodes; by_node.py is all_reduce there, the others are in their families
    select.py     which algorithm a call gets
    interpret.py  plays all ranks of a plan in one process, and proves it

The names exported here are the functions of select.py.
"""

from symcomm.collectives.plan import Collective, Need, Plan
from symcomm.collectives.select import (
    Limits,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "Collective", "Limits", "Need", "Plan", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather",
    "reduce", "reduce_scatter", "scatter",
]  # fmt: skip
