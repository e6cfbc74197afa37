"""DistributedDataParallel: PyTorch's, with our reducer inside.

Everything a user sees (no_sync, join, static graph, mixed precision, hooks, ignored parameters, pickling) is PyTorch's
own class. This package replaces the parts that talk to other ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from symcomm.ddp.assign import compute_bucket_assignment_by_size
from symcomm.ddp.broadcast import broadcast_coalesced
from symcomm.ddp.bucket import GradBucket
from symcomm.ddp.comm_hook import CommHook, register_builtin_comm_hook, register_comm_hook
from symcomm.ddp.logger import Logger
from symcomm.ddp.reducer import FIRST_BUCKET_BYTES, Reducer
from symcomm.ddp.shards import REFUSED, ShardedReducer, StepBuffers, check_arguments, check_group, check_module, refuse
from symcomm.ddp.verify import verify_params
from symcomm.errors import CallerError, bad_argument
from symcomm.torch_backend.versions import arguments_unknown_to

_SIGNATURE = inspect.signature(TorchDDP.__init__)
# Arguments that this version of PyTorch does not know. Ours takes them all the same.
_NEWER = arguments_unknown_to(
    TorchDDP.__init__,
    {
        "skip_all_reduce_unused_params": False,
        "bucket_cap_mb_list": None,
        "batched_grad_copy": False,
        "forward_sync_buffers": None,
    },
)
_MIB = 1 << 20


class DistributedDataParallel(TorchDDP):
    """Takes every argument of PyTorch's class (those of its newest version, whichever is installed).

    ``logical_shards``: how many micro-batches make a step, wherever they run: 1, 2, 4, ... ranks give the same bits.
    Each rank runs those that ``shards()`` yields. With ``spare_ranks``, there may be more ranks than shards can be
    split over; some then have none. See docs/how-to/data-parallel.md.

    One default differs: ``gradient_as_bucket_view=True``, since gradients that stay in their buckets save one copy of
    the model's size in time and memory. Pass False for gradients in memory of their own.

    Raises: BadArgumentError; CollectiveMismatchError naming the first parameter that differs between ranks; CallerError
    naming parameters without gradients; what a group's all_reduce raises.
    """

    logical_shards = 0  # none
    spare_ranks = False
    reducer: Any

    def __init__(
        self, module: torch.nn.Module, *args: Any, logical_shards: int = 0, spare_ranks: bool = False, **kwargs: Any
    ):
        newer = {name: kwargs.pop(name, default) for name, default in _NEWER.items()}
        given = _SIGNATURE.bind(self, module, *args, **kwargs).arguments
        given.pop("self")
        group = given.get("process_group")
        if group is not None and not callable(getattr(group, "rank", None)):
            raise bad_argument(
                "DistributedDataParallel", "process_group", group, "a group of torch.distributed",
                'call init_process_group("symcomm") and leave it out, or pass what dist.new_group() returns',
            )  # fmt: skip
        given.setdefault("gradient_as_bucket_view", True)
        sync_buffers = given.get("forward_sync_buffers", newer.get("forward_sync_buffers"))
        if newer.pop("forward_sync_buffers", None) is not None:
            given["broadcast_buffers"] = sync_buffers
        if (caps := newer.pop("bucket_cap_mb_list", None)) is not None:
            newer["bucket_bytes_cap_list"] = [int(cap * _MIB) for cap in caps]
            given["bucket_cap_mb"] = max(caps)
        if logical_shards:
            check_arguments({**given, **newer})
            newer.update(logical_shards=logical_shards, spare_ranks=spare_ranks)
        elif spare_ranks:
            raise bad_argument("DistributedDataParallel", "spare_ranks", spare_ranks, "left out without logical_shards")
        self.__dict__.update(newer)
        # Instead of PyTorch's constructor, _build_params_for_reducer verifies and broadcasts.
        if given.pop("init_sync", True):
            broadcast = given.get("broadcast_buffers")
            self.__dict__["_first_sync"] = True if sync_buffers is not None or broadcast is None else bool(broadcast)
        super().__init__(**given, init_sync=False)

    # --- construction -----------------------------------------------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        if self.logical_shards:
            check_module(self.module, self._use_python_reducer)
            check_group(self.process_group, parameters, self.logical_shards, self.spare_ranks)
        buffers_too = self.__dict__.pop("_first_sync", None)
        if buffers_too is not None:
            names = self._build_debug_param_to_name_mapping(parameters)
            verify_params(self.process_group, parameters, names)
            self._sync_states(0, buffers_too)
        return parameters, expect_sparse

    def _sync_states(self, source: int, buffers_too: bool) -> None:
        """Copy the parameters of rank ``source`` to all ranks."""
        ignored = self.parameters_to_ignore
        states = [p.detach() for name, p in self.module.named_parameters() if name not in ignored]
        if buffers_too:
            states += [b.detach() for name, b in self.module.named_buffers() if name not in ignored]
        broadcast_coalesced(self.process_group, states, self.broadcast_bucket_size, source)

    def _bucket_limits(self, static_graph: bool) -> tuple[list[int], list[int], int]:
        """(limits of the buckets to start with, limits to rebuild with, limit of the first bucket then)."""
        caps = list(self.__dict__.get("bucket_bytes_cap_list", ()))
        first = FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        if caps:
            return caps, caps, self.bucket_bytes_cap
        if static_graph or not self.find_unused_parameters:
            # One bucket, until we know in which order gradients come.
            return [sys.maxsize], [], first
        return ([first, self.bucket_bytes_cap] if first < self.bucket_bytes_cap else [first]), [], first

    def _ddp_init_helper(
        self, parameters: list[Any], expect_sparse_gradient: list[bool], param_to_name_mapping: Any, static_graph: bool
    ) -> None:
        """PyTorch calls this to build the reducer and the logger."""
        limits, limits_later, first = self._bucket_limits(static_graph)
        indices, sizes = compute_bucket_assignment_by_size(parameters, limits, expect_sparse_gradient)
        if self.mixed_precision is not None:
            for i, parameter in enumerate(parameters):
                parameter._idx = i
        kind: Any = Reducer
        if self.logical_shards:
            kind = partial(ShardedReducer, shards=self.logical_shards, spare_ranks=self.spare_ranks)
        self.reducer = kind(
            parameters,
            indices[::-1],  # gradients come roughly in the reverse order of definition
            sizes[::-1],
            self.process_group,
            expect_sparse_gradient,
            self.bucket_bytes_cap,
            self.find_unused_parameters,
            self.gradient_as_bucket_view,
            param_to_name_mapping,
            first,
            getattr(self, "skip_all_reduce_unused_params", False),
            self._use_python_reducer,
            limits_later,
            getattr(self, "batched_grad_copy", False),
        )
        if self.logical_shards and self.broadcast_buffers:
            self.reducer.step_buffers = StepBuffers(self)
        self.logger: Any = Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)

    # --- logical shards ---------------------------------------------------------------------------------------

    def shards(self) -> Iterator[int]:
        """This rank's logical shards, one after the other. Run one forward and backward pass of each; after the last,
        gradients are the average over all shards of all ranks. A rank without shards receives them here."""
        if not self.logical_shards:
            raise CallerError("DistributedDataParallel.shards: pass logical_shards=... to the constructor first.")
        return self.reducer.run_step()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        moved = super()._pre_forward(*inputs, **kwargs)
        if self.logical_shards and self.reducer.step_buffers is not None and torch.is_grad_enabled():
            self.reducer.step_buffers.begin(self.reducer.number)
        return moved

    def will_sync_module_buffers(self) -> bool:
        """With logical shards, buffers are synchronized at the end of a step."""
        return not self.logical_shards and super().will_sync_module_buffers()

    def no_sync(self) -> Any:
        """As PyTorch's: within it, gradients only add up."""
        if self.logical_shards:
            raise refuse("no_sync", "a step's gradients are reduced with the last of its shards anyway")
        return super().no_sync()

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's: within it, ranks may run out of input."""
        if self.logical_shards:
            raise refuse("join", "every step has all its shards")
        return super().join(*args, **kwargs)

    def join_hook(self, **kwargs: Any) -> Any:
        """What ``torch.distributed.algorithms.Join`` asks for."""
        if self.logical_shards:
            raise refuse("join", "every step has all its shards")
        return super().join_hook(**kwargs)

    def _set_static_graph(self) -> None:
        if self.logical_shards:
            raise refuse("_set_static_graph", REFUSED["static_graph"])
        super()._set_static_graph()

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        if self.logical_shards:
            raise refuse("_register_buffer_comm_hook", "buffers are those of shard 0")
        super()._register_buffer_comm_hook(*args, **kwargs)

    # --- talking to other ranks -------------------------------------------------------------------------------

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Any], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(self.process_group, tensors, buffer_size, authoritative_rank)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """Accept hooks for PyTorch's class, and those annotated with our GradBucket. Without NCCL, PyTorch refuses its
        bf16 hooks by name, although Gloo and we can reduce bfloat16."""
        bucket = inspect.signature(hook).parameters.get("bucket") if callable(hook) else None
        if bucket is not None and bucket.annotation in (GradBucket, "GradBucket"):
            return
        if getattr(hook, "__name__", "") in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
            return
        super()._check_comm_hook(hook)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce buckets, before the first backward pass."""
        if self.logical_shards:
            raise refuse("register_comm_hook", "a hook chooses its own order of additions")
        if not isinstance(hook, CommHook):
            self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._comm_hooks.append((hook, state))
        register_comm_hook(self.reducer, state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if self.logical_shards:
            raise refuse("_register_builtin_comm_hook", "a hook chooses its own order of additions")
        self.logger._set_comm_hook_name(str(comm_hook_type))
        register_builtin_comm_hook(self.reducer, comm_hook_type)
