"""Communication hooks on torch's DDP over our backend, with threads as ranks: what they send, keep and converge to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import symcomm.ddp
from symcomm import errors
from symcomm.ddp import hooks
from symcomm.ddp.hooks._exchange import all_reduce_bytes
from tests.support.ddp_jobs import (
    BF16,
    DIM,
    FP8,
    FP16,
    INT8,
    Bucket,
    dressed,
    fixed_loss,
    nothing,
    parallel,
    run,
    small_model,
    torch,
    train,
    weights_of,
)
from tests.support.ranks import run_ranks
from tests.torch_backend.checks import leave

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

# --- one small job -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tuple[float, torch.Tensor]:
    """Final loss and weights of plain all-reduce."""
    return run(None)[0][:2]


# name -> (state, hook, how far the final weights may be from plain's as a share of the way that plain's have come, the
# least share of bytes saved)
CASES: dict[str, tuple[Any, Any, float, float]] = {
    "bf16": (lambda m, g: hooks.CastState(BF16, g), hooks.cast_hook, 0.002, 0.499),
    "bf16-ef": (lambda m, g: hooks.CastState(BF16, g, error_feedback=True), hooks.cast_hook, 0.002, 0.499),
    "fp16": (lambda m, g: hooks.CastState(FP16, g), hooks.cast_hook, 0.001, 0.499),
    "int8": (lambda m, g: hooks.BlockwiseState(INT8, 256, g), hooks.blockwise_hook, 0.01, 0.74),
    "int8-ef": (
        lambda m, g: hooks.BlockwiseState(INT8, 64, g, error_feedback=True), hooks.blockwise_hook, 0.001, 0.725),
    "fp8": (lambda m, g: hooks.BlockwiseState(FP8, 256, g), hooks.blockwise_hook, 0.03, 0.74),
    "fp8-bucket-ef": (
        lambda m, g: hooks.BlockwiseState(FP8, None, g, error_feedback=True), hooks.blockwise_hook, 0.005, 0.745),
    "topk": (lambda m, g: hooks.TopKState(0.1, g), hooks.topk_hook, 0.1, 0.69),
    "powersgd": (lambda m, g: hooks.PowerSGDState(2, g, start=5), hooks.power_sgd_hook, 0.1, 0.79),
    "local-sgd": (lambda m, g: hooks.LocalSGDState(m.parameters(), 6, g), hooks.local_sgd_hook, 0.03, 0.83),
    "diloco": (
        lambda m, g: hooks.DiLoCoState(m.parameters(), 6, g, lr=0.7, momentum=0.5), hooks.local_sgd_hook, 0.25, 0.83),
    "diloco-int8": (
        lambda m, g: hooks.DiLoCoState(m.parameters(), 6, g, lr=0.7, momentum=0.5, dtype=INT8),
        hooks.local_sgd_hook, 0.25, 0.95),
    "diloco-bf16": (
        lambda m, g: hooks.DiLoCoState(m.parameters(), 6, g, lr=0.7, momentum=0.5, dtype=BF16),
        hooks.local_sgd_hook, 0.25, 0.91),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_does(name: str, plain: tuple[float, torch.Tensor]):
    make, hook, tolerance, least = CASES[name]
    ranks = run(make, hook)
    loss, weights, saved, *_ = ranks[0]
    way = (plain[1] - weights_of(small_model())).norm()
    off = ((weights - plain[1]).norm() / way).item()
    print(f"{name}: loss {loss:.4f} (plain {plain[0]:.4f}), {off:.4f} off, saved {saved:.3f}")
    assert loss <= plain[0] * 1.03
    assert off <= tolerance
    assert saved >= least
    assert all(torch.equal(weights, other[1]) for other in ranks[1:])  # the last step ends in a common point


@pytest.mark.parametrize("name", ["bf16-ef", "int8-ef", "topk", "powersgd", "diloco-int8"])
def test_our_ddp_gives_the_same_bits(name: str):
    make, hook = CASES[name][:2]
    theirs, ours = (run(make, hook, n=2, steps=12, kind=kind) for kind in (None, symcomm.ddp.DistributedDataParallel))
    for one, two in zip(theirs, ours, strict=True):
        assert torch.equal(one[1], two[1]) and one[3:] == two[3:]


def test_the_job_learns(plain: tuple[float, torch.Tensor]):
    assert plain[0] < 0.5 * fixed_loss(small_model())  # or the comparisons above would say nothing


# --- single buckets ------------------------------------------------------------------------------------------------


def alone(gradient: torch.Tensor) -> Bucket:
    return Bucket([nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))], [gradient])


STATES: dict[str, tuple[Callable[..., Any], Any]] = {
    "cast": (lambda **k: hooks.CastState(BF16, **k), hooks.cast_hook),
    "int8": (lambda **k: hooks.BlockwiseState(INT8, 32, **k), hooks.blockwise_hook),
    "fp8": (lambda **k: hooks.BlockwiseState(FP8, None, **k), hooks.blockwise_hook),
    "topk": (lambda **k: hooks.TopKState(0.05, **k), hooks.topk_hook),
    "powersgd": (lambda **k: hooks.PowerSGDState(2, **k), hooks.power_sgd_hook),
}
HOW_CLOSE = {"cast": 0.01, "int8": 0.02, "fp8": 0.08}  # error relative to the largest value


def averaged(name: str, n: int, gradient: Callable[[int], torch.Tensor], times: int = 1, **options: Any) -> list[Any]:
    """What ``times`` calls of a hook make of each rank's gradient; the state found its group by itself."""

    def fn(group: Any) -> list[torch.Tensor]:
        make, hook = STATES[name]
        state = make(**options)
        parameter = nn.Parameter(torch.zeros_like(gradient(0)))
        return [hook(state, Bucket([parameter], [gradient(group.rank)])).wait().clone() for _ in range(times)]

    return symcomm.spawn(fn, n, mode="threads", deadline=60)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], torch.Tensor]:
    return lambda rank: torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", STATES)
def test_odd_and_tiny_buckets(name: str, n: int):
    for count in (1, 2, 3, 7, 255, 1001):
        source = normal(count)
        exact = torch.stack([source(r) for r in range(n)]).mean(0)
        results = [r[0] for r in averaged(name, n, source)]
        assert all(torch.equal(results[0], other) for other in results[1:])
        if name in HOW_CLOSE or n == 1:
            close = HOW_CLOSE[name] if n > 1 else 0.0
            assert (results[0] - exact).abs().max() <= close * exact.abs().max() * 3


@pytest.mark.parametrize("dtype", [torch.float64, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_other_dtypes(name: str, dtype: torch.dtype):
    source = normal(48, 40, dtype=dtype)
    results = [r[0] for r in averaged(name, 2, source)]
    assert results[0].dtype == dtype and torch.equal(results[0], results[1])
    if name in HOW_CLOSE:
        exact = ((source(0).double() + source(1).double()) / 2).flatten()
        assert (results[0].double() - exact).abs().max() <= 3 * HOW_CLOSE[name] * exact.abs().max()


@pytest.mark.parametrize("name", STATES)
def test_zero_gradients_stay_zero(name: str):
    results = averaged(name, 2, lambda rank: torch.zeros(50, 40), times=2, error_feedback=True)
    assert all(torch.equal(one, torch.zeros(2000)) for rank in results for one in rank)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", STATES)
def test_infinities_and_nans_arrive_everywhere_and_do_not_stay(name: str, bad: float):
    def fn(group: Any) -> tuple[bool, torch.Tensor]:
        make, hook = STATES[name]
        state = make(error_feedback=True)
        parameter = nn.Parameter(torch.zeros(50, 40))
        gradient = normal(50, 40)(group.rank)
        if group.rank == 1:
            gradient[3, 5] = bad
        first = hook(state, Bucket([parameter], [gradient])).wait().clone()
        second = hook(state, Bucket([parameter], [normal(50, 40)(group.rank)])).wait()
        return bool(first[3 * 40 + 5].isfinite()), second

    for finite, after in symcomm.spawn(fn, 2, mode="threads", deadline=60):
        assert not finite
        assert after.isfinite().all()


@pytest.mark.parametrize("name", STATES)
def test_error_feedback_makes_up_for_what_was_left_out(name: str):
    """The mean of what arrives over many steps comes close to the true gradient."""
    source, times = normal(30, 40), 60
    exact = (source(0) + source(1)).flatten() / 2
    missed = {}
    for feedback in (True, False):
        steps = averaged(name, 2, source, times=times, error_feedback=feedback)[0]
        missed[feedback] = (torch.stack(steps).mean(0) - exact).norm() / exact.norm()
    assert missed[True] < missed[False] * 0.6
    assert missed[True] < 0.4


def test_quantised_bytes_are_those_of_the_codes_and_scales():
    def fn(group: Any) -> tuple[int, int]:
        state = hooks.BlockwiseState(INT8, 256)
        hooks.blockwise_hook(state, alone(torch.ones(256 * 4 * 8))).wait()
        return state.bytes_sent, state.bytes_plain

    n, count = 4, 256 * 4 * 8
    for sent, plain in symcomm.spawn(fn, n, mode="threads", deadline=60):
        assert sent == 2 * (n - 1) * (count + 4 * count // 256) // n
        assert plain == all_reduce_bytes(4 * count, n) == 2 * (n - 1) * 4 * count // n


@pytest.mark.parametrize("block", [64, None])
def test_int8_error_is_at_most_half_a_step_of_each_block(block: int | None):
    from symcomm.ddp.hooks.blockwise import BlockCodec

    codec = BlockCodec(INT8, block)
    values = torch.randn(1, 5, block or 320) * torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30]).view(1, 5, 1)
    back = codec.unpack(codec.pack(values), 5, torch.float32)
    half_step = values.abs().amax(2, keepdim=True) / 127 / 2
    assert ((back - values).abs() <= half_step * 1.001).all()


def test_powersgd_is_exact_for_a_matrix_of_low_rank():
    left, right = normal(50, 2)(0), normal(2, 40)(1)
    result = averaged("powersgd", 2, lambda rank: (rank + 1.0) * left @ right)[0][0]
    torch.testing.assert_close(result.view(50, 40), 1.5 * left @ right, rtol=1e-4, atol=1e-4)


def test_topk_sends_the_largest():
    gradient = torch.zeros(100)
    gradient[[7, 42, 99]] = torch.tensor([3.0, -5.0, 1.0])

    def fn(group: Any) -> list[float]:
        state = hooks.TopKState(0.02)
        parameter = nn.Parameter(torch.zeros(100))
        first = hooks.topk_hook(state, Bucket([parameter], [gradient])).wait().clone()
        second = hooks.topk_hook(state, Bucket([parameter], [torch.zeros(100)])).wait()
        return [*first[[7, 42, 99]].tolist(), second[99].item()]

    assert symcomm.spawn(fn, 2, mode="threads", deadline=60) == [[3.0, -5.0, 0.0, 1.0]] * 2


# --- layouts, groups, checkpoints ----------------------------------------------------------------------------------


def test_nothing_is_lost_when_buckets_are_cut_anew():
    """Over all steps, what arrived plus what waits is what was given, whatever the layouts were."""
    sizes = {"a": (30, 10), "b": (7,), "c": (20, 20)}
    layouts = [["a", "b"], ["c"]], [["b", "c"], ["a"]], [["c", "b", "a"]], [["a"], ["b"], ["c"]]

    def fn(group: Any) -> dict[str, torch.Tensor]:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})
        state = hooks.TopKState(0.3, model=model)
        sums = {name: torch.zeros(size).flatten() for name, size in sizes.items()}
        for step, layout in enumerate(layouts):
            for names in layout:
                gradients = [normal(*sizes[k])(10 * step + group.rank) for k in names]
                bucket = Bucket([model[k] for k in names], gradients)
                hooks.topk_hook(state, bucket).wait()
                for name, got in zip(names, bucket.gradients(), strict=True):
                    sums[name] += got.flatten() * group.size
        waiting = state.state_dict()["residuals"]
        for name, total in sums.items():
            rest = waiting.get(name, torch.zeros_like(total)).clone()
            group.all_reduce(rest)
            total += rest
        return sums

    for sums in symcomm.spawn(fn, 2, mode="threads", deadline=60):
        for name, size in sizes.items():
            given = sum(normal(*size)(10 * step + rank) for step in range(len(layouts)) for rank in range(2))
            torch.testing.assert_close(sums[name], given.flatten(), rtol=1e-4, atol=1e-4)


def test_ddp_rebuilds_its_buckets_and_residuals_stay_right():
    """torch's DDP cuts other buckets after the first iteration; parameters are used in another order than defined."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(40, 1), nn.Linear(50, 40), nn.Linear(DIM, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x).tanh()).tanh())

    def fn(group: Any) -> tuple[int, float]:
        model = Backwards()
        wrapped = parallel(model, dressed(group))
        state = hooks.BlockwiseState(INT8, 32, dressed(group), error_feedback=True, model=wrapped)
        layouts = []

        def watching(state: Any, bucket: dist.GradBucket) -> Any:
            layouts.append(tuple(id(p) for p in bucket.parameters()))
            return hooks.blockwise_hook(state, bucket)

        watching.__annotations__ = {}
        wrapped.register_comm_hook(state, watching)
        for step in range(4):
            wrapped.zero_grad()
            x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(10 * step + group.rank))
            wrapped(x).square().sum().backward()
        names = set(state.state_dict()["residuals"])
        assert names <= {name for name, _ in model.named_parameters()} and "middle.weight" in names
        return len(set(layouts)), state.saved

    for layouts, saved in symcomm.spawn(fn, 2, mode="threads", deadline=60):
        assert layouts > 2 and saved > 0.6


@pytest.mark.parametrize("name", ["bf16-ef", "int8-ef", "topk", "powersgd"])
def test_with_the_options_of_ddp(name: str):
    """Gradients as views of buckets, unused parameters, accumulation without sync: ranks still end equal."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = small_model(), nn.Linear(DIM, 30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def fn(group: Any, options: dict[str, bool]) -> torch.Tensor:
        model = Forked()
        wrapped = parallel(model, dressed(group), **options)
        make, hook = CASES[name][:2]
        wrapped.register_comm_hook(make(model, dressed(group)), hook)
        train(wrapped, group.rank, 6)
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(torch.ones(2, DIM) * group.rank).sum().backward()
        wrapped(torch.ones(2, DIM) * group.rank).sum().backward()
        return torch.cat([weights_of(model.used), *[p.grad.flatten() for p in model.used.parameters()]])

    for options in ({"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}):
        one, two = symcomm.spawn(fn, 2, (options,), mode="threads", deadline=60)
        assert torch.equal(one, two) and one.count_nonzero() > 0.9 * len(one) * (name != "topk")


def test_sparse_gradients_are_averaged_as_they_are():
    def fn(group: Any) -> tuple[torch.Tensor, float]:
        model = nn.Embedding(10, 4, sparse=True)
        wrapped = parallel(model, dressed(group))
        state = hooks.BlockwiseState(process_group=dressed(group), error_feedback=True)
        wrapped.register_comm_hook(state, hooks.blockwise_hook)
        wrapped(torch.tensor([1, 3 + group.rank])).sum().backward()
        return model.weight.grad.to_dense()[:, 0], state.saved

    for gradient, saved in symcomm.spawn(fn, 2, mode="threads", deadline=60):
        assert gradient.tolist() == [0, 1, 0, 0.5, 0.5, 0, 0, 0, 0, 0] and saved == 0


def test_states_of_several_groups():
    def fn(group: Any) -> list[float]:
        pair = group.split(color=group.rank // 2)
        wide, narrow = hooks.CastState(process_group=group), hooks.CastState(process_group=dressed(pair))
        one, two = alone(torch.full((64,), float(group.rank))), alone(torch.full((64,), float(group.rank)))
        futures = [hooks.cast_hook(narrow, one), hooks.cast_hook(wide, two)]
        return [future.wait()[0].item() for future in futures]

    assert symcomm.spawn(fn, 4, mode="threads", deadline=60) == [[0.5, 1.5], [0.5, 1.5], [2.5, 1.5], [2.5, 1.5]]


KEPT: dict[str, tuple[Any, Any]] = {
    "cast": (lambda m: hooks.CastState(BF16, error_feedback=True, model=m), hooks.cast_hook),
    "int8": (lambda m: hooks.BlockwiseState(INT8, 64, error_feedback=True, model=m), hooks.blockwise_hook),
    "topk": (lambda m: hooks.TopKState(0.1, model=m), hooks.topk_hook),
    "powersgd": (lambda m: hooks.PowerSGDState(2, start=2, model=m), hooks.power_sgd_hook),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_goes_on_where_it_stopped(name: str, tmp_path: Any):
    """Six steps in one go; and three, saved, loaded into a fresh state of a fresh model, and three: the same bits."""
    make, hook = KEPT[name]

    def steps(state: Any, model: nn.Module, group: Any, numbers: range) -> list[torch.Tensor]:
        own = list(model.parameters())
        return [
            hook(state, Bucket(own, [normal(*p.shape)(10 * step + group.rank) for p in own])).wait().clone()
            for step in numbers
        ]

    def fn(group: Any) -> list[bool]:
        model, again = nn.Linear(30, 50), nn.Linear(30, 50)
        state, fresh = make(model), make(nn.ModuleDict({"module": again}))  # as wrapped by DDP
        steps(state, model, group, range(3))
        path = tmp_path / f"{group.rank}.pt"
        torch.save(state.state_dict(), path)
        straight = steps(state, model, group, range(3, 6))
        fresh.load_state_dict(torch.load(path, weights_only=True))
        resumed = steps(fresh, again, group, range(3, 6))
        assert fresh.iteration == 6 and fresh.bytes_sent == state.bytes_sent
        return [torch.equal(one, two) for one, two in zip(straight, resumed, strict=True)]

    assert symcomm.spawn(fn, 2, mode="threads", deadline=60) == [[True] * 3] * 2


# --- bad arguments -------------------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: hooks.CastState(torch.int8), r"CastState: dtype must be torch.bfloat16 or torch.float16, got torch.int8"),
    (lambda: hooks.CastState(process_group="dp"), r"CastState: process_group must be a process group or None"),
    (lambda: hooks.CastState(error_feedback="yes"), r"CastState: error_feedback must be True or False"),
    (lambda: hooks.CastState(model=3), r"CastState: model must be a torch.nn.Module or None, got 'int'"),
    (lambda: hooks.BlockwiseState(torch.int16), r"BlockwiseState: dtype must be torch.int8 or torch.float8_e4m3fn"),
    (lambda: hooks.BlockwiseState(block=0), r"BlockwiseState: block must be a whole number, 1 or more, got 0"),
    (lambda: hooks.TopKState(0.0), r"TopKState: ratio must be a number above 0, at most 1, got 0.0"),
    (lambda: hooks.TopKState(float("nan")), r"TopKState: ratio must be a number above 0"),
    (lambda: hooks.PowerSGDState(0), r"PowerSGDState: rank must be a whole number, 1 or more, got 0"),
    (lambda: hooks.PowerSGDState(start=-1), r"PowerSGDState: start must be a whole number, 0 or more, got -1"),
    (lambda: hooks.LocalSGDState([]), r"LocalSGDState: parameters must be tensors, at least one.*model.parameters\(\)"),
    (lambda: hooks.LocalSGDState([torch.ones(1)], True), r"LocalSGDState: period must be a whole number"),
    (lambda: hooks.DiLoCoState([torch.ones(1)], momentum=1.0), r"DiLoCoState: momentum must be a number, at least 0"),
    (lambda: hooks.DiLoCoState([torch.ones(1)], dtype=torch.int32), r"DiLoCoState: dtype must be None or torch.bf"),
]  # fmt: skip


@pytest.mark.parametrize("call,words", WRONG)
def test_bad_arguments_get_one_sentence(call: Callable[[], Any], words: str):
    with pytest.raises(errors.BadArgumentError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_checkpoints_ask_for_the_model():
    def fn(group: Any) -> None:
        state = hooks.TopKState(0.2)
        hooks.topk_hook(state, alone(torch.ones(100))).wait()
        with pytest.raises(errors.CallerError, match=r"give the model to the state: TopKState\(model=model\)"):
            state.state_dict()
        named = hooks.TopKState(0.5, model=nn.Linear(3, 1))
        whole = named.state_dict()
        with pytest.raises(errors.BadArgumentError, match="residuals is missing"):
            named.load_state_dict({k: v for k, v in whole.items() if k != "residuals"})
        with pytest.raises(errors.BadArgumentError, match="'weight' must be 3 elements long, got '4 elements'"):
            named.load_state_dict({**whole, "residuals": {"weight": torch.ones(4)}})
        with pytest.raises(errors.BadArgumentError, match=r"every name must be a parameter's \(weight, bias\)"):
            named.load_state_dict({**whole, "residuals": {"nobody": torch.ones(4)}})

    symcomm.spawn(fn, 2, mode="threads", deadline=60)


def test_without_any_group():
    with pytest.raises(errors.GroupUnusableError, match="no default group"):
        _ = hooks.CastState().process_group


# --- as users run it: processes, and Gloo ---------------------------------------------------------------------------


def _on_backend(rank: int, world: int, path: str, backend: str) -> list[tuple[float, bool]]:
    from symcomm.torch_backend.register import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
    told = []
    for name in ("bf16-ef", "int8-ef", "topk", "powersgd", "diloco-int8"):  # six steps: PowerSGD begins after five
        make, hook = CASES[name][:2]
        model = small_model()
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        state = make(model, None)
        wrapped.register_comm_hook(state, hook)
        train(wrapped, rank, 6, getattr(state, "step", nothing))
        if name == "int8-ef":
            with wrapped.join():  # ranks that have no data left take part with zeros
                train(wrapped, rank, 2 + rank, skip=6)
        mine = weights_of(model)
        others = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(others, mine)
        told.append((state.saved, all(torch.equal(mine, other) for other in others)))
    leave()
    return told


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("backend", ["symcomm", "gloo"])
def test_in_processes(backend: str, tmp_path: Any):
    outcomes = run_ranks(_on_backend, 2, str(tmp_path / "meet"), backend, deadline=60, outcomes=True)
    if backend == "gloo" and "stuck" in [o.kind for o in outcomes]:  # Gloo's ranks may miss each other: once
        outcomes = run_ranks(_on_backend, 2, str(tmp_path / "again"), backend, deadline=60, outcomes=True)
    for outcome in outcomes:
        assert outcome.kind == "returned" and all(same and saved > 0.1 for saved, same in outcome.value), outcome
