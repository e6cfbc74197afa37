"""Faults are real signals at scripted steps, and each has one exact outcome on every rank."""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.group.failure import Status
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import delays, mark_fault, run_group
from tests.support.page_gate import Words
from tests.support.ranks import Outcome

PROMPT = 5.0  # seconds, far below every deadline here: 100 ms are promised, and a test machine may be busy


pytestmark = pytest.mark.usefixtures("nothing_is_left")


def expect(outcomes: list[Outcome], kind: type[BaseException], but: tuple[int, ...] = ()) -> list[str]:
    """Every rank except ``but`` raised ``kind``; their messages."""
    for o in outcomes:
        if o.rank not in but:
            assert o.kind == "raised" and type(o.error) is kind, "\n".join(map(str, outcomes))
    return [str(o.error) for o in outcomes if o.rank not in but]


# --- mismatch ------------------------------------------------------------------------------------------------


def different_collective(g: ProcessGroup, t: torch.Tensor) -> None:
    g.broadcast(t) if g.rank == 1 else g.all_reduce(t)


def different_dtype(g: ProcessGroup, t: torch.Tensor) -> None:
    g.all_reduce(t.double() if g.rank == 1 else t)


def different_count(g: ProcessGroup, t: torch.Tensor) -> None:
    g.all_reduce(t[:-1] if g.rank == 1 else t)


def different_op(g: ProcessGroup, t: torch.Tensor) -> None:
    g.all_reduce(t, op="max" if g.rank == 1 else "sum")


def different_root(g: ProcessGroup, t: torch.Tensor) -> None:
    g.broadcast(t, root=1 if g.rank == 1 else 0)


def extra_call(g: ProcessGroup, t: torch.Tensor) -> None:
    g.all_reduce(t)
    if g.rank == 1:
        g.all_reduce(t)
    g.barrier()


def different_pieces(g: ProcessGroup, t: torch.Tensor) -> None:
    pieces = t[:10].split([2, 2, 3, 3] if g.rank == 1 else [2, 2, 5, 1])
    g.all_gather(pieces, pieces[g.rank].clone())


def different_inputs(g: ProcessGroup, t: torch.Tensor) -> None:
    pieces = t[:80].split([20, 20, 19, 21] if g.rank == 1 else [20, 20, 20, 20])
    g.reduce_scatter(pieces[g.rank].clone(), pieces)


def splits_of_one(g: ProcessGroup, t: torch.Tensor) -> None:
    g.all_to_all_single(t[:8].clone(), t[:8], *([[1, 3, 2, 2]] * 2 if g.rank == 1 else []))


MISMATCHES = {
    different_collective: ("all_reduce(float32 x 5000, SUM)", "broadcast(float32 x 5000, root 0)"),
    different_dtype: ("all_reduce(float32 x 5000, SUM)", "all_reduce(float64 x 5000, SUM)"),
    different_count: ("all_reduce(float32 x 5000, SUM)", "all_reduce(float32 x 4999, SUM)"),
    different_op: ("all_reduce(float32 x 5000, SUM)", "all_reduce(float32 x 5000, MAX)"),
    different_root: ("broadcast(float32 x 5000, root 0)", "broadcast(float32 x 5000, root 1)"),
    extra_call: ("barrier()", "all_reduce(float32 x 5000, SUM)"),
    different_pieces: ("all_gather(float32 x [2, 2, 5, 1])", "all_gather(float32 x [2, 2, 3, 3])"),
    different_inputs: ("reduce_scatter(float32 x 80, SUM)", "reduce_scatter(float32 x [20, 20, 19, 21], SUM)"),
    splits_of_one: ("all_to_all(float32 x 32)", "all_to_all_single with splits"),
}


def _mismatch(g: ProcessGroup, which: Callable) -> None:
    t = torch.ones(5000)
    for _ in range(3):
        g.all_reduce(t)
    g.barrier()
    mark_fault()
    which(g, t)


@pytest.mark.parametrize("which", MISMATCHES, ids=lambda f: f.__name__)
def test_mismatch_names_both_calls_on_every_rank(which: Callable):
    outcomes = run_group(_mismatch, 4, which)
    common, odd = MISMATCHES[which]
    for message in expect(outcomes, errors.CollectiveMismatchError):
        # The error does not wait longer than 80 ms for a rank that is late on a busy machine.
        called = dict(
            re.findall(r"ranks? ([\d, -]+) called (.*?)(?: at \S*test_failures\.py:\d+)?[;.] ?(?=rank|Make)", message)
        )
        assert set(called.values()) <= {common, odd, "nothing yet"}, message
        assert called.get("1") in (odd, "nothing yet") and common in message and odd in message, message
        assert len(re.findall(r" at \S*test_failures\.py:\d+", message)) == 2, message
    assert any(f"ranks 0, 2, 3 called {common} at " in str(o.error) for o in outcomes)
    assert max(delays(outcomes)) < PROMPT


def _two_differ_one_is_busy(g: ProcessGroup, told: Words) -> None:
    g.barrier()
    if g.rank == 2:
        assert told.reach(0, 1) and told.reach(1, 1), "the others have not been told before it came"
    try:
        g.all_reduce(torch.ones(4 + (g.rank == 1)))
    finally:
        told[g.rank] = 1


def test_mismatch_is_seen_before_all_have_arrived():
    outcomes = run_group(_two_differ_one_is_busy, 3, Words(), timeout=20.0)
    messages = expect(outcomes, errors.CollectiveMismatchError)
    assert "rank 2 called nothing yet" in messages[0]


# --- death ---------------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    faulthandler.disable()  # pytest's would print
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_at_once() -> None:
    os._exit(7)


DEATHS = {kill: "died with SIGKILL", segfault: "died with SIGSEGV", exit_at_once: "exited with code 7"}


def _die(g: ProcessGroup, how: Callable, where: str) -> None:
    t = torch.ones(1000)
    g.all_reduce(t)
    team = g.split(g.rank % 2) if where == "sub-group" else g
    if g.rank == 1:
        time.sleep(0.05)
        mark_fault()
        how()
    if where == "p2p":
        g.recv(t, 1)
    elif where == "any source":
        g.recv(t, symcomm.ANY_SOURCE, tag=3)
    elif where == "async":
        g.all_reduce(t, async_op=True).wait()
    elif where == "sub-group" and g.rank % 2 == 0:
        return  # not a member of rank 1's group
    else:
        assert team is not None
        team.barrier()


@pytest.mark.parametrize("how", DEATHS, ids=lambda f: f.__name__)
def test_death_before_arriving(how: Callable):
    outcomes = run_group(_die, 3, how, "collective")
    for message in expect(outcomes, errors.RankFailedError, but=(1,)):
        assert DEATHS[how] in message and "rank 1 (pid" in message and "Survivors: 0, 2." in message
        assert "after all_reduce(float32 x 1000, SUM) #1" in message
    assert all(o.error.ranks == [1] for o in outcomes if o.rank != 1)
    assert max(delays(outcomes)) < PROMPT


@pytest.mark.parametrize("where", ["p2p", "any source", "async"])
def test_death_while_others_wait_elsewhere(where: str):
    outcomes = run_group(_die, 3, kill, where)
    for message in expect(outcomes, errors.RankFailedError, but=(1,)):
        assert "rank 1 (pid" in message and "died with SIGKILL" in message
    assert max(delays(outcomes)) < PROMPT


def _leave_a_receiver(g: ProcessGroup) -> str:
    t = torch.zeros(4)
    g.barrier()
    if g.rank != 0:
        g.destroy()
        return "left"
    with pytest.raises(errors.RankFailedError, match="left"):
        g.recv(t, symcomm.ANY_SOURCE)
    return "raised"


def test_a_receive_from_any_rank_ends_when_all_others_have_left():
    outcomes = run_group(_leave_a_receiver, 3, timeout=20.0)
    assert [o.value for o in outcomes] == ["raised", "left", "left"]


def test_death_in_a_sub_group():
    outcomes = run_group(_die, 4, kill, "sub-group")
    assert [o.kind for o in outcomes] == ["returned", "died", "returned", "raised"]
    assert isinstance(outcomes[3].error, errors.RankFailedError) and outcomes[3].error.ranks == [0]
    assert "'world/1.1'" in str(outcomes[3].error)


def _raise(g: ProcessGroup, how: str) -> None:
    g.barrier()
    if g.rank == 1:
        mark_fault()
        if how == "exit":
            sys.exit(3)
        if how == "exception":
            raise KeyError("my own mistake")
        if how == "return":
            return
    g.all_reduce(torch.ones(10))


@pytest.mark.parametrize("how", ["exit", "exception", "return"])
def test_ranks_that_end_early(how: str):
    outcomes = run_group(_raise, 3, how, linger=False)
    assert outcomes[1].kind == ("returned" if how == "return" else "raised")
    for message in expect(outcomes, errors.RankFailedError, but=(1,)):
        assert "rank 1 (pid" in message
    # The others may have ended too by the time a rank words its error, but the cause comes first.
    assert all(o.error.ranks[0] == 1 for o in outcomes if o.rank != 1)


def _copy_until_killed(g: ProcessGroup, seed: int) -> None:
    t = torch.ones(3 << 20)
    g.all_reduce(t)
    if g.rank == 1:
        delay = random.Random(seed).uniform(0, 0.03)

        def strike() -> None:
            time.sleep(delay)
            mark_fault()
            kill()

        threading.Thread(target=strike, daemon=True).start()
    for _ in range(10_000):
        g.all_reduce(t, op="max")


@pytest.mark.parametrize("seed", range(12))
def test_death_in_the_middle_of_a_copy(seed: int):
    outcomes = run_group(_copy_until_killed, 2 + seed % 3, seed)
    for message in expect(outcomes, errors.RankFailedError, but=(1,)):
        assert re.search(r"rank 1 \(pid \d+\) died (with SIGKILL )?(in|after) all_reduce\(float32 x 3145728, ", message)
    assert max(delays(outcomes)) < PROMPT


def _use_again(g: ProcessGroup) -> list[str]:
    if g.rank == 1:
        kill()
    found = []
    for call in (
        lambda: g.barrier(),
        lambda: g.all_reduce(torch.ones(3)),
        lambda: g.all_reduce(torch.ones(3), async_op=True),
        lambda: g.send(torch.ones(3), 0),
        lambda: g.irecv(torch.ones(3), 1),
    ):
        with pytest.raises(errors.SymcommError) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_a_failed_group_refuses_further_use_with_the_first_cause():
    for outcome in run_group(_use_again, 3):
        if outcome.rank == 1:
            continue
        assert outcome.kind == "returned", outcome
        first, *later = outcome.value
        assert first.startswith("RankFailedError: barrier #1")
        for text in later:
            assert text == f"GroupUnusableError: group 'world' cannot be used any more: {first[17:]}"


# --- stopped and late ranks ----------------------------------------------------------------------------------


def _stopped(g: ProcessGroup) -> None:
    g.barrier()
    if g.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    g.all_reduce(torch.ones(100), timeout=1.0)


def _continue_after(seconds: float, rank: int) -> Callable[[list[int]], None]:
    def during(pids: list[int]) -> None:
        time.sleep(seconds)
        os.kill(pids[rank], signal.SIGCONT)

    return during


def test_a_stopped_rank_is_named_at_the_deadline():
    outcomes = run_group(_stopped, 3, during=_continue_after(2.5, 2))
    messages = expect(outcomes, errors.DeadlineError)
    for message in messages:
        assert "did not come: 2; arrived: 0, 1; rank 2 was last seen after barrier() #1" in message
    for rank in (0, 1):
        assert re.search(r"after [1-9](\.\d+)? s", messages[rank]) or "deadline)" in messages[rank], messages[rank]
    assert all(o.error.missing == [2] for o in outcomes)


def _stop_in_copy(g: ProcessGroup) -> None:
    t = torch.ones(8 << 20)
    g.set_timeout(1.0)
    if g.rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    while True:
        g.all_reduce(t)


def test_a_rank_stopped_in_the_middle_gets_an_error_too():
    outcomes = run_group(_stop_in_copy, 3, during=_continue_after(2.5, 1))
    expect(outcomes, errors.DeadlineError)
    assert all(o.error.missing == [1] for o in outcomes)


# --- going on ------------------------------------------------------------------------------------------------


def _shrink(g: ProcessGroup, victims: list[int], stopped: int) -> tuple:
    t = torch.full((1000,), float(g.rank + 1))
    g.barrier()
    if g.rank in victims:
        kill()
    if g.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises((errors.RankFailedError, errors.DeadlineError)):
        g.all_reduce(t, timeout=0.5)
    small = g.shrink(timeout=10.0 if stopped < 0 else 1.5)
    t = torch.full((100_000,), float(g.rank + 1))
    small.all_reduce(t)
    ranks = small.all_gather_bytes(str(g.rank).encode())
    sending = small.isend(t, (small.rank + 1) % small.size)
    small.recv(torch.empty_like(t), (small.rank - 1) % small.size)
    sending.wait()
    return small.rank, small.size, t.unique().tolist(), [int(r) for r in ranks], small.global_ranks, small.name


@pytest.mark.parametrize("victims", [[1], [0], [0, 2], [3, 1]], ids=str)
def test_shrink_goes_on_with_the_right_values(victims: list[int]):
    left = [r for r in range(4) if r not in victims]
    for outcome in run_group(_shrink, 4, victims, -1):
        if outcome.rank in victims:
            assert outcome.kind == "died"
            continue
        assert outcome.kind == "returned", outcome
        total = float(sum(r + 1 for r in left))
        assert outcome.value == (left.index(outcome.rank), len(left), [total], left, left, "world-shrunk")


def test_shrink_leaves_a_stopped_rank_behind_and_tells_it():
    outcomes = run_group(_shrink, 4, [], 2, during=_continue_after(3.5, 2))
    for rank in (0, 1, 3):
        assert outcomes[rank].kind == "returned", outcomes[rank]
        assert outcomes[rank].value[3] == [0, 1, 3]
    assert outcomes[2].kind == "raised" and isinstance(outcomes[2].error, errors.RankFailedError), outcomes[2]
    assert "the other ranks went on without rank 2" in str(outcomes[2].error)


def _abort(g: ProcessGroup) -> None:
    g.barrier()
    if g.rank == 0:
        time.sleep(0.1)
        mark_fault()
        g.abort()
    if g.rank == 2:
        g.recv(torch.ones(1), 0)
    g.all_reduce(torch.ones(10))


def pass_and_give_up(g: ProcessGroup) -> int:
    """One passes a barrier and gives the group up at once; the others, still in it, have met everybody too."""
    for turn in range(50):
        team = g.split(0)
        team.barrier()
        if g.rank == turn % g.size:
            team.abort()
    return turn + 1


def test_a_barrier_that_one_has_passed_is_passed_by_all():
    assert symcomm.spawn(pass_and_give_up, 3, mode="threads", timeout=20, deadline=60) == [50] * 3


def test_abort_ends_everybodys_operation():
    outcomes = run_group(_abort, 3)
    for message in expect(outcomes, errors.GroupUnusableError):
        assert "was aborted by rank 0; destroy the group, or call group.shrink() to go on." in message
    assert max(delays(outcomes)) < PROMPT


# --- Ctrl-C --------------------------------------------------------------------------------------------------


def _interrupted(g: ProcessGroup, where: str) -> None:
    t = torch.ones(10)
    g.barrier()
    if g.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, lambda: (mark_fault(), os.kill(os.getpid(), signal.SIGINT))).start()
    if g.rank == 1:
        time.sleep(1.0)
        return
    if where == "collective":
        g.all_reduce(t)
    elif where == "behind async":
        work = g.all_reduce(t, async_op=True)
        g.all_reduce(t)
        work.wait()
    elif g.rank == 0:
        g.recv(t, 1)


@pytest.mark.parametrize("where", ["collective", "behind async"])
def test_ctrl_c_breaks_a_blocked_collective(where: str):
    outcomes = run_group(_interrupted, 3, where)
    assert outcomes[0].kind == "raised" and isinstance(outcomes[0].error, KeyboardInterrupt), outcomes[0]
    assert outcomes[2].kind == "raised" and isinstance(outcomes[2].error, errors.GroupUnusableError), outcomes[2]
    assert "aborted by rank 0" in str(outcomes[2].error)
    assert max(delays(outcomes)) < PROMPT


def test_ctrl_c_breaks_a_receive_and_leaves_the_group_alone():
    outcomes = run_group(_interrupted, 3, "receive")
    assert isinstance(outcomes[0].error, KeyboardInterrupt)
    assert [o.kind for o in outcomes] == ["raised", "returned", "returned"]
    assert max(delays(outcomes)) < PROMPT


# --- threads as ranks ----------------------------------------------------------------------------------------


def test_a_thread_rank_that_raises_is_the_error_of_spawn():
    seen: dict[int, BaseException] = {}

    def rank(g: ProcessGroup) -> None:
        try:
            if g.rank == 1:
                raise KeyError("mine")
            g.barrier()
        except errors.SymcommError as error:
            seen[g.rank] = error
            raise

    with pytest.raises(KeyError, match="mine"):
        symcomm.spawn(rank, 3, mode="threads", deadline=20)
    assert set(seen) == {0, 2}
    for error in seen.values():
        assert isinstance(error, errors.RankFailedError) and "rank 1" in str(error) and "left the group" in str(error)


def test_a_thread_rank_that_raises_with_work_pending_does_not_hang():
    def rank(g: ProcessGroup) -> None:
        if g.rank == 1:
            g.all_reduce(torch.ones(4), async_op=True)
            raise KeyError("mine")
        time.sleep(0.2)
        g.recv(torch.ones(4), 1)

    with pytest.raises(KeyError, match="mine"):
        symcomm.spawn(rank, 2, mode="threads", timeout=15, deadline=10)


def test_a_thread_rank_that_raises_leaves_its_other_groups_too():
    def rank(g: ProcessGroup) -> None:
        team = g.split(0)
        assert team is not None
        if g.rank == 1:
            raise KeyError("mine")
        team.barrier()

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        symcomm.spawn(rank, 3, mode="threads", timeout=30, deadline=20)
    assert time.monotonic() - started < 18  # the deadline is 20 s


def test_a_thread_rank_that_returns_early():
    def rank(g: ProcessGroup) -> None:
        if g.rank != 1:
            g.barrier()

    with pytest.raises(errors.RankFailedError, match=r"rank 1 \(pid \d+\) left the group before its first operation"):
        symcomm.spawn(rank, 3, mode="threads", deadline=20)


def _hears_of_it_first(g: ProcessGroup) -> tuple[int, int]:
    """Rank 0 saw rank 2 die, told rank 1, and was interrupted before it told rank 2; rank 1 gives up the group."""
    death = struct.pack("<Q", Status.DEAD | 2 << 8 | 0 << 24)
    trial = g.new_group([0, 1, 2])
    assert trial is not None
    if g.rank == 0:
        trial.handle.fail(Status.DEAD, 2)
    g.barrier()
    word = native.peek(trial.arena.base + trial._offset, native.CONTROL_BYTES).index(death)
    team = g.new_group([0, 1, 2])
    assert team is not None
    if g.rank == 1:
        native.poke(team.arena.base + team._offset + word, death)
        team.abort()
    g.barrier()
    report = team.handle.report()
    return report["status"], report["culprit"]


def test_who_gives_up_a_failed_group_passes_on_why_it_failed():
    assert symcomm.spawn(_hears_of_it_first, 3, mode="threads", deadline=60) == [(Status.DEAD, 2)] * 3
