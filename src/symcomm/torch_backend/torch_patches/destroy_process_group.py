"""What: ``destroy_process_group`` also releases our stores that were passed to torch.
Why: stores that only the group's C++ half held should be freed with it.
Versions: all.
Undo: the function is torch's again.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.distributed import distributed_c10d as c10d

from symcomm.torch_backend.torch_patches.patch import replace_function
from symcomm.undo import Undo


def apply() -> Undo:
    known = c10d.destroy_process_group

    @functools.wraps(known)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            return known(*args, **kwargs)
        finally:
            if (stores := sys.modules.get("symcomm.torch_backend.stores")) is not None:
                stores.take_back()

    return replace_function("destroy_process_group", destroy_process_group)
