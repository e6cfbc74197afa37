"""What: ``torch.distributed._dist2.new_group(backend="symcomm")`` makes groups of ours.
Why: this function has its own table of factories.
Versions: those that have the module.
Undo: the table has no entry of ours.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

from symcomm.torch_backend import versions
from symcomm.undo import Undo

_numbers = itertools.count(1)


def apply() -> Undo:
    factories = versions.dist2_factories()
    factories["symcomm"] = dist2_group
    return lambda: factories.pop("symcomm", None) and None


def dist2_group(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **options: Any) -> Any:
    from symcomm import errors
    from symcomm.torch_backend.group import TorchGroup

    if options:
        raise errors.bad_argument("new_group", "options", sorted(options), "none: symcomm has no options of its own")
    return TorchGroup(store, rank, world_size, timeout, f"dist2:{next(_numbers)}")
