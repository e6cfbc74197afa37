"""A training loses ranks and gains others, at scripted moments, and learns exactly what it would have learnt.

The global batch of a step is the same for any number of ranks, so the losses must be equal but for the order of sums.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import symcomm
from symcomm import elastic, errors
from symcomm.elastic import state as states
from symcomm.group import grow as growing
from symcomm.store import FileStore
from tests.support.elastic_ranks import ElasticRanks
from tests.support.examples import ROOT, losses, run_example
from tests.support.ranks import die, returned

pytestmark = pytest.mark.long

STEPS, BATCH, AT = 10, 24, 4
WAIT = 20.0
Hook = Callable[[str, Any], None]  # called with the moment and the session


class Net(nn.Module):
    """With a buffer that every forward changes, and random numbers: both must be undone with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layers(x) * (1 + 0.01 * self.calls) + torch.rand(1) * 0.01


def trainer(enter: Callable[[], Any], hook: Hook = lambda *_: None, **options: Any) -> tuple[Any, Callable]:
    """A session and its step. All draw from the same generator, so that losses do not depend on who draws."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    session = elastic.Session(
        model=model, optimizer=optimizer, others={"scheduler": scheduler}, enter=enter, **{"wait": WAIT, **options}
    )

    def step(session: Any) -> float:
        rows = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(session.step))[session.share(BATCH)]
        loss = (session.model(rows) - rows.sum(1, keepdim=True)).square().sum() / BATCH
        optimizer.zero_grad()
        hook("before", session)
        if session.model is model:
            loss.backward()
            for number, parameter in enumerate(model.parameters()):
                if number == 1:
                    hook("middle", session)
                session.group.all_reduce(parameter.grad)
        else:
            (loss * session.size).backward()
        hook("reduced", session)
        optimizer.step()
        scheduler.step()
        hook("stepped", session)
        total = loss.detach().clone()
        session.group.all_reduce(total)
        hook("done", session)
        return total.item()

    return session, step


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    def rank(group: Any) -> list[float]:
        group.store = symcomm.HashStore()
        session, step = trainer(lambda: group)
        return session.run(step, STEPS)

    try:
        return symcomm.spawn(rank, 1, mode="threads")[0]
    finally:
        torch.set_default_dtype(torch.float32)


def check(outcomes: list[Any], undisturbed: list[float], ranks: list[int], died: int) -> None:
    """Every survivor and every newcomer has the whole curve, and all end in the same group."""
    dead = [o for o in outcomes if o.kind == "died"]
    assert [o.value for o in dead] == [-signal.SIGKILL] * died, "\n".join(map(str, outcomes))
    for curve, members in returned([o for o in outcomes if o.kind != "died"]):
        assert curve == pytest.approx(undisturbed, rel=1e-12)
        assert members == ranks


def train(group: Any, hook: Hook, options: dict[str, Any]) -> tuple:
    session, step = trainer(lambda: group, hook, **options)
    return session.run(step, STEPS), session.group.global_ranks


def train_late(store: Any, rank: int, hook: Hook, options: dict[str, Any]) -> tuple:
    """A replacement: comes when rank ``rank`` has died."""
    while not store.check([f"died/{rank}"]):
        time.sleep(0.01)
    session, step = trainer(lambda: growing.join_through(store, "world", WAIT, rank), hook, **options)
    return session.run(step, STEPS), session.group.global_ranks


def dies(rank: int, moment: str, at: int = AT) -> Hook:
    def hook(now: str, session: Any) -> None:
        if now == moment and session.step == at and session.group.global_ranks[session.rank] == rank:
            session.group.store.set(f"died/{rank}", "x")
            if moment == "middle":  # a collective of ours is under way while we die
                second = list(session.model.parameters())[1]  # what the others call next: it is a death, not a mismatch
                session.group.all_reduce(torch.ones_like(second), async_op=True)
            die()

    return hook


MOMENTS = ["before", "middle", "reduced", "stepped", "done"]


@pytest.mark.parametrize(("victim", "moment"), [*((2, moment) for moment in MOMENTS), (0, "middle")])
def test_one_of_four_dies_and_another_comes(tmp_path, undisturbed, moment, victim):
    forked = ElasticRanks(tmp_path)
    for rank in range(4):
        forked.member(train, rank, 4, dies(victim, moment), {})
    forked.newcomer(train_late, victim, lambda *_: None, {})
    left = [r for r in range(4) if r != victim]
    check(forked.outcomes(), undisturbed, [*left, victim], died=1)


@pytest.mark.parametrize("moment", ["before", "done"])
def test_with_data_parallel(tmp_path, undisturbed, moment):
    """DistributedDataParallel in its place; its reducer is built anew on each group."""
    options = {"data_parallel": {"bucket_cap_mb": 0.001}}
    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(train, rank, 3, dies(1, moment), options)
    forked.newcomer(train_late, 1, lambda *_: None, options)
    check(forked.outcomes(), undisturbed, [0, 2, 1], died=1)


def test_going_on_with_fewer_and_a_newcomer_later(tmp_path, undisturbed):
    """Nobody waits: three ranks do some steps, until the fourth knocks."""
    sizes: list[int] = []

    def hook(now: str, session: Any) -> None:
        dies(3, "middle")(now, session)
        if now == "before":
            sizes.append(session.size)
        if now == "done" and session.step == 6:
            session.group.store.set("come", "x")
            while not session.group.store.check(["grow/world/request/1"]):
                time.sleep(0.01)

    def member(group: Any) -> tuple:
        curve, ranks = train(group, hook, {"wait": 0.0})
        assert sizes == [4, 4, 4, 4, 4, 3, 3, 3, 4, 4, 4], sizes  # step 4 was run twice
        return curve, ranks

    def newcomer(store: Any) -> tuple:
        store.wait(["come"], 20.0)
        return train_late(store, 3, lambda *_: None, {"wait": 0.0})

    forked = ElasticRanks(tmp_path)
    for rank in range(4):
        forked.member(member, rank, 4)
    forked.newcomer(newcomer)
    check(forked.outcomes(), undisturbed, [0, 1, 2, 3], died=1)


def dying_in_send(which: str) -> None:
    """This process dies in the middle of handing over the state, as its source or as its receiver."""
    pieces = states._broadcast

    def broadcast(group: Any, root: int, tensors: list[Any]) -> None:
        if group.newcomers and (which == "source") == (group.rank == root):
            pieces(group, root, tensors[:1])
            group.store.set(f"died/{group.global_ranks[group.rank]}", "again")
            die()
        pieces(group, root, tensors)

    states._broadcast = broadcast


def test_the_source_dies_while_it_hands_over_the_state(tmp_path, undisturbed):
    def member(group: Any) -> tuple:
        if group.rank == 0:
            dying_in_send("source")
        return train(group, dies(2, "before"), {})

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    forked.newcomer(train_late, 2, lambda *_: None, {})
    forked.newcomer(train_late, 0, lambda *_: None, {})
    check(forked.outcomes(), undisturbed, [1, 2, 0], died=2)


def test_the_newcomer_dies_while_it_gets_the_state(tmp_path, undisturbed):
    def newcomer(store: Any) -> tuple:
        dying_in_send("receiver")
        return train_late(store, 2, lambda *_: None, {})

    def second(store: Any) -> tuple:
        while not store.check(["died/2"]) or store.get("died/2") != b"again":
            time.sleep(0.01)
        return train_late(store, 2, lambda *_: None, {})

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(train, rank, 3, dies(2, "before"), {})
    forked.newcomer(newcomer)
    forked.newcomer(second)
    check(forked.outcomes(), undisturbed, [0, 1, 2], died=2)


@pytest.mark.parametrize("who", ["member", "newcomer"])
def test_one_dies_in_grow(tmp_path, undisturbed, who):
    def dying(group_or_store: Any, rank: int) -> None:
        exchange = growing.Round.exchange

        def exchange_dying(self: Any, item: bytes) -> list[bytes]:
            if self._turn == 1:
                group_or_store.set(f"died/{rank}", "again")
                die()
            return exchange(self, item)

        growing.Round.exchange = exchange_dying

    def member(group: Any) -> tuple:
        if who == "member" and group.rank == 1:
            dying(group.store, 1)
        return train(group, dies(2, "before"), {})

    def newcomer(store: Any) -> tuple:
        if who == "newcomer":
            dying(store, 2)
        return train_late(store, 2, lambda *_: None, {})

    def second(store: Any) -> tuple:
        rank = 1 if who == "member" else 2
        while not store.check([f"died/{rank}"]) or store.get(f"died/{rank}") != b"again":
            time.sleep(0.01)
        return train_late(store, rank, lambda *_: None, {})

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    forked.newcomer(newcomer)
    forked.newcomer(second)
    check(forked.outcomes(), undisturbed, [0, 1, 2], died=2)


class LostStore(symcomm.HashStore):
    """As if the rank that served it had died."""

    def add(self, key: str, amount: int) -> int:
        raise errors.StoreConnectionError("the store is gone")


def test_without_a_store_ranks_only_go(tmp_path, undisturbed):
    def member(group: Any) -> tuple:
        group.store = FileStore(str(tmp_path / "deaths"))
        session, step = trainer(lambda: group, dies(1, "before"))

        def with_lost_store(session: Any) -> float:
            if session.step == AT - 1:
                session.group.store = LostStore()
                session.group.join_queue = None
                session.group.store.set = lambda *_: None
            return step(session)

        return session.run(with_lost_store, STEPS), session.group.global_ranks

    forked = ElasticRanks(tmp_path)
    for rank in range(3):
        forked.member(member, rank, 3)
    check(forked.outcomes(), undisturbed, [0, 2], died=1)


def test_too_few_are_left(tmp_path):
    def member(group: Any) -> str:
        with pytest.raises(errors.RankFailedError) as caught:
            train(group, dies(1, "before"), {"wait": 0.0, "min_size": 2})
        return str(caught.value)

    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(member, rank, 2)
    alive, dead = forked.outcomes()
    assert returned([alive]) == ["1 of 2 ranks are left, which is less than min_size=2."] and dead.kind == "died"


def test_without_a_quorum_the_run_ends(tmp_path):
    """The others may go on: trying again would be wrong, and so would be going on alone."""

    def member(group: Any) -> list:
        asked = []

        def refuse(**how: Any) -> None:
            asked.append(how)
            raise errors.NoQuorumError("too few", [1])

        group.shrink = refuse
        with pytest.raises(errors.NoQuorumError, match="too few"):
            train(group, dies(1, "before"), {"wait": 0.0, "quorum": 7})
        return asked

    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(member, rank, 2)
    alive, dead = forked.outcomes()
    assert returned([alive]) == [[{"quorum": 2}]] and dead.kind == "died"


def test_errors_of_the_program_are_not_taken_for_lost_ranks(tmp_path):
    def member(group: Any) -> str:
        def hook(now: str, session: Any) -> None:
            if now == "before" and session.step == AT:
                session.group.all_reduce(torch.ones(2 + session.rank))

        with pytest.raises(errors.CollectiveMismatchError) as caught:
            train(group, hook, {})
        return str(caught.value)

    forked = ElasticRanks(tmp_path)
    for rank in range(2):
        forked.member(member, rank, 2)
    assert all("the ranks did not make the same call" in text for text in returned(forked.outcomes()))


# --- with the launcher -----------------------------------------------------------------------------


@pytest.mark.slow
def test_example_under_the_launcher(monkeypatch, capsys):
    """Four ranks; one is killed and the launcher starts another. The losses are those of a run without any trouble."""
    options = ("--max-restarts", "1", "--restart", "failed")
    lines = run_example("elastic.py", "middle", "ddp", ranks=4, options=options)
    began, lost, found = lines[:3]
    assert began == "step 0: ranks [0, 1, 2, 3]"
    assert (lost, found) == ("step 7: ranks [0, 1, 3]", "step 7: ranks [0, 1, 3, 2]")
    assert losses(lines) == pytest.approx(alone(monkeypatch, capsys), rel=1e-12)


def alone(monkeypatch: Any, capsys: Any) -> list[float]:
    """The example's losses on one rank: this process."""
    monkeypatch.setattr(sys, "argv", ["elastic.py", "never"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "examples" / "elastic.py"))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    return losses(capsys.readouterr().out.splitlines())
