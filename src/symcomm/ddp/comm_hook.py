"""Communication hooks, which replace the plain all-reduce of a bucket.

A hook is anything with ``run_hook(bucket) -> Future`` and ``parse_hook_result(value) -> Tensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.arguments import reducer_of
from symcomm.ddp.bucket import GradBucket
from symcomm.errors import wrong_type
from symcomm.types import Numbered


class BuiltinCommHookType(Numbered):
    """Hooks that come with the reducer."""

    ALLREDUCE = 1
    FP16_COMPRESS = 2


class CommHook:
    """The interface; ``parse_hook_result`` takes what the future of ``run_hook`` holds.

    ``callbacks_only_compute``: no callback of the hook's futures starts a collective, so buckets need not take turns.

    Raises: CallerError from a ``run_hook`` that a subclass does not define.
    """

    callbacks_only_compute = False

    def run_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        raise errors.CallerError(f"{type(self).__name__}.run_hook: a communication hook must define it.")

    def parse_hook_result(self, result: Any) -> torch.Tensor:
        """The tensor in ``result``. Futures of works hold it in a list."""
        return result[0] if isinstance(result, (list, tuple)) else result

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Any]:
        """For PyTorch's Reducer, which calls hooks as functions."""
        return self.run_hook(bucket).then(lambda ended: self.parse_hook_result(ended.value()))


class AllReduceHook(CommHook):
    """The average over all ranks."""

    callbacks_only_compute = True

    def __init__(self, process_group: Any):
        self.process_group = process_group

    def run_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        buffer = bucket.buffer().div_(self.process_group.size())
        return self.process_group.allreduce([buffer]).get_future()


class Fp16CompressHook(AllReduceHook):
    """The average over all ranks, sent as 16-bit floats."""

    def run_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        buffer = bucket.buffer()
        compressed = buffer.to(torch.float16).div_(self.process_group.size())
        future = self.process_group.allreduce([compressed]).get_future()
        return future.then(lambda ended: buffer.copy_(self.parse_hook_result(ended.wait())))


# torch's hooks that are known to start no collective in a callback.
_DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_ONLY_COMPUTE = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class PythonHook(CommHook):
    """A hook that is a function of a state and a bucket."""

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any]):
        self.state = state
        self.hook = hook
        is_known = getattr(hook, "__module__", "") == _DEFAULT_HOOKS and self._name() in _ONLY_COMPUTE
        self.callbacks_only_compute = is_known or getattr(hook, "callbacks_only_compute", False)

    def _name(self) -> str:
        return getattr(self.hook, "__qualname__", type(self.hook).__name__)

    def run_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise wrong_type(
                f"DDP communication hook {self._name()}", "its result", future, "a future",
                f"the callback must return a torch.futures.Future object, but got {type(future).__name__}",
            )  # fmt: skip
        return future

    def parse_hook_result(self, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise wrong_type(
                f"DDP communication hook {self._name()}", "the value of its future", result, "a tensor",
                "end the hook with .then(lambda fut: fut.value()[0]) where the future holds a list",
            )  # fmt: skip
        return result


_BUILTIN = {BuiltinCommHookType.ALLREDUCE: AllReduceHook, BuiltinCommHookType.FP16_COMPRESS: Fp16CompressHook}


def register_comm_hook(reducer: Any, state: object, comm_hook: Any) -> None:
    """Let ``comm_hook(state, bucket)`` reduce buckets; it may also be a CommHook, with ``state`` None.

    Raises: WrongTypeError; CallerError for a second hook."""
    if not isinstance(comm_hook, CommHook):
        if not callable(comm_hook):
            raise wrong_type("_register_comm_hook", "comm_hook", comm_hook, "a function of a state and a bucket")
        comm_hook = PythonHook(state, comm_hook)
    reducer_of("_register_comm_hook", reducer).set_hook(comm_hook, "register_comm_hook or register_builtin_comm_hook")


def register_builtin_comm_hook(reducer: Any, comm_hook_type: Any) -> None:
    """Let one of the built-in hooks reduce buckets.

    Raises: WrongTypeError; CallerError for a second hook."""
    reducer_of("_register_builtin_comm_hook", reducer)
    for kind, make in _BUILTIN.items():
        if kind == comm_hook_type:
            reducer.set_hook(make(reducer.process_group), "register_builtin_comm_hook or register_comm_hook")
            return
    names = " or ".join(str(kind) for kind in _BUILTIN)
    raise wrong_type("_register_builtin_comm_hook", "comm_hook_type", comm_hook_type, names)
