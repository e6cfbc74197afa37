"""Checks of the data-parallel layer that need two ranks; tests/ddp/test_ddp_checks.py runs them, all on one pair.

Most train the same model twice, with PyTorch's DistributedDataParallel and with ours, and compare bit for bit.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from symcomm.ddp import DistributedDataParallel
from tests.torch_backend.checks import WORLD, equal, joined
from tests.torch_backend.checks.__main__ import main

CHECKS: dict[str, tuple[Callable[[int, str], None], int]] = {}
KNOWN = inspect.signature(TorchDDP.__init__).parameters.keys()


def check(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
    CHECKS[function.__name__] = (function, WORLD)
    return function


class Net(nn.Module):
    """Layers of different sizes, a buffer, and one branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.middle = nn.Linear(7, 7, bias=False)
        self.branch = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Any, branch: bool = True) -> Any:
        x = self.middle(torch.relu(self.norm(self.first(x))))
        return self.last(self.branch(x) if branch else x)


def batch(rank: int, step: int) -> Any:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def state_of(model: Any) -> list[Any]:
    """Parameters, buffers and gradients."""
    grads = [p.grad for p in model.module.parameters()]
    return [*model.module.parameters(), *model.module.buffers(), *grads]


def train(
    kind: Any, rank: int, run: Any = None, setup: Any = None, steps: int = 4, model: Any = Net, **options: Any
) -> Any:
    torch.manual_seed(0)
    net = kind(model(), **options)
    if setup is not None:
        setup(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        if run is None:
            net(batch(rank, step)).square().sum().backward()
        else:
            run(net, step)
        optimizer.step()
    return net


def same_as_torch(rank: int, **how: Any) -> Any:
    """Both train; everything must be equal bit for bit."""
    theirs, ours = train(TorchDDP, rank, **how), train(DistributedDataParallel, rank, **how)
    for number, (one, other) in enumerate(zip(state_of(theirs), state_of(ours), strict=True)):
        assert (one is None) == (other is None), f"{number}: {one} and {other}, {how}"
        if one is not None:
            one, other = (t.to_dense() if t.is_sparse else t for t in (one, other))
            assert torch.equal(one, other), f"{number}: {one} and {other}, {how}"
    return ours


# --- the same as PyTorch's ----------------------------------------------------------------------------------------


@check
def trains_like_pytorchs(rank: int, path: str) -> None:
    with joined(rank, path):
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"gradient_as_bucket_view": False},
            {"bucket_cap_mb": 0.0001},
            {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": False},
            {"bucket_cap_mb_list": [0.0001, 0.0002]},
            {"static_graph": True},
            {"static_graph": True, "bucket_cap_mb": 0.0001},
            {"batched_grad_copy": True},
            {"batched_grad_copy": True, "gradient_as_bucket_view": False},
            {"find_unused_parameters": True},
            {"forward_sync_buffers": False},
        ):
            if options.keys() <= KNOWN:
                same_as_torch(rank, **options)
            else:
                train(DistributedDataParallel, rank, **options)  # ours takes what only a newer torch knows


@check
def works_on_gloo_too(rank: int, path: str) -> None:
    with joined(rank, path, "gloo"):
        same_as_torch(rank, bucket_cap_mb=0.0001)
        same_as_torch(rank, find_unused_parameters=True, gradient_as_bucket_view=False)


@check
def takes_arguments_by_place(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        model = DistributedDataParallel(Net(), None, None, 0, None, True, group, 3, True, False, False)
        assert model.bucket_bytes_cap == 3 << 20 and model.find_unused_parameters
        assert model.gradient_as_bucket_view is False
        assert DistributedDataParallel(Net()).gradient_as_bucket_view is True


@check
def gradients_live_in_symmetric_buckets(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        net = train(DistributedDataParallel, rank, bucket_cap_mb=0.0001)
        arena = group.core.arena
        assert len(net.reducer.buckets) > 3
        for bucket in net.reducer.buckets:
            assert arena.base <= bucket.buffer.data_ptr() < arena.base + arena.nbytes
            for param, view in zip(bucket.params, bucket.views, strict=True):
                assert param.grad is view and view.untyped_storage()._cdata == bucket.buffer.untyped_storage()._cdata
        used = arena.used_bytes
        del net, bucket, param, view
        gc.collect()
        dist.all_reduce(torch.ones(1), async_op=True).wait()  # a group holds on to its last works until the next one
        assert arena.used_bytes < used, "buckets are not given back"


@check
def buckets_are_rebuilt_as_pytorchs(rank: int, path: str) -> None:
    with joined(rank, path):
        told = []
        for kind in (TorchDDP, DistributedDataParallel):
            net = train(kind, rank, bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
            data = net._get_ddp_logging_data()
            times = {key for key in data if "time" in key}
            told.append(({k: v for k, v in data.items() if k not in times}, times))
        for theirs, ours in zip(*told, strict=True):
            assert theirs == ours, f"{theirs}, {ours}"


@check
def ranks_agree_on_rank_0s_order(rank: int, path: str) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            return self.a(self.b(x)) if rank == 0 else self.b(self.a(x))

    with joined(rank, path):
        net = train(DistributedDataParallel, rank, model=Either, bucket_cap_mb=0.0001)
        order = [bucket.indices for bucket in net.reducer.buckets]
        assert order[0][0] in (0, 1), order  # of layer a, which rank 0 uses last and so differentiates first


@check
def accumulates_without_sync(rank: int, path: str) -> None:
    def run(net: Any, step: int) -> None:
        with net.no_sync():
            net(batch(rank, step)).square().sum().backward()
        net(batch(rank, step + 50)).square().sum().backward()

    def keep_grads(net: Any, step: int) -> None:
        net.zero_grad(set_to_none=False)
        net(batch(rank, step)).square().sum().backward()

    with joined(rank, path):
        for options in ({}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}):
            same_as_torch(rank, run=run, **options)
        same_as_torch(rank, run=keep_grads)
        if "batched_grad_copy" in KNOWN:
            same_as_torch(rank, run=keep_grads, batched_grad_copy=True)


@check
def unused_parameters(rank: int, path: str) -> None:
    def on_one_rank(net: Any, step: int) -> None:
        net(batch(rank, step), branch=rank == 0).square().sum().backward()

    def nowhere(net: Any, step: int) -> None:
        net(batch(rank, step), branch=False).square().sum().backward()

    def sometimes(net: Any, step: int) -> None:
        net(batch(rank, step), branch=step % 2 == 0).square().sum().backward()

    def no_loss_from_outputs(net: Any, step: int) -> None:
        with_branch, without = net(batch(rank, step)), net.module(batch(rank, step), branch=False)
        (with_branch if step % 2 else without + 0 * with_branch).sum().backward()

    with joined(rank, path):
        for views in (True, False):
            for run in (on_one_rank, nowhere, sometimes):
                options = {"find_unused_parameters": True, "gradient_as_bucket_view": views, "bucket_cap_mb": 0.0001}
                same_as_torch(rank, run=run, **options)
            same_as_torch(rank, run=nowhere, static_graph=True, gradient_as_bucket_view=views)
        net = train(
            DistributedDataParallel, rank, nowhere, find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        assert net.module.branch.weight.grad is None


@check
def checkpoints(rank: int, path: str) -> None:
    class Checkpointed(Net):
        reentrant = False

        def forward(self, x: Any) -> Any:  # type: ignore[override]
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
            return self.last(checkpoint(self.branch, self.middle(x), use_reentrant=self.reentrant))

    class Reentrant(Checkpointed):
        reentrant = True

    with joined(rank, path):
        for model in (Checkpointed, Reentrant):
            same_as_torch(rank, model=model, static_graph=True)
        same_as_torch(rank, model=Checkpointed, find_unused_parameters=True)


@check
def sparse_gradients(rank: int, path: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 5, sparse=True), nn.Linear(5, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.table(x))

    def run(net: Any, step: int) -> None:
        net(torch.tensor([rank, 2 + step, 9])).square().sum().backward()

    with joined(rank, path):
        torch.manual_seed(0)
        for views in (True, False):
            same_as_torch(rank, model=Sparse, run=run, gradient_as_bucket_view=views)


@check
def sparse_gradients_with_known_rows(rank: int, path: str) -> None:
    with joined(rank, path):
        torch.manual_seed(0)
        plain, known = (DistributedDataParallel(nn.Embedding(10, 3, sparse=True)) for _ in range(2))
        known.module.load_state_dict(plain.module.state_dict())
        known._set_sparse_metadata({".weight": torch.tensor([2, 3, 7])})
        for net in (plain, known):
            net(torch.tensor([2 + rank, 7])).square().sum().backward()
        equal(known.module.weight.grad.to_dense(), plain.module.weight.grad.to_dense())
        assert known.module.weight.grad._indices().tolist() == [[2, 3, 7]]


@check
def uneven_inputs(rank: int, path: str) -> None:
    def joined_training(kind: Any, group: Any, divide: bool) -> Any:
        torch.manual_seed(0)
        net = kind(Net(), bucket_cap_mb=0.0001, process_group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with net.join(divide_by_initial_world_size=divide):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                net(batch(rank, step)).square().sum().backward()
                optimizer.step()
        return net

    with joined(rank, path) as group:
        gloo = dist.new_group(backend="gloo")
        for divide in (True, False):
            theirs = joined_training(TorchDDP, gloo, divide)
            ours = joined_training(DistributedDataParallel, group, divide)
            for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
                equal(one, other)
        assert ours._get_ddp_logging_data()["join_uneven_inputs"] == 1


@check
def delayed_all_reduce(rank: int, path: str) -> None:
    def delayed(kind: Any) -> Any:
        torch.manual_seed(0)
        module = Net()
        net = kind(
            module,
            delay_all_reduce_named_params=[("branch.weight", module.branch.weight)],
            param_to_hook_all_reduce=module.first.weight,
        )
        for step in range(3):
            net.zero_grad()
            net(batch(rank, step)).square().sum().backward()
        return net

    with joined(rank, path):
        theirs, ours = delayed(TorchDDP), delayed(DistributedDataParallel)
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            equal(one.grad, other.grad)


@check
def buffers_are_broadcast(rank: int, path: str) -> None:
    with joined(rank, path):
        net = DistributedDataParallel(Net())
        net.module.norm.running_mean.fill_(rank)
        net(batch(rank, 0))
        before = net.module.norm.running_mean.clone()
        net(batch(rank, 1))  # starts from rank 0's
        both = [torch.empty_like(before) for _ in range(WORLD)]
        dist.all_gather(both, before)
        assert not torch.equal(both[0], both[1]), "each rank normalizes its own batch"
        net._sync_buffers()
        dist.all_gather(both, net.module.norm.running_mean)
        equal(both[0], both[1])


@check
def buffers_through_a_hook(rank: int, path: str) -> None:
    def average(state: Any, buffers: dict[str, Any]) -> list[Any]:
        floats = [b for b in buffers.values() if b.is_floating_point()]
        return [dist.all_reduce(b, op=dist.ReduceOp.AVG, async_op=True).get_future() for b in floats]

    with joined(rank, path):
        same_as_torch(rank, setup=lambda net: net._register_buffer_comm_hook(None, average))


@check
def process_group_can_change(rank: int, path: str) -> None:
    with joined(rank, path):
        for static in (False, True):
            net = train(DistributedDataParallel, rank, static_graph=static)
            other = dist.new_group(range(WORLD))
            net._update_process_group(other)
            for step in range(3):
                net.zero_grad()
                net(batch(rank, step)).square().sum().backward()
            assert net.process_group is other and net._has_rebuilt_buckets
            both = [torch.empty_like(net.module.last.weight.grad) for _ in range(WORLD)]
            dist.all_gather(both, net.module.last.weight.grad)
            equal(both[0], both[1])


@check
def pickles_and_copies(rank: int, path: str) -> None:
    with joined(rank, path):
        net = train(DistributedDataParallel, rank)
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        for again in (torch.load(file, weights_only=False), copy.deepcopy(net)):
            assert type(again) is DistributedDataParallel
            again.zero_grad()
            again(batch(rank, 0)).sum().backward()
            assert again.module.first.weight.grad is not None


@check
def higher_order_gradients(rank: int, path: str) -> None:
    """They are not reduced; the first order is, and is the same as without a graph."""
    with joined(rank, path):
        for views in (True, False):
            grads = []
            for create_graph in (True, False):
                torch.manual_seed(0)
                net = DistributedDataParallel(Net(), gradient_as_bucket_view=views)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    net(batch(rank, 0)).square().sum().backward(create_graph=create_graph)
                grads.append([p.grad.detach() for p in net.parameters()])
            for one, other in zip(*grads, strict=True):
                equal(one, other)


@check
def bits_for_three_way_division(rank: int, path: str) -> None:
    """Not a power of two: join mode with one rank left out of three would do; here by the reducer's own divisor."""
    with joined(rank, path):
        net = DistributedDataParallel(Net())
        net(batch(rank, 0)).sum().backward()
        net.zero_grad()
        out = net(batch(rank, 1)).sum()
        net.reducer._divide_by = 3
        out.backward()
        plain = copy.deepcopy(net.module)
        plain.zero_grad()
        plain.train()
        grads = torch.autograd.grad(plain(batch(rank, 1)).sum(), [plain.last.weight])
        mine = grads[0] * (1.0 / 3)
        dist.all_reduce(mine)
        equal(net.module.last.weight.grad, mine)


if __name__ == "__main__":
    import tests.ddp.more_checks as more

    sys.exit(main(sys.argv[1:], {**CHECKS, **more.CHECKS}))
