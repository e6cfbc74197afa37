"""symmetrize(): the same objects with the same values, in symmetric memory."""

from __future__ import annotations

import copy
import gc
import io
import sys

import pytest
import torch
from torch import nn

import symcomm
from symcomm import errors, symm_mem
from symcomm._core import native
from symcomm.group.meeting import layout
from symcomm.memory.arena import current_arena
from tests.support.places import spawn

pytestmark = pytest.mark.torch_versions

symmetrize_module = sys.modules["symcomm.symm_mem.symmetrize"]  # the function of that name hides it


class NoSwap:
    """torch before 2.13 has no way to exchange the memory of a storage."""

    def __init__(self, storage):
        self.storage = storage


@pytest.fixture(params=["swap", "data"])
def way(request, monkeypatch):
    """Both ways to move a storage; with the second one only the tensors that were given follow."""
    if request.param == "data":
        move = symmetrize_module._rehome
        monkeypatch.setattr(
            symmetrize_module, "_rehome", lambda storage, home, users: move(NoSwap(storage), home, users)
        )
    elif not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("this torch cannot swap")
    return request.param


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **zero) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 3, 8, 8, generator=generator)
        loss = module(x).square().mean()
        optimizer.zero_grad(**zero)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)]
)
def test_training_goes_on_bit_for_bit(way, flat, make):
    module, twin = net(), net()
    optimizer, other = make(module.parameters()), make(twin.parameters())
    train(module, optimizer, 2)
    train(twin, other, 2)
    before = {name: (id(p), id(p.grad)) for name, p in module.named_parameters()}
    assert symcomm.symmetrize(module, flat=flat) is module
    assert {name: (id(p), id(p.grad)) for name, p in module.named_parameters()} == before
    for tensor in [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]:
        assert symm_mem.is_symm_mem_tensor(tensor)
    assert_same_bits(module, twin)
    ours, theirs = train(module, optimizer, 4), train(twin, other, 4)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert_same_bits(module, twin)
    assert all(symm_mem.is_symm_mem_tensor(p) for p in module.parameters())


def test_gradients_can_be_allocated():
    module, twin = net(), net()
    symcomm.symmetrize(module, grads="allocate")
    places = [p.grad.data_ptr() for p in module.parameters()]
    assert all(not p.grad.any() and p.grad.stride() == p.stride() for p in module.parameters())
    train(module, torch.optim.SGD(module.parameters(), 0.1), 3, set_to_none=False)
    train(twin, torch.optim.SGD(twin.parameters(), 0.1), 3, set_to_none=False)
    assert_same_bits(module, twin)
    assert [p.grad.data_ptr() for p in module.parameters()] == places


def test_gradients_can_be_left_alone():
    module = nn.Linear(3, 3)
    module(torch.ones(3)).sum().backward()
    symcomm.symmetrize(module, grads=False)
    assert symm_mem.is_symm_mem_tensor(module.weight) and not symm_mem.is_symm_mem_tensor(module.weight.grad)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    symcomm.symmetrize(frozen, grads="allocate")
    assert frozen.weight.grad is None


def test_a_backward_pass_may_be_under_way():
    weight = torch.randn(4, requires_grad=True)
    loss = (weight * weight).sum()
    symcomm.symmetrize(weight)
    loss.backward()
    assert torch.equal(weight.grad, 2 * weight.detach())


def test_shared_memory_stays_shared(way):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.view = nn.Parameter(self.a.weight.data[1])

    module = Tied()
    symcomm.symmetrize(module)
    assert module.a.weight is module.b.weight
    assert module.view.data_ptr() == module.a.weight.data_ptr() + 16
    with torch.no_grad():
        module.view.fill_(7)
    assert (module.b.weight[1] == 7).all()


def test_references_nobody_told_us_about_follow():
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("this torch cannot swap")
    base = torch.arange(10.0)
    alias, part, detached = base.data, base[3:], base.detach()
    symcomm.symmetrize(base)
    base.mul_(2)
    for other in (alias, detached):
        assert torch.equal(other, base)
    assert torch.equal(part, base[3:])


def test_layout_hooks_and_flags_survive(way):
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    module.bias.requires_grad_(False)
    calls = []
    module.weight.register_hook(lambda grad: calls.append(1))
    module.weight.tag = "mine"
    stride, version = module.weight.stride(), module.weight._version
    symcomm.symmetrize(module)
    assert module.weight.stride() == stride and module.weight.is_contiguous(memory_format=torch.channels_last)
    assert module.weight.requires_grad and not module.bias.requires_grad
    assert module.weight.tag == "mine" and module.weight._version == version
    module(torch.ones(1, 3, 5, 5)).sum().backward()
    assert calls == [1]


def test_odd_tensors_keep_their_shape(way):
    tensors = {
        "transposed": torch.randn(3, 5).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "strided": torch.randn(20)[2::3],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(7).half(),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    expected = copy.deepcopy(tensors)
    facts = {k: (t.shape, t.stride(), t.storage_offset()) for k, t in tensors.items()}
    assert symcomm.symmetrize(tensors) is tensors
    for key, tensor in tensors.items():
        assert torch.equal(tensor, expected[key]), key
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == facts[key]
        assert symm_mem.is_symm_mem_tensor(tensor) or tensor.numel() == 0


def test_flat_is_one_piece_in_order():
    tensors = [torch.randn(100), torch.randn(3), torch.randn(50)]
    before = symm_mem.memory_stats()["used_bytes"]
    symcomm.symmetrize(tensors, flat=True)
    assert [t.data_ptr() - tensors[0].data_ptr() for t in tensors] == [0, 448, 512]
    assert symm_mem.memory_stats()["used_bytes"] - before == 4096
    kept = tensors.pop(1)
    tensors.clear()
    gc.collect()
    assert symm_mem.memory_stats()["used_bytes"] - before == 4096, "one piece lives as long as any part"
    del kept
    gc.collect()
    assert symm_mem.memory_stats()["used_bytes"] == before
    tensors = symcomm.symmetrize([torch.randn(100), torch.randn(3)], flat=False)
    assert symm_mem.memory_stats()["used_bytes"] - before == 2 * 4096


def test_what_is_symmetric_stays():
    tensor = symm_mem.empty(5)
    mixed = (tensor, torch.ones(5))
    place = tensor.data_ptr()
    symcomm.symmetrize(mixed)
    symcomm.symmetrize(mixed)
    second = mixed[1].data_ptr()
    symcomm.symmetrize(mixed)
    assert tensor.data_ptr() == place and mixed[1].data_ptr() == second
    assert symcomm.symmetrize([]) == [] and symcomm.symmetrize({}) == {}


def test_saving_and_copying():
    module = symcomm.symmetrize(net())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert len(file.getvalue()) < 60_000, "every tensor is saved with its own bytes only"
    loaded = net()
    loaded.load_state_dict(torch.load(file))
    assert_same_bits(module, loaded)
    clone = copy.deepcopy(module)
    assert_same_bits(module, clone)
    assert not symm_mem.is_symm_mem_tensor(clone[0].weight)


def lazy():
    return nn.LazyLinear(3)


def shared():
    return torch.ones(3).share_memory_()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: torch.empty(3, device="meta"),
            "tensors must be a dense CPU tensor .* got 'a meta tensor'; .*to_empty",
        ),
        (
            lambda: [torch.ones(2), torch.eye(3).to_sparse()],
            r"tensors\[1\] must .* 'a torch.sparse_coo tensor'; .*to_dense",
        ),
        (lambda: {"w": 3.0}, r"tensors\['w'\] must be a tensor, a module.* got 'float'"),
        (lazy, "weight must .* 'a parameter without a shape yet'; run the module once"),
        (shared, "'shared with other processes by share_memory_"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "got 'a NestedTensor'"),
    ],
)
def test_what_cannot_move_is_refused_before_anything_moves(make, says):
    first = torch.ones(3)
    item = make()
    with pytest.raises(errors.BadArgumentError, match=says):
        symcomm.symmetrize(item if not isinstance(item, list) else [first, *item][1:])
    with pytest.raises(errors.BadArgumentError):
        symcomm.symmetrize([first, item])
    assert not symm_mem.is_symm_mem_tensor(first)


def test_bad_options():
    with pytest.raises(errors.BadArgumentError, match="grads must be True, False or 'allocate', got 'all'"):
        symcomm.symmetrize(torch.ones(1), grads="all")


def in_arena(group, tensor) -> bool:
    """What the core asks to decide that no copy is needed."""
    return 0 <= tensor.data_ptr() - group.arena.base < group.arena.nbytes


def _data_parallel(group, start, symmetric):
    module = net() if start is None else copy.deepcopy(start)  # threads share one random generator
    if symmetric:
        symcomm.symmetrize(module, grads="allocate")
        assert all(in_arena(group, p) and in_arena(group, p.grad) for p in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        module(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        for p in module.parameters():
            group.all_reduce(p.grad, symcomm.ReduceOp.AVG)
        optimizer.step()
    for buffer in module.buffers():
        group.broadcast(buffer, 0)
    if symmetric:
        assert current_arena() is group.arena and all(in_arena(group, p.grad) for p in module.parameters())
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_data_parallel_training(mode):
    start = net()

    def run(symmetric):
        if mode == "threads":
            return spawn(_data_parallel, 3, mode, start, symmetric)
        return spawn(_data_parallel_plain, 2, mode, None, symmetric)

    plain, moved = run(False), run(True)
    for name in plain[0]:
        values = [torch.as_tensor(states[name]) for states in [*plain, *moved]]
        assert all(torch.equal(values[0], v) for v in values), name


def _data_parallel_plain(group, start, symmetric):
    """NumPy arrays, which come back through a pipe and not through torch's shared memory."""
    return {name: value.numpy() for name, value in _data_parallel(group, start, symmetric).items()}


def _no_copy(group):
    """An all_reduce of symmetric tensors reads the peers' memory itself: nothing passes through the staging area."""
    stage, end, _ = layout(group.size, group.plan_limits)
    staging = group.arena.base + group._offset + stage
    plain = torch.full((3_000_000,), float(group.rank + 1))
    tensor = symcomm.symmetrize(plain.clone())
    place = tensor.data_ptr()
    touched = []
    for each in (tensor, plain):
        group.barrier()
        native.poke(staging, b"\x5a" * (end - stage))
        group.barrier()
        group.all_reduce(each)
        group.barrier()
        touched.append(native.peek(staging, end - stage).strip(b"\x5a") != b"")
        assert (each == sum(range(1, group.size + 1))).all()
    assert in_arena(group, tensor) and tensor.data_ptr() == place
    return touched


def test_all_reduce_needs_no_copy():
    results = symcomm.spawn(_no_copy, 2, mode="threads", timeout=20, deadline=50)
    assert results == [[False, True]] * 2
