"""shrink() on one host, with a rank that dies or stops at every step of the agreement.

The steps are what a rank does to the memory they agree in: every record it publishes and every change of the word. The
victim is killed, or stopped, just before one of them. Whatever happens, all ranks that get a group get one of the same
members, it works, and the one that was stopped changes nothing when it goes on. Every scenario has ranks of its own,
and several run at the same time, since they mostly wait.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from symcomm import errors
from symcomm._core import native
from symcomm.group import failure
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.group.process_group import ProcessGroup
from symcomm.membership.shared_board import AttemptWord, Records, SharedBoard, pack_record, unpack_record
from symcomm.membership.succession import Attempt, Record, Succession, pack_ranks, unpack_ranks
from symcomm.memory.share import GroupNotBuilt
from symcomm.observe.recorder.processes import process_state
from symcomm.store import FileStore
from tests.support.faults import leftovers, run_group
from tests.support.ranks import Outcome

WORLD = 4
STEPS = 5  # of a rank that proposes: proposal, word, vote, decision, done
SECONDS = 2.0  # of one deadline: many ranks share few cores


def _strike_at(step: int, how: signal.Signals) -> None:
    """``how`` comes to this process just before its step number ``step``."""
    taken = 0

    def striking(method: Callable) -> Callable:
        def call(*args):
            nonlocal taken
            if taken == step:
                os.kill(os.getpid(), how)
            taken += 1
            return method(*args)

        return call

    Records.publish = striking(Records.publish)  # type: ignore[method-assign]
    Records.swap = striking(Records.swap)  # type: ignore[method-assign]


def _use(group: ProcessGroup) -> list[float]:
    x = torch.full((5000,), float(group.global_ranks[group.rank] + 1))
    group.all_reduce(x, timeout=SECONDS)
    return x.unique().tolist()


def _join(rank: int, world: int, folder: str, timeout: float) -> ProcessGroup:
    """Rank ``rank`` of all is one of a scenario of its own, which has the number of the step."""
    step, me = divmod(rank, WORLD)
    store = FileStore(os.path.join(folder, f"store{step}"), WORLD)
    group = join_ranks(store, me, WORLD, 60.0, partial(make_group, timeout=timeout), tidy=False)
    group.step = step  # type: ignore[attr-defined]
    return group


def _go_on(group: ProcessGroup, marks: str, victim: int, how: signal.Signals) -> list:
    """Shrink until a group works: each one's members, and then what it gave."""
    me, step, told = group.rank, group.step, []  # type: ignore[attr-defined]
    group.barrier()
    if me == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if me == victim:
        _strike_at(step, how)
    kept = [group]  # the old ones stay: their memory is not given back meanwhile
    try:
        while True:
            group = group.shrink(timeout=SECONDS)
            kept.append(group)
            told.append(group.global_ranks)
            try:
                return [*told, _use(group)]
            except (errors.PeerError, errors.DeadlineError, errors.GroupUnusableError):
                continue
    except errors.RankFailedError as error:
        return [*told, (group.global_ranks[error.ranks[0]], "went on without" in str(error))]
    finally:
        open(os.path.join(marks, f"{step}-{me}"), "w").close()


def _continue_last(marks: str, victim: int, pids: list[int]) -> None:
    """Let each stopped rank go on when the others of its scenario have ended."""

    def has_ended(step: int, rank: int) -> bool:
        return os.path.exists(os.path.join(marks, f"{step}-{rank}"))

    waiting, end = set(range(STEPS)), time.monotonic() + 40
    while waiting and time.monotonic() < end:
        for step in list(waiting):
            pid = pids[WORLD * step + victim]
            state = process_state(pid)
            if state == "Z" or has_ended(step, victim):
                waiting.discard(step)
            elif state == "T" and all(has_ended(step, r) for r in range(WORLD - 1) if r != victim):
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stops"])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_set_or_none_whoever_fails_at_whichever_step(victim: int, how: signal.Signals, tmp_path):
    marks, during = str(tmp_path), partial(_continue_last, str(tmp_path), victim)
    every = run_group(_go_on, WORLD * STEPS, marks, victim, how, timeout=10.0, deadline=60.0, during=during, join=_join)
    for step in range(STEPS):
        _check_one_set(every[WORLD * step : WORLD * (step + 1)], victim, how)
    assert not leftovers()


def _check_one_set(outcomes: list[Outcome], victim: int, how: signal.Signals) -> None:
    others = [o for r, o in enumerate(outcomes) if r not in (victim, WORLD - 1)]
    assert all(o.kind == "returned" for o in others), "\n".join(map(str, outcomes))
    assert len({str(o.value) for o in others}) == 1, "\n".join(map(str, outcomes))
    told = others[0].value
    members, values = told[-2:]
    assert values == [float(sum(r + 1 for r in members))]
    assert set(members) in ({0, 1, 2}, {0, 1, 2} - {victim})
    struck = outcomes[victim]
    if how == signal.SIGKILL:
        assert struck.kind == "died" or struck.value == told, struck
        return
    assert struck.kind == "returned", struck
    if struck.value != told:  # it was stopped, and left behind
        assert struck.value[-1] == (victim, True), struck
        assert struck.value[:-1] == told[: len(struck.value) - 1], struck


def test_the_steps_are_all_that_a_rank_takes():
    """A rank on its own takes every step there is: striking at one more would strike nobody."""
    marks = tempfile.mkdtemp()
    [outcome] = run_group(_count_steps, 1, marks)
    assert outcome.value == (STEPS, [0])


def _count_steps(group: ProcessGroup, marks: str) -> tuple:
    steps = []
    for name in ("publish", "swap"):
        method = getattr(Records, name)
        setattr(Records, name, lambda *args, method=method: (steps.append(1), method(*args))[1])
    return len(group.shrink().global_ranks) and len(steps), group.global_ranks


# --- more than one call, and other words in the record ------------------------------------------------------------


def _again_and_again(group: ProcessGroup) -> list:
    """The same group is shrunk three times; rank 2 dies before the second."""
    told, kept = [], []
    for turn in range(3):
        if turn == 1 and group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        smaller = group.shrink(timeout=5.0)
        kept.append(smaller)
        told.append((smaller.global_ranks, _use(smaller)))
    return told


def test_the_same_group_can_be_shrunk_again():
    outcomes = run_group(_again_and_again, 3)
    assert [o.kind for o in outcomes] == ["returned", "returned", "died"], "\n".join(map(str, outcomes))
    after = ([0, 1], [3.0])
    assert outcomes[0].value == outcomes[1].value == [([0, 1, 2], [6.0]), after, after]


def _late_and_early(group: ProcessGroup, marks: str) -> list:
    """Deadlines that differ: rank 0's passes long before rank 2 comes, rank 1's long after."""
    if group.rank == 2:
        while not os.path.exists(os.path.join(marks, "0")):
            time.sleep(0.005)
    smaller = group.shrink(timeout=0.3 if group.rank == 0 else 20.0)
    open(os.path.join(marks, str(group.rank)), "w").close()
    return [smaller.global_ranks, _use(smaller)]


def test_the_first_deadline_counts_for_all():
    with tempfile.TemporaryDirectory() as marks:
        begun = time.monotonic()
        outcomes = run_group(_late_and_early, 3, marks)
        assert time.monotonic() - begun < 18  # the others' deadline is 20 s
    assert [o.kind for o in outcomes] == ["returned", "returned", "raised"], "\n".join(map(str, outcomes))
    assert outcomes[0].value == outcomes[1].value == [[0, 1], [3.0]]
    assert isinstance(outcomes[2].error, errors.RankFailedError) and outcomes[2].error.ranks == [2]


def _gives_up(group: ProcessGroup) -> list:
    """Rank 1 runs out of memory for its part of the new group."""
    if group.rank == 1:

        def refuse(*_: object, **__: object) -> int:
            raise errors.ResourceError("no room")

        group.arena.allocate_sparse = refuse  # type: ignore[method-assign]
    smaller = group.shrink(timeout=20.0)
    return [smaller.global_ranks, _use(smaller)]


def test_a_rank_that_cannot_go_on_says_so_at_once():
    begun = time.monotonic()
    outcomes = run_group(_gives_up, 3)
    assert time.monotonic() - begun < 18  # the others' deadline is 20 s
    assert isinstance(outcomes[1].error, errors.ResourceError), outcomes[1]
    assert outcomes[0].value == outcomes[2].value == [[0, 2], [4.0]], "\n".join(map(str, outcomes))


# --- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [[], [0], [7, 8], range(1, 1024), range(0, 1024, 2)], ids=str)
def test_any_set_of_1024_ranks_fits_a_record(dead):
    cores = "f" * 256  # as many processors
    item = json.dumps({"offset": 1 << 40, "total": 1 << 30, "cores": cores}).encode()
    proposals = (Attempt(1 << 20, 1 << 20, frozenset(dead)), Attempt((1 << 20) + 1, 1 << 20, frozenset(dead)))
    record = Record(proposals, 1 << 20, 1 << 20, item)
    assert unpack_ranks(pack_ranks(dead)) == frozenset(dead)
    assert unpack_record(pack_record(record)) == record
    assert len(pack_record(record)) <= 768
    word = AttemptWord((1 << 47) - 1, 1023, True)
    assert AttemptWord.unpack(word.pack()) == word and word.pack() < 1 << 64


def _long_words(group: ProcessGroup) -> list:
    refused = []
    for kind in (native.RECORD_CALL, native.RECORD_VOTE):
        group.handle.publish(kind, b"before")
        with pytest.raises(ValueError, match="bytes at most, not 5000"):
            group.handle.publish(kind, b"x" * 5000)
        refused.append(group.handle.records(kind)[group.rank])
    failure._publish(group, "all_reduce()", "/" + "d/" * 2000 + "train.py:7", 3)
    said = json.loads(group.handle.records(native.RECORD_CALL)[group.rank])
    return [*refused, said["call"], said["site"].startswith("...") and said["site"].endswith("/train.py:7")]


def test_words_that_do_not_fit_are_refused_and_never_cut():
    [outcome] = run_group(_long_words, 1)
    assert outcome.value == [b"before", b"before", "all_reduce()", True], outcome


def _mismatch_then_shrink(group: ProcessGroup) -> str:
    """Rank 0 fails, and votes at once; rank 1 still has to read what rank 0 called."""
    group.barrier()
    if group.rank == 1:
        wait = failure._await_records
        failure._await_records = lambda *args: (time.sleep(0.3), wait(*args))[1]
    with pytest.raises(errors.CollectiveMismatchError) as info:
        group.all_reduce(torch.ones(4 + group.rank))
    group.shrink(timeout=10.0)
    return str(info.value)


def test_votes_do_not_overwrite_what_others_still_read():
    for outcome in run_group(_mismatch_then_shrink, 2):
        assert outcome.kind == "returned", outcome
        assert "float32 x 4" in outcome.value and "float32 x 5" in outcome.value


class Scripted:
    """The memory in which ranks agree, without ranks: the test moves it on at a step of its choice."""

    def __init__(self, size: int):
        self.now, self.records = AttemptWord(0, 0, False), [Record()] * size
        self.before_look: Callable[[], None] = lambda: None

    def gone(self) -> set[int]:
        return set()

    def word(self) -> AttemptWord:
        self.before_look()
        return self.now

    def swap(self, before: AttemptWord, after: AttemptWord) -> None:
        if self.now == before:
            self.now = after

    def publish(self, record: Record) -> None:
        self.records[1] = record

    def read(self) -> list[Record]:
        return list(self.records)


@pytest.mark.parametrize(("since", "error"), [(1, GroupNotBuilt), (2, errors.RankFailedError)])
def test_a_vote_that_may_have_counted_is_not_taken_back(since: int, error: type):
    """Rank 1 is stopped once it has voted for attempt 1, and finds attempt 2. Within the same agreement nobody has
    decided attempt 1, and its part of that group may go (GroupNotBuilt). In a later one rank 0 may have the group."""
    memory = Scripted(2)
    agreement = Succession(SharedBoard(memory, 1, 2, "world"), 1.0, [])
    first, second = Attempt(1, 1), Attempt(2, since, frozenset({1}) if since == 1 else frozenset())
    memory.now = AttemptWord(1, 0, True)
    memory.records[0] = Record((first,), vote=1)

    def meanwhile() -> None:
        memory.now = AttemptWord(2, 0, True)
        memory.records[0] = Record((first, second), vote=1, done=1 if since == 2 else 0)

    memory.before_look = meanwhile
    with pytest.raises(errors.PeerError) as raised:
        agreement.exchange_for(first)(b"where my part lies")
    assert type(raised.value) is error
