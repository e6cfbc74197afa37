"""Looking at a job through its ranks' servers, as from another host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import symcomm
from symcomm.errors import BadArgumentError, ResourceError
from symcomm.observe.recorder.records import operations_of
from symcomm.observe.server.server import start
from symcomm.observe.top.model import Live
from symcomm.observe.top.servers_feed import FAILURES, attach_servers, get_json
from symcomm.store import HashStore

pytestmark = pytest.mark.without_torch

TOKEN = "a secret of this job"


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(tmp_path / "run"))
    for name in ("SYMCOMM_TOKEN", "SYMCOMM_SERVER", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_what_servers_tell():
    """The same operations that the recorders hold, each once, also when one is seen running and then ended."""
    store = HashStore()

    def body(group):
        x = np.ones(100, dtype=np.float32)
        with start("tcp", group=group, store=store, token=TOKEN, gil_seconds=0) as server:
            group.all_reduce(x)
            group.barrier()
            found = None
            if group.rank == 1:  # the others wait in a barrier meanwhile, which is seen before it ends
                feed = attach_servers(server.address, TOKEN)
                first = feed.poll()
                time.sleep(0.05)
                found = [feed, first, feed.poll()]
            group.barrier()
            group.all_reduce(x)
            group.barrier()
            if group.rank == 1:
                found += [feed.poll(), operations_of(group), feed.stacks(0), feed.store_keys()]
                feed.close()
            group.barrier()
            return found

    feed, first, second, third, known, stacks, keys = symcomm.spawn(body, 2, mode="threads", deadline=60)[1]
    assert feed.title.endswith("2 ranks on 1 host")
    assert [(f.rank, f.pid, f.alive, f.missed) for f in third.ranks] == [(r, os.getpid(), True, 0) for r in (0, 1)]
    assert all(f.arena_bytes > 0 and f.operations >= 5 for f in third.ranks)
    assert [(g.name, g.ranks) for g in third.groups] == [("world", (0, 1))]
    assert [op.call for op in first.operations[0]] == ["all_reduce", "barrier", "barrier"]
    assert [op.state for op in first.operations[0]] == ["completed", "completed", "running"]
    for rank in (0, 1):
        ended = [op.number for s in (first, second, third) for op in s.operations[rank] if op.finished_ns is not None]
        assert ended == [op.number for op in known[rank] if op.finished_ns is not None][: len(ended)]
        assert len(ended) >= 4
    for op, same in zip(first.operations[1], known[1], strict=False):
        assert abs(op.created_ns - same.created_ns) < 2e9 and op.call == same.call
    assert "test_top_servers.py" in stacks and "symcomm/server/0" in keys


JOB = """
import numpy, os, signal, sys, time, symcomm
group = symcomm.init()
x = numpy.ones(1000)
for _ in range(20):
    group.all_reduce(x)
print("ready", flush=True)
if group.rank == 2:
    time.sleep(60)
group.all_reduce(x)
"""


def test_a_job_by_its_ports(tmp_path):
    """Under the launcher: found by one port, judged, and a rank that was killed is not alive any more."""
    (tmp_path / "job.py").write_text(JOB)
    env = {
        **os.environ, "SYMCOMM_SERVER": "tcp", "SYMCOMM_TOKEN": TOKEN,
        "SYMCOMM_SERVER_BIND": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-m", "symcomm", "run", "-n", "3", "--no-prefix", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            assert [launcher.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
            facts = symcomm.observe.server_registry.on_this_host()
            live = Live(attach_servers(next(f["address"] for f in facts if f["rank"] == 1), TOKEN))
            verdict = ""
            deadline = time.monotonic() + 20
            while "rank 2 has not called" not in verdict and time.monotonic() < deadline:
                live.refresh()
                verdict = str(live.verdict())
                time.sleep(0.1)
            assert (
                "rank 2 has not called all_reduce #21 (world), which ranks 0, 1 called at job.py:10; it is at job.py:9"
                in verdict
            )
            os.kill(next(f["pid"] for f in facts if f["rank"] == 2), signal.SIGKILL)
            while any(f.alive for f in live.sample.ranks if f.rank == 2) and time.monotonic() < deadline:
                live.refresh()
            assert [f.alive for f in live.sample.ranks if f.rank == 2] == [False]
            live.feed.close()
        finally:
            launcher.kill()


def test_who_does_not_answer(monkeypatch):
    with pytest.raises(BadArgumentError, match="--server must be http://HOST:PORT, .*, got 'nobody'"):
        attach_servers("nobody", TOKEN)
    with pytest.raises(ResourceError, match="the server at http://127.0.0.1:1 does not answer .* is the job there"):
        attach_servers("http://127.0.0.1:1", TOKEN)
    group = symcomm.init(store=HashStore(), rank=0, world_size=1)
    try:
        with start("tcp", group=group, token=TOKEN, gil_seconds=0) as server:
            with pytest.raises(ResourceError, match="401 .*SYMCOMM_TOKEN the job's"):
                attach_servers(server.address, "wrong")
            assert [f.rank for f in attach_servers(server.address, TOKEN).poll().ranks] == [0]  # without a store
    finally:
        symcomm.destroy()


@pytest.mark.parametrize("length", [1 << 40, 1 << 62])
def test_a_server_that_announces_more_than_it_sends(length: int):
    """Taking memory for what was announced would be a MemoryError, which ends the page of all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n[" % length)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(FAILURES):
            get_json(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, "/api/v1/rank", seconds=20)
        thread.join(20)
