"""WatchedGroup: a group that torch's C++ hooks watch. cpp_backend.py says which way its calls go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from symcomm.ops import BY_TORCH_NAME
from symcomm.torch_backend import versions
from symcomm.torch_backend.cpp_backend import works_made
from symcomm.torch_backend.frames import named_for_cpp
from symcomm.torch_backend.group import TorchGroup


class WatchedGroup(TorchGroup):
    """A TorchGroup whose calls go through C++, where hooks see them."""


def _through_cpp(name: str) -> Callable[..., Any]:
    theirs = getattr(dist.ProcessGroup, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with works_made() as works:
            work = theirs(self, *args, **kwargs)
        return works[-1] if works else work

    return named_for_cpp(call, name)


for _name in versions.present(dist.ProcessGroup, BY_TORCH_NAME):
    setattr(WatchedGroup, _name, _through_cpp(_name))
