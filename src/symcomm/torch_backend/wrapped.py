"""Makes groups for wrappers that would otherwise call ``ProcessGroupGloo(store, rank, size, timeout)``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import default_pg_timeout

from symcomm.torch_backend.group import TorchGroup


def torch_process_group(store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> TorchGroup:
    """A ``torch.distributed.ProcessGroup`` of ours, made without torch's ``init_process_group``.

    ``store`` is where its ranks meet. Groups that meet in one store, one after another, need a prefix each
    (``torch.distributed.PrefixStore``), as Gloo's do. All ranks call this at once. ``timeout`` holds for this call, and
    for each call of the group that names none. End the group with ``shutdown()`` or ``abort()``.

    Raises: RankFailedError, DeadlineError and BadArgumentError, as ``init_process_group`` does."""
    return TorchGroup(store, rank, size, timeout, "", None, None, None, label="world")
