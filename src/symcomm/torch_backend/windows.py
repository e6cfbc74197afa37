"""Windows of torch.distributed groups: ours, with works and attributes as torch wants them."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm.torch_backend.work import TorchWork, done
from symcomm.windows.window import Window, WindowAttr, new_window


class TorchWindow(Window):
    """Made by ``TorchGroup.new_window()``. torch 2.15's own Window has no constructor that a subclass could call."""

    _done = done

    def _dressed(self, call: str, work: Any, seconds: float) -> Any:
        return TorchWork(work, [], call, seconds)

    def get_attr(self, peer_rank: int) -> Any:
        """torch's WindowAttr, or ours before torch 2.15."""
        attr = super().get_attr(peer_rank)
        theirs: Any = vars(torch_c10d).get("WindowAttr", WindowAttr)
        if theirs is WindowAttr:
            return attr
        made = theirs()
        made.access_type = getattr(vars(torch_c10d)["WindowAccessType"], attr.access_type.name)
        return made


def new_torch_window(core: Any, tensor: Any = None) -> Window:
    """A window of torch's view of the group ``core``."""
    return new_window(core, tensor, TorchWindow)
