"""Ranks lend tensors in scatter, all_to_all and all_gather: peers read them by system call (``exec/cma.c``).

A page of rank 1's output that the kernel must ask the test for (userfaultfd) stops it in the very middle of its read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.collectives import select
from symcomm.collectives.limits import NO_BYTES, X86
from symcomm.collectives.plan import Plan
from symcomm.collectives.select import DEFAULT, Limits
from symcomm.group.factory import make_group
from symcomm.group.process_group import ProcessGroup
from symcomm.observe.recorder import records
from symcomm.types import DType, RedOpType
from tests.support.call_gate import refuse
from tests.support.faults import attempt, join_group, run_group
from tests.support.halted_calls import PATTERN
from tests.support.page_gate import PAGE, Words, ordinary, stop
from tests.support.pager import Pager, needs_pager
from tests.support.ranks import Outcome, returned

LENT = Limits(attach_bytes=1 << 14, attach_gather_bytes=1 << 14, attach_scatter_bytes=1 << 14, attach_ranks=2)
CALLS = ("scatter", "all_to_all", "all_gather")
COUNT = 1 << 13  # elements of a piece: eight pages
WORLD = 3
GATHERED = 1  # the piece that a rank gives to an all_gather
HIT, GAVE_UP = 0, 1  # words: rank 1 stands in its read; the root has its tensors back
lent = partial(join_group, limits=LENT)
_libc = ctypes.CDLL(None, use_errno=True)


pytestmark = pytest.mark.usefixtures("nothing_is_left")


def pieces(root: int, shift: float = 0.0) -> list[torch.Tensor]:
    return [torch.arange(COUNT, dtype=torch.float32) + 1000 * root + 10_000 * rank + shift for rank in range(WORLD)]


def exchange(
    g: ProcessGroup,
    call: str,
    out: torch.Tensor,
    given: list[torch.Tensor],
    root: int = 0,
    timeout: float | None = None,
) -> None:
    """Rank k gets the root's k-th tensor in ``out``, or all_gather's. What others send, too, must be right."""
    if call == "scatter":
        g.scatter(out, given if g.rank == root else None, root, timeout=timeout)
        return
    outs = [out if rank == root else torch.empty(COUNT) for rank in range(WORLD)]
    if call == "all_to_all":
        g.all_to_all(outs, given, timeout=timeout)
    else:
        g.all_gather(outs, given[GATHERED], timeout=timeout)
    assert all(torch.equal(outs[r], wanted(call, r, g.rank)) for r in range(WORLD) if r not in (root, g.rank))


def wanted(call: str, root: int, rank: int, shift: float = 0.0) -> torch.Tensor:
    return pieces(root, shift)[GATHERED if call == "all_gather" else rank]


def last_plan(g: ProcessGroup) -> str:
    return [op.plan for op in records.operations_of(g)[g.rank] if op.call in CALLS][-1]


def _exchanges(g: ProcessGroup, call: str, refused: int) -> tuple[int, str]:
    if g.rank == refused:
        refuse("process_vm_readv")
    wrong = 0
    for turn in range(20):
        for root in range(WORLD):
            out = torch.full((COUNT,), 0.5)
            exchange(g, call, out, pieces(root, turn) if g.rank == root else pieces(g.rank), root)
            wrong += not torch.equal(out, wanted(call, root, g.rank, turn))
    return wrong, last_plan(g)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("refused", "plan"), [(-1, "attached"), (0, "streamed"), (2, "streamed")])
def test_values_are_right_also_where_the_kernel_refuses_one_rank(call, refused, plan):
    assert returned(run_group(_exchanges, WORLD, call, refused, join=lent)) == [(0, plan)] * WORLD


def in_arena(g: ProcessGroup) -> torch.Tensor:
    return torch.frombuffer(g.arena.buffer(4 * WORLD * COUNT), dtype=torch.float32)[: WORLD * COUNT]


def _one_is_symmetric(g: ProcessGroup) -> list[str]:
    """Rank 1's tensors are symmetric, then rank 1's input alone, then all ranks' inputs."""
    plans = []
    g.barrier()  # peers' memory is read once they have introduced themselves
    for turn, symmetric in enumerate([(1,), (1,), range(WORLD)]):
        given = torch.cat(pieces(g.rank, turn))
        if g.rank in symmetric:
            given = in_arena(g).copy_(given)
        out = in_arena(g) if g.rank in symmetric and turn == 0 else torch.empty(WORLD * COUNT)
        g.all_to_all_single(out, given)
        assert torch.equal(out, torch.cat([pieces(r, turn)[g.rank] for r in range(WORLD)]))
        plans.append(last_plan(g))
    return plans


def test_some_tensors_may_be_symmetric():
    assert returned(run_group(_one_is_symmetric, WORLD, join=lent)) == [["attached", "attached", "direct"]] * WORLD


def _odd_inputs(g: ProcessGroup) -> list[str]:
    """One tensor cut into pieces, pieces that are the same tensor, and a root whose output is its own piece."""
    plans = []
    g.barrier()
    whole = torch.cat(pieces(0))
    for given in (list(whole.chunk(WORLD)), [pieces(0)[g.rank]] * WORLD, pieces(0)):
        out = given[0] if g.rank == 0 and given[0].data_ptr() != whole.data_ptr() else torch.empty(COUNT)
        g.scatter(out, given if g.rank == 0 else None, 0)
        plans.append(last_plan(g))
        assert torch.equal(out, pieces(0)[0 if len(plans) == 2 else g.rank])
    return plans


def test_pieces_may_lie_anywhere():
    assert returned(run_group(_odd_inputs, WORLD, join=lent)) == [["attached"] * 3] * WORLD


def _outputs_are_inputs(g: ProcessGroup) -> str:
    """What comes from one rank goes where what another one still has to read lies, on every second rank."""
    for turn in range(20):
        given = pieces(g.rank, turn)
        outs = [given[(k + 1) % WORLD] for k in range(WORLD)] if g.rank % 2 else [torch.empty(COUNT) for _ in given]
        g.all_to_all(outs, given)
        assert all(torch.equal(out, pieces(r, turn)[g.rank]) for r, out in enumerate(outs)), turn
    return last_plan(g)


def test_outputs_may_lie_on_inputs_that_are_lent():
    assert returned(run_group(_outputs_are_inputs, WORLD, join=lent)) == ["attached"] * WORLD


def _gathers_into_inputs(g: ProcessGroup) -> list[str]:
    """The input lies in the output where its own values go, where a peer's go, and across both; or is in the list."""
    plans = []
    g.barrier()
    for turn in range(20):
        for start in (g.rank * COUNT, (g.rank + 1) % WORLD * COUNT, COUNT // 2 + 1):
            out = torch.full((WORLD * COUNT,), 0.5)
            given = out[start : start + COUNT].copy_(pieces(g.rank, turn)[GATHERED])
            g.all_gather_single(out, given)
            assert torch.equal(out, torch.cat([pieces(r, turn)[GATHERED] for r in range(WORLD)])), (turn, start)
            plans.append(last_plan(g))
        outs = [torch.empty(COUNT) for _ in range(WORLD)]
        g.all_gather(outs, outs[(g.rank + turn) % WORLD].copy_(pieces(g.rank, turn)[GATHERED]))
        assert all(torch.equal(outs[r], pieces(r, turn)[GATHERED]) for r in range(WORLD)), turn
        plans.append(last_plan(g))
    return plans


def test_an_all_gathers_input_may_lie_in_its_output():
    assert returned(run_group(_gathers_into_inputs, WORLD, join=lent)) == [["attached"] * 80] * WORLD


def test_ranks_that_are_threads_stage():
    def ways(g: ProcessGroup) -> str:
        v = make_group(g.rank, g.size, g.all_gather_bytes, "threads", timeout=20, limits=LENT)
        out = torch.empty(COUNT)
        v.scatter(out, pieces(0) if g.rank == 0 else None, 0)
        assert torch.equal(out, pieces(0)[g.rank])
        return last_plan(v)

    assert symcomm.spawn(ways, WORLD, mode="threads", timeout=20) == ["streamed"] * WORLD


def _halted(g: ProcessGroup, call: str, words: Words, prepare: Callable[[], torch.Tensor]) -> tuple[str, bool]:
    """Rank 1 stands in its read until the test lets it go on. The root overwrites its tensors after its call."""
    given = [ordinary(COUNT) for _ in range(WORLD)]
    for tensor, values in zip(given, pieces(g.rank), strict=True):
        tensor.copy_(values)
    out = torch.full((COUNT,), 0.5) if g.rank != 1 else prepare()
    g.barrier()
    raised = attempt(lambda: exchange(g, call, out, given, timeout=4.0 if g.rank == 0 else 20.0))
    if g.rank == 0:
        for tensor in given:
            tensor.fill_(PATTERN)
        words[GAVE_UP] = 1
    return raised, bool(torch.equal(out, wanted(call, 0, g.rank))) if g.rank else True


def _run_halted(call: str, how: str) -> list[Outcome]:
    words = Words()
    hear, let_go = os.pipe()

    def prepare() -> torch.Tensor:
        """In rank 1: its main thread will stand in the read, another one serves the page."""
        pager = Pager()
        out = pager.tensor(COUNT, 4 * PAGE)

        def serve() -> None:
            words[HIT] = pager.await_hit()
            os.read(hear, 1)
            pager.give()

        threading.Thread(target=serve, daemon=True).start()
        return out

    def during(pids: list[int]) -> None:
        assert words.reach(HIT, 1, 20)
        if how == "owner dies":
            os.kill(pids[0], signal.SIGKILL)
            os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        elif how == "reader dies":
            os.kill(pids[1], signal.SIGKILL)
        elif how == "reader stops":
            stop(pids[1])
            assert words.reach(GAVE_UP, 1, 20)
            os.kill(pids[1], signal.SIGCONT)
        else:
            assert words.reach(GAVE_UP, 1, 20)
        os.write(let_go, b".")

    try:
        return run_group(_halted, WORLD, call, words, prepare, join=lent, during=during)
    finally:
        os.close(hear)
        os.close(let_go)


def _unmapped(g: ProcessGroup, call: str, where: int) -> tuple[str, str]:
    """A page of the root's piece for rank 1 (``where`` 0), or of rank 1's output, cannot be touched."""
    given = [ordinary(COUNT) for _ in range(WORLD)]
    out = ordinary(COUNT)
    g.barrier()
    if g.rank == where:
        page = (given[1] if where == 0 else out).data_ptr() + 4 * PAGE
        assert _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    try:
        exchange(g, call, out, given)
    except errors.SymcommError as error:
        return type(error).__name__, str(error)
    return "", ""


# An all_gather's root reads its own tensor itself.
@pytest.mark.parametrize(("call", "where"), [*((call, 1) for call in CALLS), ("scatter", 0), ("all_to_all", 0)])
def test_memory_that_is_not_there_is_an_error_on_all_ranks(call, where):
    told = returned(run_group(_unmapped, WORLD, call, where, join=lent))
    assert [name for name, _ in told[:2]] == ["GroupUnusableError"] * 2 and told[2][0] in ("", "GroupUnusableError")
    assert all("rank 1 could not copy out of the tensor of rank 0" in words for _, words in told[:2]), told


def has_it_or_raised(told: tuple[str, bool], error: str) -> bool:
    """Of a rank that nobody stopped: it was done in time, or its read came too late."""
    return told == ("", True) or told[0] == error


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["owner gives up", "reader stops"])
def test_what_an_owner_overwrites_after_its_deadline_is_no_result(call, how):
    needs_pager()
    root, reader, other = returned(_run_halted(call, how))
    assert root == ("DeadlineError", True)
    assert reader == ("DeadlineError", False), "or it was not stopped in the middle"
    assert has_it_or_raised(other, "DeadlineError")


@pytest.mark.parametrize("call", CALLS)
def test_a_reader_whose_owner_dies_raises(call):
    needs_pager()
    root, reader, other = _run_halted(call, "owner dies")
    assert (root.kind, reader.value[0]) == ("died", "RankFailedError")
    assert has_it_or_raised(other.value, "RankFailedError")


@pytest.mark.parametrize("call", CALLS)
def test_a_reader_that_dies_is_named(call):
    needs_pager()
    root, reader, other = _run_halted(call, "reader dies")
    assert (reader.kind, root.value) == ("died", ("RankFailedError", True))
    assert has_it_or_raised(other.value, "RankFailedError")


def bytes_lent(plan_of: Callable[[int], Plan], world: int) -> int:
    """What ranks read out of others' memory at once; all must think the same."""
    (size,) = {plan_of(rank).attach_bytes for rank in range(world)}
    return size


def lent_by_root(counts: tuple[int, ...], limits: Limits = DEFAULT) -> int:
    world = len(counts)
    return bytes_lent(lambda rank: select.scatter(rank, world, counts, DType.FLOAT32, 0, True, limits), world)


def lent_by_all(world: int, matrix: int | tuple[tuple[int, ...], ...], limits: Limits) -> int:
    return bytes_lent(lambda rank: select.all_to_all(rank, world, matrix, DType.FLOAT32, False, limits), world)


def lent_to_all(counts: tuple[int, ...], limits: Limits) -> int:
    world = len(counts)
    return bytes_lent(lambda rank: select.all_gather(rank, world, counts, DType.FLOAT32, False, limits), world)


def test_a_scatters_root_lends_large_even_pieces():
    even = (1 << 18,) * 4
    assert lent_by_root(even) == lent_by_root(even, Limits().crowded()) == 1 << 20
    assert lent_by_root((1 << 15,) * 4) == 1 << 17
    assert lent_by_root((1 << 15,) * 4, Limits().crowded()) == lent_by_root((1 << 14,) * 4) == 0
    assert lent_by_root(even[:3]) == (1 << 20 if X86 else 0)
    assert lent_by_root(even[:2], Limits(attach_ranks=3)) == 0
    assert lent_by_root((*even[:3], 1 << 19)) == 0


def test_ranks_of_an_all_to_all_lend_large_even_pieces():
    limits = Limits(attach_bytes=64 << 10, attach_ranks=2)
    assert lent_by_all(4, 1 << 14, limits) == lent_by_all(2, 1 << 14, limits) == 1 << 16
    assert lent_by_all(4, 1 << 13, limits) == 0
    assert lent_by_all(4, ((1 << 14,) * 4,) * 3 + ((1 << 15,) * 4,), limits) == 0
    assert lent_by_all(4, 1 << 15, limits.crowded()) == 0
    assert lent_by_all(4, 1 << 16, limits.crowded()) == 1 << 18
    assert Limits().attach_bytes == (64 << 10 if X86 else NO_BYTES)


def test_ranks_of_an_all_gather_lend_large_even_inputs():
    limits = Limits(attach_gather_bytes=64 << 10, attach_ranks=2)
    assert lent_to_all((1 << 14,) * 4, limits) == lent_to_all((1 << 14,) * 2, limits) == 1 << 16
    assert lent_to_all((1 << 13,) * 4, limits) == lent_to_all((1 << 14, 1 << 15), limits) == 0
    assert lent_to_all((1 << 20,) * 4, limits.crowded()) == 0
    assert Limits().attach_gather_bytes == (128 << 10 if X86 else NO_BYTES)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attach_bytes": -8}, "only reads"),
        ({"attach_bytes": 1 << 19}, "across pieces"),
        ({"attach_bytes": 4}, "more than a piece"),
        ({"direct": None}, "only reads"),
        ({"staged": []}, "no room"),
    ],
)
def test_the_core_refuses_to_read_what_nobody_lends(change, why):
    plan = select.scatter(1, 4, (1 << 18,) * 4, DType.FLOAT32, 0)
    with pytest.raises(ValueError, match=why):
        native.make_plan(replace(plan, **change).encode())


def test_the_core_reads_for_copies_alone():
    plan = select.reduce_scatter(1, 4, (1 << 18,) * 4, DType.FLOAT32, RedOpType.SUM)
    with pytest.raises(ValueError, match="more than a copy"):
        native.make_plan(replace(plan, attach_bytes=1 << 20).encode())
