"""One real job and every way to look at it: the launcher's verdict, `trace`, `trace --live`, `top`, the ranks' servers.

They must not only all work at the same time: they must say the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from symcomm.observe import server_registry
from symcomm.observe.analysis.verdict import PATIENCE
from symcomm.observe.recorder.stacks import where
from symcomm.observe.top.ask import ask_stacks
from symcomm.observe.top.feed import attach
from symcomm.observe.top.jobs import arenas_of, choose_job, find_jobs
from symcomm.observe.top.model import Live
from tests.support.control_client import ask

pytestmark = pytest.mark.without_torch

SRC = Path(__file__).parents[2] / "src"
SCRIPT = """
import os, re, sys, time, numpy, symcomm

def next_batch():
    time.sleep(100) if len(sys.argv) == 2 else re.match(r"(a+)+$", "a" * 60 + "b")  # which lets no other thread run

group = symcomm.init(timeout=float(sys.argv[1]))
group.all_reduce(numpy.ones(1000, "f"))
open(f"ready-{group.rank}", "w").close()
if group.rank == 1:
    next_batch()
group.all_reduce(numpy.ones(4, "f"))
"""
STUCK = "rank 1 has not called all_reduce #2 (world), which {} called at job.py:12; it is at job.py:5 in next_batch."


@pytest.fixture
def start(tmp_path, monkeypatch):
    """``start(ranks, timeout, *options)``: a job of which rank 1 never comes, once all ranks are on their way."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(run))
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    monkeypatch.chdir(tmp_path)  # sentences name files from here
    (tmp_path / "job.py").write_text(SCRIPT)
    jobs = []

    def begin(ranks: int, timeout: float, *options: str, script_options: tuple[str, ...] = ()) -> subprocess.Popen:
        script = ["job.py", str(timeout), *script_options]
        launcher = [sys.executable, "-m", "symcomm", "run", "-n", str(ranks), *options]
        jobs.append(subprocess.Popen([*launcher, *script], stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < ranks:
            assert time.monotonic() < deadline and jobs[-1].poll() is None, "the ranks did not start"
            time.sleep(0.05)
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
        job.communicate(timeout=30)


def command(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "symcomm", *arguments], capture_output=True, text=True, timeout=60,
        env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def judged(job: subprocess.Popen) -> str:
    """The banner of the live page of ``job``, as soon as there is one; late enough for `trace --live` to agree."""
    facts = choose_job("test", str(job.pid), find_jobs())
    live = Live(attach(facts.pids, facts.title), stuck_after=1.5 * PATIENCE)
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            live.refresh()
            if verdict := live.verdict():
                return verdict.sentence
            time.sleep(0.1)
    finally:
        live.feed.close()
    raise AssertionError("nothing is wrong with a job that is stuck")


def test_all_say_the_same_sentence(start):
    """While it hangs: the live page, and `trace --live`. Once the others gave up: the launcher, and `trace DIR`."""
    job = start(3, 20.0, "--trace", "dumps", "--server")
    sentence = STUCK.format("ranks 0, 2")
    assert judged(job) == sentence
    code, text = command("trace", "--live", "--job", str(job.pid))
    assert code == 1 and text.splitlines()[0] == sentence
    assert "did not say where it is" not in text and "note:" not in text
    _, said = job.communicate(timeout=60)
    assert job.returncode == 1 and f"  trace: {sentence}\n" in said
    code, text = command("trace", "dumps")
    assert code == 1 and text.splitlines()[0] == sentence


def pids_of_servers() -> dict[int, int]:
    return {facts["rank"]: facts["pid"] for facts in server_registry.on_this_host()}


def test_servers_page_and_trace_of_one_job(start):
    """No dumps are asked for: stacks come from the ranks' arenas, also of those that have servers."""
    job = start(2, 60.0, "--server")
    sentence = STUCK.format("rank 0")
    assert judged(job) == sentence
    stacks = ask_stacks({r: (pid, arenas_of(pid)[0]) for r, pid in pids_of_servers().items()})
    assert sorted(stacks) == [0, 1]
    assert str(where(stacks[1])) == "job.py:5 in next_batch" and stacks[1][0].is_rank
    code, text = command("trace", "--live", "--job", str(job.pid), "--json")
    verdict = json.loads(text)[0]["verdict"]
    assert code == 1 and (verdict["sentence"], verdict["ranks"]) == (sentence, [1])
    deadline = time.monotonic() + 20
    while True:  # the page shows what is stuck after 5 s
        code, text = command("top", str(job.pid), "--terminal", "--once")
        if code or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert code == 1 and sentence in text and "job.py, 2 processes" in text


def test_a_rank_that_cannot_answer(start):
    """It hangs in native code that keeps the interpreter lock: its server is silent, and that is said in time."""
    job = start(2, 60.0, "--server", script_options=("native",))
    sentence = (
        "rank 1 has not called all_reduce #2 (world), which rank 0 called at job.py:12; it (pid {}) runs no Python "
        "that could tell where it is."
    ).format(next(facts["pid"] for facts in server_registry.on_this_host() if facts["rank"] == 1))
    assert judged(job) == sentence
    code, text = command("trace", "--live", "--job", str(job.pid))
    assert code == 1 and text.splitlines()[0] == sentence and "did not say where it is" in text


def test_metrics_of_a_rank(start):
    pytest.importorskip("prometheus_client")
    start(2, 60.0, "--server")
    facts = next(f for f in server_registry.on_this_host() if f["rank"] == 1)
    for _ in range(2):  # asked twice, counted once
        answer = ask(facts["address"], "GET", "/api/v1/metrics", token=facts["token"])
        body = answer.content
        assert answer.status == 200 and (answer.content_type or "").startswith("text/plain; version=0.0.4"), body
        assert re.search(rb'^symcomm_operations_total{collective="all_reduce",group="world"} 1\.0$', body, re.M)
    assert b'symcomm_recorded_operations_total{rank="1"}' in body and b'rank="0"' not in body
