"""What torch 2.14 and 2.15 ask of a backend, here on every version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm import errors
from symcomm.torch_backend.call_hooks import HookRegistration
from symcomm.torch_backend.estimate import TimeEstimates
from symcomm.torch_backend.lifecycle import Lifecycle


class NewerTorch(HookRegistration, TimeEstimates, Lifecycle):
    """Mixed into TorchGroup."""

    _group_uid = ""

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> Any:
        """A group of some of our ranks, in this order. Collective; ranks outside it get None.

        The rendezvous uses this group, so ``store`` is not needed."""
        timeout = getattr(opts, "_timeout", None)
        return self.split_group(list(ranks), timeout, opts, getattr(opts, "group_name", None) or None)

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Any:
        """A group of the ``size`` ranks that meet in ``store``; the caller is number ``rank`` of them."""
        if not isinstance(size, int) or not isinstance(rank, int) or not 0 <= rank < size:
            raise errors.bad_argument("merge", "rank", rank, f"one of the {size} ranks that meet, 0 to {size} - 1")
        timeout = getattr(opts, "_timeout", None) or timedelta(seconds=self.core.timeout)
        name = getattr(opts, "group_name", None) or f"{self.getGroupName()}:merge"
        make: Any = type(self)
        return make(store, rank, size, timeout, name, list(range(size)), opts, check=self.merge_check(store))

    def get_error(self) -> Any:
        """What ended the group, if something has."""
        kinds: Any = vars(torch_c10d)["ErrorType"]
        failure = self.core.failure
        if failure is None:
            return kinds.SUCCESS
        if isinstance(failure, errors.DeadlineError):
            return kinds.TIMEOUT
        return kinds.REMOTE_ERROR if isinstance(failure, errors.PeerError) else kinds.COMM_ERROR

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the time-out until the next operation has ended. Compilers add the time that a cache hit saved, which
        may be zero."""
        if timeout > timedelta(0):
            self.core.add_ephemeral_timeout(timeout)

    def _set_group_uid(self, uid: str) -> None:
        """Only stored: groups are identified by their names."""
        self._group_uid = str(uid)
