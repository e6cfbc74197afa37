"""Names of PyTorch's that belong to other vendors' libraries: passed on where this build of PyTorch has them.

Otherwise a name stands for an object that, when used, says which library it needs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm import errors
from symcomm.c10d.enums import named
from symcomm.torch_backend.versions import present

_NCCL = "NVIDIA's NCCL"
GROUPS = {
    "ProcessGroupNCCL": _NCCL,
    "ProcessGroupNCCL2": _NCCL,
    "ProcessGroupNCCLLazy": _NCCL,
    "NCCLXStub": "Meta's NCCLX",
    "ProcessGroupGloo": "Gloo",
    "ProcessGroupMPI": "MPI",
    "ProcessGroupUCC": "UCC",
    "ProcessGroupXCCL": "Intel's oneCCL",
}
FUNCTIONS = {
    "_get_intra_node_comm_usage_counter": "CUDA",
    "_hash_tensors": "CUDA",
    "_nvshmemx_cumodule_init": "NVIDIA's NVSHMEM",
    "_register_external_nccl_comm": _NCCL,
    "_unregister_external_nccl_comm": _NCCL,
}


def _refusal(name: str, vendor: str) -> errors.CallerError:
    return errors.CallerError(
        f"{name} belongs to {vendor}, which this build of PyTorch ({torch.__version__}) does not have; install one "
        "that has it, or use symcomm's own groups."
    )


def _absent_group(name: str, vendor: str) -> type:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise _refusal(name, vendor)

    text = f"A backend of {vendor}, not in this build of PyTorch. Raises: CallerError."
    return type(name, (), {"__init__": refuse, "__doc__": text})


def _absent_function(name: str, vendor: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise _refusal(name, vendor)

    return named(refuse, name, f"A function of {vendor}, not in this build of PyTorch. Raises: CallerError.")


def _is_nvshmem_available() -> bool:
    """False, where PyTorch has no such function. Raises: nothing."""
    return False


def vendors() -> dict[str, Any]:
    """Each name with PyTorch's own object, or with a stand-in."""
    here: dict[str, Any] = {
        **{name: _absent_group(name, vendor) for name, vendor in GROUPS.items()},
        **{name: _absent_function(name, vendor) for name, vendor in FUNCTIONS.items()},
        "_is_nvshmem_available": _is_nvshmem_available,
        "_DEFAULT_PG_NCCL_TIMEOUT": timedelta(minutes=10),
    }
    newer = [name for name in dir(torch_c10d) if name.startswith("ProcessGroup") and name != "ProcessGroup"]
    return here | present(torch_c10d, (*here, *newer))
