"""Linear layers in logical shards: forward and backward have the same bits on any number of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import symcomm
from symcomm import errors
from symcomm.llama import Config, Llama, Parallel, ShardedRanks
from symcomm.nn import ColumnParallelLinear, RowParallelLinear, parallelize, sum_shards

pytestmark = pytest.mark.torch_versions
SHARDS = 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def whole_layers(width: int, dtype: torch.dtype) -> list[nn.Linear]:
    draw = torch.Generator().manual_seed(0)
    layers = [nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 96, bias=False)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(generator=draw).div_(width**0.5)
    return [layer.to(dtype) for layer in layers]


def run(up: Any, down: Any, last: Any, x: torch.Tensor) -> torch.Tensor:
    y = last(torch.tanh(down(torch.tanh(up(x))) + x))
    y.square().sum().backward()
    return y


def passes(group: Any, width: int, dtype: torch.dtype) -> tuple[list[str], list[list[str]]]:
    """Hashes of what all ranks have (output, gradients of the input and of the bias), and of each shard's gradients."""
    layers = whole_layers(width, dtype)
    x = torch.randn(17, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine, whole = (x.clone().requires_grad_() for _ in range(2))
    up, last = ColumnParallelLinear(layers[0], SHARDS, group), ColumnParallelLinear(layers[2], SHARDS, group, True)
    down = RowParallelLinear(layers[1], SHARDS, group)
    y, wanted = run(up, down, last, mine), run(*layers, whole)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(y, wanted, **near)
    torch.testing.assert_close(mine.grad, whole.grad, **near)
    for split, layer, dimension in ((up, layers[0], 0), (down, layers[1], 1), (last, layers[2], 0)):
        grads = torch.cat([p.grad for p in split.weights], dimension)
        torch.testing.assert_close(grads, layer.weight.grad.chunk(group.size, dimension)[group.rank], **near)
    shards = [*zip(up.weights, up.biases, down.weights, last.weights, strict=True)]
    everywhere = [digest(t) for t in (y, mine.grad, down.bias.grad)]
    return everywhere, [[digest(p.grad) for p in shard] for shard in shards]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_have_the_same_bits_on_any_number_of_ranks(dtype: torch.dtype):
    found = []
    for ranks in (1, 2, 4):
        outcomes = symcomm.spawn(passes, ranks, (256, dtype), mode="threads")
        assert all(everywhere == outcomes[0][0] for everywhere, _ in outcomes)
        found.append((outcomes[0][0], [shard for _, shards in outcomes for shard in shards]))
    assert found[0] == found[1] == found[2]


def compiled(group: Any) -> str:
    """Hashes of output and input's gradient. A shard's 4 x 72 activations of one row are no multiple of 64 elements."""
    torch.set_num_threads(1)
    whole_up, whole_down, _ = whole_layers(72, torch.float32)
    up, down = ColumnParallelLinear(whole_up, SHARDS, group), RowParallelLinear(whole_down, SHARDS, group)
    x = torch.randn(5, 72, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = torch.compile(lambda x: x + down(nn.functional.silu(up(x * 1.5))) * 0.7)(x)
    y.square().sum().backward()
    return digest(y) + digest(x.grad)


@pytest.mark.timeout(300)  # seven processes compile
@pytest.mark.usefixtures("forked_ranks")
def test_compiled_models_have_the_same_bits_on_any_number_of_ranks():
    assert len({bits for ranks in (1, 2, 4) for bits in symcomm.spawn(compiled, ranks, deadline=300)}) == 1


# --- the model ---------------------------------------------------------------------------------------------------

CONFIG = Config(layers=1, width=512, vocabulary=512, length=24, batch=3)
PROMPT = torch.arange(48).view(3, 16) * 17 % 512


class OnePart(ShardedRanks):
    """A part a rank: what is split depends on the number of ranks."""

    def __init__(self, group: Any):
        super().__init__(group, group.size)


def logits(group: Any, dtype: torch.dtype, sharded: bool) -> str:
    """A hash of all ranks' logits: of a prompt, and of some tokens after it."""
    torch.set_num_threads(1)
    model = Llama(CONFIG, ShardedRanks(group, SHARDS) if sharded else OnePart(group)).to(dtype)
    x, places, found = PROMPT, torch.arange(16), []
    with torch.no_grad():
        for place in range(16, 20):
            found.append(model.logits(x, places))
            x, places = model.most_likely(found[-1])[:, None], torch.tensor([place])
        parts = [torch.empty(4, 3, 512 // group.size, dtype=dtype) for _ in range(group.size)]
        group.all_gather(parts, torch.stack(found))
    return digest(torch.cat(parts, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_bits_on_1_2_and_4_ranks(dtype: torch.dtype):
    assert len({bits for n in (1, 2, 4) for bits in symcomm.spawn(logits, n, (dtype, True), mode="threads")}) == 1
    plain = {bits for n in (1, 2, 4) for bits in symcomm.spawn(logits, n, (dtype, False), mode="threads")}
    assert len(plain) > 1, "the comparison can fail"


@pytest.mark.usefixtures("forked_ranks")
def test_logits_of_processes():
    [alone] = symcomm.spawn(logits, 1, (torch.float32, True), mode="threads")
    assert symcomm.spawn(logits, 4, (torch.float32, True)) == [alone] * 4


def test_parts_add_up_to_the_whole():
    with torch.no_grad():
        wanted = Llama(CONFIG, Parallel()).logits(PROMPT, torch.arange(16))
        got = symcomm.spawn(
            lambda group: Llama(CONFIG, ShardedRanks(group, SHARDS)).logits(PROMPT, torch.arange(16)), 1, mode="threads"
        )
    torch.testing.assert_close(got[0], wanted, rtol=1e-4, atol=1e-4)


# --- plans, and what goes wrong ----------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 32)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in "ab")
        self.head = nn.Linear(32, 12)
        for parameter in self.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(2)).div_(6)

    def forward(self, x: Any) -> Any:
        x = self.words(x)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.head(x)


PLAN = {
    "words": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def planned(group: Any) -> str:
    model, text = Model(), torch.arange(10)
    wanted = model(text)
    split = parallelize(model, PLAN, SHARDS, group)
    assert split is model and isinstance(model.head, ColumnParallelLinear) and isinstance(model.words, nn.Embedding)
    got = model(text)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    return digest(got)


def test_a_plan_replaces_layers():
    assert len({bits for n in (1, 2, 4) for bits in symcomm.spawn(planned, n, mode="threads")}) == 1


REFUSED = [
    (lambda g: ColumnParallelLinear(nn.Linear(4, 6), 4, g), "out_features must be a multiple of shards, 4, got 6"),
    (lambda g: RowParallelLinear(nn.Linear(6, 4), 4, g), "in_features must be a multiple of shards, 4, got 6"),
    (lambda g: RowParallelLinear(nn.ReLU(), 4, g), "linear must be a torch.nn.Linear"),
    (lambda g: RowParallelLinear(nn.Linear(6, 6), 3, g), "shards must be 2 .the group's ranks. times a power of two"),
    (lambda g: RowParallelLinear(nn.Linear(8, 4), 4, g)(torch.ones(2, 8)), "must be 4: this rank's inputs, got 8"),
    (lambda g: sum_shards([], 4, g), "parts must be as many as this rank has of 4 shards, got 0"),
    (lambda g: sum_shards([torch.ones(2)], 4, g), "inputs must be as many as this rank has shards, 2, got 1"),
    (lambda g: parallelize(Model(), {"head": "sideways"}, 4, g), "sideways"),
    (lambda g: parallelize(Model(), {"tail": "colwise"}, 4, g), "plan must be names of the model's linear layers"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refused(call: Any, words: str):
    def on_rank(group: Any) -> None:
        with pytest.raises(errors.BadArgumentError, match=words):
            call(group)

    symcomm.spawn(on_rank, 2, mode="threads")
