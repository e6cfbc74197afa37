"""Reducer: averages gradients over ranks while backward is still computing others.

The life of an iteration:

1. ``prepare_for_forward``, ``_rebuild_buckets`` (once, after the first backward), ``prepare_for_backward``
2. autograd calls ``_gradient_came(index)`` for each parameter: its gradient goes into its bucket
3. a full bucket is reduced, in the order of buckets, which is the same on all ranks
4. after the last one, autograd's final callback waits for all buckets and hands gradients back: ``_finalize``

With a static graph the first backward only counts gradients; ``_delay_all_reduce`` then reduces everything at its end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.ddp.arguments import bucket_of, buckets_of, check_leaves, group_of, logger_of, names_of, outputs_of
from symcomm.ddp.assign import compute_bucket_assignment_by_size
from symcomm.ddp.autograd_hooks import AutogradHooks
from symcomm.ddp.bucket import Bucket, GradBucket, is_alias
from symcomm.ddp.comm_hook import CommHook
from symcomm.ddp.faults import Faults
from symcomm.ddp.fill import Filler
from symcomm.ddp.hook_order import HookOrder
from symcomm.ddp.timeline import ALWAYS_SAMPLED, Clock, IterationTimes, measure, not_compiled, now
from symcomm.ddp.unused import marked_twice, search_unused, unfinished
from symcomm.torch_backend import values

log = logging.getLogger(__name__)
FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first reduction starts early
BUCKET_BYTES = 25 << 20


class Reducer:
    """See the module's text. Arguments and methods are those of PyTorch's.

    Raises: BadArgumentError, CallerError; what a group's all_reduce raises."""

    def __init__(
        self,
        params: Sequence[Any],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = BUCKET_BYTES,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Mapping[int, str] | None = None,
        first_bucket_bytes_cap: int = FIRST_BUCKET_BYTES,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,
    ):
        self.params = values.tensors("Reducer: params", params)
        self._sparse = values.flags("Reducer: expect_sparse_gradients", expect_sparse_gradients)
        self._sparse = self._sparse or [False] * len(self.params)
        buckets = buckets_of(bucket_indices, self.params, self._sparse)
        limits = values.sizes("Reducer: per_bucket_size_limits", per_bucket_size_limits)
        check_leaves(self.params)
        self.process_group = group_of("Reducer", process_group)
        self.bucket_bytes_cap = values.integer("Reducer: bucket_bytes_cap", bucket_bytes_cap)
        self.find_unused_parameters = values.flag("Reducer: find_unused_parameters", find_unused_parameters)
        self.gradient_as_bucket_view = values.flag("Reducer: gradient_as_bucket_view", gradient_as_bucket_view)
        self._faults = Faults(names_of(param_to_name_mapping))
        first = values.integer("Reducer: first_bucket_bytes_cap", first_bucket_bytes_cap)
        caps = values.ranks("Reducer: bucket_bytes_cap_list", bucket_bytes_cap_list)
        self._limits = caps or [first, self.bucket_bytes_cap]
        self._skips_unused = values.flag("Reducer: skip_all_reduce_unused_params", skip_all_reduce_unused_params)
        in_batches = values.flag("Reducer: batched_grad_copy", batched_grad_copy)
        self._filler = Filler(self._faults, self.gradient_as_bucket_view, in_batches)
        self._lock = threading.RLock()
        self._order = HookOrder(self._lock)
        self._hook: CommHook | None = None

        self._start_counting()
        self.has_rebuilt = False
        self._arrived: list[int] = []  # parameters, in the order in which buckets will be rebuilt
        self._restart_state()
        self.buckets: list[Bucket] = []
        self._build_buckets(buckets, limits)
        in_graph = values.flag("Reducer: use_python_reducer", use_python_reducer)
        self._hooks = AutogradHooks(self.params, self._gradient_came, left_out=in_graph)

    def _start_counting(self) -> None:
        """Forget all gradients and times."""
        self.clock = Clock()
        self.iterations = 0
        self._sample_rate = 100
        self._backward_stats = [0] * len(self.params)
        self._stats_start = 0

        self.static_graph = False
        self._backwards = 0  # how many began
        self._hook_counts = [0] * len(self.params)  # static graph: how often each gradient comes in a backward pass
        self._hooks_left: list[int] = []
        self._used = torch.zeros(len(self.params), dtype=torch.int32)
        self._used_anywhere = torch.zeros(len(self.params), dtype=torch.int32, device=self.params[0].device)
        self._graph_seems_static = True
        self._unused_before: list[int] | None = None
        self.unused: list[int] = []

    def _restart_state(self) -> None:
        """The state between two iterations."""
        self._expecting = False  # whether gradients are put into buckets
        self._unfinished = False  # gradients have come, but not all buckets are reduced and handed back
        self._in_backward = False
        self._unused_marked = False
        self._ready: set[int] = set()
        self.ready_order: list[int] = []
        self._next = 0  # bucket to reduce next
        self.buckets_reduced = 0
        self._divide_by = 0  # 0: not known yet
        self._join: tuple[Any, bool] | None = None
        self._used_work: Any = None
        self._used_known = False
        self._futures: list[Any] = []

    # --- buckets ----------------------------------------------------------------------------------------------

    def _build_buckets(self, bucket_indices: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        self.buckets = []
        self._places: dict[int, tuple[Bucket, int]] = {}
        for position, indices in enumerate(bucket_indices):
            limit = limits[position] if position < len(limits) else 0
            bucket = Bucket(indices, [self.params[i] for i in indices], self._sparse[indices[0]], limit)
            if not bucket.sparse:
                bucket.allocate(self.process_group, self._filler.mixed_dtype)
            self._places.update({index: (bucket, slot) for slot, index in enumerate(indices)})
            self.buckets.append(bucket)
        if self.gradient_as_bucket_view and self._filler.mixed_dtype is None:
            self._move_gradients()

    def _move_gradients(self) -> None:
        """Make gradients that exist already (accumulated, or in old buckets) views of the buckets."""
        with torch.no_grad():
            for bucket in self.buckets:
                for param, view in zip(bucket.params, bucket.views, strict=False):
                    grad = param.grad
                    if grad is not None and not is_alias(grad, view):
                        view.copy_(grad)
                        self._filler.set_grad(param, view)

    def _may_rebuild(self) -> bool:
        return (self.static_graph or not self.find_unused_parameters) and not self.has_rebuilt

    @not_compiled
    def _rebuild_buckets(self) -> bool:
        """Once, make buckets in the order in which rank 0's gradients came. Returns whether it did so now."""
        with self._lock:
            self._check_reducer_finalized()
            if not self._may_rebuild() or not self._arrived:
                return False
            if len(self._arrived) != len(self.params):
                raise errors.InternalError(
                    f"Reducer: {len(self._arrived)} gradients came, the model has {len(self.params)} parameters."
                )
            order, self._arrived = self._arrived, []
            last_is_small = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
            if last_is_small:
                order = order[::-1]
            tensors = [self.params[i] for i in order]
            buckets, limits = compute_bucket_assignment_by_size(
                tensors, self._limits, self._sparse, order, self._faults.logger()
            )
            if last_is_small:
                buckets, limits = buckets[::-1], limits[::-1]
            self.has_rebuilt = True
            self._build_buckets(*self._agree(buckets, limits))
            return True

    def _agree(self, buckets: list[list[int]], limits: list[int]) -> tuple[list[list[int]], list[int]]:
        """Rank 0's buckets: (indices, limits)."""
        most = len(self.params)
        row = [len(buckets), *map(len, buckets), *[0] * (most - len(buckets))]
        row += [index for bucket in buckets for index in bucket] + limits + [0] * (most - len(limits))
        tensor = torch.tensor(row, dtype=torch.int64, device=self.params[0].device)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.process_group.broadcast([tensor], options).wait()
        row = tensor.tolist()
        count, lengths, indices = row[0], row[1 : 1 + row[0]], iter(row[1 + most : 1 + 2 * most])
        return [[next(indices) for _ in range(n)] for n in lengths], row[1 + 2 * most : 1 + 2 * most + count]

    def _push_all_rebuilt_params(self) -> None:
        """For a rank without input: pretend that every gradient came, in the order of parameters."""
        if self._may_rebuild() and not self._arrived:
            self._arrived = list(range(len(self.params)))

    # --- an iteration -----------------------------------------------------------------------------------------

    @not_compiled
    def prepare_for_forward(self) -> None:
        self.iterations += 1
        self.clock.start()

    @not_compiled
    def prepare_for_backward(self, outputs: Any) -> None:
        """``outputs``: tensors of the forward pass. Parameters that no output leads to go unused."""
        outputs = outputs_of(outputs)
        with self._lock:
            self._order.end()  # of a backward pass that raised
            self.clock.backward_start = now()
            self._stats_start = time.monotonic_ns()
            self._expecting = True
            self.ready_order = []
            self._unused_marked = False
            self._ready.clear()
            self._next = self.buckets_reduced = 0
            for bucket in self.buckets:
                bucket.restart()
            if self.static_graph:
                self._hooks_left = list(self._hook_counts)
            elif self.find_unused_parameters:
                self._search_unused(outputs)

    def _search_unused(self, outputs: Sequence[Any]) -> None:
        self.unused = search_unused(outputs, self._hooks.nodes)
        if self.unused and dist.get_debug_level() == dist.DebugLevel.DETAIL:
            names = ", ".join(self._faults.name(i) for i in self.unused)
            log.info("rank %d: no output leads to %s", self.process_group.rank(), names)
        if self._graph_seems_static:
            if self.iterations > 1 and self.unused != self._unused_before:
                self._graph_seems_static = False
                if (logger := self._faults.logger()) is not None:
                    logger.graph_is_static(False)
            self._unused_before = self.unused

    def _counts_only(self) -> bool:
        return self.static_graph and self._backwards == 1

    def _autograd_hook(self, index: int) -> None:
        """PyTorch's class calls this with mixed precision: the gradient of parameter ``index`` has been accumulated."""
        call = "_autograd_hook"
        if not 0 <= (index := values.integer(call, index)) < len(self.params):
            raise errors.bad_argument(call, "index", index, f"from 0 to {len(self.params) - 1}")
        self._gradient_came(index)

    def _gradient_came(self, index: int) -> None:
        with self._lock:
            self._order.advance()
            if not self._in_backward:
                self._in_backward = True
                self._backwards += 1
            if self.static_graph or self.find_unused_parameters:
                # Hooks also run for undefined gradients, if the loss does not use an output.
                if self.params[index].grad is not None and (not self.static_graph or self._counts_only()):
                    self._used[index] = 1
                if self._counts_only():
                    self._hook_counts[index] += 1
                    return
            if not self._expecting:
                return  # no_sync: gradients only add up
            self.ready_order.append(index)
            if not self._unused_marked:
                self._unused_marked = True
                for unused in self.unused:
                    self._mark_ready(unused)
            if self.static_graph and not self._is_last_hook(index):
                return
            if self._may_rebuild():
                self._arrived.append(index)
            self._mark_ready(index)

    def _is_last_hook(self, index: int) -> bool:
        """Static graph: whether this gradient will not come again in this backward pass."""
        if self._hooks_left[index] == 0:
            raise self._faults.fault(
                f"Your training graph has changed in this iteration: a gradient came for {self._faults.name(index)}, "
                "which went unused in the first iteration (or came fewer times), which is not compatible with "
                "static_graph set to True; leave that out and pass find_unused_parameters=True."
            )
        self._hooks_left[index] -= 1
        return self._hooks_left[index] == 0

    def _mark_ready(self, index: int) -> None:
        if index in self._ready:
            raise self._faults.fault(marked_twice(index, self._faults.shown_names(), self.find_unused_parameters))
        self._ready.add(index)
        self._backward_stats[index] = time.monotonic_ns() - self._stats_start
        self._unfinished = True
        bucket, slot = self._places[index]
        self._filler.fill(bucket, slot, index, self._divide_by or self._divisor())
        bucket.pending -= 1
        if bucket.pending == 0 and bucket is self.buckets[self._next]:
            self._launch_full()

    def _launch_full(self) -> None:
        """Reduce the next buckets, as far as they are full."""
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            if not (self._skips_unused and all(index in self.unused for index in bucket.indices)):
                self._launch(bucket)
            self._next += 1
        if self._next == len(self.buckets):
            if self.find_unused_parameters and not self.static_graph:
                self._order.call(self.process_group, self._reduce_used)
            if not self._finalized_by_caller:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _divisor(self) -> int:
        """What to divide gradients by: the number of ranks; in join mode, perhaps of those that still have input. 1
        with a hook, which divides by itself."""
        if self._hook is not None:
            return 1
        if not self._divide_by:
            self._divide_by = self.process_group.size()
            if self._join is not None and not self._join[1]:
                self._divide_by = int(self._join[0].get_future().wait()[0].item())
        return self._divide_by

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = now()
        if self.buckets_reduced == 0:
            self.clock.comm_start = bucket.launched
        self.buckets_reduced += 1
        if bucket.deferred or self._filler.in_batches:
            self._filler.fill_deferred(bucket, self._divisor())
        if self._hook is None and not bucket.sparse:
            bucket.work = self._all_reduce(bucket)
        else:
            self._launch_hook(bucket)
        self.clock.inside += now() - bucket.launched

    def _all_reduce(self, bucket: Bucket) -> Any:
        return self.process_group.allreduce([bucket.buffer])

    def _launch_hook(self, bucket: Bucket) -> None:
        def call() -> Any:
            bucket.future = self._call_hook(self._grad_bucket(self.buckets.index(bucket), bucket.buffer))
            return bucket.future

        if not self._keeps_order(bucket.buffer):
            call()
            return
        if self.buckets_reduced == 1:  # before the hooks' own final callbacks, which expect that all hooks have run
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_hooks)
        self._order.call(self.process_group, call)

    def _finish_hooks(self) -> None:
        with self._lock:
            self._order.finish()

    def _keeps_order(self, buffer: Any) -> bool:
        """Whether the hook might start collectives in callbacks, which run in other threads."""
        return self._hook is not None and not self._hook.callbacks_only_compute and buffer.is_cpu

    def _reduce_used(self) -> None:
        """On how many ranks was each parameter used? Join mode matches this call, so it must be a plain sum."""
        self._used_anywhere.copy_(self._used)
        self._used_work = self.process_group.allreduce([self._used_anywhere])

    def _backward_ended(self) -> None:
        with self._lock:
            self.clock.compute_end = now()
            self._order.end()
            if self.static_graph and self._may_rebuild():
                self._arrived += self.unused
            self._finalize()

    def _delay_all_reduce(self) -> None:
        """The end of a static graph's first backward pass: reduce all that has come."""
        with self._lock:
            self.clock.compute_end = now()
            self._order.call(self.process_group, self._reduce_used)
            self._unfinished = True
            self.unused = [index for index, count in enumerate(self._hook_counts) if count == 0]
            for index in range(len(self.params)):
                self._filler.fill(*self._places[index], index, self._divide_by or self._divisor())
            for bucket in self.buckets:
                self._launch(bucket)
            self._next = len(self.buckets)
            if not self._finalized_by_caller:
                self._order.end()
                self._finalize()

    # Whether the caller finalizes, having done something else while the last buckets were under way.
    _finalized_by_caller = False

    def _set_manual_finalization_required(self, required: bool) -> None:
        """With ``required``, the end of a backward pass does not wait for the buckets: ``_finalize_backward_manual``
        does."""
        if self._expecting or self._in_backward:
            raise self._faults.fault(
                "_set_manual_finalization_required: a backward pass is under way; set it before the forward pass."
            )
        self._finalized_by_caller = bool(required)

    def _should_finalize_after_backward(self) -> bool:
        """Whether the caller must finalize right after backward: as long as the order of gradients is being noted."""
        return self._may_rebuild() or self._counts_only()

    def _finalize_backward_manual(self) -> None:
        """Wait for every bucket and hand gradients back; all of them must be under way."""
        call = "_finalize_backward_manual"
        if not self._finalized_by_caller:
            raise self._faults.fault(f"{call}: call _set_manual_finalization_required(True) first.")
        if not self._unfinished or self._next < len(self.buckets):
            left = len(self.buckets) - self._next if self._unfinished else 0
            why = f"{left} buckets still wait for gradients" if left else "no gradients are being reduced"
            raise self._faults.fault(f"{call}: {why}; call it once after each backward pass.")
        self._backward_ended()

    def _finalize(self) -> None:
        """Wait for every bucket and hand gradients back."""
        self._expecting = self._in_backward = self._unfinished = False
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.work is not None or bucket.future is not None:
                    self._hand_back(bucket)
        torch.futures.wait_all(self._futures)
        if self._used_work is not None and not self._used_known:
            self._used_work.wait()
        if self.find_unused_parameters and not self.static_graph:
            self._used.zero_()
        self.clock.comm_end = now()
        self._used_work, self._used_known, self._futures = None, False, []
        self._divide_by, self._join, self._filler.sparse_metadata = 0, None, None

    def _hand_back(self, bucket: Bucket) -> None:
        """Wait for the bucket's reduction, and make its result the parameters' gradients."""
        bucket.wait_began = now()
        if bucket.work is not None:
            bucket.work.wait()
            result = bucket.buffer
        else:
            result = (self._hook or CommHook()).parse_hook_result(bucket.future.wait())
        bucket.ended = now()
        bucket.work = bucket.future = None
        self._filler.hand_back(bucket, result, self._is_unused_everywhere)

    def _is_unused_everywhere(self, index: int) -> bool:
        """Asks the other ranks only where this one did not use the parameter."""
        if not (self.static_graph or self.find_unused_parameters) or self._used[index]:
            return False
        if self._used_work is not None and not self._used_known:
            self._used_work.wait()
            self._used.copy_(self._used_anywhere)
            self._used_known = True
        return not self._used[index]

    # --- errors -----------------------------------------------------------------------------------------------

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward pass left gradients unreduced, saying whose were missing."""
        if not self._unfinished:
            return
        missing = [index for index in range(len(self.params)) if index not in self._ready]
        quiet = dist.get_debug_level() == dist.DebugLevel.OFF
        if not quiet:
            names = ", ".join(self._faults.name(i) for i in missing)
            log.warning("rank %d: no gradient came for %s", self.process_group.rank(), names)
        error = unfinished(
            self.process_group, self.iterations, missing, self._faults.shown_names(),
            find_unused=self.find_unused_parameters, static_graph=self.static_graph, quiet=quiet,
        )  # fmt: skip
        raise self._faults.fault(error)

    # --- hooks ------------------------------------------------------------------------------------------------

    def set_hook(self, hook: CommHook, words: str) -> None:
        if self._hook is not None:
            raise self._faults.fault(f"{words} can only be called once.")
        self._hook = hook
        self._divide_by = 0  # a hook divides by itself

    def _grad_bucket(self, index: int, buffer: Any) -> GradBucket:
        return GradBucket(index, len(self.buckets), buffer, self.buckets[index])

    def _call_hook(self, bucket: GradBucket) -> Any:
        return self._run_allreduce_hook(bucket) if self._hook is None else self._hook.run_hook(bucket)

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """A rank without input calls this for each bucket, while the others are in their backward pass."""
        if not self._keeps_order(bucket_of("_run_comm_hook", bucket).buffer()):
            return self._call_hook(bucket)
        with self._lock:
            return self._order.call_in_turn(self.process_group, lambda: self._call_hook(bucket))

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """The plain sum over ranks, as a future of a list of one tensor."""
        return self.process_group.allreduce([bucket_of("_run_allreduce_hook", bucket).buffer()]).get_future()

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """What a rank without input contributes."""
        return [self._grad_bucket(i, torch.zeros_like(b.buffer)) for i, b in enumerate(self.buckets)]

    # --- settings ---------------------------------------------------------------------------------------------

    def set_logger(self, logger: Any) -> None:
        self._faults.logger = (lambda: None) if logger_of("set_logger", logger) is None else weakref.ref(logger)

    def _set_static_graph(self) -> None:
        if self.iterations:
            raise self._faults.fault("_set_static_graph() should be called before training loop starts.")
        self.static_graph = True

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters went unused in all iterations so far."""
        return self._graph_seems_static

    def _set_optimizer_in_backward(self) -> None:
        self._filler.optimizer_in_backward = True

    def _set_mixed_precision_param_dtype(self, dtype: Any) -> None:
        """Gradients come in this dtype, so buckets are of it too."""
        self._filler.mixed_dtype = dtype
        self._build_buckets([b.indices for b in self.buckets], [b.limit for b in self.buckets])

    def _set_sparse_metadata(self, metadata: Mapping[str, Any]) -> None:
        """The rows of sparse gradients that any rank has, by parameter name, for the next backward pass."""
        words = "str to tensor"
        call = "_set_sparse_metadata: metadata"
        self._filler.sparse_metadata = values.mapping(call, metadata, values.text, values.tensor, words) or None

    @not_compiled
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Join mode: ``work`` sums up how many ranks take part in this iteration."""
        call = "_set_forward_pass_work_handle"
        if work is not None and not isinstance(work, dist.Work):
            raise errors.wrong_type(call, "work", work, "a Work or None")
        static = values.flag(f"{call}: use_static_world_size", use_static_world_size)
        self._join = None if work is None else (work, static)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Futures to wait for at the end of backward, besides those that were installed before."""
        wrong = [f for f in futures if not isinstance(f, torch._C.Future)]
        if wrong:
            raise errors.wrong_type("_install_post_backward_futures", "futures", wrong[0], "a list of futures")
        self._futures += futures

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._sample_rate = values.short("_set_ddp_runtime_logging_sample_rate", sample_rate)

    def _get_local_used_map(self) -> torch.Tensor | None:
        """Which parameters were used on any rank; None unless unused ones are looked for."""
        return self._used_anywhere if self.find_unused_parameters or self.static_graph else None

    def _remove_autograd_hooks(self) -> None:
        self._hooks.remove()

    def _reset_state(self) -> None:
        """Forget a backward pass that did not end; buckets will be rebuilt."""
        with self._lock:
            self.has_rebuilt = False
            self._arrived = []
            self._restart_state()
            if not self.static_graph:  # which finds its unused parameters once and for all
                self._used.zero_()

    def _update_process_group(self, process_group: Any) -> None:
        self.process_group = group_of("_update_process_group", process_group)

    # --- statistics -------------------------------------------------------------------------------------------

    def is_sampled(self) -> bool:
        """Whether the logger looks at this iteration."""
        return self.iterations > 0 and (self.iterations <= ALWAYS_SAMPLED or self.iterations % self._sample_rate == 0)

    def get_backward_stats(self) -> list[int]:
        """For each parameter, nanoseconds from the beginning of backward to its gradient."""
        return list(self._backward_stats)

    def timeline(self) -> IterationTimes:
        """The last iteration, bucket by bucket: how long it computed and communicated, and how much of that was not
        hidden."""
        return measure(self.clock, self.buckets)
