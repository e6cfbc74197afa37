"""What: a buffer hook of DistributedDataParallel does not raise the versions of the buffers that it overwrites.
Why: by default such a hook runs between forward and backward, and its all_reduces end during backward. By then autograd
has saved the running statistics of batch norms, although backward needs them in evaluation only. It would refuse to go
on, since our all_reduces raise versions; torch's do not.
Versions: all.
Undo: the method is torch's again.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from symcomm.undo import Undo, replace


def apply() -> Undo:
    known = DistributedDataParallel._sync_module_buffers

    @functools.wraps(known)
    def sync(module: Any, authoritative_rank: int) -> None:
        core = sys.modules.get("symcomm._core")
        if core is None or not hasattr(module, "buffer_hook"):
            return known(module, authoritative_rank)
        before = core.native.keep_versions(True)
        try:
            return known(module, authoritative_rank)
        finally:
            core.native.keep_versions(before)

    return replace(DistributedDataParallel, "_sync_module_buffers", sync)
