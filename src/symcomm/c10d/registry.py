"""Groups by name, works by tensor, and a few process-wide settings.

PyTorch and Symcomm share one of each: PyTorch's C++ code reads them (functional collectives find groups by name and
wait for works by tensor). Our groups and works are taken as they are. Settings that an older PyTorch lacks are not here
either.
"""

from __future__ import annotations

import torch._C._distributed_c10d as torch_c10d

from symcomm.torch_backend.versions import present

SHARED = (
    "_allow_inflight_collective_as_graph_input", "_current_process_group", "_get_comm_profiling_name",
    "_get_work_registry_size", "_is_process_group_registered", "_register_process_group", "_register_work",
    "_resolve_process_group", "_set_allow_inflight_collective_as_graph_input", "_set_comm_profiling_name",
    "_set_global_rank", "_set_process_group", "_set_thread_isolation_mode", "_unregister_all_process_groups",
    "_unregister_process_group",
)  # fmt: skip


def _is_process_group_registered(group_name: str) -> bool:
    """Whether a group of that name is known. PyTorch has it since 2.15. Raises: nothing."""
    try:
        torch_c10d._resolve_process_group(group_name)
    except RuntimeError:
        return False
    return True


_comm_profiling_name = ""


def _get_comm_profiling_name() -> str:
    """What ``_set_comm_profiling_name`` was last given. PyTorch has both since 2.12. Raises: nothing."""
    return _comm_profiling_name


def _set_comm_profiling_name(name: str) -> None:
    """Keep ``name`` for ``_get_comm_profiling_name``. Raises: nothing."""
    global _comm_profiling_name
    _comm_profiling_name = name


_OLDER = {
    "_get_comm_profiling_name": _get_comm_profiling_name,
    "_is_process_group_registered": _is_process_group_registered,
    "_set_comm_profiling_name": _set_comm_profiling_name,
}
shared = _OLDER | present(torch_c10d, SHARED)
