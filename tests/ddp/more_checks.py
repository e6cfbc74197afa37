"""More checks of the data-parallel layer: communication hooks, errors, single functions; see tests/ddp/checks.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import symcomm.c10d as ours
from symcomm.ddp import BuiltinCommHookType, CommHook, DistributedDataParallel, GradBucket
from tests.ddp.checks import Net, batch, same_as_torch, state_of, train
from tests.torch_backend.checks import WORLD, equal, joined, refused

CHECKS: dict[str, tuple[Callable[[int, str], None], int]] = {}


def check(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
    CHECKS[function.__name__] = (function, WORLD)
    return function


# --- hooks made for PyTorch's -------------------------------------------------------------------------------------


def hooked(rank: int, state: Any, hook: Any, **options: Any) -> None:
    """``state``: a function that makes a fresh one."""
    for views in (True, False):
        same_as_torch(
            rank, setup=lambda net: net.register_comm_hook(state(), hook), gradient_as_bucket_view=views,
            bucket_cap_mb=0.0001, steps=6, **options,
        )  # fmt: skip


@check
def default_hooks_work(rank: int, path: str) -> None:
    def bf16(state, bucket):  # by its own name it is refused without GPUs
        return default_hooks.bf16_compress_hook(state, bucket)

    with joined(rank, path) as group:
        for hook in (
            default_hooks.allreduce_hook,
            default_hooks.fp16_compress_hook,
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
            bf16,
        ):
            hooked(rank, lambda: None, hook)
            hooked(rank, lambda: group, hook)


@check
def built_in_hooks_work(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        gloo = dist.new_group(backend="gloo")
        for kind in ("ALLREDUCE", "FP16_COMPRESS"):

            def trained(wrap: Any, kinds: Any, group: Any, kind: str = kind) -> Any:
                chosen = getattr(kinds, kind)
                return train(wrap, rank, setup=lambda net: net._register_builtin_comm_hook(chosen), process_group=group)

            theirs = trained(TorchDDP, dist.BuiltinCommHookType, gloo)
            mine = trained(DistributedDataParallel, BuiltinCommHookType, group)
            for one, other in zip(state_of(theirs), state_of(mine), strict=True):
                equal(one, other)
            assert theirs._get_ddp_logging_data()["comm_hook"] == mine._get_ddp_logging_data()["comm_hook"]
        net = DistributedDataParallel(Net())
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # PyTorch's member will do


@check
def power_sgd_works(rank: int, path: str) -> None:
    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    with joined(rank, path):
        same_as_torch(rank, setup=lambda net: net.register_comm_hook(state(), powerSGD_hook.powerSGD_hook), steps=6)
        # With several buckets, PyTorch's would start the next one's collectives in between the callbacks' ones.
        net = train(
            DistributedDataParallel, rank, steps=6, bucket_cap_mb=0.0001,
            setup=lambda net: net.register_comm_hook(state(), powerSGD_hook.powerSGD_hook),
        )  # fmt: skip
        for param in net.parameters():
            both = [torch.empty_like(param) for _ in range(WORLD)]
            dist.all_gather(both, param.detach())
            equal(both[0], both[1])


@check
def quantization_hooks_work(rank: int, path: str) -> None:
    """As on NCCL; on Gloo they fail, since its futures hold a list of tensors."""
    with joined(rank, path):
        for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):

            def setup(net: Any, hook: Any = hook) -> None:
                net.register_comm_hook(None, hook)

            same_as_torch(rank, setup=setup, steps=3)
            train(DistributedDataParallel, rank, setup=setup, steps=3, bucket_cap_mb=0.0001)


@check
def bf16_hooks_work_by_their_own_names(rank: int, path: str) -> None:
    with joined(rank, path):
        trained = [
            train(DistributedDataParallel, rank, setup=lambda net, hook=hook: net.register_comm_hook(None, hook))
            for hook in (
                default_hooks.bf16_compress_hook,
                lambda s, bucket: default_hooks.bf16_compress_hook(s, bucket),
            )
        ]
        for one, other in zip(*map(state_of, trained), strict=True):
            equal(one, other)


@check
def post_local_sgd_works(rank: int, path: str) -> None:
    with joined(rank, path):
        subgroup = dist.new_group([rank], use_local_synchronization=True)

        def state() -> Any:
            return post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)

        hooked(rank, state, post_localSGD_hook.post_localSGD_hook)


@check
def fused_optimizers_work(rank: int, path: str) -> None:
    def fused(kind: Any) -> Any:
        torch.manual_seed(0)
        net = kind(Net(), bucket_cap_mb=0.0001)
        net._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in range(4):
            net(batch(rank, step)).square().sum().backward()
            net.zero_grad()
        return net

    with joined(rank, path):
        for one, other in zip(fused(TorchDDP).parameters(), fused(DistributedDataParallel).parameters(), strict=True):
            equal(one, other)


@check
def zero_overlap_works(rank: int, path: str) -> None:
    def overlapped(kind: Any, make: Any) -> Any:
        torch.manual_seed(0)
        net = kind(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)), static_graph=True)
        zero = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
        )
        net.register_comm_hook(None, make(default_hooks.allreduce_hook, net, zero))
        for step in range(6):
            net(batch(rank, step)).square().sum().backward()
            net.zero_grad()
        return net

    with joined(rank, path):
        for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
            theirs, mine = overlapped(TorchDDP, make), overlapped(DistributedDataParallel, make)
            for one, other in zip(theirs.parameters(), mine.parameters(), strict=True):
                equal(one, other)


@check
def optimizer_in_backward_works(rank: int, path: str) -> None:
    """PyTorch's hook for it makes a stream, which a machine without accelerator does not have."""

    class Stream:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

        def wait_stream(self, _: Any) -> None:
            pass

    def inside(kind: Any, views: bool) -> Any:
        torch.manual_seed(0)
        net = kind(Net(), gradient_as_bucket_view=views, bucket_cap_mb=0.0001)
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        for step in range(4):
            net(batch(rank, step)).square().sum().backward()
        assert all(p.grad is None for p in net.parameters())
        return net

    kept = torch.Stream, torch.accelerator.current_stream
    torch.Stream, torch.accelerator.current_stream = Stream, Stream  # type: ignore[misc,assignment]
    try:
        with joined(rank, path):
            for views in (True, False):
                theirs, mine = inside(TorchDDP, views), inside(DistributedDataParallel, views)
                for one, other in zip(theirs.parameters(), mine.parameters(), strict=True):
                    equal(one, other)
    finally:
        torch.Stream, torch.accelerator.current_stream = kept  # type: ignore[misc,assignment]


@check
def callbacks_that_hooks_queue_run_after_all_hooks(rank: int, path: str) -> None:
    """The optimizer-in-backward hook relies on it: its callback takes the gradients away."""

    def order(kind: Any) -> list[list[Any]]:
        net = kind(Net(), bucket_cap_mb=0.0001)
        passes: list[list[Any]] = []

        def hook(bucket: Any) -> Any:
            if bucket.index() == 0:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: passes[-1].append("ended"))
            passes[-1].append(bucket.index())
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(slowly)

        def slowly(ended: Any) -> Any:
            time.sleep(0.02)  # so that the next bucket's hook has to wait for its turn
            return ended.value()[0]

        net.register_comm_hook(None, lambda _, bucket: hook(bucket))
        for step in range(3):
            passes.append([])
            net(batch(rank, step)).square().sum().backward()
        return passes

    with joined(rank, path):
        theirs, mine = order(TorchDDP), order(DistributedDataParallel)
        assert theirs == mine, f"{theirs} and {mine}"


# --- hooks made for ours ------------------------------------------------------------------------------------------


@check
def hook_objects_and_annotations(rank: int, path: str) -> None:
    class Half(CommHook):
        def run_hook(self, bucket: GradBucket) -> Any:
            return dist.all_reduce(bucket.buffer() / WORLD, async_op=True).get_future()

    def annotated(state: list[Any], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return future.then(lambda ended: ended.value()[0])

    seen: list[Any] = []
    with joined(rank, path):
        plain = train(DistributedDataParallel, rank)
        for setup in (
            lambda net: net.register_comm_hook(None, Half()),
            lambda net: net.register_comm_hook(seen, annotated),
        ):
            net = train(DistributedDataParallel, rank, setup=setup, bucket_cap_mb=0.0001)
            for one, other in zip(state_of(plain), state_of(net), strict=True):
                equal(one, other)
        last = seen[-len(net.reducer.buckets) :]
        assert [row[0] for row in last] == list(range(len(last))) and last[-1][1] and not last[0][1]


# --- errors -------------------------------------------------------------------------------------------------------


def step(net: Any, rank: int, **how: Any) -> None:
    net(batch(rank, 0), **how).sum().backward()


@check
def unused_parameters_are_named(rank: int, path: str) -> None:
    with joined(rank, path):
        net = DistributedDataParallel(Net())
        step(net, rank, branch=False)
        words = (
            "Expected to have finished reduction in the prior iteration before starting a new one",
            "branch.weight (parameter 5 of module branch) on ranks 0, 1",
            "branch.bias (parameter 6 of module branch) on ranks 0, 1",
            "find_unused_parameters=True",
            "static_graph=True",
        )
        refused(lambda: step(net, rank), *words)
        refused(net._check_reducer_finalized, words[0])
        data = net._get_ddp_logging_data()
        assert data["has_error"] == 1 and "branch.weight" in data["error"]
        net._update_process_group(dist.group.WORLD)  # forgets it
        net.zero_grad()
        step(net, rank)


@check
def a_second_backward_is_refused(rank: int, path: str) -> None:
    with joined(rank, path):
        net = DistributedDataParallel(Net())

        @torch.enable_grad()
        def use_last_again(_: Any) -> None:
            net.module.last(torch.ones(7)).sum().backward()

        def again_inside() -> None:
            loss = net(batch(rank, 0)).sum()
            net.module.first.weight.register_post_accumulate_grad_hook(use_last_again)
            loss.backward()

        refused(again_inside, "mark a variable ready only once", "with name last.", "second one ran")


@check
def changed_graphs_are_refused(rank: int, path: str) -> None:
    with joined(rank, path):
        net = DistributedDataParallel(Net(), static_graph=True)
        step(net, rank, branch=False)
        words = ("Your training graph has changed in this iteration", "branch.", "static_graph")
        refused(lambda: step(net, rank), *words)
        net = DistributedDataParallel(Net(), static_graph=True)
        step(net, rank)
        step(net, rank, branch=False)
        refused(lambda: step(net, rank), "your training graph has changed", "branch.weight", "on ranks 0, 1")
        refused(lambda: net.reducer._set_static_graph(), "before training loop starts")


@check
def wrong_hooks_are_refused(rank: int, path: str) -> None:
    def result(value: Any) -> Any:
        def hook(state, bucket):
            future: Any = torch.futures.Future()
            future.set_result(value(bucket))
            return future

        return hook

    def of(hook: Any) -> Callable[[], None]:
        net = DistributedDataParallel(Net())
        net.register_comm_hook(None, hook)
        return lambda: step(net, rank)

    with joined(rank, path):
        refused(of(lambda state, bucket: 3), "must return a torch.futures.Future object, but got int")
        refused(of(result(lambda bucket: [bucket.buffer()])), "the value of its future", "a tensor")
        refused(of(result(lambda bucket: bucket.buffer()[:2])), "returned 2 elements for a bucket of")
        net = DistributedDataParallel(Net())
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        again = "register_comm_hook or register_builtin_comm_hook can only be called once"
        refused(lambda: net.register_comm_hook(None, default_hooks.allreduce_hook), again)
        builtin = "register_builtin_comm_hook or register_comm_hook can only be called once"
        refused(lambda: net._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE), builtin)
        for call in (lambda: net.register_comm_hook(None, 3), lambda: net._register_builtin_comm_hook(3)):
            try:
                call()
            except TypeError:
                continue
            raise AssertionError("nothing was raised")


@check
def different_models_are_refused(rank: int, path: str) -> None:
    with joined(rank, path):
        refused(
            lambda: DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + rank))),
            "params[2]", "'1.weight'", "appears not to match sizes", "sizes [3, 3]", "sizes [4, 3]",
        )  # fmt: skip
        refused(
            lambda: DistributedDataParallel(nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + rank)])),
            f"DDP expects same model across all ranks, but Rank {rank} has", "inconsistent",
        )  # fmt: skip
        refused(
            lambda: DistributedDataParallel(nn.Linear(3, 3).to([torch.float32, torch.float64][rank])),
            "params[0]", "('weight')", "float32", "float64",
        )  # fmt: skip
        DistributedDataParallel(nn.Linear(3, 3))  # the group goes on


# --- single functions ---------------------------------------------------------------------------------------------


@check
def broadcasts_like_pytorchs(rank: int, path: str) -> None:
    def tensors() -> list[Any]:
        torch.manual_seed(rank)
        shapes = [(3, 4), (), (5,), (2, 3, 4), (0,), (7,)]
        made = [torch.randn(s) for s in shapes] + [torch.randint(0, 9, s) for s in shapes]
        return [*made, torch.randn(4, 6).t(), torch.randn(8)[::2]]

    with joined(rank, path) as group:
        for size in (0, 1, 40, 1000):
            for root in range(WORLD):
                theirs, mine = tensors(), tensors()
                dist._broadcast_coalesced(group, theirs, size, root)
                ours._broadcast_coalesced(group, mine, size, root)
                for one, other in zip(theirs, mine, strict=True):
                    equal(one, other)
        ours._broadcast_coalesced(group, [], 10)


def _averaged(module: Any, group: Any, rank: int, **options: Any) -> list[Any]:
    """Gradients of two backward passes through a reducer alone, without a logger or others to count."""
    params = [nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(2)]
    reducer = module.Reducer(params, [[1], [0]], [100, 100], group, **options)
    for _ in range(2):
        reducer.set_logger(None)
        reducer._set_forward_pass_work_handle(None, False)
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        sum((param * param).sum() * (rank + 1) for param in params).backward()
        reducer._check_reducer_finalized()
    return [param.grad for param in params]


@check
def a_reducer_for_graphs_reduces_without_them(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for options in ({}, {"use_python_reducer": True}):
            for one, other in zip(
                _averaged(dist, group, rank, **options), _averaged(ours, group, rank, **options), strict=True
            ):
                equal(one, other)
            assert torch.equal(_averaged(ours, group, rank, **options)[0], torch.full((3,), 6.0)), options


@check
def what_a_reducer_refuses_leaves_the_group_alone(rank: int, path: str) -> None:
    leaf = nn.Parameter(torch.ones(2))
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with joined(rank, path) as group:
        for params in ([leaf, wide], [leaf, leaf * 2], [leaf, torch.ones(2)]):
            refused(lambda params=params: ours.Reducer(params, [[0, 1]], [100], group), "Reducer: param")
            total = torch.ones(2)
            dist.all_reduce(total)
            equal(total, torch.full((2,), float(WORLD)))


@check
def verifies_like_pytorchs(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for module in (dist, ours):
            module._verify_params_across_processes(group, [torch.ones(2, 3), torch.ones(4)])
            refused(
                lambda module=module: module._verify_params_across_processes(group, [torch.ones(2)] * (1 + rank)),
                "inconsistent",
            )


@check
def timeline_tells(rank: int, path: str) -> None:
    with joined(rank, path):
        net = train(DistributedDataParallel, rank, bucket_cap_mb=0.0001)
        times = net.reducer.timeline()
        assert len(times.buckets) == len(net.reducer.buckets) > 3
        assert times.forward > 0 and times.backward > 0 and times.communication >= times.exposed >= 0
        for before, after in zip(times.buckets, times.buckets[1:], strict=False):
            assert before.launched <= after.launched and before.ended <= after.ended
        assert sum(b.nbytes for b in times.buckets) == sum(4 * p.numel() for p in net.parameters())
        assert all(ns > 0 for ns in net.reducer.get_backward_stats())


@check
def a_slow_rank_shows_as_exposed_time(rank: int, path: str) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            time.sleep(0.2 * rank)
            return grad

    with joined(rank, path):
        net = DistributedDataParallel(Net())
        for _ in range(3):
            net.zero_grad()
            Slow.apply(net(batch(rank, 0))).sum().backward()
        if rank == 0:
            assert net.reducer.timeline().exposed > 100
