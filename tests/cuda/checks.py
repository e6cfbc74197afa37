"""What a CudaGroup does, compared with the same group's collectives on the CPU, bit for bit.

``run_all(rank, world)`` runs every check on a rank and gives {check: "" or what went wrong}.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import torch

import symcomm
from symcomm._core import native
from symcomm.cuda import single_kernel
from symcomm.errors import BadArgumentError
from symcomm.group.buffers import torch_dtypes
from symcomm.types import RedOpType
from tests.support.autograd import LEAF, Case
from tests.support.autograd import check as check_case
from tests.support.gpu_ranks import join

CHECKS: dict[str, Callable[[Any, Any], None]] = {}
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SIZES = [0, 1, 7, 1000, 70_001]  # the last is, in most dtypes, too large to go through host memory
SEED = 11


def check(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    CHECKS[function.__name__] = function
    return function


def random_tensor(core: Any, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(SEED + 1000 * core.rank + salt)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(-5, 100, (n,), generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def same(got: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{what}: {got.shape} {expected.shape}"
    if not torch.equal(bits(got), bits(expected)):
        raise AssertionError(f"{what}: got {got.flatten()[:8].cpu()}..., expected {expected.flatten()[:8]}...")


def defined(dtype: torch.dtype, op: RedOpType) -> bool:
    return op is not RedOpType.PREMUL_SUM and bool(native.reduce_defined(torch_dtypes()[dtype], op))


def close_or_same(got: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    """Products of complex numbers may be rounded differently."""
    if expected.is_complex():
        assert torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-5), what
    else:
        same(got, expected, what)


def one_shot_bytes(gpu: Any) -> int:
    """Tensor x ranks: larger ones are combined in parts."""
    return min(gpu.limits.one_shot_bytes, single_kernel.ONE_SHOT_BYTES)


@check
def all_reduce(gpu: Any, core: Any) -> None:
    wrong = []  # told at the end: all ranks make all calls
    for dtype, op, n in itertools.product(DTYPES, RedOpType, SIZES):
        if defined(dtype, op):
            mine = random_tensor(core, n, dtype)
            on_gpu = mine.cuda()
            core.all_reduce(mine, op)
            gpu.all_reduce(on_gpu, op)
            try:
                close_or_same(on_gpu, mine, (dtype, op, n))
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)[:1500]


@check
def all_reduce_large_and_symmetric(gpu: Any, core: Any) -> None:
    two_shot, beyond_the_stage = (one_shot_bytes(gpu) // core.size // 4) * 2 + 5, (gpu.limits.most_half // 4) + 7
    for symmetric, n in itertools.product((False, True), (two_shot, beyond_the_stage)):
        mine = random_tensor(core, n, torch.float32)
        on_gpu = symcomm.symm_mem.empty(n, device="cuda") if symmetric else torch.empty(n, device="cuda")
        on_gpu.copy_(mine)
        core.all_reduce(mine)
        gpu.all_reduce(on_gpu)
        same(on_gpu, mine, (symmetric, n))


@check
def symmetric_parts(gpu: Any, core: Any) -> None:
    """A symmetric tensor at different offsets on different ranks, and one on only some ranks."""
    n = one_shot_bytes(gpu) // 4 + 64
    whole = symcomm.symm_mem.empty(n + 64 * core.size, device="cuda")
    part = whole[64 * core.rank : 64 * core.rank + n]
    for tensor in (part, part if core.rank == 0 else torch.empty(n, device="cuda")):
        mine = random_tensor(core, n, torch.float32)
        tensor.copy_(mine)
        core.all_reduce(mine)
        gpu.all_reduce(tensor)
        same(tensor, mine)


@check
def the_same_kind_again(gpu: Any, core: Any) -> None:
    """The fast path of calls seen before, at addresses that are multiples of anything and that are not."""
    for n, begin in itertools.product((1, 5, 1000, 4099, 500_000, 1_000_000, 5_000_003), (0, 1)):
        wholes = [torch.zeros(n + 1, device="cuda") for _ in range(3)]
        mine = random_tensor(core, n, torch.float32)
        for whole in wholes:
            whole[begin : begin + n].copy_(mine)
            gpu.all_reduce(whole[begin : begin + n])
        core.all_reduce(mine)
        for whole in wholes:
            same(whole[begin : begin + n], mine, (n, begin))
            assert whole[-1 - begin * n] == 0  # the element beside it


@check
def the_fast_path_is_taken(gpu: Any, core: Any) -> None:
    """By count, where ranks share the GPU through MPS: up to what is combined in place the core does it alone."""
    if not isinstance(gpu.collectives, single_kernel.SingleKernelCollectives):
        return
    for tensor in (torch.ones(1000, device="cuda"), torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))):
        with torch.no_grad():
            gpu.all_reduce(tensor)
            before = core.call_stats()["collectives"]["short"]
            for _ in range(5):
                gpu.all_reduce(tensor)
            assert core.call_stats()["collectives"]["short"] == before + 5


@check
def aligned_on_some_ranks_only(gpu: Any, core: Any) -> None:
    for n in (3, 1000, 300_000):
        whole = torch.zeros(n + core.size, device="cuda")
        part = whole[core.rank : core.rank + n]
        for _ in range(3):
            mine = random_tensor(core, n, torch.float32)
            part.copy_(mine)
            core.all_reduce(mine)
            gpu.all_reduce(part)
            same(part, mine, n)


@check
def large_and_small_in_turns(gpu: Any, core: Any) -> None:
    """Whatever way each takes, it sees what was before it and is seen by what follows."""
    sizes = [10, 3_000_000, 100_000, 1, 60_000, 400_000]
    tensors = [torch.zeros(n, device="cuda") for n in sizes]
    gathered = torch.zeros(100 * core.size, device="cuda")
    for turn in range(20):
        for tensor in tensors:
            tensor.fill_(core.rank + turn)
            gpu.all_reduce(tensor)
            gpu.all_gather_single(gathered, tensor[:100] if tensor.numel() >= 100 else gathered[:100] * 0)
    expected = float(sum(r + 19 for r in range(core.size)))
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, expected)), (tensor.numel(), tensor[:5])


@check
def premul_sum(gpu: Any, core: Any) -> None:
    op = symcomm.make_premul_sum(0.5)
    for dtype, n in itertools.product((torch.float32, torch.complex64), (100, 100_000)):
        mine = random_tensor(core, n, dtype)
        on_gpu = mine.cuda()
        core.all_reduce(mine, op)
        gpu.all_reduce(on_gpu, op)
        close_or_same(on_gpu, mine, (dtype, n))


@check
def reduce(gpu: Any, core: Any) -> None:
    for root, n in itertools.product(range(core.size), SIZES):
        mine = random_tensor(core, n, torch.bfloat16)
        on_gpu = mine.cuda()
        core.reduce(mine, root, "avg")
        gpu.reduce(on_gpu, root, "avg")
        same(on_gpu, mine, (root, n))


@check
def reduce_scatter(gpu: Any, core: Any) -> None:
    big = gpu.limits.direct_bytes // 4 // core.size + 100
    for dtype, n in [*itertools.product((torch.float32, torch.bfloat16, torch.int64), SIZES), (torch.float32, big)]:
        given = random_tensor(core, n * core.size, dtype)
        expected, got = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype, device="cuda")
        core.reduce_scatter_single(expected, given)
        gpu.reduce_scatter_single(got, given.cuda())
        same(got, expected, (dtype, n))
        symmetric = symcomm.symm_mem.empty(n * core.size, dtype=dtype, device="cuda")
        symmetric.copy_(given)
        gpu.reduce_scatter_single(got.zero_(), symmetric)
        same(got, expected, (dtype, n, "symmetric"))
    pieces = [random_tensor(core, 10 * k + 3, torch.float32, k) for k in range(core.size)]
    expected = torch.empty_like(pieces[core.rank])
    got = expected.cuda()
    core.reduce_scatter(expected, pieces, "max")
    gpu.reduce_scatter(got, [p.cuda() for p in pieces], "max")
    same(got, expected, "list")


@check
def broadcast(gpu: Any, core: Any) -> None:
    for root, n in itertools.product(range(core.size), SIZES):
        mine = random_tensor(core, n, torch.float16)
        on_gpu = mine.cuda()
        core.broadcast(mine, root)
        gpu.broadcast(on_gpu, root)
        same(on_gpu, mine, (root, n))


@check
def all_gather(gpu: Any, core: Any) -> None:
    for n in [*SIZES, gpu.limits.direct_bytes // 4 + 9]:
        mine = random_tensor(core, n, torch.float32)
        expected = torch.empty(n * core.size)
        core.all_gather_single(expected, mine)
        symmetric = symcomm.symm_mem.empty(n, device="cuda")
        symmetric.copy_(mine)
        for source in (mine.cuda(), symmetric):
            got = torch.zeros(n * core.size, device="cuda")
            gpu.all_gather_single(got, source)
            same(got, expected, n)
    mine = random_tensor(core, 5 + core.rank, torch.int32)
    expected_list = [torch.empty(5 + k, dtype=torch.int32) for k in range(core.size)]
    got_list = [e.cuda() for e in expected_list]
    core.all_gather(expected_list, mine)
    gpu.all_gather(got_list, mine.cuda())
    for g, e in zip(got_list, expected_list, strict=True):
        same(g, e, "list")


@check
def gather_and_scatter(gpu: Any, core: Any) -> None:
    for root, n in itertools.product(range(core.size), SIZES):
        mine = random_tensor(core, n, torch.float32)
        places = [torch.empty(n, device="cuda") for _ in range(core.size)] if core.rank == root else None
        gpu.gather(places, mine.cuda(), root)
        everyone = [torch.empty(n) for _ in range(core.size)]
        core.all_gather(everyone, mine)
        for place, expected in zip(places or [], everyone, strict=False):
            same(place, expected, (root, n))
        whole = torch.empty(n * core.size, device="cuda") if core.rank == root else None
        gpu.gather_single(whole, mine.cuda(), root)
        if whole is not None:
            same(whole, torch.cat(everyone), (root, n))
        back = torch.empty(n, device="cuda")
        gpu.scatter(back, places, root)
        same(back, mine, (root, n))
        back = torch.empty(n, device="cuda")
        gpu.scatter_single(back, whole, root)
        same(back, mine, (root, n))


@check
def all_to_all(gpu: Any, core: Any) -> None:
    for n in SIZES:
        mine = random_tensor(core, n * core.size, torch.float32)
        expected, got = torch.empty_like(mine), torch.empty(n * core.size, device="cuda")
        core.all_to_all_single(expected, mine)
        gpu.all_to_all_single(got, mine.cuda())
        same(got, expected, n)
        got.copy_(mine)
        gpu.all_to_all_single(got, got)
        same(got, expected, (n, "in place"))
    sent = [core.rank + k + 1 for k in range(core.size)]
    got_splits = [k + core.rank + 1 for k in range(core.size)]
    mine = random_tensor(core, sum(sent) * 2, torch.int64).view(-1, 2)
    expected, got = torch.empty(sum(got_splits), 2, dtype=torch.int64), None
    got = expected.cuda()
    core.all_to_all_single(expected, mine, got_splits, sent)
    gpu.all_to_all_single(got, mine.cuda(), got_splits, sent)
    same(got, expected, "uneven")
    pieces = [random_tensor(core, s, torch.float32, 5) for s in sent]
    expected_list = [torch.empty(s) for s in got_splits]
    got_list = [e.cuda() for e in expected_list]
    core.all_to_all(expected_list, pieces)
    gpu.all_to_all(got_list, [p.cuda() for p in pieces])
    for g, e in zip(got_list, expected_list, strict=True):
        same(g, e, "list")


@check
def not_contiguous(gpu: Any, core: Any) -> None:
    base = torch.full((6, 8), float(core.rank + 1), device="cuda")
    gpu.all_reduce(base.t()[::2])
    total = core.size * (core.size + 1) / 2
    assert torch.equal(base[:, ::2], torch.full((6, 4), total, device="cuda"))
    assert torch.equal(base[:, 1::2], torch.full((6, 4), float(core.rank + 1), device="cuda"))


@check
def many_in_a_row_on_several_streams(gpu: Any, core: Any) -> None:
    """What follows in a stream sees the result, and what went before is seen by it."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = [torch.zeros(50_000 * (k + 1), device="cuda") for k in range(3)]
    torch.cuda.synchronize()
    for turn in range(30):
        for stream, tensor in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                tensor.fill_(core.rank + turn)
                work = gpu.all_reduce(tensor, async_op=turn % 2 == 1)
                if work is not None:
                    work.wait()
                tensor += 1
    torch.cuda.synchronize()
    expected = sum(r + 29 for r in range(core.size)) + 1
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, float(expected))), tensor[:5]


@check
def asynchronous(gpu: Any, core: Any) -> None:
    tensors = [torch.full((n,), float(core.rank), device="cuda") for n in (1, 1000, 3_000_000)]
    works = [gpu.all_reduce(t, async_op=True) for t in tensors]
    futures = [w.get_future() for w in works]
    for work, future, tensor in zip(works, futures, tensors, strict=True):
        assert work.wait()
        assert future.wait()[0] is tensor
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(core.size))))
        assert work.exception() is None
    works[-1].synchronize()
    assert works[-1].is_completed() and works[-1].is_success()


@check
def messages(gpu: Any, core: Any) -> None:
    me, world = core.rank, core.size
    for n, dtype in itertools.product(SIZES, (torch.float32, torch.int8)):
        right, left = (me + 1) % world, (me - 1) % world
        mine = random_tensor(core, n, dtype)
        got, expected = torch.empty(n, dtype=dtype, device="cuda"), torch.empty(n, dtype=dtype)
        sent = gpu.isend(mine.cuda(), right, 3)
        assert gpu.recv(got, left, 3) == left
        sent.wait()
        work = core.isend(mine, right)
        core.recv(expected, left)
        work.wait()
        same(got, expected, (n, dtype))
    if me == 0:
        seen = {gpu.recv(torch.empty(2, device="cuda")) for _ in range(world - 1)}
        assert seen == set(range(1, world))
    else:
        gpu.send(torch.ones(2, device="cuda"), 0)
    if me < 2:  # tags pick the message, whichever came first
        other = 1 - me
        for tag in (1, 2):
            gpu.isend(torch.full((4,), float(tag), device="cuda"), other, tag)
        second, first = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
        gpu.recv(second, other, 2)
        gpu.recv(first, other, 1)
        assert first.tolist() == [1.0] * 4 and second.tolist() == [2.0] * 4
        for number in range(50):  # none taken yet
            gpu.isend(torch.full((50_000,), float(number + me), device="cuda"), other)
        for number in range(50):
            got = torch.empty(50_000, device="cuda")
            gpu.recv(got, other)
            assert torch.equal(got, torch.full_like(got, float(number + other))), number
    core.barrier()


@check
def coalesced(gpu: Any, core: Any) -> None:
    ones = [torch.ones(k + 1, device="cuda") for k in range(4)]
    gpu.all_reduce_coalesced(ones)
    assert all(torch.equal(t, torch.full_like(t, core.size)) for t in ones)
    outs = [torch.zeros(2 * core.size, device="cuda") for _ in range(2)]
    gpu.all_gather_coalesced(outs, [torch.full((2,), float(core.rank), device="cuda")] * 2)
    assert all(t.tolist() == [float(r) for r in range(core.size) for _ in range(2)] for t in outs)


@check
def barrier(gpu: Any, core: Any) -> None:
    """A rank that is busy on its GPU holds the others' streams back."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if core.rank == 0:
        torch.cuda._sleep(200_000_000)
    started.record()
    gpu.barrier()
    ended.record()
    gpu.synchronize()
    torch.cuda.synchronize()
    if core.rank == 1:
        assert started.elapsed_time(ended) > 20


@check
def refusals(gpu: Any, core: Any) -> None:
    for wrong, words in (
        (lambda: gpu.all_reduce(torch.ones(2)), "on cuda:"),
        (lambda: gpu.all_reduce(torch.ones(2, device="cuda"), "band"), "op must be one that is defined for float32"),
        (lambda: gpu.broadcast(torch.ones(2, device="cuda"), 99), "root must be a rank of this group"),
        (lambda: gpu.all_gather([torch.ones(2, device="cuda")], torch.ones(2, device="cuda")), "one per rank"),
        (lambda: gpu.isend(torch.ones(2, device="cuda"), 99), "peer must be a rank"),
    ):
        try:
            wrong()
        except BadArgumentError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


@check
def symmetric_memory(gpu: Any, core: Any) -> None:
    me, world = core.rank, core.size
    tensor = symcomm.symm_mem.empty(16, 4, device="cuda")
    handle = symcomm.symm_mem.rendezvous(tensor, core)
    assert symcomm.symm_mem.is_symm_mem_tensor(tensor) and handle.world_size == world
    assert handle.multicast_ptr == 0 and handle.device.type == "cuda"
    tensor.fill_(me)
    handle.barrier()
    for peer in range(world):
        assert torch.equal(handle.get_buffer(peer, (16, 4), torch.float32), torch.full((16, 4), float(peer)).cuda())
        assert torch.equal(handle.get_remote_tensor(peer, (2,), torch.float32).cpu(), torch.full((2,), float(peer)))
    handle.barrier(channel=1)
    right, left = (me + 1) % world, (me - 1) % world
    handle.get_buffer(right, (16, 4), torch.float32).fill_(100 + me)
    handle.put_signal(right, channel=2)
    handle.wait_signal(left, channel=2)
    assert tensor.unique().tolist() == [100.0 + left]
    pad = handle.get_signal_pad(me)
    assert pad.dtype == torch.uint32 and int(pad.to(torch.int64).sum()) == 0
    words = handle.get_signal_pad(me, (4,), torch.uint32, storage_offset=pad.numel() - 4)
    symcomm.symm_mem.memset32(words, 1, 7, 2)
    symcomm.symm_mem.stream_write_value32(words, 3, 9)
    assert words.tolist() == [0, 7, 7, 9]
    handle.barrier()
    assert len(handle.buffer_ptrs) == world and handle.buffer_ptrs[me] == tensor.data_ptr()


def _waited(call: Callable[[], Any]) -> Callable[[], None]:
    def act() -> None:
        works = call()
        for work in works if isinstance(works, list) else [works]:
            if work is not None:
                work.wait()

    return act


def _writing(gpu: Any, core: Any, n: int, options: dict[str, Any]) -> dict[str, Case]:
    root, right, left = core.rank == 1, (core.rank + 1) % core.size, (core.rank - 1) % core.size
    x, y, mine, got, *row = (torch.ones(n, device="cuda") for _ in range(4 + core.size))
    whole, odd = torch.ones(n * core.size, device="cuda"), torch.ones(2 * n, device="cuda")[::2]
    return {
        "all_reduce": Case(lambda: gpu.all_reduce(x, **options), [x], []),
        "not contiguous": Case(lambda: gpu.all_reduce(odd, **options), [odd], []),
        "broadcast": Case(lambda: gpu.broadcast(y, 1, **options), [] if root else [y], [y] if root else []),
        "all_gather": Case(lambda: gpu.all_gather(row, mine, **options), row, [mine]),
        "all_gather_single": Case(lambda: gpu.all_gather_single(whole, mine, **options), [whole], [mine]),
        "reduce_scatter": Case(lambda: gpu.reduce_scatter(got, row, **options), [got], row),
        "messages": Case(lambda: [gpu.isend(mine, right), gpu.irecv(got, left)], [got], [mine]),
    }


@check
def autograd_is_told(gpu: Any, core: Any) -> None:
    """Of what a call writes, whichever way it takes, and of nothing else."""
    for n, options in itertools.product((5, 70_001), ({}, {}, {"timeout": 50.0}, {"async_op": True})):
        for name, case in _writing(gpu, core, n, options).items():
            check_case(case, _waited(case.call), f"{name} of {n}, {options}")


@check
def a_window_tells_autograd(gpu: Any, core: Any) -> None:
    held, mine = symcomm.symm_mem.zeros(5, device="cuda"), torch.ones(5, device="cuda")
    right, left = (core.rank + 1) % core.size, (core.rank - 1) % core.size
    window = core.new_window(held)

    def put() -> None:
        window.put(mine, right)
        window.signal(right)
        window.wait_signal(left)

    check_case(Case(put, [held], [mine]), put, "a window")
    check_case(Case(put, [held], [mine]), lambda: window.put(mine, core.rank), "a put to itself")
    window.tensor_deregister()


@check
def autograd_refuses_leaves(gpu: Any, core: Any) -> None:
    for _ in range(2):
        row = [torch.zeros(3, device="cuda", requires_grad=core.rank == 0) for _ in range(core.size)]
        try:
            gpu.all_gather(row, torch.ones(3, device="cuda"))
        except BadArgumentError as error:
            assert core.rank == 0 and LEAF in str(error), error
            assert all(not t.any() for t in row)
        else:
            assert core.rank != 0 and all(t.tolist() == [1.0] * 3 for t in row)


def run_all(rank: int, world: int, store: str) -> dict[str, str]:
    gpu = join(rank, world, store, timeout=60)
    core = gpu.core
    told = {}
    for name, function in CHECKS.items():
        try:
            function(gpu, core)
            torch.cuda.synchronize()
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
        try:
            core.barrier()
        except BaseException as error:
            told[name] += f"\n{error}"
            break
    return told
