"""Looking at jobs while they run, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm.errors import BadArgumentError, SymcommError
from symcomm.observe.analysis.verdict import judge
from symcomm.observe.recorder.stacks import short_path, short_site
from symcomm.observe.top.jobs import JobFacts, choose_job, choose_jobs, find_jobs
from symcomm.observe.top.live import look
from tests.support.faults import run_group
from tests.support.traces import symcomm_trace


def job_of(pid: int):
    return choose_job("test", str(pid), find_jobs())


def verdict_once(pid: int, kind: str, seconds: float = 20):
    """What is said of the job of ``pid``, as soon as it is of that kind."""
    deadline = time.monotonic() + seconds
    said = None
    while time.monotonic() < deadline:
        try:
            trace = look(job_of(pid))
            said = judge(trace)
            if said.kind == kind:
                return trace, said
        except SymcommError as error:  # it has not started yet
            said = error
        time.sleep(0.1)
    raise AssertionError(f"expected {kind}, at last it was {said}")


def come_late(group):
    group.barrier()
    if group.rank == 2:
        time.sleep(3)  # here
    group.all_reduce(torch.ones(5))  # here
    return group.sequence_number


@pytest.mark.parametrize("share", ["fd", "named"])
def test_a_rank_that_is_late(share, monkeypatch):
    monkeypatch.setenv("SYMCOMM_SHARE", share)
    seen = []

    def during(pids):
        seen.append((pids, *verdict_once(pids[1], "missing")))

    outcomes = run_group(come_late, 3, during=during)
    assert [o.value for o in outcomes] == [2, 2, 2]  # being looked at does no harm
    pids, trace, verdict = seen[0]
    assert [trace.ranks[r].pid for r in range(3)] == pids
    lines = [line for line, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# here" in text]
    called = short_site(f"{__file__}:{lines[1]}")
    assert verdict.sentence == (
        f"rank 2 has not called all_reduce #2 (world), which ranks 0, 1 called at {called}; "
        f"it is at {short_path(__file__)}:{lines[0]} in come_late."
    )
    assert trace.problems == []


def stop_in_the_middle(group):
    group.barrier()
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


def test_a_rank_that_is_stopped():
    seen = []

    def during(pids):
        seen.append((pids, verdict_once(pids[1], "stopped")[1]))
        os.kill(pids[0], signal.SIGCONT)

    assert [o.kind for o in run_group(stop_in_the_middle, 2, during=during)] == ["returned"] * 2
    pids, verdict = seen[0]
    assert verdict.sentence.startswith(f"rank 0 (pid {pids[0]}) is stopped after barrier #1 (world)")
    assert verdict.sentence.endswith(f"`kill -CONT {pids[0]}` lets it go on.")


def test_two_jobs_are_told_apart_by_what_they_share():
    """Also when both were forked by a process that has an arena of its own, which they inherit."""
    seen = []

    def inner(pids):
        def outer(others):
            assert pids and others
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not seen:
                jobs = {tuple(job.pids) for job in find_jobs()}
                if tuple(sorted(pids)) in jobs and tuple(sorted(others)) in jobs:
                    seen.append(judge(look(job_of(pids[0]))))

        run_group(come_late, 3, during=outer)

    symcomm.init(store=symcomm.HashStore(), rank=0, world_size=1)
    try:
        run_group(come_late, 2, during=inner)
    finally:
        symcomm.destroy()
    assert seen and seen[0].kind in ("fine", "missing")


def test_no_such_job():
    nobody = str(2**22 + 1)
    with pytest.raises(BadArgumentError, match="JOB must be the pid or name of a job; there are: 7 "):
        choose_jobs("symcomm trace", nobody, [JobFacts("a.py", [7], {"7"})])
    code, text = symcomm_trace("--live", "--pid", nobody)
    assert code == 2 and text.startswith(("symcomm trace: no job found", "symcomm trace: JOB must be"))


SCRIPT = """
import numpy, os, sys, time, symcomm

def next_batch():
    time.sleep(80)

group = symcomm.init(timeout=100)
with open(f"pid-{group.rank}", "w") as file:
    file.write(str(os.getpid()))
group.barrier()
if group.rank == 1:
    next_batch()
group.all_reduce(numpy.ones(4))
"""


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.mark.parametrize("launcher", ["symcomm", "torchrun"])
def test_where_ranks_are(tmp_path, launcher):
    """Under any launcher ranks are asked for their stacks; nothing of that stays behind."""
    (tmp_path / "job.py").write_text(SCRIPT)
    command = {"symcomm": ["-m", "symcomm", "run", "-n", "2", "--trace", "dumps"], "torchrun": TORCHRUN}[launcher]
    with subprocess.Popen([sys.executable, *command, "job.py"], cwd=tmp_path, stderr=subprocess.DEVNULL) as job:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "pid-0").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.2)
            pid = (tmp_path / "pid-0").read_text()
            verdict_once(int(pid), "missing")
            code, text = symcomm_trace("--live", "--pid", pid)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(30)
    assert code == 1
    first = text.splitlines()[0]
    assert first == (
        "rank 1 has not called all_reduce #2 (world), which rank 0 called at job.py:13; "
        "it is at job.py:5 in next_batch."
    )
    assert not (tmp_path / "dumps").exists() or os.listdir(tmp_path / "dumps") == []


def test_jobs_that_end_while_we_look(monkeypatch):
    """Those are skipped; where none is left, the sentence is of the command that was called."""
    from symcomm.cli.trace import _look_at
    from symcomm.observe.top import live

    gone = JobFacts("gone", [2**22 + 1, 2**22 + 2])  # more than any process's number
    with pytest.raises(SymcommError, match=r"^symcomm trace: no rank found in processes 4194305, 4194306; they must"):
        _look_at([gone])
    real = live.look
    monkeypatch.setattr(live, "look", lambda job, call: "still there" if job is not gone else real(job, call))
    assert _look_at([gone, JobFacts("runs", [1])]) == ["still there"]
