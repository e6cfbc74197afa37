"""What: torch's Reducer keeps the work that it is given in ``_set_forward_pass_work_handle``.
Why: that work counts the ranks that still take part. C++ keeps only its own half alive, but its wait needs the Python
half.
Versions: all.
Undo: the method is C++'s again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist

from symcomm.undo import Undo, replace

_kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def apply() -> Undo:
    known = dist.Reducer._set_forward_pass_work_handle

    @functools.wraps(known)
    def keep(reducer: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        _kept[reducer] = work
        known(reducer, work, *args, **kwargs)

    return replace(dist.Reducer, "_set_forward_pass_work_handle", keep)
