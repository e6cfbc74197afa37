"""Groups for code that makes its own: wrappers that would say ``ProcessGroupGloo(store, rank, size, timeout)``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import default_pg_timeout

from symcomm.torch_backend.group import TorchGroup


def torch_process_group(store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> TorchGroup:
    """A ``torch.distributed.ProcessGroup`` of ours, which torch's ``init_process_group`` knows nothing of.

    ``store`` is where its ranks meet. Groups that meet in one store, one after the other, need a prefix each
    (``torch.distributed.PrefixStore``), as Gloo's do. All ranks call this at once; ``timeout`` is for that, and for
    every call that does not say otherwise. It ends with ``shutdown()`` or ``abort()``.

    Raises: RankFailedError, DeadlineError and BadArgumentError, as ``init_process_group`` does."""
    return TorchGroup(store, rank, size, timeout, "", None, None, None, label="world")
