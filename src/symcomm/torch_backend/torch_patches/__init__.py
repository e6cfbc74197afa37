"""Every change that Symcomm makes to torch's behaviour, one file each. A file says what it changes, why, for which
versions of torch, and how to undo it; its ``apply()`` returns the function that undoes it.

when Symcomm is registered, while torch is imported
    store_errors.py           our stores' exceptions are torch's, too
    reduce_op_options.py      torch's options take our reduce operations
    prefix_store.py           torch's PrefixStore takes our stores
    init_process_group.py     waits for the previous group's end, and tries again if its store goes away
    destroy_process_group.py  releases stores that only the group's C++ half held
    buffer_hook.py            autograd accepts that DDP's buffer hook overwrites buffers
    reducer_join.py           torch's Reducer keeps the work that counts joined ranks
    monitored_barrier.py      asks our groups
    pg_timeout.py             asks our groups
    split_group.py            asks our groups
    shrink_group.py           asks our groups
    debug_wrapper.py          no wrapper around our groups with TORCH_DISTRIBUTED_DEBUG=DETAIL
    flight_recorder_hook.py   no hook of torch's recorder on our groups
    dist2.py                  torch.distributed._dist2 makes our groups
    cpu_allocator.py          CPU tensors lie in the arena; only with SYMCOMM_HEAP
    replace_gloo.py           groups asked of Gloo are ours; only with SYMCOMM_REPLACE=gloo
when the first group is made
    functional_collectives.py operators that torch's C++ cannot run on Python groups
    flight_recorder_dumps.py  torch's dumps show our operations
    health_check_hook.py      torch's health check also attaches ours
    cpp_hooks.py              groups notice that a hook of C++ was attached
    when_imported.py          waits until the compiler's modules and FSDP2's are imported, for make_fx.py,
                              comm_debug_mode.py, dynamo_rules.py, fsdp_buffers.py and our lowerings (symcomm.compile)

method_swap.py, patch.py and ``symcomm.undo`` are tools that these use. ``symm_mem/install.py`` and
``compile/install.py`` change torch in the same way, when they are asked to. This package is loaded while torch is being
imported, so it imports only what it needs at once.
"""

from __future__ import annotations

import importlib
import threading

from symcomm.undo import Undo

__all__ = ["AT_FIRST_GROUP", "AT_IMPORT", "apply", "applied", "undo_all"]

AT_IMPORT = (
    "store_errors", "reduce_op_options", "prefix_store", "init_process_group", "destroy_process_group", "buffer_hook",
    "reducer_join", "monitored_barrier", "pg_timeout", "split_group", "shrink_group", "debug_wrapper",
    "flight_recorder_hook", "dist2",
)  # fmt: skip
AT_FIRST_GROUP = (
    "functional_collectives", "flight_recorder_dumps", "health_check_hook", "cpp_hooks", "when_imported",
)  # fmt: skip

_undo: dict[str, Undo] = {}
_lock = threading.RLock()


def apply(*names: str) -> None:
    """Apply the named patches, unless they are applied."""
    if all(name in _undo for name in names):
        return
    with _lock:
        for name in names:
            if name not in _undo:
                _undo[name] = importlib.import_module(f"{__name__}.{name}").apply()


def applied() -> list[str]:
    return list(_undo)


def undo_all() -> None:
    """Undo all patches, in reverse order."""
    with _lock:
        while _undo:
            _undo.popitem()[1]()
