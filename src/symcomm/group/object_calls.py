"""Collectives of Python objects, which are pickled. They are for settings and names: tensors have calls of their own.

A pickle can do anything when it is loaded: these calls trust the ranks of the group, as all others do.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from symcomm import errors
from symcomm.group.refusal import Refusals
from symcomm.group.request import Caller, check_root
from symcomm.group.work import Timeout

ROOT = struct.Struct("<q")


class Group(Caller, Protocol):
    """What these calls need of a group."""

    name: str

    def all_gather_bytes(self, item: bytes, timeout: Timeout = None) -> list[bytes]: ...


def all_gather_object(group: Group, obj: Any, timeout: Timeout) -> list[Any]:
    with Refusals(group):
        mine = pickle.dumps(obj)
    return [pickle.loads(item) for item in group.all_gather_bytes(mine, timeout)]


def broadcast_object(group: Group, obj: Any, root: int, timeout: Timeout) -> Any:
    with Refusals(group):
        mine = pickle.dumps(obj) if group.rank == root else b""
    return pickle.loads(_tell(group, "broadcast_object", root, mine, timeout)[root])


def gather_object(group: Group, obj: Any, root: int, timeout: Timeout) -> list[Any] | None:
    with Refusals(group):
        mine = pickle.dumps(obj)
    told = _tell(group, "gather_object", root, mine, timeout)
    return [pickle.loads(item) for item in told] if group.rank == root else None


def scatter_object(group: Group, objs: Sequence[Any] | None, root: int, timeout: Timeout) -> Any:
    mine = b""
    with Refusals(group):
        if group.rank == root:
            if objs is None or len(objs) != group.size:
                raise errors.bad_argument("scatter_object", "objs", objs, f"{group.size} objects, one for each rank")
            mine = pickle.dumps([pickle.dumps(obj) for obj in objs])
    return pickle.loads(pickle.loads(_tell(group, "scatter_object", root, mine, timeout)[root])[group.rank])


def _tell(group: Group, call: str, root: int, item: bytes, timeout: Timeout) -> list[bytes]:
    """All ranks' items; raises on all ranks if they name different roots."""
    with Refusals(group):
        check_root(group, call, root)
    told = group.all_gather_bytes(ROOT.pack(root) + item, timeout)
    roots = [ROOT.unpack_from(item)[0] for item in told]
    if len(set(roots)) > 1:
        said = ", ".join(f"rank {r} says {root}" for r, root in enumerate(roots))
        raise errors.CollectiveMismatchError(f"{call} on group {group.name!r}: ranks name different roots: {said}.")
    return [item[ROOT.size :] for item in told]
