"""What: the exceptions of our stores get torch's exceptions as further base classes.
Why: scripts catch a store's exceptions by torch's names (DistStoreError, DistNetworkError, QueueEmptyError).
Versions: all.
Undo: the exceptions have only their own base classes again.
"""

from __future__ import annotations

import torch.distributed as dist

from symcomm import errors
from symcomm.undo import Undo


def apply() -> Undo:
    known: dict[type, tuple[type, ...]] = {}
    for ours, theirs in (
        (errors.StoreDeadlineError, dist.DistStoreError),
        (errors.StoreConnectionError, dist.DistNetworkError),
        (errors.StoreAuthError, dist.DistNetworkError),
        (errors.QueueEmptyError, dist.QueueEmptyError),
    ):
        if not issubclass(ours, theirs):
            known[ours] = ours.__bases__
            first, *others = ours.__bases__
            ours.__bases__ = (first, theirs, *others)  # others may be OSErrors, which come after RuntimeErrors

    def undo() -> None:
        for ours, bases in known.items():
            ours.__bases__ = bases

    return undo
