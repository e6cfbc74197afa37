"""Collectives of Python objects, which are pickled. They are for settings and names: tensors have calls of their own.

A pickle can do anything when it is loaded: these calls trust the ranks of the group, as all others do.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm.group.facade import Collectives
from symcomm.group.refusal import Refusals
from symcomm.group.request import check_root
from symcomm.group.work import Timeout

ROOT = struct.Struct("<q")


class ObjectCalls(Collectives):
    """Mixed into ProcessGroup."""

    def all_gather_object(self, obj: Any, timeout: Timeout = None) -> list[Any]:
        """Everybody's object, in rank order.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            mine = pickle.dumps(obj)
        return [pickle.loads(item) for item in self.all_gather_bytes(mine, timeout)]

    def broadcast_object(self, obj: Any = None, root: int = 0, timeout: Timeout = None) -> Any:
        """The object of rank ``root``; what others give is not looked at.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            mine = pickle.dumps(obj) if self.rank == root else b""
        return pickle.loads(self._tell("broadcast_object", root, mine, timeout)[root])

    def gather_object(self, obj: Any, root: int = 0, timeout: Timeout = None) -> list[Any] | None:
        """Everybody's object, in rank order, on rank ``root``; None elsewhere.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        with Refusals(self):
            mine = pickle.dumps(obj)
        told = self._tell("gather_object", root, mine, timeout)
        return [pickle.loads(item) for item in told] if self.rank == root else None

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0, timeout: Timeout = None) -> Any:
        """This rank's object of those that ``root`` gives, one for each rank; others give None.

        Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, GroupUnusableError."""
        mine = b""
        with Refusals(self):
            if self.rank == root:
                if objs is None or len(objs) != self.size:
                    raise errors.bad_argument("scatter_object", "objs", objs, f"{self.size} objects, one for each rank")
                mine = pickle.dumps([pickle.dumps(obj) for obj in objs])
        return pickle.loads(pickle.loads(self._tell("scatter_object", root, mine, timeout)[root])[self.rank])

    def _tell(self, call: str, root: int, item: bytes, timeout: Timeout) -> list[bytes]:
        """Everybody's item; raises on all ranks if they do not name one root."""
        with Refusals(self):
            check_root(self, call, root)
        told = self.all_gather_bytes(ROOT.pack(root) + item, timeout)
        roots = [ROOT.unpack_from(item)[0] for item in told]
        if len(set(roots)) > 1:
            said = ", ".join(f"rank {r} says {root}" for r, root in enumerate(roots))
            raise errors.CollectiveMismatchError(f"{call} on group {self.name!r}: ranks name different roots: {said}.")
        return [item[ROOT.size :] for item in told]
