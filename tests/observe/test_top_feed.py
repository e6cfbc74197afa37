"""Reading a running job from outside: its flight recorders, which processes belong to it, what else can be asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import symcomm
from symcomm.errors import BadArgumentError, ResourceError
from symcomm.observe.recorder.processes import ancestors_of, command_of
from symcomm.observe.recorder.records import operations_of
from symcomm.observe.recorder.stacks import short_site
from symcomm.observe.top import ask
from symcomm.observe.top.feed import READ_AT_ONCE, attach
from symcomm.observe.top.jobs import JobFacts, arenas_mapped, arenas_of, choose_job, find_jobs
from symcomm.observe.top.model import STATES, Live
from tests.support.ranks import run_ranks


def watched(group, feed_of):
    """Rank 0 looks at both ranks from outside while they work."""
    t = torch.ones(100)
    group.all_reduce(t)
    group.barrier()
    if group.rank == 0:
        feed_of.append(attach([os.getpid()], "threads"))
        feed_of[0].poll()
    group.barrier()
    for _ in range(5):
        group.all_reduce(t)
    group.barrier()
    if group.rank:
        group.barrier()
        return None
    sample = feed_of[0].poll()
    known = operations_of(group)
    group.barrier()
    return sample, known


def feed_of_two_threads(*_):
    feed: list = []
    sample, known = symcomm.spawn(watched, 2, (feed,), mode="threads", deadline=60)[0]
    for rank in (0, 1):
        told = [(o.number, o.call, o.seq) for o in sample.operations[rank]]
        ours = [(o.number, o.call, o.seq) for o in known[rank]]
        assert told and set(told) <= set(ours)
        assert [call for _, call, *_ in told].count("all_reduce") == 5
    assert [fact.rank for fact in sample.ranks] == [0, 1]
    assert all(fact.alive and fact.pid == os.getpid() and fact.arena_bytes > 0 for fact in sample.ranks)
    assert ("world", (0, 1)) in [(g.name, g.ranks) for g in sample.groups]
    feed[0].close()


def test_a_feed_tells_what_the_recorders_hold():
    run_ranks(feed_of_two_threads, 1)  # a process of its own: a feed shows all that lives in one


def overflow(group, feeds):
    if group.rank == 0:
        feeds.append(attach([os.getpid()]))
        feeds[0].poll()
    group.barrier()
    t = torch.ones(1)
    for _ in range(3 * READ_AT_ONCE):
        group.all_reduce(t)
    group.barrier()
    return feeds[0].poll() if group.rank == 0 else None


def feed_of_many(*_):
    feeds: list = []
    sample = symcomm.spawn(overflow, 2, (feeds,), mode="threads", deadline=100)[0]
    for fact in sample.ranks:
        told = sample.operations[fact.rank]
        assert fact.missed > 2 * READ_AT_ONCE and len(told) <= READ_AT_ONCE
        assert fact.operations - 4 <= fact.missed + len(told) <= fact.operations + 4
        assert [o.number for o in told] == sorted(o.number for o in told)
    feeds[0].close()


def test_what_was_too_fast_is_counted():
    run_ranks(feed_of_many, 1)


JOB = """
import os, signal, sys, time, torch, symcomm
def work(group):
    t = torch.ones(8)
    for _ in range(20):
        group.all_reduce(t)
    if group.rank == 1:
        print("ready", flush=True)
        time.sleep(60)
    group.all_reduce(t)
if __name__ == "__main__":
    symcomm.spawn(work, 2, deadline=80)
"""


@pytest.fixture(params=["passed", "named"])
def job(tmp_path, request):
    script = tmp_path / "stuck_job.py"
    script.write_text(JOB)
    env = {**os.environ, **({"SYMCOMM_SHARE": "named"} if request.param == "named" else {})}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def refreshed_until(live: Live, done, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, (live.verdict(), live.states())
        time.sleep(0.1)
        live.refresh()


def test_a_stuck_job_of_processes(job):
    """Found by its launcher's pid; the stuck rank is named, also after it was killed."""
    facts = choose_job("symcomm top", str(job.pid), find_jobs())
    assert len(facts.pids) == 2 and facts.title == "stuck_job.py, 2 processes"
    live = Live(attach(facts.pids, facts.title), stuck_after=0.5)
    live.refresh()
    refreshed_until(live, lambda: live.verdict() is not None)
    at, at_work = (f"at {short_site(f'{job.args[1]}:{line}')}" for line in ("10", "9 in work"))
    assert (
        live.verdict().sentence
        == f"rank 1 has not called all_reduce #21 (world), which rank 0 called {at}; it is {at_work}."
    )
    assert [STATES[s] for s in live.states()] == ["waiting", "late"]
    assert "thread" in ask.kernel_stacks(live.ranks[1].pid)
    os.kill(live.ranks[1].pid, signal.SIGKILL)
    refreshed_until(live, lambda: live.verdict() is not None and live.verdict().kind == "dead")
    assert live.verdict().sentence == (
        f"rank 1 (pid {live.ranks[1].pid}) died after all_reduce #20 (world), while rank 0 waited for it in "
        f"all_reduce #21 (world) {at}."
    )
    assert live.feed.stacks(1) == "rank 1 does not run any more."
    live.feed.close()


def test_processes_without_arenas():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert arenas_of(child.pid) == []
        with pytest.raises(ResourceError, match=rf"^attach: no rank found in process {child.pid};"):
            attach([child.pid])
        assert os.getpid() in ancestors_of(child.pid)
    finally:
        child.kill()
        child.wait()
    assert arenas_of(child.pid) == []


def test_which_job_is_meant(monkeypatch: pytest.MonkeyPatch):
    jobs = [JobFacts("a.py", [10, 11], {"10", "11", "tag"}), JobFacts("b.py", [20], {"20"})]

    above = {10: {5, 1}, 20: {6, 1}}
    monkeypatch.setattr("symcomm.observe.top.jobs.ancestors_of", lambda pid: above.get(pid, set()))
    assert choose_job("symcomm top", "tag", jobs) is jobs[0]
    assert choose_job("symcomm top", "6", jobs) is jobs[1]
    assert choose_job("symcomm top", None, jobs[:1]) is jobs[0]
    with pytest.raises(BadArgumentError, match=r"there are 2 jobs; name one by a pid: 10 \(a.py, 2 processes\); 20"):
        choose_job("symcomm top", None, jobs)
    with pytest.raises(BadArgumentError, match="JOB must be the pid or name of a job; there are: 10"):
        choose_job("symcomm top", "other", jobs)
    with pytest.raises(ResourceError, match="no job found"):
        choose_job("symcomm top", None, [])


def test_keys_of_the_store(monkeypatch):
    store = symcomm.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("epoch", "3")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    monkeypatch.setattr(ask, "environment_of", lambda pid: env)
    assert ask.list_store(1) == ["epoch"]
    with pytest.raises(ResourceError, match="names no store"):
        ask.list_store(None)


def test_names_of_commands(tmp_path):
    assert command_of(os.getpid()) != "" and command_of(2**22 + 1) == ""
    assert arenas_mapped(2**22 + 1) == set() and arenas_of(2**22 + 1) == []
