"""What: ``dist.PrefixStore(prefix, store)`` takes our stores.
Why: all of torch's code that takes a store wraps it in a PrefixStore first.
Versions: all.
Undo: the constructor is C++'s again.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

from symcomm.undo import Undo, replace


def apply() -> Undo:
    known = dist.PrefixStore.__init__

    @functools.wraps(known)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        known(self, *map(_as_torchs, args), **{name: _as_torchs(value) for name, value in kwargs.items()})

    return replace(dist.PrefixStore, "__init__", make)


def _as_torchs(value: Any) -> Any:
    base = sys.modules.get("symcomm.store.base")  # loaded, if there is a store of ours
    if base is None or not isinstance(value, base.Store):
        return value
    from symcomm.torch_backend.stores import as_torch_store

    return as_torch_store(value)
