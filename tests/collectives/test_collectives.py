"""Every collective against torch's own arithmetic: dtypes, operations, world sizes, algorithms, kinds of memory.

Threads as ranks run the same plans, kernels and checks as processes, start in milliseconds, and share what is expected;
where many wait for Python's lock most of the time, processes are quicker.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

import symcomm
from symcomm import errors, testing
from symcomm.collectives.select import Limits
from symcomm.group.factory import make_group
from symcomm.group.process_group import ProcessGroup
from symcomm.types import DType, RedOpType
from tests.support.faults import run_group
from tests.support.ranks import returned
from tests.support.reductions import COMPLEX, DEFINED, expected, moderate, torch_dtype

pytestmark = pytest.mark.long

NEVER, ALWAYS = 1 << 50, 0
LIMITS = {
    "usual": Limits(),
    "one-shot": Limits(one_shot_bytes=NEVER, one_shot_extra=NEVER, root_extra=NEVER, direct_bytes=NEVER),
    "two-shot": Limits(one_shot_bytes=ALWAYS, direct_bytes=NEVER, two_rank_variant="two_shot"),
    "small chunks": Limits(stage_bytes=8192, chunk_bytes=1024, one_shot_bytes=512, direct_bytes=NEVER),
    "direct": Limits(direct_bytes=ALWAYS),
}
WORLDS = range(1, 9)
KINDS = ("ordinary", "symmetric", "mixed", "strided")


def threads(fn: Callable, n: int, *args: object) -> list:
    return symcomm.spawn(fn, n, args, mode="threads", timeout=20, deadline=100)


def processes(fn: Callable, n: int) -> list:
    return returned(run_group(fn, n, timeout=20, deadline=100))


def variant(g: ProcessGroup, limits: Limits) -> ProcessGroup:
    """A group of the same ranks that chooses its algorithms by other limits."""
    return make_group(g.rank, g.size, g.all_gather_bytes, "variant", timeout=20, limits=limits)


def place(g: ProcessGroup, values: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values in memory of some kind. ``mixed``: symmetric on every second rank."""
    if kind == "symmetric" or (kind == "mixed" and g.rank % 2 == 0):
        raw = torch.frombuffer(g.arena.buffer(max(values.nbytes, 1)), dtype=torch.uint8)[: values.nbytes]
        out = raw.view(values.dtype) if values.numel() else raw[:0].view(values.dtype)
        out.copy_(values)
        return out
    if kind == "strided":
        out = torch.zeros(2 * values.numel(), dtype=values.dtype)[::2]
        out.copy_(values)
        return out
    return values.clone()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    dense = [t if t.stride() == (1,) else torch.empty(t.numel(), dtype=t.dtype).copy_(t) for t in (a, b)]
    return a.dtype == b.dtype and np.array_equal(*(t.view(torch.uint8).numpy() for t in dense))


def agree(dtype: DType, op: RedOpType, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit; complex products only to rounding, since torch's may fuse multiply and add."""
    if dtype in COMPLEX and op == RedOpType.PRODUCT:
        return torch.allclose(got, wanted, rtol=1e-5)
    return same_bits(got, wanted)


@functools.cache  # threads of one test ask for the same, and change copies
def inputs_of(dtype: DType, world: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    found = [moderate(dtype, count, 1000 * seed + r) for r in range(world)]
    return [t.view(torch.uint8) > 127 for t in found] if dtype == DType.BOOL else found  # torch copies no odd bools


@functools.cache
def reduced(dtype: DType, op: RedOpType, world: int, count: int, seed: int = 0) -> torch.Tensor:
    return expected(dtype, op, inputs_of(dtype, world, count, seed))


# --- reductions ----------------------------------------------------------------------------------------------


@testing.ranks(WORLDS, deadline=100)
def test_every_dtype_and_operation(g: ProcessGroup):
    two_shot = variant(g, LIMITS["two-shot"])
    for dtype, op in DEFINED:
        if op == RedOpType.PREMUL_SUM:
            continue
        sources = inputs_of(dtype, g.size, 77)
        wanted = reduced(dtype, op, g.size, 77)
        for group in (g, two_shot):
            t = sources[g.rank].clone()
            group.all_reduce(t, op)
            assert agree(dtype, op, t, wanted), (dtype, op, group.name)
        t = sources[g.rank].clone()
        g.reduce(t, g.size - 1, op)
        assert agree(dtype, op, t, wanted if g.rank == g.size - 1 else sources[g.rank]), (dtype, op, "reduce")
        pieces = inputs_of(dtype, g.size, 5 * g.size, 1)
        out = torch.empty(5, dtype=torch_dtype(dtype))
        g.reduce_scatter_single(out, pieces[g.rank], op)
        assert agree(dtype, op, out, reduced(dtype, op, g.size, 5 * g.size, 1)[5 * g.rank :][:5]), (
            dtype,
            op,
            "reduce_scatter",
        )


COUNTS = (0, 1, 3, 127, 2049, 20_001)


def _every_algorithm(g: ProcessGroup) -> None:
    groups = {name: variant(g, limits) for name, limits in LIMITS.items()}
    for count in COUNTS:
        for dtype in (DType.FLOAT32, DType.BFLOAT16):
            sources = inputs_of(dtype, g.size, count)
            wanted = reduced(dtype, RedOpType.SUM, g.size, count)
            for name, group in groups.items():
                for kind in KINDS:
                    t = place(group, sources[g.rank], kind)
                    group.all_reduce(t)
                    assert same_bits(t, wanted), (count, dtype, name, kind)
                    t, root = place(group, sources[g.rank], kind), count % g.size
                    group.reduce(t, root)
                    assert same_bits(t, wanted if g.rank == root else sources[g.rank]), (count, name, kind, "reduce")


@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_gives_the_same_bits(world: int):
    processes(_every_algorithm, world)


def _reduce_scatter(g: ProcessGroup) -> None:
    groups = {name: variant(g, limits) for name, limits in LIMITS.items()}
    for count in (0, 1, 129, 3001):
        sources = inputs_of(DType.FLOAT32, g.size, count * g.size)
        wanted = reduced(DType.FLOAT32, RedOpType.SUM, g.size, count * g.size)[count * g.rank :][:count]
        for name, group in groups.items():
            for kind in KINDS:
                source, out = place(group, sources[g.rank], kind), place(group, torch.zeros(count), kind)
                group.reduce_scatter_single(out, source)
                assert same_bits(out, wanted) and same_bits(source, sources[g.rank]), (count, name, kind)
                group.reduce_scatter(out.zero_(), list(source.split(count)) if count else [source] * g.size)
                assert same_bits(out, wanted), (count, name, kind, "list")
                mine = source[count * g.rank :][:count]  # in place: the output is a piece of the input
                group.reduce_scatter_single(mine, source)
                assert same_bits(mine, wanted), (count, name, kind, "in place")
        sizes = [count + r for r in range(g.size)]
        whole = inputs_of(DType.FLOAT32, g.size, sum(sizes), 2)
        out = torch.empty(sizes[g.rank])
        g.reduce_scatter(out, list(whole[g.rank].split(sizes)))
        assert same_bits(out, reduced(DType.FLOAT32, RedOpType.SUM, g.size, sum(sizes), 2).split(sizes)[g.rank]), (
            count,
            "uneven",
        )


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int):
    processes(_reduce_scatter, world)


@testing.ranks([1, 2, 5])
def test_premultiplied_sums(g: ProcessGroup):
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.INT32):
        sources = inputs_of(dtype, g.size, 50)
        factors = [3, torch.arange(50).to(torch_dtype(dtype))] + ([0.5] if dtype != DType.INT32 else [])
        for factor in factors:
            scaled = [(s * factor).to(s.dtype) for s in sources]
            t = sources[g.rank].clone()
            g.all_reduce(t, symcomm.make_premul_sum(factor))
            assert same_bits(t, expected(dtype, RedOpType.SUM, scaled)), (dtype, factor)
        t = torch.zeros(10, dtype=torch_dtype(dtype))
        g.reduce_scatter_single(t[:1], torch.ones(g.size, dtype=t.dtype), symcomm.make_premul_sum(2))
        assert t[0].item() == 2 * g.size


# --- copies --------------------------------------------------------------------------------------------------


def _copies(g: ProcessGroup) -> None:
    groups = {name: variant(g, limits) for name, limits in LIMITS.items()}
    n = g.size
    for turn, count in enumerate(COUNTS):
        for dtype in [(DType.FLOAT32, DType.UINT8, DType.COMPLEX128)[turn % 3]]:
            sources = inputs_of(dtype, n, count)
            joined = torch.cat(sources)
            for name, group in groups.items():
                for kind in KINDS:
                    root, case = count % n, (count, dtype, name, kind)
                    mine = place(group, sources[g.rank], kind)
                    blank = functools.partial(torch.zeros, dtype=mine.dtype)
                    t = place(group, sources[g.rank], kind)
                    group.broadcast(t, root)
                    assert same_bits(t, sources[root]), case
                    whole = place(group, blank(n * count), kind)
                    group.all_gather_single(whole, mine)
                    assert same_bits(whole, joined), case
                    parts = [place(group, blank(count), kind) for _ in range(n)]
                    group.all_gather(parts, mine)
                    assert all(map(same_bits, parts, sources)), case
                    parts = [place(group, blank(count), kind) for _ in range(n)]
                    group.gather(parts if g.rank == root else None, mine, root)
                    assert g.rank != root or all(map(same_bits, parts, sources)), case
                    whole = place(group, blank(n * count), kind)
                    group.gather_single(whole if g.rank == root else None, mine, root)
                    assert same_bits(whole, joined if g.rank == root else blank(n * count)), case
                    group.all_gather_single(whole, mine)
                    out = place(group, blank(count), kind)
                    group.scatter(out, parts if g.rank == root else None, root)
                    assert same_bits(out, sources[g.rank]), case
                    out = place(group, blank(count), kind)
                    group.scatter_single(out, whole if g.rank == root else None, root)
                    assert same_bits(out, sources[g.rank]), case
                    slot = whole[g.rank * count :][:count]  # in place: the input is a piece of the output
                    slot.copy_(mine)
                    group.all_gather_single(whole, slot)
                    assert same_bits(whole, joined), case


@pytest.mark.parametrize("world", WORLDS)
def test_copies(world: int):
    processes(_copies, world)


def _uneven(g: ProcessGroup) -> None:
    rng = random.Random(5)
    n = g.size
    for dtype in (DType.FLOAT32, DType.INT16):
        for turn in range(4):
            matrix = [[rng.choice((0, 1, 5, 4000)) for _ in range(n)] for _ in range(n)]
            send = [[moderate(dtype, matrix[i][j], 100 * i + j) for j in range(n)] for i in range(n)]
            wanted = [send[i][g.rank] for i in range(n)]
            outs = [torch.zeros(w.numel(), dtype=w.dtype) for w in wanted]
            kind = KINDS[turn]
            g.all_to_all(outs, [place(g, s, kind) for s in send[g.rank]])
            assert all(map(same_bits, outs, wanted)), (dtype, turn)
            out = torch.zeros(sum(map(len, wanted)), dtype=outs[0].dtype)
            g.all_to_all_single(out, place(g, torch.cat(send[g.rank]), kind), [len(w) for w in wanted], matrix[g.rank])
            assert same_bits(out, torch.cat(wanted)), (dtype, turn, "single")
            sizes = matrix[0]
            outs = [torch.zeros(s, dtype=out.dtype) for s in sizes]
            g.all_gather(outs, moderate(dtype, sizes[g.rank], g.rank))
            assert all(same_bits(o, moderate(dtype, sizes[r], r)) for r, o in enumerate(outs)), "uneven all_gather"


def _all_to_all(g: ProcessGroup) -> None:
    groups = {name: variant(g, limits) for name, limits in LIMITS.items()}
    n = g.size
    for count in (0, 1, 130, 3000):
        sources = inputs_of(DType.FLOAT64, n, count * n)
        wanted = torch.cat([s[count * g.rank :][:count] for s in sources])
        for name, group in groups.items():
            for kind in KINDS:
                out = place(group, torch.zeros(count * n, dtype=torch.float64), kind)
                group.all_to_all_single(out, place(group, sources[g.rank], kind))
                assert same_bits(out, wanted), (count, name, kind)
    out, rows = torch.zeros(n, 3), torch.arange(3.0 * n).reshape(n, 3) + 100 * g.rank  # splits count rows
    g.all_to_all_single(out, rows, [1] * n, [1] * n)
    assert torch.equal(out, torch.stack([torch.arange(3.0) + 3 * g.rank + 100 * r for r in range(n)]))


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all(world: int):
    processes(_all_to_all, world)
    processes(_uneven, world)


@testing.ranks([1, 2, 3, 4])
def test_outputs_that_lie_on_inputs(g: ProcessGroup):
    """Outputs on inputs: pieces of other sizes are exchanged, or stand elsewhere in a list; a tensor moves by one."""
    n, r, rng = g.size, g.rank, random.Random(7)
    for count in (3, 5000):
        matrix = [[rng.choice((0, 1, count)) for _ in range(n)] for _ in range(n)]
        send = [torch.arange(float(sum(row))) + 10 * count * i for i, row in enumerate(matrix)]
        wanted = torch.cat([each.split(row)[r] for each, row in zip(send, matrix, strict=True)])
        small, large = sorted([len(wanted), len(send[r])])
        memory = torch.zeros(large + r * small)
        smaller, larger = memory[r * small :][:small], memory[:large]  # as in place as a gather's input is
        source, out = (smaller, larger) if len(wanted) == large else (larger, smaller)
        g.all_to_all_single(out, source.copy_(send[r]), [row[r] for row in matrix], matrix[r])
        assert torch.equal(out, wanted), (count, matrix)
        for turn in range(n):
            inputs = [torch.full((count,), 10.0 * r + k) for k in range(n)]
            outputs = [inputs[(k + turn) % n] for k in range(n)]
            g.all_to_all(outputs, inputs)
            assert [o[0].item() for o in outputs] == [10.0 * k + r for k in range(n)], (count, turn)
    if n > 1:
        return
    for call in (g.all_gather_single, g.reduce_scatter_single, g.all_to_all_single) * 2:  # then from the cache
        x = torch.arange(100_000.0)
        call(x[1:], x[:-1])
        assert torch.equal(x[1:], torch.arange(99_999.0)), call.__name__


@testing.ranks([1, 3])
def test_coalesced(g: ProcessGroup):
    tensors = [torch.ones(3), torch.ones(5, dtype=torch.int64), torch.ones(0)]
    g.all_reduce_coalesced(tensors)
    assert [t.tolist() for t in tensors] == [[g.size] * 3, [g.size] * 5, []]
    outs = [torch.zeros(g.size), torch.zeros(2 * g.size)]
    work = g.all_gather_coalesced(outs, [torch.tensor([float(g.rank)]), torch.ones(2)], async_op=True)
    assert work is not None and work.result() is not None
    assert outs[0].tolist() == list(range(g.size)) and outs[1].tolist() == [1.0] * 2 * g.size
    out = torch.zeros(2)
    g.reduce_scatter_coalesced([out], [torch.ones(2 * g.size)])
    assert out.tolist() == [g.size] * 2
    g.all_reduce_coalesced([])
    with pytest.raises(errors.BadArgumentError, match="outputs must be as many as inputs"):
        g.all_gather_coalesced([out], [])


# --- what may be passed --------------------------------------------------------------------------------------


class OnlyDLPack:
    """A tensor of some other library: it has DLPack and a shape, and nothing else."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **kwargs: object):
        return self._array.__dlpack__(**kwargs)  # type: ignore[arg-type]

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def _foreign(g: ProcessGroup) -> None:
    n, total = g.size, g.size * (g.size + 1) / 2
    array = np.full((4, 6), g.rank + 1, np.float32)
    g.all_reduce(array)
    assert (array == total).all()
    g.all_reduce(array[:, ::2])  # a strided view
    assert (array[:, ::2] == n * total).all() and (array[:, 1::2] == total).all()
    array = np.full(7, g.rank + 1, np.int64)
    g.all_reduce(OnlyDLPack(array))
    assert (array == total).all()
    out = np.zeros(n, np.int16)
    g.all_gather_single(out, torch.tensor([g.rank], dtype=torch.int16))
    assert out.tolist() == list(range(n))
    scalar = torch.tensor(2.5)  # no dimensions
    g.all_reduce(scalar)
    assert scalar.item() == 2.5 * n
    leaf = torch.ones(3, requires_grad=True)
    g.all_reduce(leaf)
    assert leaf.tolist() == [n] * 3 and leaf.is_leaf
    frozen = np.ones(3)
    frozen.flags.writeable = False
    g.broadcast(frozen, root=g.rank) if n == 1 else None
    with pytest.raises(errors.BadArgumentError, match="tensor must be writable"):
        g.all_reduce(frozen)


def _lazy_views(g: ProcessGroup) -> None:
    for _ in range(2):  # the second call would take the short cut
        z = torch.full((4,), 1 + 2j)
        g.all_reduce(z.conj())
        assert z.tolist() == [(1 + 2j) * g.size] * 4
        x = torch.full((4,), 3.0)
        g.all_reduce(x.clone())
        g.all_reduce(torch._neg_view(x))
        assert x.tolist() == [3.0 * g.size] * 4
        one = torch.tensor([1 + 2j])
        g.all_reduce(one.clone().imag)
        g.all_reduce(one.conj().imag)
        assert one.tolist() == [1 + 2j * g.size]
        two, sums = torch.tensor([1 + 2j, 3 + 4j]).conj(), torch.zeros(g.size)
        for negated in (two.imag[1:], two[1].imag, two.imag[1:].unsqueeze(0), two.imag[1:].view(1).squeeze()):
            g.all_gather_single(sums, negated)
            assert sums.tolist() == [-4.0] * g.size


@pytest.mark.parametrize("world", [1, 2, 4])
def test_foreign_and_lazy_tensors(world: int):
    threads(_foreign, world)
    threads(_lazy_views, world)


# --- what is refused -----------------------------------------------------------------------------------------

BAD = {
    "meta": (
        lambda g: g.all_reduce(torch.ones(3, device="meta")),
        "must be a CPU tensor, got 'a tensor on meta'; it has no values; make one on the CPU",
    ),
    "sparse": (lambda g: g.all_reduce(torch.ones(3).to_sparse()), "must be dense, got 'a torch.sparse_coo tensor'"),
    "expanded array": (lambda g: g.all_reduce(np.broadcast_to(np.ones(1), 4)), "must be writable"),
    "no tensor": (lambda g: g.all_reduce([1.0, 2.0]), "tensor must be a tensor, a NumPy array .* got 'list'"),
    "strings": (lambda g: g.all_reduce(np.array(["a"])), "dtype"),
    "None": (lambda g: g.all_reduce(None), "got 'NoneType'"),
    "op": (lambda g: g.all_reduce(torch.ones(3), "median"), "op must be one of SUM, AVG, .* got 'median'"),
    "op number": (lambda g: g.all_reduce(torch.ones(3), 77), "op must be one of"),
    "bits of floats": (lambda g: g.all_reduce(torch.ones(3), "band"), "op must be one that is defined for float32"),
    "order of complex": (lambda g: g.all_reduce(torch.ones(3) * 1j, "max"), "defined for complex64"),
    "no factor": (lambda g: g.all_reduce(torch.ones(3), "premul_sum"), "PREMUL_SUM without a factor"),
    "root": (lambda g: g.broadcast(torch.ones(3), root=2), "root must be a rank of this group, 0 to 1, got 2"),
    "root below": (lambda g: g.reduce(torch.ones(3), root=-1), "root must be a rank of this group, 0 to 1, got -1"),
    "root of 64 bits": (lambda g: g.broadcast(torch.ones(3), root=1 << 63), "root must be a rank of this group"),
    "root of 200 bits": (lambda g: g.gather(None, torch.ones(3), root=-(1 << 200)), "root must be a rank"),
    "root to shift": (lambda g: g.reduce(torch.ones(3), root=1 << 62), "root must be a rank of this group"),
    "root to scatter": (lambda g: g.scatter(torch.ones(3), None, root=1 << 64), "root must be a rank of this group"),
    "root name": (lambda g: g.broadcast(torch.ones(3), root="0"), "root must be a rank"),
    "list length": (lambda g: g.all_gather([torch.ones(3)], torch.ones(3)), "outputs must be a list of 2 tensors"),
    "not a list": (lambda g: g.all_gather(torch.ones(6), torch.ones(3)), "outputs must be a list of 2 tensors"),
    "two dtypes": (
        lambda g: g.all_gather([torch.ones(3), torch.ones(3).int()], torch.ones(3)),
        "tensors must be all of one dtype, got 'dtypes float32, int32'",
    ),
    "output count": (lambda g: g.all_gather_single(torch.ones(5), torch.ones(3)), "output must be 6 elements"),
    "input count": (lambda g: g.reduce_scatter_single(torch.ones(3), torch.ones(7)), "input must be 6 elements"),
    "root's list": (
        lambda g: g.gather([torch.ones(3)] * (1 if g.rank == 0 else 2), torch.ones(3), 0),
        "outputs must be (a list of 2 tensors|given on the root only)",
    ),
    "one output": (
        lambda g: g.gather_single(torch.ones(5), torch.ones(3), 0),
        "output must be (6 elements|given on the root only)",
    ),
    "one input": (
        lambda g: g.scatter_single(torch.ones(3), torch.ones(5), 0),
        "input must be (6 elements|given on the root only)",
    ),
    "one tensor for the list": (
        lambda g: g.scatter(torch.ones(3), [torch.ones(6)], 0),
        "inputs must be (a list of 2 tensors|given on the root only)",
    ),
    "splits": (
        lambda g: g.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2]),
        r"output_splits must be 2 non-negative numbers that add up to output's 4 rows, got \[1, 1\]",
    ),
    "odd rows": (lambda g: g.all_to_all_single(torch.ones(3), torch.ones(3)), "input must be divisible by the group's"),
    "splits that disagree": (
        lambda g: g.all_to_all([torch.ones(2), torch.ones(1)], [torch.ones(1), torch.ones(1)]),
        "rank 0 sends 1 elements to rank 0, which expects 2; make input and output splits agree",
    ),
    "timeout below": (lambda g: g.barrier(timeout=-1), "timeout must be a positive number of seconds"),
    "timeout NaN": (lambda g: g.barrier(timeout=float("nan")), "timeout must be a positive number of seconds"),
    "timeout zero": (lambda g: g.barrier(timeout=0), "timeout must be a positive number of seconds"),
    "timeout words": (lambda g: g.barrier(timeout="soon"), "timeout must be a positive number of seconds"),
    "wait": (lambda g: g.barrier(async_op=True).wait(-2), "wait: timeout must be a positive number of seconds"),
    "new_group": (lambda g: g.new_group([0, 0]), "ranks must be distinct ranks of 0 to 1"),
    "new_group of none": (lambda g: g.new_group([]), "ranks must be distinct ranks of 0 to 1, at least one"),
}  # fmt: skip


@testing.ranks(2)
def test_bad_arguments_get_one_sentence_and_leave_the_group_usable(g: ProcessGroup):
    t = torch.ones(3)
    g.all_reduce(t)  # so that the short cut is there for float32 x 3
    for name, (call, words) in BAD.items():
        with pytest.raises(errors.BadArgumentError, match=words) as caught:
            call(g)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("."), (name, str(caught.value))
        t = torch.ones(3)
        g.all_reduce(t)  # the group is as good as before
        assert t.tolist() == [2.0] * 3, name
    g.barrier(timeout=float("inf"))
    g.barrier(timeout=1e9)


# --- real processes ------------------------------------------------------------------------------------------


def _in_processes(g: ProcessGroup) -> bytes:
    _every_algorithm(g)
    _uneven(g)
    t = torch.randn(300_000, generator=torch.Generator().manual_seed(g.rank))
    g.all_reduce(t)
    return t.numpy().tobytes()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_in_processes(world: int):
    outcomes = run_group(_in_processes, world, deadline=100)
    assert all(o.kind == "returned" for o in outcomes), "\n".join(map(str, outcomes))
    assert len({o.value for o in outcomes}) == 1  # bit for bit the same everywhere
