"""torch's own entrances to symmetric memory, and ``torch.ops.symm_mem.*``, on CPU tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as theirs
from torch._C._distributed_c10d import _SymmetricMemory as Statics

import symcomm
from symcomm import errors, symm_mem
from symcomm._core import native
from symcomm.group.meeting import layout
from symcomm.symm_mem.install import get_elements
from symcomm.torch_backend import symm_boxed, symm_one_sided, symm_ops, symm_reduce, symm_shuffle
from symcomm.torch_backend.register import register
from tests.support.plan_cases import tree
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

ops = torch.ops.symm_mem
WORLDS = pytest.mark.parametrize("world", [2, 3])
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def needs(owner: Any, name: str) -> pytest.MarkDecorator:
    """For tests that call what older versions of torch do not have."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"torch {torch.__version__} has no {name}")


def has_scales_by_row() -> bool:
    a = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(a, a.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.fixture(autouse=True)
def installed():
    symm_mem.install()
    yield
    symm_mem.uninstall()


def on_ranks(fn, world, *args):
    return symcomm.spawn(fn, world, args, mode="threads", timeout=20, deadline=50)


def values_of(rank: int, shape, dtype=torch.float32) -> torch.Tensor:
    """What a rank has, known to all ranks."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)) * 8
    return values.to(dtype)


def mine(rank: int, shape, dtype=torch.float32) -> torch.Tensor:
    return symm_mem.empty(*shape, dtype=dtype).copy_(values_of(rank, shape, dtype))


def summed(world: int, shape, dtype=torch.float32) -> torch.Tensor:
    """As the tree over ranks; 16-bit floats are added in float32 and rounded once."""
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    return tree(torch.add, [values_of(rank, shape, dtype).to(wide) for rank in range(world)]).to(dtype)


# --- none is forgotten ------------------------------------------------------------------------------------


def test_every_operator_is_in_one_table():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("symm_mem::")}
    tables = [symm_ops.IMPLEMENTED, symm_ops.NEEDS_MULTICAST, symm_boxed.BOXED]
    listed = [f"symm_mem::{name}" for table in tables for name in table]
    assert len(listed) == len(set(listed))
    assert registered <= set(listed), "new operators of torch's: say in symm_ops.py what becomes of them"
    for name in symm_ops.IMPLEMENTED.keys() | symm_ops.NEEDS_MULTICAST.keys():
        if f"symm_mem::{name}" in registered:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU"), name


@needs(ops, "_rendezvous")
def test_operators_that_need_multicast_say_so_and_what_to_use():
    t = torch.ones(4)
    calls = {
        "multimem_all_gather_out": (t, "world", t),
        "multimem_all_reduce_": (t, "sum", "world"),
        "multimem_one_shot_all_reduce": (t, "sum", "world"),
        "multimem_one_shot_all_reduce_out": (t, "sum", "world", t),
        "multimem_one_shot_reduce_out": (t, "sum", 0, "world", t),
    }
    assert calls.keys() == symm_ops.NEEDS_MULTICAST.keys()
    for name, args in calls.items():
        other = symm_ops.NEEDS_MULTICAST[name]
        with pytest.raises(errors.CallerError, match=f"{name} on CPU tensors: needs multicast .*{other}\\.$"):
            getattr(ops, name)(*args)
        assert other in symm_ops.IMPLEMENTED


@pytest.mark.parametrize("name", ["two_shot_all_reduce_", "one_shot_all_reduce_out", "two_shot_all_reduce_out"])
def test_dynamo_traces_operators_that_return_what_they_write(name: str):
    """Values on real tensors are compared below; here is what a traced program is told."""
    operator = getattr(ops, name)
    places = [a.name for a in operator.default._schema.arguments if a.name in ("out", "output")]

    def call(tensor: torch.Tensor) -> torch.Tensor:
        written = {place: torch.empty_like(tensor) for place in places}
        return operator(tensor, "sum", "a group", **written) + 1

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *args: (args[0],)

    with torch._dynamo.config.patch(optimize_ddp=False):  # which another test's module would have it do
        torch.compile(call, backend=keep, fullgraph=True)(torch.ones(3))
    assert [node.target for node in graphs[0].graph.nodes if "all_reduce" in str(node.target)] == [operator]
    (result,) = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
    assert result.meta["example_value"].shape == (3,)


def test_uninstall_gives_back_what_was_there():
    ours = Statics.rendezvous
    symm_mem.install()
    assert Statics.rendezvous is ours
    symm_mem.uninstall()
    symm_mem.uninstall()
    assert Statics.rendezvous is not ours
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::one_shot_all_reduce", "CPU")
    with pytest.raises(RuntimeError):
        theirs.empty(4, device="cpu")
    symm_mem.install()
    assert symm_mem.is_symm_mem_tensor(theirs.empty(4, device="cpu"))


def check_handles(group):
    """Operators that pass a handle, in both ways torch has of naming them; the memory is looked at after each."""
    tensor = theirs.empty(6, dtype=torch.float32, device="cpu").fill_(group.rank)
    handle = ops._rendezvous(tensor, group.name)
    assert handle.boxed() is handle and handle.buffer_ptrs == symm_mem.rendezvous(tensor, group.name).buffer_ptrs
    assert ops._rendezvous(torch.ones(3)) is None
    other = 1 - group.rank
    ops._barrier(handle)
    assert handle.get_buffer(other, (6,), torch.float32).eq(other).all()
    ops._barrier.default(handle)
    if group.rank == 0:
        ops.nccl_put_signal(torch.full((6,), 7.0), handle, other)
    else:
        ops.nccl_wait_signal(handle, other)
        assert tensor.eq(7).all()
    handle.barrier(channel=1)
    mine, part = theirs.empty(8, dtype=torch.int32, device="cpu"), torch.zeros(3, dtype=torch.int32)
    met = symm_mem.rendezvous(mine.copy_(torch.arange(8) + 10 * group.rank), group)
    met.barrier()
    symm_boxed.BOXED["nccl_get_out"](part, met, 2, 2, other)  # an operator since torch 2.15, as the function get is
    assert part.tolist() == [2 + 10 * other, 3 + 10 * other, 0]
    if hasattr(theirs, "get"):
        theirs.get(part, met, other, 5)
        assert part.tolist() == [n + 10 * other for n in (5, 6, 7)]
    for peer, offset, says in ((other, 6, "exceeds.*32 bytes"), (2, 0, "invalid peer 2"), (-1, 0, "invalid peer -1")):
        with pytest.raises(errors.BadArgumentError, match=says):
            get_elements(part, met, peer, offset)
    met.barrier()
    return True


@needs(ops, "nccl_wait_signal")
def test_operators_that_pass_a_handle():
    assert on_ranks(check_handles, 2) == [True, True]
    with pytest.raises(RuntimeError):  # anything else goes to torch's
        ops._barrier("no handle")


def check_pools(group):
    for refused in (theirs.get_mempool_allocator, theirs.get_mem_pool, Statics.get_mempool_allocator):
        with pytest.raises(errors.BadArgumentError, match="no memory pools for CPU tensors"):
            refused(torch.device("cpu"))
    return ops.one_shot_all_reduce(torch.ones(2), "sum", group.name).tolist()


@needs(theirs, "get_mem_pool")
def test_memory_pools_are_refused_on_every_rank_and_nobody_waits():
    assert on_ranks(check_pools, 2) == [[2.0, 2.0], [2.0, 2.0]]


# --- torch's functions --------------------------------------------------------------------------------------


def check_functions(group):
    tensor = theirs.empty(2, 3, dtype=torch.float32, device="cpu").fill_(group.rank)
    assert theirs.is_symm_mem_tensor(tensor) and not theirs.is_symm_mem_tensor(torch.ones(1))
    handle = theirs.rendezvous(tensor, group.name)
    assert (handle.rank, handle.world_size) == (group.rank, group.size)
    assert theirs.rendezvous(torch.ones(3), group.name) is None  # as torch says that a tensor is not symmetric
    assert theirs.is_symm_mem_enabled_for_group(group.name)
    assert not theirs.is_symm_mem_enabled_for_group("nobody")
    theirs.enable_symm_mem_for_group(group_name=group.name)
    assert theirs.get_backend("cpu") == "symcomm"
    small, large = theirs.get_symm_mem_workspace(group.name, 100), theirs.get_symm_mem_workspace(group.name, 5000)
    assert small.buffer_size >= 100 and large.buffer_size >= 5000
    assert theirs.get_symm_mem_workspace(group.name, 200).buffer_ptrs == large.buffer_ptrs
    strided = Statics.empty_strided_p2p((2, 2), (1, 2), torch.int32, torch.device("cpu"), group.name)
    assert strided.stride() == (1, 2) and Statics.rendezvous(strided).world_size == group.size
    words = theirs.empty(4, dtype=torch.uint32, device="cpu")
    Statics.memset32(words, 0, 7, 4)
    Statics.stream_write_value32(words, 1, 9)
    assert words.tolist() == [7, 9, 7, 7]
    ops.memset32_(words, 0, 3, 2)
    ops.stream_write_value32_(words, 3, 4)
    assert words.tolist() == [3, 3, 7, 4]
    other = 1 - group.rank
    group.barrier()
    if group.rank == 0:
        theirs.put_signal(torch.full((2, 3), 5.0), handle, other)
    else:
        theirs.wait_signal(handle, other)
        assert tensor.eq(5).all()
    return True


@needs(theirs, "is_symm_mem_tensor")
def test_torchs_functions_on_cpu_tensors():
    assert on_ranks(check_functions, 2) == [True, True]


def test_set_signal_pad_size_sets_both():
    before = symm_mem.get_signal_pad_size()
    try:
        theirs.set_signal_pad_size(4096)
        assert symm_mem.get_signal_pad_size() == theirs.get_signal_pad_size() == 4096
    finally:
        theirs.set_signal_pad_size(before)


# --- reductions and gathers -----------------------------------------------------------------------------------


def check_reductions(group):
    name, rank, world, shape = group.name, group.rank, group.size, (group.size * 2, group.size * 5)
    for dtype in DTYPES:
        expected = summed(world, shape, dtype)
        tensor = mine(rank, shape, dtype)
        assert torch.equal(ops.one_shot_all_reduce(tensor, "sum", name), expected)
        out = torch.empty_like(tensor)
        assert ops.one_shot_all_reduce_out(tensor, "sum", name, out).data_ptr() == out.data_ptr()
        assert torch.equal(out, expected)
        assert torch.equal(tensor, values_of(rank, shape, dtype))
        buffer = symm_mem.empty(tensor.numel() + 3, dtype=dtype)
        local = values_of(rank, shape, dtype)
        assert torch.equal(ops.one_shot_all_reduce_copy(buffer, local, "sum", name), expected)
        assert torch.equal(ops.one_shot_all_reduce_copy_out(buffer, local, "sum", name, out.zero_()), expected)
        assert torch.equal(ops.two_shot_all_reduce_out(tensor, "sum", name, out.zero_()), expected)
        assert torch.equal(out, expected)
        for last, dim in ((True, 1), (False, 0)):
            piece = expected.chunk(world, dim)[rank]
            got = ops.reduce_scatter_out(tensor, name, last, torch.empty_like(piece))
            assert torch.equal(got, piece)
        assert torch.equal(ops._low_contention_reduce_scatter(tensor, "sum", name), expected.chunk(world)[rank])
        everything = torch.cat([values_of(r, shape, dtype) for r in range(world)])
        assert torch.equal(ops._low_contention_all_gather(tensor, name), everything)
        assert ops.two_shot_all_reduce_(tensor, "sum", name) is tensor
        assert torch.equal(tensor, expected)
    largest = torch.stack([values_of(r, shape) for r in range(world)]).amax(0)
    assert torch.equal(ops.one_shot_all_reduce(mine(rank, shape), "max", name), largest)
    mean = ops._low_contention_reduce_scatter(mine(rank, shape), "avg", name)
    torch.testing.assert_close(mean, summed(world, shape).chunk(world)[rank] / world)
    return True


@WORLDS
def test_reductions(world):
    assert on_ranks(check_reductions, world) == [True] * world


def check_tiles(group):
    name, rank, world, shape = group.name, group.rank, group.size, (6, 12)
    expected, tensor = summed(world, shape), mine(group.rank, shape)
    out = symm_mem.zeros(*shape)
    ops.tile_reduce(tensor[2:4, 3:7], out[2:4, 3:7], 1, name)
    assert torch.equal(out[2:4, 3:7], expected[2:4, 3:7] if rank == 1 else torch.zeros(2, 4))
    assert torch.equal(tensor, values_of(rank, shape))
    tile = torch.zeros(3, 4)
    roots = [world - 1, 0]
    ops.multi_root_tile_reduce([tensor[:3, :4], tensor[3:, 8:]], tile, roots, name)
    want = {world - 1: expected[:3, :4], 0: expected[3:, 8:]}
    assert torch.equal(tile, want.get(rank, torch.zeros(3, 4)))
    for dim in (0, 1):
        part = expected.chunk(world, dim)[rank]
        got = [torch.empty_like(part)]
        theirs.reduce_scatter_offset(tensor, got, name, dim=dim)
        assert torch.equal(got[0], part)
    owned = [torch.empty(6, 5), torch.empty(6, 4)] if rank == 1 else []
    theirs.reduce_scatter_offset(tensor, owned, name, dim=1, offsets=[5, 9], dst_ranks=[1, 1])
    if rank == 1:
        assert torch.equal(owned[0], expected[:, :5]) and torch.equal(owned[1], expected[:, 5:9])
    assert torch.equal(tensor, values_of(rank, shape))
    return True


@needs(theirs, "reduce_scatter_offset")
@WORLDS
def test_tiles_and_blocks(world):
    assert on_ranks(check_tiles, world) == [True] * world


# --- matmuls ------------------------------------------------------------------------------------------------------


def check_matmuls(group):
    name, rank, world = group.name, group.rank, group.size
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (0, 1, 2, -1):
            shape = (2, 3, 4)
            whole = torch.cat([values_of(r, shape, dtype) for r in range(world)], dim)
            Bs = [values_of(50 + k, (whole.shape[-1], 5), dtype) for k in range(2)]
            A, products = ops.fused_all_gather_matmul(mine(rank, shape, dtype), Bs, dim, name)
            assert torch.equal(A, whole)
            for B, product in zip(Bs, products, strict=True):
                torch.testing.assert_close(product, whole @ B)
        assert ops.fused_all_gather_matmul(mine(rank, shape, dtype), Bs, 2, name, return_A=False)[0] is None
        for dim in (0, 1, 2):
            shape, B = (2 * world, 3 * world, 4), values_of(60, (4, 2 * world), dtype)
            total = sum((values_of(r, shape, dtype) @ B).float() for r in range(world)).to(dtype)
            got = ops.fused_matmul_reduce_scatter(mine(rank, shape, dtype), B, "sum", dim, name)
            torch.testing.assert_close(got, total.chunk(world, dim)[rank])
    return True


@WORLDS
def test_matmuls(world):
    assert on_ranks(check_matmuls, world) == [True] * world


def check_scaled(group):
    name, rank, world = group.name, group.rank, group.size
    f8, one = torch.float8_e4m3fn, torch.tensor(1.5)
    B = values_of(70, (16, 32)).to(f8).t()
    for dim in (0, 1):
        shape = (2 * world, 3 * world, 32)
        whole = torch.cat([values_of(r, shape).to(f8).float() for r in range(world)], dim)
        row_scales = torch.cat([values_of(80 + r, (*shape[:-1], 1)).abs() for r in range(world)], dim)
        b_rows = torch.full((1, 16), 1.5)
        for scale, b_scale, factor in (
            (one, one, torch.tensor(1.5)),
            (values_of(80 + rank, (*shape[:-1], 1)).abs(), b_rows, row_scales),
            (row_scales, b_rows, row_scales),
        ):
            A, (product,) = ops.fused_all_gather_scaled_matmul(
                values_of(rank, shape).to(f8),
                [B],
                scale,
                [b_scale],
                dim,
                name,
                [None],
                [None],
                [torch.bfloat16],
                [False],
            )
            assert torch.equal(A.float(), whole)
            torch.testing.assert_close(product.float(), whole @ B.float() * factor * 1.5, rtol=2e-2, atol=1)
        total = sum(values_of(r, shape).to(f8).float() @ B.float() * 2.25 for r in range(world))
        flat = values_of(rank, shape).to(f8).flatten(0, 1)
        got = ops.fused_scaled_matmul_reduce_scatter(
            flat, B, one, one, "sum", dim, 0, name, [*shape[:-1], 16], out_dtype=torch.bfloat16
        )
        torch.testing.assert_close(got.float(), total.chunk(world, dim)[rank], rtol=2e-2, atol=8)
    return True


@pytest.mark.skipif(not has_scales_by_row(), reason="this torch multiplies with one scale a tensor only")
@WORLDS
def test_scaled_matmuls(world):
    assert on_ranks(check_scaled, world) == [True] * world


# --- all-to-all -----------------------------------------------------------------------------------------------------


def splits_of(rank: int, count: int) -> list[int]:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(rank)).tolist()


def rows_of(rank: int) -> torch.Tensor:
    return values_of(rank, (40, 2))


def check_shuffles(group):
    name, rank, world = group.name, group.rank, group.size
    out = symm_mem.empty(world * 3, 2)
    ops.nvshmem_all_to_all(mine(rank, (world * 3, 2)), out, name)
    assert torch.equal(out, torch.cat([values_of(r, (world * 3, 2)).chunk(world)[rank] for r in range(world)]))
    root = mine(rank, (5,))
    ops.nvshmem_broadcast(root, 1, name)
    assert torch.equal(root, values_of(1, (5,)))

    # pieces[r][k]: what rank r sends as its k-th
    pieces = [rows_of(r)[: sum(splits_of(r, world))].split(splits_of(r, world)) for r in range(world)]
    out, told = symm_mem.empty(40, 2), symm_mem.empty(2, world, dtype=torch.int64)
    ops.all_to_all_vdev(mine(rank, (40, 2)), out, torch.tensor(splits_of(rank, world)), told, name)
    for source in range(world):
        rows, start = told[:, source].tolist()
        assert torch.equal(out[start : start + rows], pieces[source][rank])
    assert told[1].tolist() == [sum(told[0][:k].tolist()) for k in range(world)]
    return True


def _of_torch_2_14(group) -> None:
    """Operators that torch has had since 2.14, by our own functions, so that they are checked with every torch."""
    rank, world, name = group.rank, group.size, group.name
    parts = [values_of(r, (world, 4, 3)) for r in range(world)]
    out = torch.empty(1, 4, 3 * world)
    symm_shuffle.nccl_all_to_all_nd(parts[rank], out, 0, 2, name)
    assert torch.equal(out, torch.cat([part[rank : rank + 1] for part in parts], 2))
    symm_shuffle.nccl_all_to_all_nd(parts[rank], out.view(1, 4 * world, 3), 0, -2, name)
    assert torch.equal(out.view(1, 4 * world, 3), torch.cat([part[rank : rank + 1] for part in parts], 1))
    for wrong in ((parts[rank], out, 3, 0), (parts[rank][:1], out, 0, 2), (parts[rank], out.double(), 0, 2)):
        with pytest.raises(errors.BadArgumentError, match="nccl_all_to_all_nd"):
            symm_shuffle.nccl_all_to_all_nd(*wrong, name)

    everybodys = torch.cat([values_of(r, (2, 3)) for r in range(world)])
    into = symm_mem.empty(2 * world, 3)
    assert symm_reduce.low_contention_all_gather_out(values_of(rank, (2, 3)), name, into) is into
    assert torch.equal(into, everybodys)
    with pytest.raises(errors.BadArgumentError, match="out must be"):
        symm_reduce.low_contention_all_gather_out(values_of(rank, (2, 3)), name, into[:1])
    number, numbers = torch.tensor(float(rank)), torch.arange(float(world))
    assert torch.equal(symm_reduce.low_contention_all_gather_multicast(number, name), numbers)
    assert torch.equal(symm_reduce.low_contention_all_gather_out(number, name, symm_mem.empty(world)), numbers)
    group.barrier()
    into.zero_()
    group.barrier()
    given = values_of(rank, (2, 3))
    assert symm_one_sided.memcpy_to_multicast(into, given, rank * given.nbytes, name) is into
    group.barrier()
    assert torch.equal(into, everybodys)
    with pytest.raises(errors.BadArgumentError, match="byte_offset must be 0 to"):
        symm_one_sided.memcpy_to_multicast(into, given, into.nbytes - 4, name)


@WORLDS
def test_operators_of_torch_2_14(world):
    on_ranks(_of_torch_2_14, world)


@WORLDS
def test_shuffles(world):
    assert on_ranks(check_shuffles, world) == [True] * world


def check_experts(group, align):
    """To the experts and back again."""
    name, rank, world, experts = group.name, group.rank, group.size, 3
    count = world * experts
    splits = {r: splits_of(r, count) for r in range(world)}
    pieces = {r: rows_of(r)[: sum(splits[r])].split(splits[r]) for r in range(world)}
    there, told = symm_mem.zeros(120, 2), symm_mem.empty(2, count, dtype=torch.int64)
    ops.all_to_all_vdev_2d(mine(rank, (40, 2)), there, torch.tensor(splits[rank]), told, name, align)
    end = 0
    for expert in range(experts):
        assert told[1, expert * world] == end and end % (align or 1) == 0
        for source in range(world):
            rows, start = told[:, expert * world + source].tolist()
            assert torch.equal(there[start : start + rows], pieces[source][rank * experts + expert])
            end = start + rows
        end = max(-(-end // (align or 1)) * (align or 1), told[1, expert * world].item() + (align or 1))
    back, told_back = symm_mem.zeros(40, 2), symm_mem.empty(2, count, dtype=torch.int64)
    ops.all_to_all_vdev_2d_offset(there, back, told, told_back, name)
    assert torch.equal(back[: sum(splits[rank])], rows_of(rank)[: sum(splits[rank])])
    assert told_back[0].tolist() == splits[rank]
    with pytest.raises(errors.BadArgumentError, match="out must be"):
        ops.all_to_all_vdev_2d(mine(rank, (40, 2)), there[:1], torch.tensor(splits[rank]), told, name, align)
    return True


@WORLDS
@pytest.mark.parametrize("align", [None, 8])
def test_experts(world, align):
    assert on_ranks(check_experts, world, align) == [True] * world


# --- one-sided ----------------------------------------------------------------------------------------


def check_one_sided(group):
    name, rank, world = group.name, group.rank, group.size
    right, left = (rank + 1) % world, (rank - 1) % world
    tensor = symm_mem.empty(8)
    with pytest.raises(errors.BadArgumentError, match="rendezvous"):
        ops.nvshmem_put(tensor, right)
    handle = symm_mem.rendezvous(tensor, group)
    for get, put in ((ops.nvshmem_get, ops.nvshmem_put), (ops.nccl_get, ops.nccl_put)):
        tensor.copy_(torch.arange(8) + 100 * rank)
        group.barrier()
        half = tensor[4:]
        assert [t.tolist()[0] for t in ops.get_remote_tensors(half, name)] == [100.0 * r + 4 for r in range(world)]
        group.barrier()
        if rank == 0:
            put(half, right)
        group.barrier()
        if rank == 1:
            assert tensor.tolist() == [100, 101, 102, 103, 4, 5, 6, 7]
            get(tensor[:2], 0)
            assert tensor.tolist()[:3] == [0, 1, 102]
        group.barrier()
    pad = handle.get_signal_pad(rank)
    wide = symm_mem.zeros(1, dtype=torch.int64)
    symm_mem.rendezvous(wide, group)
    for signal, word in ((5, pad), (2**33 + 1, wide)):
        tensor.fill_(rank)
        group.barrier()
        if rank == 0:
            ops.nvshmem_put_with_signal(tensor, word, signal, 1)
        if rank == 1:
            ops.nvshmem_wait_for_signal(word, signal, 0)
            assert tensor.eq(0).all()
        group.barrier()
    tensor.fill_(rank)
    group.barrier()
    if rank == 1:
        ops.nccl_put_with_signal(tensor, 7, 0)
    if rank == 0:
        ops.nccl_wait_for_signal(tensor, 7)
        assert tensor.eq(1).all()
    with pytest.raises(errors.BadArgumentError, match="signal must be 0 to 4294967295"):
        ops.nvshmem_put_with_signal(tensor, pad, 2**32, right)
    with pytest.raises(errors.BadArgumentError, match="sigpad must be of 32-bit or 64-bit integers"):
        ops.nvshmem_put_with_signal(tensor, tensor, 1, right)
    group.barrier()
    signals = symm_mem.zeros(4, dtype=torch.uint32)
    handle = symm_mem.rendezvous(signals, group)
    for k in (2, 3, 0, 1):  # for the neighbour, who waits for them in that order
        ops.stream_write_value32_(handle.get_buffer(right, (4,), torch.uint32), k, 1)
    a, b = values_of(rank, (8, 3)), values_of(left, (3, 2))
    torch.testing.assert_close(ops._async_input_mm(a, b, signals, 2), a @ b)
    group.barrier()
    return True


@needs(ops, "nccl_get")
@WORLDS
def test_one_sided(world):
    assert on_ranks(check_one_sided, world) == [True] * world


def check_deadline(group):
    tensor = symm_mem.zeros(1, dtype=torch.int64)
    with pytest.raises(errors.DeadlineError, match="nvshmem_wait_for_signal: waiting for 3, found 0, timed out"):
        ops.nvshmem_wait_for_signal(tensor, 3, 0)
    return True


def test_a_signal_that_never_comes_ends_with_the_groups_timeout():
    assert symcomm.spawn(check_deadline, 1, mode="threads", timeout=0.2, deadline=20) == [True]


def check_writer_left(group):
    tensor = symm_mem.zeros(1, dtype=torch.int64)
    symm_mem.rendezvous(tensor, group)
    if group.rank == 0:
        for wait in (lambda: ops.nvshmem_wait_for_signal(tensor, 3, 1), lambda: ops.nccl_wait_for_signal(tensor, 3)):
            with pytest.raises(errors.RankFailedError, match="waiting for 3 failed: rank 1 died or left"):
                wait()
    return True


@needs(ops, "nccl_wait_for_signal")
def test_a_signal_of_a_rank_that_left_is_not_waited_for():
    assert on_ranks(check_writer_left, 2) == [True, True]


def check_refusals(group):
    t, name = torch.ones(5, 4), group.name
    for call, said in (
        (lambda: ops.one_shot_all_reduce(t, "sum", "nobody"), "'nobody'"),
        (lambda: ops.one_shot_all_reduce_out(t, "sum", name, t[0]), "out must be"),
        (lambda: ops.one_shot_all_reduce_copy(t[0], t, "sum", name), "symm_buffer must be"),
        (lambda: ops._low_contention_reduce_scatter(t, "sum", name), "divisible by the group's 2 ranks"),
        (lambda: ops.fused_all_gather_matmul(t, [t.t()], 5, name), "gather_dim"),
        (lambda: ops.all_to_all_vdev(t, t, torch.ones(3, dtype=torch.int64), t, name), "number of splits"),
        (lambda: ops.all_to_all_vdev(t, t, torch.tensor([1, -1]), t, name), "not negative"),
        (lambda: ops.tile_reduce(t, t[0], 0, name), "out_tile must be"),
        (lambda: ops.multi_root_tile_reduce([t, t], t, [1, 1], name), "roots must be"),
        (lambda: ops._async_input_mm(t, t.t(), torch.ones(2), 0), "a_chunk_signals"),
    ):
        with pytest.raises(errors.BadArgumentError, match=said):
            call()
    return True


def test_refusals_are_one_sentence():
    assert on_ranks(check_refusals, 2) == [True, True]


# --- torch.distributed: groups, names, collectives ------------------------------------------------------------


def staging_area(core) -> bytes:
    """What passes through this rank's staging area stays there until the next operation needs the room."""
    stage, channels, _ = layout(core.size, core.plan_limits)
    return native.peek(core.arena.base + core._offset + stage, channels - stage)


def join(rank: int, world: int, path: str, backend: str = "symcomm"):
    torch.set_num_threads(1)
    register()
    symm_mem.install()
    dist.init_process_group(backend, f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=30))
    return dist.group.WORLD


def check_torch_groups(rank, world, folder):
    for turn in range(2):  # the second time torch gives its groups the same names again
        group = join(rank, world, f"{folder}/{turn}")
        tensor = symm_mem.empty(1000).fill_(rank + 1)
        handles = [symm_mem.rendezvous(tensor, g) for g in (group, group.group_name, None)]
        handles += [theirs.rendezvous(tensor, g) for g in (group, group.group_name)]
        handles += [Statics.rendezvous(tensor, group.group_name), Statics.rendezvous(tensor)]
        assert all(h.group is group.core and h.buffer_ptrs == handles[0].buffer_ptrs for h in handles)
        handles[0].barrier()
        assert handles[0].get_buffer(1 - rank, (1000,), torch.float32).eq(2 - rank).all()
        handles[0].barrier()
        owned = symm_mem.empty_strided_p2p((3,), (1,), torch.int32, "cpu", group)
        assert symm_mem.rendezvous(owned).group is group.core
        pair = dist.new_group([1, 0], backend="symcomm")
        alone = [dist.new_group([r], backend="symcomm") for r in range(world)][rank]
        assert symm_mem.rendezvous(tensor, pair.group_name).group is pair.core
        assert symm_mem.rendezvous(tensor, alone).world_size == 1
        assert theirs.is_symm_mem_enabled_for_group(pair.group_name)
        assert ops.one_shot_all_reduce(tensor, "sum", pair.group_name).eq(3).all()
        gloo = dist.new_group(backend="gloo")
        with pytest.raises(errors.BadArgumentError, match='make it with backend="symcomm"'):
            symm_mem.rendezvous(tensor, gloo)
        assert not theirs.is_symm_mem_enabled_for_group(gloo.group_name)
        dist.destroy_process_group()
    with pytest.raises(errors.GroupUnusableError, match="no default group"):
        symm_mem.rendezvous(symm_mem.empty(3))
    return True


def check_no_copy(rank, world, folder):
    """Collectives of torch.distributed on symmetric tensors leave the staging area alone."""
    core = join(rank, world, f"{folder}/store").core
    count = 1 << 18
    make, plain = (lambda: symm_mem.empty(count).fill_(rank + 1.25)), torch.full((count,), rank + 1.25)
    whole, part = symm_mem.empty(world * count), symm_mem.empty(count // world)
    before = staging_area(core)
    tensor = make()
    address = tensor.data_ptr()
    dist.all_reduce(tensor)
    assert tensor.eq(3.5).all() and tensor.data_ptr() == address
    tensor = make()
    dist.all_gather_into_tensor(whole, tensor)
    assert whole[:count].eq(1.25).all() and whole[count:].eq(2.25).all()
    dist.reduce_scatter_tensor(part, tensor)
    assert part.eq(3.5).all()
    dist.broadcast(tensor, 1)
    assert tensor.eq(2.25).all()
    ops.two_shot_all_reduce_(tensor, "sum", dist.group.WORLD.group_name)
    assert tensor.eq(4.5).all()
    dist.barrier()
    assert staging_area(core) == before
    dist.all_reduce(plain)
    assert plain.eq(3.5).all()
    dist.barrier()
    assert staging_area(core) != before, "or the comparison above says nothing"
    dist.destroy_process_group()
    return True


def check_like_torchs_fallback(rank, world, folder):
    """The matmuls give what torch's own fallbacks give, strides included."""
    name = join(rank, world, f"{folder}/store").group_name

    def same(got, expected):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()

    A, B, wide = values_of(rank, (4, 6, 8)), values_of(9, (8, 10)), values_of(9, (8 * world, 10))
    for dim, right in ((0, B), (1, B), (2, wide)):
        ours, expected = (
            f(A, [right], dim, name) for f in (ops.fused_all_gather_matmul, theirs._fused_all_gather_matmul_fallback)
        )
        same(ours[0], expected[0])
        same(ours[1][0], expected[1][0])
    for dim in range(3):
        args = (A, B, "sum", dim, name)
        same(ops.fused_matmul_reduce_scatter(*args), theirs._fused_matmul_reduce_scatter_fallback(*args))
    dist.destroy_process_group()
    return True


CHECKS = [check_torch_groups, check_no_copy, check_like_torchs_fallback]


def check_all(rank, world, folder):
    return [check(rank, world, f"{folder}/{check.__name__}") for check in CHECKS]


def test_with_torch_distributed(tmp_path):
    for check in CHECKS:
        (tmp_path / check.__name__).mkdir()
    assert run_ranks(check_all, 2, str(tmp_path), deadline=90) == [[True] * len(CHECKS)] * 2


# --- autograd -------------------------------------------------------------------------------------------------------


def _symmetric(group, n, dtype=torch.float32):
    tensor = symm_mem.empty(n, dtype=dtype).fill_(1)
    symm_mem.rendezvous(tensor, group)
    return tensor


def _written(group):
    """(operator, its tensors that are written here, those that are only read)"""
    a, o, s, h, p = (_symmetric(group, n) for n in (4, 4, 4, 2, 4))
    local, name, first = torch.ones(4), group.name, group.rank == 0
    splits, report = _symmetric(group, 2, torch.int64), _symmetric(group, (2, 2), torch.int64)
    words = _symmetric(group, 4, torch.uint32)
    tiles = a.view(2, 2), o.view(2, 2)

    def put_and_wait():
        ops.nccl_put_with_signal(p, 3, 1 - group.rank)
        ops.nccl_wait_for_signal(p, 3)

    return {
        "two_shot_all_reduce_": (lambda: ops.two_shot_all_reduce_(a, "sum", name), [a], []),
        "two_shot_all_reduce_out": (lambda: ops.two_shot_all_reduce_out(a, "sum", name, o), [o], [a]),
        "one_shot_all_reduce": (lambda: ops.one_shot_all_reduce(a, "sum", name), [], [a]),
        "one_shot_all_reduce_out": (lambda: ops.one_shot_all_reduce_out(a, "sum", name, o), [o], [a]),
        "one_shot_all_reduce_copy_out": (
            lambda: ops.one_shot_all_reduce_copy_out(s, local, "sum", name, o), [o, s], [local],
        ),
        "one_shot_all_reduce_copy": (lambda: ops.one_shot_all_reduce_copy(s, local, "sum", name), [s], [local]),
        "reduce_scatter_out": (lambda: ops.reduce_scatter_out(a, name, False, h), [h], [a]),
        "nvshmem_get": (lambda: ops.nvshmem_get(a, 1 - group.rank), [a], []),
        "nvshmem_put": (lambda: ops.nvshmem_put(a, 1 - group.rank), [], [a]),
        "nccl_wait_for_signal": (put_and_wait, [p], []),
        "nvshmem_broadcast": (lambda: ops.nvshmem_broadcast(a, 0, name), [] if first else [a], [a] if first else []),
        "nvshmem_all_to_all": (lambda: ops.nvshmem_all_to_all(a, o, name), [o], [a]),
        "all_to_all_vdev": (lambda: ops.all_to_all_vdev(a, o, splits, report, name), [o, report], [a, splits]),
        "tile_reduce": (lambda: ops.tile_reduce(*tiles, 0, name), [o] if first else [], [a]),
        "nccl_reduce_scatter_offset": (
            lambda: ops.nccl_reduce_scatter_offset(tiles[0], [tiles[1][:1]], name, 0), [o], [a],
        ),
        "memset32_": (lambda: ops.memset32_(words, 0, 5, 2), [words], []),
        "stream_write_value32_": (lambda: ops.stream_write_value32_(words, 0, 7), [words], []),
        "memcpy_to_multicast_": (lambda: ops.memcpy_to_multicast_(a, local, 0, name), [a], [local]),
        "_low_contention_all_gather": (lambda: ops._low_contention_all_gather(a, name), [], [a]),
    }  # fmt: skip


def _versions_of_operators(group):
    for name in _written(group):
        if not hasattr(ops, name):
            continue  # in an older torch
        for _ in range(2):
            act, written, read = _written(group)[name]
            before = [t._version for t in (*written, *read)]
            act()
            after = [t._version for t in (*written, *read)]
            raised = [new > old for old, new in zip(before, after, strict=True)]
            assert raised == [True] * len(written) + [False] * len(read), f"{name}: {before} -> {after}"
            group.barrier()


def test_operators_raise_the_versions_of_what_they_write():
    on_ranks(_versions_of_operators, 2)
