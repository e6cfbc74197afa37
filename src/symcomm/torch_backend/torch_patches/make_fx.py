"""What: ``dist.all_reduce`` and the like under ``make_fx`` become nodes of the graph, as with torch's own groups.
Why: a Python group would just run them, and the graph would lack them.
Versions: all.
Undo: methods are no longer swapped during tracing; the operators' kernels are torch's again.

::

    make_fx(f)      f calls group.allreduce      a Python group would just run it, and the graph would lack it
    while tracing   group.allreduce = ProcessGroup.allreduce, which calls torch.ops.c10d.allreduce_, which is traced
    the operator    finally runs on real tensors: our kernel calls the group's own method

The methods are swapped only during tracing (see method_swap.py); the operators get kernels when the first call
is traced, so programs that never trace pay nothing for this.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from symcomm.ops import BY_TORCH_NAME, OPERATORS, OPS
from symcomm.torch_backend import versions
from symcomm.torch_backend.frames import named_for_cpp
from symcomm.torch_backend.torch_patches import method_swap
from symcomm.torch_backend.work import done
from symcomm.undo import Undo, all_of

# The methods that are traced, and the kind of their options
_OPTIONS = {op.torch: getattr(c10d, op.options) for op in OPS if op.plan and op.torch in OPERATORS}
_lock = threading.Lock()
_PREMUL_SUM = int(torch.distributed.ReduceOp.RedOpType.PREMUL_SUM)
_libraries: list[Any] = []  # kernels live as long as it does


def apply(proxy_tensor: Any, group_class: type) -> Undo:
    """Trace calls of this class of groups from now on. ``proxy_tensor`` is torch's tracing module."""
    operations = {method_swap.own(group_class, method) for method in _OPTIONS}

    def traced(name: str, own: Callable[..., Any], now: Callable[..., Any]) -> Callable[..., Any] | None:
        """Operations by all names that this version of torch calls them by."""
        is_called = own in operations and versions.present(torch.distributed.ProcessGroup, [name])
        return _dispatched(name, own, now) if is_called else None

    swapped = method_swap.wrap_inside(proxy_tensor.ProxyTorchDispatchMode, group_class, traced)
    return all_of(_remove_kernels, swapped)


def _dispatched(method: str, own: Callable[..., Any], now: Callable[..., Any]) -> Callable[..., Any]:
    theirs = getattr(torch.distributed.ProcessGroup, method)
    if own.__name__ == "all_to_all_single":
        theirs = _all_to_all_single

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # another thread's tracing does not concern this call
            return now(self, *args, **kwargs)
        _add_kernels()
        return theirs(self, *args, **kwargs)

    return named_for_cpp(call, versions.looked_up_by_cpp(own.__name__, method))


def _all_to_all_single(
    group: Any, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
) -> Any:
    """C++ looks this method up under two names, and would call back a method of either."""
    torch.ops.c10d.alltoall_base_(output, input, group.boxed(), list(output_splits), list(input_splits), False)
    return done


def _add_kernels() -> None:
    with _lock:
        if _libraries:
            return
        library = torch.library.Library("c10d", "IMPL")
        _libraries.append(library)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for method, options in _OPTIONS.items():
                name = OPERATORS[method]
                known = torch.library.get_kernel(f"c10d::{name}", "CPU")
                schema = getattr(torch.ops.c10d, name).default._schema
                library.impl(name, _kernel(schema, known, method, options), "CPU", with_keyset=True)


def _remove_kernels() -> None:
    with _lock:
        while _libraries:
            _libraries.pop()._destroy()


def _kernel(schema: Any, known: Any, method: str, kind: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema.arguments]
    place = names.index("process_group")

    def kernel(keys: Any, *args: Any) -> Any:
        group: Any = torch.distributed.ProcessGroup.unbox(args[place])
        given = dict(zip(names, args, strict=False))
        splits = [list(given[name]) for name in ("output_split_sizes", "input_split_sizes") if name in given]
        if getattr(group, "is_symcomm", False):
            method_swap.own(type(group), method)(group, *args[:place], *splits, _options(kind, given, False))
            work = c10d.FakeWork()  # a work that has ended
        elif (theirs := _of_backend(group, method, given)) is not None:
            work = theirs(
                *args[:place], *splits, _options(kind, given, given.get("async_op", given.get("asyncOp", True)))
            )
        else:
            return known.call_boxed(keys, *args)
        return (args[0], work.boxed()) if len(schema.returns) == 2 else work.boxed()

    return kernel


def _of_backend(group: Any, method: str, given: dict[str, Any]) -> Callable[..., Any] | None:
    """For a group that is not ours: the function that the operator's own kernel would call.

    We do not call that kernel: from Python it runs with the interpreter lock held, and Gloo's thread may wait for that
    lock while it holds one that the call needs."""
    if "reduce_op" in given and given["reduce_op"].op() == _PREMUL_SUM:  # we do not get its factor
        return None
    if given.get("sparse_indices") is not None:
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group in Python, as ours is
        return None
    return getattr(backend, BY_TORCH_NAME[method].backend_name, None)


def _options(kind: Any, given: dict[str, Any], is_async: bool) -> Any:
    options = kind()
    options.asyncOp = is_async
    if "reduce_op" in given:
        options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.RedOpType(given["reduce_op"].op()))
    if "root_rank" in given:
        options.rootRank = given["root_rank"]
    if "root_tensor" in given:
        options.rootTensor = given["root_tensor"]
    if given.get("timeout", -1) > 0:
        options.timeout = timedelta(milliseconds=given["timeout"])
    return options
