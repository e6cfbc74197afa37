"""What a rank does in a scenario of the soak: checked calls, the fault, life after it, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from symcomm import errors
from symcomm.group import grow, leaving
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import current_arena
from tests.soak.scenario import HARMLESS, STARVED, STOPPED_TIMEOUT, Scenario
from tests.support.halted_calls import CASES, PATTERN, shift_values
from tests.support.page_gate import ordinary, symmetric
from tests.support.ranks import until

STEPS_AFTER = 12
TURNS = 20  # of groups that are left, in a scenario
CLAIMS = 24  # tensors of 256 KiB in the place of a group's memory
SETTLE = 10.0  # seconds for threads to end, peers to leave, survivors and newcomers to come: on a busy machine, too


class WrongValues(Exception):
    """A call returned, and what it gave is not right."""


@dataclass
class Report:
    """How a rank fared."""

    kind: str = ""  # of its first error
    message: str = ""
    named: list[int] = field(default_factory=list)
    steps: int = 0
    sizes: list[int] = field(default_factory=list)  # of the groups that it was in
    wrong: list[str] = field(default_factory=list)

    def note(self, error: errors.SymcommError) -> None:
        cause = error.__cause__  # where an earlier call, that nobody has waited for yet, was the first to fail
        if isinstance(error, errors.GroupUnusableError) and isinstance(cause, errors.SymcommError):
            error = cause
        if not self.kind:
            self.kind, self.message = type(error).__name__, str(error)
            self.named = list(getattr(error, "missing", None) or getattr(error, "ranks", []) or [])


# --- calls -------------------------------------------------------------------------------------------------------


def check(right: bool, what: str) -> None:
    if not right:
        raise WrongValues(what)


def one_step(g: ProcessGroup, dice: random.Random, own: random.Random) -> None:
    """A random call, the same on all ranks since ``dice`` is; ``own`` may differ: where this rank's tensors lie."""
    shift_values(dice.randrange(1000))
    n = dice.choice((1, 100, 1500, 20_000, 150_000))
    kind = dice.randrange(len(CASES) + 4)
    make = own.choice((ordinary, symmetric))
    if kind < len(CASES):
        case = CASES[kind](g, make, n)
        case.fill()
        case.run()
        check(not case.wrong(), f"{CASES[kind].__name__} of {n}: {case.wrong()} wrong elements")
    elif kind == len(CASES):
        tensors = [make(n).fill_(float(g.rank + i)) for i in range(3)]
        for i, work in enumerate([g.all_reduce(t, async_op=True) for t in tensors]):
            assert work is not None
            work.wait()
            total = g.size * (g.size - 1) / 2 + i * g.size
            check(bool((tensors[i] == total).all()), f"asynchronous all_reduce of {n}")
    elif kind == len(CASES) + 1:
        g.barrier()
    else:
        ring(g, make, n, float(dice.randrange(1000)), blocking=kind == len(CASES) + 2)


def ring(g: ProcessGroup, make: Callable, n: int, base: float, blocking: bool) -> None:
    """Messages round the ring. A fault of a rank reaches those that do not talk to it at the barrier."""
    after, before = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    x, y = make(n).fill_(base + g.rank), make(n).fill_(-1.0)
    sending = g.isend(x, after, tag=n)
    if blocking:
        g.recv(y, before, tag=n)
    else:
        g.irecv(y, before, tag=n).wait()
    sending.wait()
    check(bool((y == base + before).all()), f"message of {n}")
    g.barrier()


# --- faults ------------------------------------------------------------------------------------------------------


def later(seconds: float, act: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def strike(plan: Scenario, g: ProcessGroup, kept: list[Any]) -> None:
    """The fault, on the victim."""
    pid = os.getpid()
    if plan.fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif plan.fault == "kill later":
        later(plan.delay, lambda: os.kill(pid, signal.SIGKILL))
    elif plan.fault == "exit":
        os._exit(5)
    elif plan.fault in ("stop", "pause"):
        os.kill(pid, signal.SIGSTOP)
    elif plan.fault == "abort":
        later(plan.delay, g.abort)
    elif plan.fault == "destroy":
        peer = (g.rank + 1) % g.size
        kept += [g.isend(symmetric(20_000).fill_(1.0), peer, tag=-5), g.irecv(symmetric(20_000), peer, tag=-6)]
        kept.append(later(plan.delay, g.destroy))


def run_steps(plan: Scenario, g: ProcessGroup, report: Report, kept: list[Any]) -> None:
    dice, own = random.Random(-1 - plan.seed), random.Random(plan.seed * 31 + g.rank)
    for step in range(plan.step + 12 if plan.fault in HARMLESS else 2000):
        if step == plan.step and plan.fault == "stop":
            g.set_timeout(STOPPED_TIMEOUT)
        if step == plan.step and plan.fault == "mismatch":
            g.reduce(torch.ones(3), op="max") if g.rank == plan.victim else g.all_reduce(torch.ones(7))
        elif step == plan.step and plan.fault == "leavings":
            leave_often(g, dice)
        elif step == plan.step and g.rank == plan.victim:
            strike(plan, g, kept)
        one_step(g, dice, own)
        report.steps += 1


def wait_somewhere(team: ProcessGroup, which: int) -> None:
    """In a call that nobody else makes."""
    peer = (team.rank + 1) % team.size
    try:
        if which == 0:
            team.all_reduce(torch.ones(20_000))
        elif which == 1:
            team.barrier()
        elif which == 2:
            team.recv(torch.ones(20_000), peer, tag=1)
        else:
            team.irecv(torch.ones(20_000), peer, tag=1).wait()
    except errors.SymcommError:
        pass


def leave_often(g: ProcessGroup, dice: random.Random) -> None:
    """Groups that are left, or aborted, while another thread waits in them; works of theirs are asked afterwards."""
    for _ in range(TURNS):
        team = g.new_group(range(g.size), timeout=5.0)
        assert team is not None
        waits, which, how = dice.randrange(g.size), dice.randrange(4), dice.choice(("destroy", "abort"))
        kept: list[Any] = []
        if g.rank == waits:
            kept.append(team.isend(symmetric(20_000).fill_(1.0), (g.rank + 1) % g.size, tag=-5))
            kept.append(later(0.0, lambda team=team, which=which: wait_somewhere(team, which)))
        g.barrier()
        if how == "destroy":
            team.destroy()
        elif g.rank == waits:
            team.abort()
        claims = [symmetric(65_536).fill_(PATTERN) for _ in range(CLAIMS)]
        g.barrier()
        wrong = ask_late(kept, team) if kept else []
        g.barrier()
        touched = sum(int((t != PATTERN).sum()) for t in claims)
        check(not touched, f"{touched} elements written in the place of a group that was left")
        check(not wrong, "; ".join(wrong))
        team.destroy()


# --- afterwards --------------------------------------------------------------------------------------------------


def ask_late(kept: list[Any], g: ProcessGroup) -> list[str]:
    """Works and a group that were left: every call comes back, and tensors in their place stay as they are."""
    wrong = []
    works = kept[:-1]
    kept[-1].join(SETTLE)
    claims = [symmetric(65_536).fill_(PATTERN) for _ in range(CLAIMS)]
    for call in [f for w in works for f in (w.is_completed, w.exception, lambda w=w: w.wait(0.05), w.wait)] + [g.abort]:
        started = time.monotonic()
        try:
            call()
        except errors.SymcommError:
            pass
        if time.monotonic() - started > SETTLE:
            wrong.append("a call on something that was left did not return in time")
    touched = sum(int((t != PATTERN).sum()) for t in claims)
    return wrong + ([f"{touched} elements of new tensors were written"] if touched else [])


def shrink(g: ProcessGroup) -> ProcessGroup:
    while True:
        try:
            return g.shrink(timeout=SETTLE)
        except errors.RankFailedError as error:
            if "call shrink() again" not in str(error):
                raise


def go_on(plan: Scenario, g: ProcessGroup, report: Report) -> ProcessGroup:
    """Without who is gone, and with who comes."""
    old, g = g, shrink(g)
    old.destroy()
    g.set_timeout(10.0)
    report.sizes.append(g.size)
    after(plan, g, 1)
    if plan.newcomers:
        wait = 3.0 if plan.newcomer_killed else SETTLE  # the killed one never comes
        old, g = g, g.grow(timeout=SETTLE, wait=wait, size=g.size + plan.newcomers)
        if g is not old:
            old.destroy()
        report.sizes.append(g.size)
        g = after_growing(plan, g)
    return g


def after_growing(plan: Scenario, g: ProcessGroup) -> ProcessGroup:
    """The newcomer that is killed may have come in by then; the others go on without it once more."""
    try:
        after(plan, g, 2)
        return g
    except errors.SymcommError as error:
        if not plan.newcomer_killed or not isinstance(error.__cause__ or error, errors.RankFailedError):
            raise
    old, g = g, shrink(g)
    old.destroy()
    after(plan, g, 3)
    return g


def after(plan: Scenario, g: ProcessGroup, part: int) -> None:
    dice, own = random.Random(plan.seed * 7 + part), random.Random(g.rank)
    for _ in range(STEPS_AFTER):
        one_step(g, dice, own)
    g.barrier()


def member(join: Callable[[], ProcessGroup], seed: int) -> Report:
    plan, report, g = Scenario(seed), Report(), join()
    kept: list[Any] = []
    before = held()
    report.sizes.append(g.size)
    try:
        try:
            run_steps(plan, g, report, kept)
        except errors.SymcommError as error:
            report.note(error)
        if kept:
            report.wrong += ask_late(kept, g)
        elif report.kind and plan.goes_on and not (plan.fault == "stop" and g.rank == plan.victim):
            g = go_on(plan, g, report)
    except WrongValues as error:
        report.wrong.append(f"wrong values: {error}")
    except errors.SymcommError as error:
        report.wrong.append(f"afterwards: {type(error).__name__}: {error}")
    if plan.fault == "stop" and not plan.goes_on:
        # A late message is no failure of the group, but the end of its rank would be one, until the stopped rank has
        # gone on and waited in vain as well.
        time.sleep(STARVED + 2 * STOPPED_TIMEOUT)
    g.destroy()
    del g, kept
    return report if plan.ends_at_once else leave(report, before, plan.newcomer_killed)


def newcomer(store: Any, seed: int) -> Report:
    plan, report = Scenario(seed), Report()
    try:
        g = grow.join_through(store, "world", 40.0)
    except errors.DeadlineError:
        if not plan.newcomer_killed:
            raise
        return report  # whoever comes with one that dies is not let in, and the members look for newcomers only once
    report.sizes.append(g.size)
    try:
        g = after_growing(plan, g)
    except WrongValues as error:
        report.wrong.append(f"wrong values: {error}")
    g.destroy()
    return report


# --- leaks -------------------------------------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    """(descriptors, threads, bytes of the arena) of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), current_arena().used_bytes


def leave(report: Report, before: tuple[int, int, int], grown_in_vain: bool) -> Report:
    """All that was taken since ``before`` must be gone, once everybody has left. What this rank had made ready for a
    group that came to nothing stays: nobody can say whether some rank has it."""

    def gone() -> bool:
        gc.collect()
        leaving.free_retired()
        counted = 2 if grown_in_vain else 3
        return all(now <= then for now, then in zip(held()[:counted], before[:counted], strict=True))

    if not until(gone, SETTLE):
        now = held()
        report.wrong.append(f"leaks (descriptors, threads, bytes of the arena): {before} before, {now} after")
    return report
