"""DistributedDataParallel with logical shards: on any number of ranks, the bits of as many as there are shards."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import symcomm
from symcomm import errors
from symcomm.ddp.sampling import seed_of
from symcomm.ddp.shards import ranks_with_shards
from tests.support.ddp_jobs import dressed

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

SHARDS, STEPS = 8, 4
BF16 = torch.bfloat16


class Net(nn.Module):
    """With a batch norm, and a branch that only some shards use."""

    def __init__(self, dtype: torch.dtype, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.branch = nn.Linear(16, 16)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(16, 3)
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) / 3)
        self.to(dtype)

    def forward(self, x: Any, branch: bool) -> Any:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.branch(x) if branch else x)


def loss_of(model: Any, step: int, shard: int, dtype: torch.dtype, unused: bool) -> Any:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + shard))
    branch = not unused or (shard == 5 and step % 2 == 0)
    return (model(x.to(dtype), branch) * (1 + shard)).square().sum()


def trained(group: Any, shards: int, dtype: torch.dtype, unused: bool, clip: bool, options: Any) -> list[torch.Tensor]:
    """State after some steps, and the last gradients. ``shards`` 0: plain, one shard a rank."""
    module = Net(dtype)
    if not unused:
        del module.never
    how = {"logical_shards": shards, **options} if shards else options
    model = symcomm.DistributedDataParallel(
        module, process_group=dressed(group), find_unused_parameters=unused, bucket_cap_mb=0.0005, **how
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0005, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for shard in model.shards() if shards else [group.rank]:
            loss_of(model, step, shard, dtype, unused).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert unused == any(p.grad is None for p in module.parameters())
    assert all(p.isfinite().all() for p in module.parameters())
    gradients = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters()]
    if shards:
        assert len(model.reducer.buckets) > 1 and model.reducer.has_rebuilt == (not unused)
    return [*module.state_dict().values(), *gradients]


def digest(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


CASES = {
    "plain": (torch.float32, False, False, {}),
    "unused": (torch.float32, True, False, {}),
    "bfloat16": (BF16, False, False, {}),
    "clipped": (torch.float32, False, True, {"gradient_as_bucket_view": False}),
    "batched": (torch.float32, False, False, {"batched_grad_copy": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_as_many_ranks(name):
    dtype, unused, clip, options = CASES[name]
    want = symcomm.spawn(trained, SHARDS, (0, dtype, unused, clip, options), mode="threads", deadline=100)
    # plain ranks' batch norms differ until the next forward, in which rank 0's are sent to all
    rank_0 = digest(want[0])
    for ranks in (1, 2, 4, 8):
        got = symcomm.spawn(trained, ranks, (SHARDS, dtype, unused, clip, options), mode="threads", deadline=100)
        assert [digest(one) == rank_0 for one in got] == [True] * ranks, ranks


@pytest.mark.parametrize(("shards", "numbers"), [(3, (1, 3)), (6, (1, 3, 6)), (7, (1,))])
def test_numbers_of_shards_that_are_no_power_of_two(shards, numbers):
    arguments = (torch.float32, True, False, {})
    want = symcomm.spawn(trained, shards, (0, *arguments), mode="threads", deadline=100)
    for ranks in numbers:
        got = symcomm.spawn(trained, ranks, (shards, *arguments), mode="threads", deadline=100)
        assert {digest(one) for one in got} == {digest(want[0])}, ranks


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("ranks", [3, 5, 6])
def test_ranks_without_shards_get_the_result(ranks, unused):
    [want] = symcomm.spawn(trained, 1, (SHARDS, torch.float32, unused, False, {}), mode="threads")
    options = {"spare_ranks": True}
    got = symcomm.spawn(trained, ranks, (SHARDS, torch.float32, unused, False, options), mode="threads", deadline=100)
    assert {digest(one) for one in got} == {digest(want)}


def test_small_floats_across_hosts():
    """They travel in float32, though SYMCOMM_WIDE_SUMS is not set."""
    [want] = symcomm.spawn(trained, 1, (SHARDS, BF16, False, False, {}), mode="threads")
    for hosts in ([2, 2], [2] * 4):
        arguments = (SHARDS, BF16, False, False, {})
        got = symcomm.spawn(trained, sum(hosts), arguments, mode="threads", hosts=hosts, deadline=100)
        assert {digest(one) for one in got} == {digest(want)}


def test_the_average_of_the_shards_in_turn():
    """Against torch's own accumulation, to rounding: it is the average, and not some other tree of ours."""

    def alone() -> list[torch.Tensor]:
        module = Net(torch.float64, norm=False)
        for shard in range(SHARDS):
            (loss_of(module, 0, shard, torch.float64, False) / SHARDS).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    def on_rank(group: Any) -> list[torch.Tensor]:
        module = Net(torch.float64, norm=False)
        del module.never
        model = symcomm.DistributedDataParallel(module, process_group=dressed(group), logical_shards=SHARDS)
        for shard in model.shards():
            assert all(p.grad is None for p in module.parameters())
            loss_of(model, 0, shard, torch.float64, False).backward()
        return [p.grad.clone() for p in module.parameters()]

    for got in symcomm.spawn(on_rank, 2, mode="threads"):
        for one, other in zip(got, alone(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- what goes wrong ----------------------------------------------------------------------------------------------


def small(group: Any, **options: Any) -> Any:
    kind = symcomm.DistributedDataParallel
    return kind(nn.Linear(3, 3), process_group=dressed(group), **{"logical_shards": 4, **options})


def alone(call: Any) -> Any:
    return symcomm.spawn(call, 1, mode="threads")[0]


def hook(state: Any, bucket: Any) -> Any:
    raise AssertionError


REFUSED = [
    (
        lambda m: m.no_sync(),
        "no_sync: it does not go with logical_shards: a step's gradients are reduced with the last",
    ),
    (lambda m: m.join(), "join: it does not go with logical_shards: every step has all its shards"),
    (lambda m: m.register_comm_hook(None, hook), "register_comm_hook: it does not go with logical_shards: a hook"),
    (lambda m: m._set_static_graph(), "_set_static_graph: it does not go with logical_shards: its first"),
    (lambda m: m._register_builtin_comm_hook(1), "_register_builtin_comm_hook: it does not go with"),
    (lambda m: m._register_buffer_comm_hook(None, hook), "_register_buffer_comm_hook: it does not go with"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=range(len(REFUSED)))
def test_calls_that_do_not_go_with_it(call, words):
    def on_rank(group: Any) -> str:
        with pytest.raises(errors.CallerError) as caught:
            call(small(group))
        return str(caught.value)

    said = alone(on_rank)
    assert said.startswith(words) and "\n" not in said


OPTIONS = [
    ({"static_graph": True}, "static_graph must be left out with logical_shards, got True"),
    ({"skip_all_reduce_unused_params": True}, "skip_all_reduce_unused_params must be left out with logical_shards"),
    ({"delay_all_reduce_named_params": [("weight", 1)]}, "delay_all_reduce_named_params must be left out"),
    ({"logical_shards": 0.5}, "logical_shards must be a number of shards, got"),
    ({"logical_shards": -1}, "logical_shards must be 1 or more, got -1"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=range(len(OPTIONS)))
def test_arguments_that_do_not_go_with_it(options, words):
    def on_rank(group: Any) -> str:
        with pytest.raises(errors.BadArgumentError) as caught:
            small(group, **options)
        return str(caught.value)

    assert words in alone(on_rank)


@pytest.fixture
def alone_in_the_world():
    dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_the_world")
def test_what_else_does_not_go_with_it():
    kind = symcomm.DistributedDataParallel
    layers = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.raises(errors.CallerError, match="with logical_shards: SyncBatchNorm's statistics are those of"):
        kind(layers, logical_shards=4)
    with pytest.raises(errors.BadArgumentError, match="spare_ranks must be left out without logical_shards"):
        kind(nn.Linear(3, 3), spare_ranks=True)
    with (
        pytest.raises(errors.CallerError, match="join: it does not go with logical_shards"),
        Join([kind(nn.Linear(3, 3), logical_shards=4)]),
    ):
        raise AssertionError
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(errors.CallerError, match=r"with logical_shards: optimize_ddp=\"python_reducer\" reduces in"),
    ):
        kind(nn.Linear(3, 3), logical_shards=4)


@pytest.mark.usefixtures("alone_in_the_world")
def test_a_saved_model_goes_on():
    model = symcomm.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), logical_shards=4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for _ in again.shards():
        again(torch.randn(4, 3)).sum().backward()
    assert again.module[1].num_batches_tracked == 1 and again.module[0].weight.grad is not None


def test_numbers_of_ranks_and_shards():
    def on_rank(group: Any) -> list[str]:
        said = []
        for shards in (8, 4 + group.rank):
            with pytest.raises(errors.CallerError) as caught:
                small(group, logical_shards=shards)
            said.append(str(caught.value))
        return said

    for odd, different in symcomm.spawn(on_rank, 3, mode="threads"):
        assert (
            odd == "DistributedDataParallel: logical_shards must be 3 (the group's ranks) times a power of two, got 8."
        )
        assert "differ between ranks: (4, False) on rank 0, (5, False) on rank 1, (6, False) on rank 2" in different
    assert [ranks_with_shards(8, n) for n in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    assert [ranks_with_shards(12, n) for n in range(1, 7)] == [1, 1, 3, 3, 3, 6]


def test_other_backends_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(errors.BadArgumentError, match="must be one of backend symcomm with logical_shards"):
            symcomm.DistributedDataParallel(nn.Linear(2, 2), logical_shards=2)
        with pytest.raises(errors.CallerError, match=r"shards: pass logical_shards=... to the constructor first"):
            symcomm.DistributedDataParallel(nn.Linear(2, 2)).shards()
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_are_refused():
    def on_rank(group: Any) -> None:
        layer = nn.Embedding(3, 3, sparse=True)
        with pytest.raises(errors.CallerError, match="with logical_shards: a parameter has sparse gradients"):
            symcomm.DistributedDataParallel(layer, process_group=dressed(group), logical_shards=2)

    alone(on_rank)


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_that_are_there_as_a_step_begins(as_views):
    """Adding to them, or to zeros, which have a sign, would give bits that depend on the number of ranks."""

    def on_rank(group: Any) -> None:
        model = small(group, gradient_as_bucket_view=as_views)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                for _ in model.shards():
                    model(torch.ones(1, 3)).sum().backward()
            else:
                with pytest.raises(errors.CallerError, match="has a gradient already as a step of 4 logical shards"):
                    model(torch.ones(1, 3)).sum().backward()

    alone(on_rank)


def test_zeroing_between_forward_and_backward():
    def on_rank(group: Any) -> Any:
        model = small(group)
        for _ in range(2):
            for _ in model.shards():
                loss = model(torch.ones(1, 3)).sum()
                model.zero_grad()
                loss.backward()
        return model.module.bias.grad.tolist()

    assert alone(on_rank) == [1.0, 1.0, 1.0]


def test_steps_that_are_not_whole():
    def on_rank(group: Any) -> Any:
        model = small(group)

        def run(number: int) -> None:
            model.zero_grad()
            for shard in model.shards():
                if shard == number:
                    break
                model(torch.ones(1, 3)).sum().backward()

        run(2)
        with pytest.raises(errors.CallerError, match="the last step ended after 2 of this rank's 4 shards; run all"):
            run(9)
        with pytest.raises(
            errors.CallerError, match="0 backward passes ended in shard 0; run one of each shard's loss"
        ):
            next(shards := model.shards())
            next(shards)
        run(9)
        return model.module.bias.grad.tolist()

    assert alone(on_rank) == [1.0, 1.0, 1.0]


def test_parameters_without_gradients_are_named():
    def on_rank(group: Any) -> None:
        layers = nn.ModuleDict({"used": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
        layers.forward = lambda x: layers["used"](x)
        model = symcomm.DistributedDataParallel(layers, process_group=dressed(group), logical_shards=4)
        words = r"shards: no gradient came for other.weight, other.bias in shard \d; pass find_unused_parameters=True"
        with pytest.raises(errors.CallerError, match=words):
            for _ in model.shards():
                model(torch.ones(1, 3)).sum().backward()

    for ranks in (1, 2):
        symcomm.spawn(on_rank, ranks, mode="threads")


def test_gradients_after_a_shard_has_ended():
    """They would be added to the next shard's, or to the average: to other sums on each number of ranks."""

    def on_rank(group: Any) -> None:
        model = small(group)
        with pytest.raises(errors.CallerError, match="gradients came after the backward pass of shard . had ended"):
            for shard in model.shards():
                loss = model(torch.ones(1, 3)).sum()
                loss.backward(retain_graph=True)
                if shard == 4 // group.size * (group.rank + 1) - 1:
                    loss.backward()
        model.zero_grad()
        for _ in model.shards():
            model(torch.ones(1, 3)).sum().backward()
        assert model.module.bias.grad.tolist() == [1.0, 1.0, 1.0]

    for ranks in (1, 2):
        symcomm.spawn(on_rank, ranks, mode="threads")


def test_a_rank_without_shards_runs_no_backward():
    def on_rank(group: Any) -> Any:
        model = small(group, logical_shards=1, spare_ranks=True)
        if group.rank == 1:
            with pytest.raises(errors.CallerError, match="this rank has none of the 1 logical shards; run backward"):
                model(torch.ones(1, 3)).sum().backward()

    symcomm.spawn(on_rank, 2, mode="threads")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.reentrant = reentrant
        source = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=source) / 3)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))
        if self.reentrant is not None:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        else:
            x = self.middle(x)
        return self.last(torch.tanh(x))


def halved(parameter: Any) -> None:
    parameter.grad *= 0.5


def gradients_of(group: Any, reentrant: bool | None, hooks: bool) -> list[torch.Tensor]:
    module = Checkpointed(reentrant)
    model = symcomm.DistributedDataParallel(module, process_group=dressed(group), logical_shards=4)
    for parameter in module.parameters() if hooks else ():
        parameter.register_hook(lambda gradient: gradient * 4)
        parameter.register_post_accumulate_grad_hook(halved)
    for step in range(2):
        model.zero_grad()
        for shard in model.shards():
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + shard))
            with torch.autocast("cpu", BF16):
                loss = model(x).float().square().sum()
            loss.backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_checkpoints_and_hooks_of_parameters():
    """Activations computed anew give the same gradients; hooks of tensors see each shard's, as plain ranks' do."""
    [plain] = symcomm.spawn(gradients_of, 1, (None, False), mode="threads")
    for reentrant, hooks in ((None, False), (True, False), (False, False), (None, True)):
        for ranks in (1, 2, 4):
            got = symcomm.spawn(gradients_of, ranks, (reentrant, hooks), mode="threads")
            want = [2 * gradient for gradient in plain] if hooks else plain
            assert {digest(one) for one in got} == {digest(want)}, (reentrant, hooks, ranks)


def test_validation_between_steps_counts_for_nothing():
    def on_rank(group: Any) -> Any:
        module = Net(torch.float32)
        del module.never
        model = symcomm.DistributedDataParallel(module, process_group=dressed(group), logical_shards=4)
        for _ in range(2):
            model.zero_grad()
            for _ in model.shards():
                model(torch.ones(2, 6), True).sum().backward()
                with torch.no_grad():
                    model.eval()(torch.ones(2, 6), True)
                    model.train()
        return module.norm.num_batches_tracked.item()

    assert symcomm.spawn(on_rank, 2, mode="threads") == [2, 2]


# --- samples and seeds --------------------------------------------------------------------------------------------


def test_a_shard_gets_the_same_samples_wherever_it_runs():
    whole = symcomm.ShardSampler(100, 4, 3, seed=5)
    assert whole.steps == 8
    for epoch in range(2):
        seen = [i for step in range(8) for shard in range(4) for i in whole.batch(8 * epoch + step, shard)]
        assert len(set(seen)) == len(seen) == 96 and set(seen) <= set(range(100))
    assert whole.batch(0, 0) != whole.batch(8, 0), "epochs have orders of their own"
    assert symcomm.ShardSampler(100, 4, 3, seed=6).batch(0, 0) != whole.batch(0, 0)
    halves = [symcomm.ShardSampler(range(100), 4, 3, mine=mine, seed=5) for mine in (range(2), range(2, 4))]
    for mine, sampler in zip((range(2), range(2, 4)), halves, strict=True):
        assert list(sampler) == [whole.batch(step, shard) for step in range(8) for shard in mine]
        assert len(sampler) == 16
    later = symcomm.ShardSampler(100, 4, 3, mine=[1], start=13, seed=5)
    assert list(later) == [whole.batch(step, 1) for step in (13, 14, 15)] and len(later) == 3
    in_order = symcomm.ShardSampler(100, 4, 3, shuffle=False)
    assert in_order.batch(9, 1) == [15, 16, 17]
    data = torch.arange(100)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_sampler=halves[1])
    assert [rows.tolist() for (rows,) in loader] == list(halves[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 4, 3), "samples must be at least those of one step, 4 shards of 3, got 10"),
        ((10, 0, 3), "shards must be 1 or more, got 0"),
        ((10, 2, 0), "batch_size must be 1 or more, got 0"),
    ],
)
def test_samplers_that_cannot_be(arguments, words):
    with pytest.raises(errors.BadArgumentError, match=words):
        symcomm.ShardSampler(*arguments)
    with pytest.raises(errors.BadArgumentError, match="shard must be 0 to 1, got 2"):
        symcomm.ShardSampler(10, 2, 1).batch(0, 2)


def test_seeds_of_shards():
    def draw() -> list[float]:
        import numpy as np

        return [torch.rand(1).item(), random.random(), float(np.random.random())]

    torch.manual_seed(3)
    random.seed(3)
    draw()
    before = torch.get_rng_state(), random.getstate()
    drawn = {}
    for step in range(2):
        for shard in range(3):
            with symcomm.shard_seed(shard, step):
                drawn[shard, step] = tuple(draw())
    assert len({value for values in drawn.values() for value in values}) == 18
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    with symcomm.shard_seed(2, 1):
        assert tuple(draw()) == drawn[2, 1]
    with symcomm.shard_seed(2, 1, seed=1):
        assert tuple(draw()) != drawn[2, 1]
    assert 0 <= seed_of("shard", 0, 1, 2) < 1 << 63


def dropped(group: Any) -> bytes:
    module = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    source = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=source))
    model = symcomm.DistributedDataParallel(module, process_group=dressed(group), logical_shards=4)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for shard in model.shards():
            with symcomm.shard_seed(shard, step):
                model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return digest(list(module.state_dict().values()))


@pytest.mark.usefixtures("forked_ranks")
def test_dropout_on_any_number_of_ranks():
    """Ranks are processes: threads would share one generator."""
    assert len({state for ranks in (1, 2, 4) for state in symcomm.spawn(dropped, ranks, deadline=100)}) == 1
