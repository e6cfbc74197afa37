"""What differs between the versions of torch that Symcomm runs on. Nothing else in the package asks for a version.

Builds differ as well as versions, so each fact is asked of the torch that is running, and not read from its number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm.torch_versions import NEWEST, release

__all__ = [
    "ACCEPTS_IN_FLIGHT_INPUTS",
    "CAN_REPLACE_KERNELS",
    "SPLIT_KEEPS_ORDER",
    "HAS_PYTHON_BACKENDS",
    "all_gather_single",
    "looked_up_by_cpp",
    "op_type",
    "warn_if_untested",
]


# A Python class can be a real Backend (since 2.15); before that Backend has no constructor that Python could call.
HAS_PYTHON_BACKENDS = "rank" in (torch_c10d.Backend.__init__.__doc__ or "")

# torch.library can wrap the kernel that an operator has (since 2.11).
CAN_REPLACE_KERNELS = hasattr(torch.library, "get_kernel")

# split_group numbers ranks in the order of the list, and not by size, and gives others NON_GROUP_MEMBER (since 2.15).
SPLIT_KEEPS_ORDER = "order of ranks within each split is preserved" in " ".join(
    (c10d.split_group.__doc__ or "").split()
)

# Whether graphs may be given tensors that a collective still writes; asked at each call (since 2.12).
ACCEPTS_IN_FLIGHT_INPUTS: Callable[[], bool] = getattr(
    torch_c10d, "_allow_inflight_collective_as_graph_input", lambda: False
)

# dist.all_gather_into_tensor has another name since 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def looked_up_by_cpp(name: str, older: str) -> str:
    """The name under which C++ looks for a Python group's method: ``older`` before 2.13."""
    return name if hasattr(dist.ProcessGroup, "all_gather_single") else older


def op_type(name: str, otherwise: str) -> Any:
    """A member of torch's OpType, or another one in versions that lack it."""
    kinds = vars(torch_c10d)["OpType"]  # which torch's own stubs do not list
    return getattr(kinds, name, None) or getattr(kinds, otherwise)


_warned: list[str] = []


def warn_if_untested() -> None:
    """Say once a process that nobody has tried this version of torch yet."""
    if release(torch.__version__) > release(NEWEST) and not _warned:
        _warned.append(torch.__version__)
        warnings.warn(
            f"symcomm was tested with torch up to {NEWEST}; this is {torch.__version__}. `symcomm doctor` tries it.",
            stacklevel=3,
        )
