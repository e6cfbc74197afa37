"""Communication hooks and autograd: backward is never held up by a hook, and ranks start collectives in one order.

Steps that must happen before others wait for events; what a deadline had to end shows as False.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch._C._distributed_c10d as torch_c10d  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import symcomm.c10d  # noqa: E402
from symcomm.ddp import DistributedDataParallel, hooks  # noqa: E402
from tests.support.ddp_jobs import dressed  # noqa: E402
from tests.torch_backend.checks import leave  # noqa: E402

pytestmark = pytest.mark.torch_versions

DIM, LAYERS, PATIENCE = 4, 3, 3.0


def net(kind: Any, group: Any, hook: Any, state: Any = None, **options: Any) -> Any:
    """One layer a bucket, and one backward pass done, after which buckets are in the order of gradients."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))
    for layer in model:
        layer.weight.data.copy_(torch.eye(DIM))
    wrapped = kind(model, process_group=group, bucket_cap_mb=1e-6, **options)
    wrapped.register_comm_hook(state, hook)
    return wrapped


def backward(model: Any, scale: float, on_inputs: Callable[[], None] | None = None) -> list[float]:
    """One value of each layer's gradient. ``on_inputs``: called when autograd has been through all layers."""
    model.zero_grad()
    x = torch.full((1, DIM), scale, requires_grad=True)
    if on_inputs is not None:
        x.register_hook(lambda _: on_inputs())
    model(x).sum().backward()
    return [layer.weight.grad[0, 0].item() for layer in model.module]


def on_gloo(job: Callable[[Any], Any]) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return job(dist.group.WORLD)
    finally:
        leave()


def on_ours(job: Callable[[Any], Any], ranks: int = 1) -> list[Any]:
    return symcomm.spawn(lambda group: job(dressed(group)), ranks, mode="threads", deadline=60)


# --- hooks whose futures are set later -------------------------------------------------------------------------------


def futures_set_late(kind: Any, group: Any) -> tuple[bool, bool, list[float]]:
    """(all hooks were called, and autograd was through all layers, before any future was set; gradients)."""
    given: queue.Queue[tuple[Any, Any]] = queue.Queue()
    all_called, all_computed = threading.Event(), threading.Event()
    is_late = False

    def hook(_, bucket):  # unannotated: torch compares annotations with its own types
        future: Any = torch.futures.Future()
        if is_late:
            given.put((future, bucket.buffer()))
        else:
            future.set_result(bucket.buffer())
        if bucket.is_last():
            all_called.set()
        return future

    def set_futures(seen: list[bool]) -> None:
        seen += [all_called.wait(PATIENCE), all_computed.wait(PATIENCE)]
        for _ in range(LAYERS):
            future, buffer = given.get(timeout=PATIENCE)
            future.set_result(buffer * 2)

    model = net(kind, group, hook)
    backward(model, 1.0)
    all_called.clear()
    is_late = True
    seen: list[bool] = []
    setter = threading.Thread(target=set_futures, args=(seen,))
    setter.start()
    grads = backward(model, 3.0, all_computed.set)
    setter.join()
    return seen[0], seen[1], grads


def test_torchs_backward_is_not_held_up_by_futures():
    assert on_gloo(lambda group: futures_set_late(nn.parallel.DistributedDataParallel, group)) == (
        True, True, [6.0, 6.0, 6.0],
    )  # fmt: skip


def test_backward_is_not_held_up_by_futures():
    assert on_ours(lambda group: futures_set_late(DistributedDataParallel, group)) == [(True, True, [6.0, 6.0, 6.0])]


# --- hooks that go on in callbacks -----------------------------------------------------------------------------------


class Chained:
    """A hook of two all-reduces, the second in a callback of the first.

    ``hold()``: in the next backward pass rank 0's first callback waits for an event, in a thread of its own: the other
    ranks start after rank 0, so that the all-reduce has not ended when the callback is added.
    """

    def __init__(self, group: Any, started: threading.Event | None = None):
        self.group = group
        self.started = started
        self.held: threading.Event | None = None
        self.released_in_time = True
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def hold(self) -> threading.Event:
        self.held = threading.Event()
        return self.held

    def hook(self, _, bucket):
        buffer, index = bucket.buffer(), bucket.index()
        scripted = self.held is not None and index == 0 and self.started is not None
        if scripted and self.group.rank():
            assert self.started.wait(PATIENCE)
        self.threads.add(threading.get_ident())
        self.calls.append(f"first of {index}")
        begun = dist.all_reduce(buffer, group=self.group, async_op=True).get_future()

        def second(ended: Any) -> Any:
            ended.wait()
            if scripted and self.group.rank() == 0:
                self.released_in_time &= self.held.wait(PATIENCE)
            self.calls.append(f"second of {index}")
            return dist.all_reduce(buffer, group=self.group, async_op=True).get_future().wait()[0]

        future = begun.then(second)
        if scripted:
            self.started.set()
        return future


IN_TURN = [f"{which} of {index}" for index in range(LAYERS) for which in ("first", "second")]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_order_is_kept_without_holding_up_backward(options: dict[str, bool]):
    """Rank 0's first callback waits until autograd is through all layers; meanwhile rank 1 may be anywhere."""
    started = threading.Event()

    def job(group: Any) -> tuple[bool, list[str], list[float], bool]:
        chained = Chained(group, started)
        model = net(DistributedDataParallel, group, chained.hook, **options)
        for _ in range(2):  # buckets are cut anew after the first, with a static graph after the second
            backward(model, 1.0)
        chained.calls.clear()
        grads = backward(model, 1.0 + group.rank(), chained.hold().set)
        return chained.released_in_time, chained.calls, grads, chained.threads == {threading.get_ident()}

    assert on_ours(job, 2) == [(True, IN_TURN, [6.0] * LAYERS, True)] * 2


def test_a_rank_without_input_keeps_the_order():
    """What ``join`` does on rank 1, while rank 0 is in backward."""
    started = threading.Event()

    def job(group: Any) -> tuple[bool, list[str], list[float]]:
        chained = Chained(group, started)
        model = net(DistributedDataParallel, group, chained.hook)
        for _ in range(2):
            backward(model, 1.0)
        chained.calls.clear()
        release = chained.hold().set
        if group.rank() == 0:
            grads = backward(model, 1.0, release)
        else:
            buckets = model.reducer._get_zeros_like_grad_buckets()
            futures = [model.reducer._run_comm_hook(bucket) for bucket in buckets]
            grads = [future.wait()[0].item() for future in futures]
        return chained.released_in_time, chained.calls, grads

    assert on_ours(job, 2) == [(True, IN_TURN, [2.0] * LAYERS)] * 2


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, before: Callable[[], None]) -> Any:
        ctx.group, ctx.before = group, before
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        total = grad.clone()
        ctx.before()
        dist.all_reduce(total, group=ctx.group)
        return total, None, None


class WithSum(nn.Module):
    """Layers, with a sum between the first and the others."""

    def __init__(self, group: Any, before: Callable[[], None]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))
        self.summed = lambda x: Summed.apply(x, group, before)
        for layer in self.layers:
            layer.weight.data.copy_(torch.eye(DIM))

    def forward(self, x: Any) -> Any:
        x = self.summed(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def test_a_models_own_collective_keeps_its_place():
    """It comes after the hooks of the buckets before it, also on a rank where those wait for their turn."""
    started = threading.Event()

    def job(group: Any) -> list[float]:
        chained = Chained(group, started)

        def release_soon() -> None:
            if chained.held is not None:
                threading.Timer(0.2, chained.held.set).start()

        model = DistributedDataParallel(WithSum(group, release_soon), process_group=group, bucket_cap_mb=1e-6)
        model.register_comm_hook(None, chained.hook)
        for step in range(2):
            model.zero_grad()
            if step:
                chained.hold()
            model(torch.ones(1, DIM)).sum().backward()
        assert chained.released_in_time
        return [layer.weight.grad[0, 0].item() for layer in model.module.layers]

    # Each rank's gradient is 1, the first layer's 2; each all-reduce of the hook doubles them.
    assert on_ours(job, 2) == [[8.0, 4.0, 4.0]] * 2


def test_hooks_that_only_compute_need_not_take_turns():
    """The first bucket's callback waits until the last bucket's hook has been called."""

    def job(group: Any) -> tuple[bool, list[float]]:
        last_called, in_time = threading.Event(), [True]

        def hook(_, bucket):  # unannotated: torch compares annotations with its own types
            buffer, index = bucket.buffer(), bucket.index()
            started = dist.all_reduce(buffer, group=group, async_op=True).get_future()
            if bucket.is_last():
                last_called.set()

            def result(ended: Any) -> Any:
                if index == 0:
                    in_time[0] &= last_called.wait(PATIENCE)
                return ended.value()[0]

            return started.then(result)

        hook.callbacks_only_compute = True  # type: ignore[attr-defined]
        model = net(DistributedDataParallel, group, hook)
        backward(model, 1.0)
        last_called.clear()
        return in_time[0], backward(model, 1.0 + group.rank())

    assert on_ours(job, 2) == [(True, [3.0] * LAYERS)] * 2


def test_our_own_hooks_need_not_take_turns():
    made = (hooks.cast_hook, hooks.blockwise_hook, hooks.topk_hook, hooks.power_sgd_hook, hooks.local_sgd_hook)
    assert all(hook.callbacks_only_compute for hook in made)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", range(LAYERS))
def test_backward_raises_what_a_hook_raises(fails: int):
    """Also if the hook had to wait for its turn; and the model can be used again."""
    started = threading.Event()

    def job(group: Any) -> tuple[str, list[float]]:
        chained, is_broken = Chained(group, started), False

        def hook(state, bucket):
            if is_broken and bucket.index() == fails:
                raise ValueError(f"no room for bucket {fails}")
            return chained.hook(state, bucket)

        model = net(DistributedDataParallel, group, hook)
        backward(model, 1.0)
        is_broken, release = True, chained.hold().set
        with pytest.raises(ValueError) as raised:
            backward(model, 1.0, release)
        release()
        is_broken, chained.held = False, None
        model.reducer._reset_state()
        return str(raised.value), backward(model, 1.0)

    assert on_ours(job, 2) == [(f"no room for bucket {fails}", [4.0] * LAYERS)] * 2


# --- futures of others -----------------------------------------------------------------------------------------------


def installed_twice(module: Any, group: Any) -> tuple[bool, list[float]]:
    """(whether a backward pass ended before the futures of both calls had, the gradient)."""
    param = nn.Parameter(torch.ones(DIM))
    reducer = module.Reducer([param], [[0]], [1 << 20], group)
    logger = module.Logger(reducer)
    reducer.set_logger(logger)
    reducer.prepare_for_forward()
    loss = (param * 2).sum()
    reducer.prepare_for_backward([])
    futures: list[Any] = [torch.futures.Future() for _ in range(2)]
    for future in futures:
        reducer._install_post_backward_futures([future])
    futures[1].set_result(None)
    ended = threading.Event()

    def run() -> None:
        loss.backward()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    too_early = ended.wait(0.3)
    futures[0].set_result(None)
    thread.join()
    return too_early, param.grad.tolist()  # type: ignore[union-attr]


def test_post_backward_futures_add_up():
    def both(group: Any) -> list[tuple[bool, list[float]]]:
        return [installed_twice(module, group) for module in (torch_c10d, symcomm.c10d)]

    assert on_gloo(both) == [(False, [2.0] * DIM)] * 2
