"""Logical shards of DistributedDataParallel: a step is a fixed number of micro-batches, wherever they run.

Each rank runs forward and backward of its own shards, one after the other. The reducer adds up their gradients
pairwise, bucket by bucket, as they come; with a rank's last shard it reduces the buckets over ranks. So gradients are
averaged as one tree over all shards, and a step gives the same bits on 1, 2, 4, ... ranks: those of as many ranks as
there are shards.

With ``spare_ranks``, there may be ranks to which no shards can be split off. They contribute -0.0, which changes no
sum, and receive the result.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm._core import native
from symcomm.ddp.broadcast import broadcast_coalesced
from symcomm.ddp.bucket import Bucket, allocate
from symcomm.ddp.reducer import Reducer
from symcomm.group.buffers import torch_dtypes
from symcomm.group.shards import PairwiseReduction, share_of
from symcomm.types import RedOpType

CALL = "DistributedDataParallel"
# Arguments that do not go with logical shards, and why.
REFUSED = {
    "static_graph": "its first backward pass reduces nothing",
    "mixed_precision": "gradients come in another dtype than their parameters",
    "delay_all_reduce_named_params": "these gradients are reduced apart from the others",
    "skip_all_reduce_unused_params": "shards of one rank may use other parameters than another's",
}


def ranks_with_shards(shards: int, size: int) -> int:
    """The most ranks, of ``size``, that shards can be split over."""
    return next(n for n in range(min(shards, size), 0, -1) if n == 1 or _splits(shards, n))


def _splits(shards: int, size: int) -> bool:
    per = shards // size
    return shards % size == 0 and per & (per - 1) == 0


def shards_of(process_group: Any, shards: int, spare_ranks: bool) -> range:
    """This rank's shards."""
    rank, size = process_group.rank(), process_group.size()
    if spare_ranks and type(shards) is int and shards > 0:
        size = ranks_with_shards(shards, size)
    return share_of(CALL, "logical_shards", shards, rank, size) if rank < size else range(0)


def check_arguments(given: dict[str, Any]) -> None:
    """Raise if an argument does not go with logical shards."""
    for name, why in REFUSED.items():
        if given.get(name):
            raise errors.bad_argument(CALL, name, given[name], "left out with logical_shards", why)


def check_group(process_group: Any, parameters: Sequence[Any], shards: Any, spare_ranks: bool) -> None:
    """Raise unless these ranks can add as one tree, and mean the same number of shards."""
    if not getattr(process_group, "is_symcomm", False):
        got = type(process_group).__name__
        allowed = "one of backend symcomm with logical_shards"
        raise errors.bad_argument(CALL, "process_group", got, allowed, "others add in other orders")
    elsewhere = [parameter.device for parameter in parameters if not parameter.is_cpu]
    if elsewhere:
        raise errors.bad_argument(CALL, "module", f"on {elsewhere[0]}", "on the CPU with logical_shards")
    told = process_group.core.all_gather_bytes(repr((shards, spare_ranks)).encode())
    if len(set(told)) > 1:
        words = ", ".join(f"{item.decode()} on rank {rank}" for rank, item in enumerate(told))
        raise errors.CallerError(
            f"{CALL}: logical_shards and spare_ranks differ between ranks: {words}; pass the same everywhere."
        )
    shards_of(process_group, shards, spare_ranks)


def check_module(module: torch.nn.Module, in_graph: bool) -> None:
    """Raise if the module, or the way it is compiled, does not go with logical shards."""
    if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
        raise refuse(CALL, "SyncBatchNorm's statistics are those of as many shards as there are ranks")
    if in_graph:
        raise refuse(CALL, 'optimize_ddp="python_reducer" reduces in the compiled graph, in its own order')


def refuse(call: str, why: str) -> errors.SymcommError:
    return errors.CallerError(f"{call}: it does not go with logical_shards: {why}; leave one of them out.")


class StepBuffers:
    """The model's buffers, such as a batch norm's averages. Each shard's forward starts from their values at the
    beginning of the step; at its end all ranks get the values that shard 0 left. With as many ranks as shards,
    PyTorch's class does the same."""

    def __init__(self, ddp: Any):
        self._ddp: Any = weakref.ref(ddp)
        self._before: list[Any] = []
        self._left: list[Any] = []  # shard 0's, at its end
        self.restart()

    def restart(self) -> None:
        self._begun = -1  # the last of this rank's shards whose forward has begun
        self._before, self._left = [], []

    def _of_the_model(self) -> list[Any]:
        self._ddp()._assign_modules_buffers()  # some may be other tensors now
        return self._ddp().modules_buffers

    def begin(self, number: int) -> None:
        """Before the forward of this rank's shard ``number``."""
        if number == self._begun:
            return
        self._begun, buffers = number, self._of_the_model()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            if number == 0:
                self._before = [buffer.clone() for buffer in buffers]
                return
            if number == 1 and self._ddp().process_group.rank() == 0:
                self._left = [buffer.clone() for buffer in buffers]
            _copy(buffers, self._before)

    def end(self) -> None:
        """After the last backward, on all ranks."""
        ddp, buffers = self._ddp(), self._of_the_model()
        if buffers:
            with torch.no_grad():
                if self._left:
                    _copy(buffers, self._left)
                broadcast_coalesced(ddp.process_group, buffers, ddp.broadcast_bucket_size, 0)
        self.restart()


def _copy(to: Sequence[Any], source: Sequence[Any]) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other)


class ShardedReducer(Reducer):
    """A reducer whose steps have several backward passes; between them, parameters have no gradients."""

    def __init__(self, *args: Any, shards: int, spare_ranks: bool):
        self.shards, self._spare_ranks = shards, spare_ranks
        self.number = 0  # which of this rank's shards is next or under way
        self.backwards = 0  # how many have ended, in all steps
        self.step_buffers: StepBuffers | None = None
        self._partials: dict[int, PairwiseReduction] = {}  # by the bucket's position
        self._totals: dict[int, Any] = {}  # what is reduced over ranks instead of a bucket of a smaller type
        self._gradients: list[Any] = []  # the parameters' gradients when the step began
        super().__init__(*args)
        if any(self._sparse):
            raise self._faults.fault(refuse(CALL, "a parameter has sparse gradients"))
        self.mine = shards_of(self.process_group, shards, spare_ranks)

    def _is_last(self) -> bool:
        return self.number == len(self.mine) - 1

    # --- buckets ----------------------------------------------------------------------------------------------

    def _build_buckets(self, bucket_indices: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        super()._build_buckets(bucket_indices, limits)
        self._partials, self._totals = {}, {}

    def _may_rebuild(self) -> bool:
        return super()._may_rebuild() and self.number == 0

    def _partial_of(self, position: int) -> PairwiseReduction:
        if position not in self._partials:
            buffer = self.buckets[position].buffer
            dtype = torch_dtypes()[buffer.dtype]
            self._partials[position] = PairwiseReduction(dtype, RedOpType.SUM, buffer.numel())
        return self._partials[position]

    def _total_of(self, position: int) -> Any:
        """What is reduced over ranks: the bucket or, for small floats, sums in float32 until all have been added. With
        one shard a rank on one host, the all_reduce itself adds in float32."""
        buffer, kept = self.buckets[position].buffer, self._partial_of(position).kept
        is_one_call = self.shards <= self.process_group.size()
        if kept is torch_dtypes()[buffer.dtype] or (is_one_call and not self.process_group.core.spans_hosts):
            return buffer
        if position not in self._totals:
            self._totals[position] = allocate(self.process_group, buffer.numel(), torch.float32, buffer.device)
        return self._totals[position]

    # --- a step -----------------------------------------------------------------------------------------------

    def prepare_for_backward(self, outputs: Any) -> None:
        if self.number == 0:
            self._gradients = [parameter.grad for parameter in self.params]
        super().prepare_for_backward(outputs)

    def _mark_ready(self, index: int) -> None:
        if not self.mine:
            raise self._faults.fault(
                f"{CALL}: this rank has none of the {self.shards} logical shards; run backward passes in a loop over "
                "shards() only."
            )
        if self.number == 0 and self._gradients[index] is not None:
            if self.params[index].grad is self._gradients[index]:
                raise self._faults.fault(
                    f"{CALL}: {self._faults.name(index)} has a gradient already as a step of {self.shards} logical "
                    "shards begins; call zero_grad(set_to_none=True) before."
                )
            self._gradients[index] = None
        super()._mark_ready(index)

    def _divisor(self) -> int:
        return self.shards

    def _all_reduce(self, bucket: Bucket) -> Any:
        """Called with a full bucket: starts its reduction over ranks if this is the rank's last shard."""
        position = self._next
        partial, address = self._partial_of(position), bucket.buffer.data_ptr()
        if not self._is_last():
            partial.add(address)
            for parameter in bucket.params:
                parameter.grad = None
            return None
        total = self._total_of(position)
        if total is bucket.buffer and len(self.mine) == 1:
            return self.process_group.allreduce([total])
        partial.end(address, total.data_ptr())
        return self.process_group.allreduce([total])

    def _hand_back(self, bucket: Bucket) -> None:
        total = self._totals.get(self.buckets.index(bucket))
        if total is not None:
            bucket.work.wait()
            dtype = torch_dtypes()[bucket.buffer.dtype]
            native.narrow(dtype, bucket.buffer.data_ptr(), total.data_ptr(), total.numel())
        super()._hand_back(bucket)

    def _reduce_used(self) -> None:
        if self._is_last():
            super()._reduce_used()

    def _finalize(self) -> None:
        used = self._used.clone()  # by any of the rank's shards so far
        super()._finalize()
        self.backwards += 1
        if not self._is_last():
            self._used.copy_(used)
            self.number += 1
            return
        self._end_step()

    def _end_step(self) -> None:
        if self.step_buffers is not None:
            self.step_buffers.end()
        self.number = 0

    def _forget_step(self) -> None:
        """Forget the step so far: its shards will be run again, or never."""
        self.number = 0
        self._partials = {}
        self._used.zero_()
        if self.step_buffers is not None:
            self.step_buffers.restart()

    def _reset_state(self) -> None:
        super()._reset_state()
        self._forget_step()

    def _update_process_group(self, process_group: Any) -> None:
        super()._update_process_group(process_group)
        self.mine = shards_of(self.process_group, self.shards, self._spare_ranks)

    # --- the loop of a step -----------------------------------------------------------------------------------

    def run_step(self) -> Iterator[int]:
        """This rank's shards, while the caller runs forward and backward of each."""
        if self.number:
            words = f"after {self.number} of this rank's {len(self.mine)} shards"
            self._forget_step()
            raise self._faults.fault(f"{CALL}.shards: the last step ended {words}; run all of them in each step.")
        for shard in self.mine:
            before = self.backwards
            yield shard
            if (came := self.backwards - before) != 1:
                words = (
                    self._missing(shard)
                    if came == 0 and self._unfinished
                    else (f"{came} backward passes ended in shard {shard}; run one of each shard's loss.")
                )
                self._forget_step()
                raise self._faults.fault(f"{CALL}.shards: {words}")
            if self._in_backward:
                self._forget_step()
                raise self._faults.fault(
                    f"{CALL}.shards: gradients came after the backward pass of shard {shard} had ended; run one of "
                    "each shard's loss, and no other."
                )
        if not self.mine:
            self._take_part()

    def _missing(self, shard: int) -> str:
        names = ", ".join(self._faults.name(index) for index in range(len(self.params)) if index not in self._ready)
        return (
            f"no gradient came for {names} in shard {shard}; pass find_unused_parameters=True if shards may leave "
            "parameters unused, or use all outputs of forward in the loss."
        )

    def _take_part(self) -> None:
        """The step of a rank without shards."""
        with self._lock, torch.no_grad():
            self.prepare_for_forward()
            self._rebuild_buckets()
            self.prepare_for_backward([])
            for parameter in self.params:
                parameter.grad = None
            for position, bucket in enumerate(self.buckets):
                total = self._total_of(position).fill_(-0.0)
                bucket.work = self.process_group.allreduce([total])
            if self.find_unused_parameters:
                super()._reduce_used()
            self._push_all_rebuilt_params()
            super()._finalize()
            self._end_step()
