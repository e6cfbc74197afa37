"""What differs between the versions of torch that Symcomm runs on. Nothing else in the package asks for a version.

Builds differ as well as versions, so each fact is found by asking the running torch, not by its version number. Two
packages are below this one and cannot import it: ``group`` (buffers, arguments) and ``symm_mem`` (symmetrize) ask the
tensor or storage that they get. ``device`` asks torch itself, since it also runs on builds without
``torch.distributed``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# A Python class can be a real Backend since 2.14; before, Backend had no constructor that Python could call.
HAS_PYTHON_BACKENDS = "rank" in (torch_c10d.Backend.__init__.__doc__ or "")

# A build for CUDA has kernels for it, whether there is a GPU or not.
HAS_CUDA = torch.version.cuda is not None

# split_group numbers ranks in the order of the list, not by size, and gives others NON_GROUP_MEMBER (since 2.15).
SPLIT_KEEPS_ORDER = "order of ranks within each split is preserved" in " ".join(
    (c10d.split_group.__doc__ or "").split()
)

# Whether graphs may be given tensors that a collective still writes; asked at each call.
ACCEPTS_IN_FLIGHT_INPUTS: Callable[[], bool] = vars(torch_c10d)["_allow_inflight_collective_as_graph_input"]

# dist.all_gather_into_tensor has another name since 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def present(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """The ``names`` that a module or class of this torch has. Some came and some went between versions."""
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def functional_operators(names: Iterable[str]) -> list[str]:
    """The ``names`` that are functional collectives here: all versions have all_gather_into_tensor_out, and
    batch_p2p_ops came with 2.13."""
    return list(present(torch.ops._c10d_functional, names))


def fake_options() -> Any:
    """The class of options of torch's FakeProcessGroup, or None."""
    return getattr(torch_c10d.FakeProcessGroup, "Options", None)


def hook_classes() -> dict[str, Any]:
    """torch's classes of hooks that watch groups (since 2.15)."""
    return present(torch_c10d, ("FlightRecorderHook", "HealthCheckHook", "HookOpName", "NanCheckHook"))


def method_of_group(group: Any, name: str, older: str) -> Callable[..., Any] | None:
    """A method of one of torch's own groups, called ``older`` before 2.13; None where this version lacks it."""
    return getattr(group, name, None) or getattr(group, older, None)


def allocates_comm_buffers() -> bool:
    """Whether Inductor's allocation lines support comm buffers (since 2.12). Before, these had a separate line, and
    only values without fixed strides could become one."""
    from torch._inductor.codegen.wrapper import AllocateLine

    return hasattr(AllocateLine, "_codegen_comm_buffer")


def dist2_factories() -> dict[str, Callable[..., Any]]:
    """How torch.distributed._dist2 makes groups, by backend; empty since 2.14, which lacks it."""
    try:
        from torch.distributed import _dist2
    except ImportError:
        return {}
    return _dist2._BACKENDS


def arguments_unknown_to(function: Callable[..., Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, with defaults, that newer versions take and this version's function does not."""
    known = inspect.signature(function).parameters
    return {name: default for name, default in newer.items() if name not in known}


def looked_up_by_cpp(name: str, older: str) -> str:
    """The name under which C++ looks for a Python group's method: ``older`` before 2.13."""
    return name if hasattr(dist.ProcessGroup, "all_gather_single") else older


def op_type(name: str, otherwise: str) -> Any:
    """A member of torch's OpType; ``otherwise`` in versions that lack it."""
    kinds = vars(torch_c10d)["OpType"]  # torch's own stubs do not list it
    return getattr(kinds, name, None) or getattr(kinds, otherwise)


_warned: list[str] = []


def warn_if_untested() -> None:
    """Warn once per process that this version of torch is untested."""
    from symcomm.torch_versions import NEWEST, release

    if release(torch.__version__) > release(NEWEST) and not _warned:
        _warned.append(torch.__version__)
        warnings.warn(
            f"symcomm was tested with torch up to {NEWEST}; this is {torch.__version__}. `symcomm doctor` tries it.",
            stacklevel=3,
        )
