"""How ranks wait: those that have a core keep it, the others offer theirs, all sleep in the end, and nothing lasts.

Judged by the group's own counts of how its waits ended, never by how long they took.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm.group.local import SPIN_COUNT
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.control_groups import PROC, Quota, granted_cores, quotas, watch_quotas
from tests.support.faults import run_group
from tests.support.page_gate import Words
from tests.support.ranks import until

pytestmark = pytest.mark.unused_process

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
LATE = 300e-6  # seconds: longer than the first looks, shorter than a rank keeps its core for


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def waits_of_rank_0(g: ProcessGroup, call: Callable[[], object], times: int = 10, late: float = LATE) -> dict[str, int]:
    """How rank 0's waits ended in so many calls to which rank 1 came late; the same answer on all ranks."""
    before = g.wait_stats()
    for _ in range(times):
        if g.rank == 1:
            spin(late)
        call()
    found = torch.tensor([g.wait_stats()[way] - before[way] for way in before])
    g.broadcast(found, 0)
    return dict(zip(before, found.tolist(), strict=True))


def keeps(found: dict[str, int]) -> bool:
    """A busy machine makes a rank later than it meant to be, so that some waits may end in sleep."""
    return found["looked"] >= 5 and found["yielded"] == 0


def offers(found: dict[str, int]) -> bool:
    return found["looked"] == 0 and found["yielded"] + found["slept"] > 0


def comes_to(
    g: ProcessGroup, judge: Callable[[dict[str, int]], bool], call: Callable[[], object] | None = None
) -> bool:
    """Whether the group's waits become so, within some calls and the time after which it counts its cores again."""
    t = torch.zeros(2)
    end = torch.tensor([time.monotonic() + 10])
    g.broadcast(end, 0)
    while not judge(found := waits_of_rank_0(g, call or (lambda: g.all_reduce(t)))):
        late = torch.tensor([int(time.monotonic() > end.item())])
        g.broadcast(late, 0)
        if late.item():
            print(f"rank {g.rank}: {found}")
            return False
    return True


def first_looks(g: ProcessGroup) -> int:
    return g.handle.waits()[3]


def check(outcomes: list) -> None:
    assert [o.kind for o in outcomes] == ["returned"] * len(outcomes), "\n".join(map(str, outcomes))


# --- cores ---------------------------------------------------------------------------------------------------


def affinity_changes(g: ProcessGroup) -> None:
    assert comes_to(g, keeps), "two ranks, two cores"
    os.sched_setaffinity(0, {CORES[g.rank]})
    assert comes_to(g, keeps), "each has its own"
    os.sched_setaffinity(0, {CORES[0]})
    assert comes_to(g, offers), "both have the same"
    os.sched_setaffinity(0, {CORES[g.rank]})
    assert comes_to(g, keeps), "each has its own again"
    assert g.rank == 1 or first_looks(g) == SPIN_COUNT, "nothing is left of that"
    if g.rank == 0:
        os.sched_setaffinity(0, CORES[:1])
    else:
        os.sched_setaffinity(0, CORES[:2])
    assert comes_to(g, keeps), "there is a core for each"


@needs_two_cores
def test_a_rank_that_has_a_core_keeps_it_and_changes_are_found():
    check(run_group(affinity_changes, 2))


def quota_changes(g: ProcessGroup, folder: Path) -> None:
    os.sched_setaffinity(0, {CORES[g.rank]})
    limit, old, period, stat = (folder / n for n in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.stat"))

    def write(file: Path, text: str) -> None:
        g.barrier()
        if g.rank == 0:
            file.write_text(text)
        g.barrier()

    write(limit, "max 100000\n")
    watch_quotas([Quota(limit, None)])
    assert comes_to(g, keeps), "no limit"
    write(limit, "150000 100000\n")
    assert comes_to(g, offers), "one and a half cores for two ranks"
    write(limit, "200000 100000\n")
    assert comes_to(g, keeps), "two cores"
    for n in range(1, 30):  # used up again and again
        write(stat, f"nr_periods 100\nnr_throttled {n}\nthrottled_usec 1000\n")
        if offers(waits_of_rank_0(g, g.barrier)):
            break
        time.sleep(0.06)
    else:
        raise AssertionError("a quota that is used up does not count")
    assert comes_to(g, keeps), "it is not used up any more"
    write(old, "-1\n")
    write(period, "50000\n")
    watch_quotas([Quota(old, period)])
    assert comes_to(g, keeps), "no limit, in the first version's words"
    write(old, "75000\n")
    assert comes_to(g, offers), "one and a half cores, in the first version's words"
    old.unlink(missing_ok=True)
    assert comes_to(g, keeps), "the control group is gone"


@needs_two_cores
def test_quotas_count_and_are_read_again(tmp_path: Path):
    check(run_group(quota_changes, 2, tmp_path))


def test_quotas_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In both versions, of this control group and those above."""
    for place, file, text in (
        ("v2", "cpu.max", "300000 100000"), ("v2/job", "cpu.max", "max 100000"),
        ("v1/job", "cpu.cfs_quota_us", "250000"),
    ):  # fmt: skip
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / file).write_text(text)
    (tmp_path / "v1/job/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/job\n0::/job\n")
    (tmp_path / "mountinfo").write_text(
        f"30 23 0:26 / {tmp_path}/v2 rw,nosuid - cgroup2 cgroup2 rw\n"
        f"31 23 0:27 / {tmp_path}/v1 rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 23 0:28 / {tmp_path}/other rw,nosuid - cgroup cgroup rw,memory\n"
    )
    assert sorted(q.cores or 0 for q in quotas(tmp_path)) == [0, 2.5, 3.0]
    monkeypatch.setattr(quotas, "__defaults__", (tmp_path,))
    assert granted_cores() == 2.5
    monkeypatch.setattr(quotas, "__defaults__", (tmp_path / "none",))
    assert granted_cores() is None
    assert all(q.limit.exists() for q in quotas(PROC))


def more_ranks_than_cores(g: ProcessGroup, cpu: list[float]) -> dict[str, int]:
    pair = g.new_group([0, 1])
    g.barrier()
    time.sleep(0.15)  # the first to join counted their cores before the last had joined: they count again after 100 ms
    g.barrier()
    g.barrier()
    counts, before = g.wait_stats(), time.process_time()
    if g.rank == 1:
        time.sleep(0.5)
    g.barrier()
    cpu.append(time.process_time() - before)
    if pair is not None:  # its two ranks are not alone
        assert comes_to(pair, offers)
    g.barrier()
    return {way: count - counts[way] for way, count in g.wait_stats().items()}


def test_more_ranks_than_cores_burn_nothing_in_any_group():
    cpu: list[float] = []
    os.sched_setaffinity(0, CORES[:2])
    try:
        found = symcomm.spawn(more_ranks_than_cores, 8, (cpu,), mode="threads", timeout=30, deadline=60)
    finally:
        os.sched_setaffinity(0, CORES)
    assert sum(counts["looked"] for counts in found) == 0, found
    assert all(counts["slept"] > 0 for rank, counts in enumerate(found) if rank != 1), found
    assert min(cpu) < 0.3, "8 ranks waited for half a second"


def has_a_core(g: ProcessGroup) -> None:
    os.sched_setaffinity(0, {CORES[g.rank]})
    assert comes_to(g, keeps)


def arena_of(g: ProcessGroup) -> object:
    g.barrier()
    return g.arena


@needs_two_cores
def test_ranks_that_have_left_all_groups_do_not_count():
    arenas = symcomm.spawn(arena_of, 8, mode="threads", timeout=30, deadline=60)  # mapped as long as we hold them
    check(run_group(has_a_core, 2))
    assert len(arenas) == 8


# --- disturbances --------------------------------------------------------------------------------------------


def waits_for_a_stopped_peer(g: ProcessGroup, words: Words) -> tuple[float, dict[str, int], int]:
    os.sched_setaffinity(0, {CORES[g.rank]})
    assert comes_to(g, keeps)
    t = torch.zeros(2)
    before, used = g.wait_stats(), time.thread_time()
    words[g.rank] = 1
    if g.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    g.all_reduce(t)
    used = time.thread_time() - used
    found = {way: n - before[way] for way, n in g.wait_stats().items()}
    batches = 1
    while not keeps(waits_of_rank_0(g, lambda: g.all_reduce(t))):
        batches += 1
    return used, found, batches


@needs_two_cores
def test_a_stopped_peer_costs_no_core_and_leaves_nothing_behind():
    words = Words()

    def during(pids: list[int]) -> None:
        assert words.reach(0, 1) and words.reach(1, 1)
        assert until(lambda: Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGCONT)

    outcomes = run_group(waits_for_a_stopped_peer, 2, words, during=during)
    check(outcomes)
    used, found, batches = outcomes[0].value
    assert found["slept"] == 1 and found["looked"] == found["yielded"] == 0, found
    assert used < 0.3, "it waited for a second"
    assert batches <= 20, "it looks again within some calls"


# --- every kind of wait --------------------------------------------------------------------------------------


def messages_and_windows(g: ProcessGroup) -> None:
    os.sched_setaffinity(0, {CORES[g.rank]})
    t, window = torch.zeros(2), g.new_window(torch.zeros(2))
    if g.rank == 0:
        message, signal_ = lambda: g.recv(t, 1), lambda: window.wait_signal(1)
    else:
        message, signal_ = lambda: g.send(t, 0), lambda: window.signal(0)
    assert comes_to(g, keeps, message), "messages"
    assert comes_to(g, keeps, signal_), "windows"
    os.sched_setaffinity(0, {CORES[0]})
    assert comes_to(g, offers, message), "messages, on one core"
    assert comes_to(g, offers, signal_), "windows, on one core"


@needs_two_cores
def test_messages_and_windows_wait_alike():
    check(run_group(messages_and_windows, 2))


def operations_aside(g: ProcessGroup) -> None:
    os.sched_setaffinity(0, {CORES[g.rank]})
    t = torch.zeros(50_000)

    def unattended() -> None:
        work = g.all_reduce(t, async_op=True)
        while not work.is_completed():  # this rank goes on computing
            spin(20e-6)

    assert comes_to(g, offers, unattended), "the rank's own work needs the core"
    assert comes_to(g, keeps, lambda: g.all_reduce(t, async_op=True).wait()), "the rank waits"


@needs_two_cores
def test_an_operation_that_nobody_waits_for_leaves_the_core_to_the_ranks_own_work():
    check(run_group(operations_aside, 2))


def looks_on_one_core(g: ProcessGroup) -> list[tuple[float, int]]:
    """By size: how often this rank looks first, and in how many of its waits that was in vain."""
    found = []
    for elements in (128, 2048, 16384):
        mine = symcomm.symm_mem.empty(elements)
        whole = symcomm.symm_mem.empty(g.size * elements) if g.rank == 0 else None
        states = []
        for _ in range(300):
            g.gather_single(whole, mine)
            states.append(g.handle.waits())
        in_vain = [looked + yielded + slept for looked, yielded, slept, _ in states[100:]]
        found.append((statistics.median(looks for *_, looks in states[100:]), in_vain[-1] - in_vain[0]))
    return found


def test_ranks_that_need_each_others_core_do_not_look_for_long():
    """A gather has two waits: the second is over before it begins, which is no reason to look longer in the first."""
    os.sched_setaffinity(0, {CORES[0]})
    try:
        outcomes = run_group(looks_on_one_core, 2)
    finally:
        os.sched_setaffinity(0, CORES)
    check(outcomes)
    for outcome in outcomes:
        assert all(looks <= 100 or in_vain <= 20 for looks, in_vain in outcome.value), [o.value for o in outcomes]


def ends_while_looking(g: ProcessGroup) -> str:
    os.sched_setaffinity(0, {CORES[g.rank]})
    g.barrier()
    if g.rank == 1:
        assert until(lambda: g.handle.report()["ranks"][0]["seq"] == g.sequence_number + 1, 20)
        spin(0.001)
        g.abort()
        return ""
    try:
        g.all_reduce(torch.zeros(2))
    except symcomm.errors.SymcommError as error:
        return str(error)
    return "no error"


@needs_two_cores
def test_an_abort_ends_a_wait_that_looks():
    outcomes = run_group(ends_while_looking, 2)
    check(outcomes)
    assert "rank 1" in outcomes[0].value and "abort" in outcomes[0].value


def counted_by_rank(g: ProcessGroup) -> tuple[dict[str, int], bytes]:
    from symcomm.observe.top.metrics import _RankMeter

    assert comes_to(g, keeps) or comes_to(g, offers)
    return g.wait_stats(), _RankMeter(g.arena).render()[1]


def test_waits_are_in_the_metrics():
    pytest.importorskip("prometheus_client")
    outcomes = run_group(counted_by_rank, 2)
    check(outcomes)
    for outcome in outcomes:
        counts, page = outcome.value
        for way, count in counts.items():
            assert f'symcomm_waits_total{{ended="{way}",rank="{outcome.rank}"}} {float(count)}'.encode() in page, page


def test_forks_while_another_thread_counts_cores():
    """The table of ranks is locked for a moment; a child must not inherit that."""
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            watch_quotas([])

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                watch_quotas([])
                os._exit(7)
            assert until(lambda pid=pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)), (
                "a child hangs"
            )
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        done.set()
        thread.join()
        watch_quotas()
