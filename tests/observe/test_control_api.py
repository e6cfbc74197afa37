"""What /api/v1 tells about ranks, how servers are started and found, and what is said of a hung interpreter lock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import symcomm
from symcomm import errors
from symcomm.launcher.job import Job
from symcomm.observe import server_registry
from symcomm.observe.recorder import gil
from symcomm.observe.server import handlers
from symcomm.observe.server.server import start
from symcomm.store import HashStore, PrefixStore
from tests.support.control_client import ask

pytestmark = pytest.mark.without_torch

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(tmp_path / "run"))
    for name in ("SYMCOMM_TOKEN", "SYMCOMM_SERVER", "RANK"):
        monkeypatch.delenv(name, raising=False)


def on_ranks(fn, n: int = 2, store=None):
    """Run ``fn(group, ask)`` on threads as ranks, each with a server; ask(path, ...) asks one's own."""

    def body(group):
        with start("unix", group=group, store=store, token="secret", gil_seconds=0) as server:
            result = fn(group, lambda path, method="GET", **more: ask(server.address, method, path, **more))
            group.barrier()  # nobody leaves while others ask about it
            return result

    return symcomm.spawn(body, n, mode="threads", deadline=60)


def test_rank():
    def facts(group, get):
        return get("/api/v1/rank").json

    for number, said in enumerate(on_ranks(facts, 3)):
        assert said["rank"] == number and said["world_size"] == 3 and said["pid"] == os.getpid()
        assert said["version"] == symcomm.__version__ and said["uptime_s"] >= 0
        assert said["address"].startswith("unix:/") and abs(said["clock_ns"] - time.monotonic_ns()) < 60e9


def test_operations_since():
    def poll(group, get):
        x = np.ones(100, dtype=np.float32)
        for _ in range(5):
            group.all_reduce(x)
        first = get("/api/v1/operations?limit=3").json
        rest = get(f"/api/v1/operations?since={first['next']}").json
        again = get(f"/api/v1/operations?since={rest['next']}").json
        return first, rest, again

    for first, rest, again in on_ranks(poll):
        assert len(first["operations"]) == 3 and first["more"] and not rest["more"]
        numbers = [op["number"] for op in first["operations"] + rest["operations"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        reduces = [op for op in first["operations"] + rest["operations"] if op["call"] == "all_reduce"]
        assert len(reduces) == 5 and all(op["state"] == "completed" and op["nbytes"] == 400 for op in reduces)
        assert again["operations"] == [] and again["next"] == rest["next"]


def test_what_runs_is_told_again_until_it_ends():
    waiting, asked = threading.Event(), threading.Event()

    def late(group, get):
        x = np.ones(4, dtype=np.float32)
        if group.rank == 1:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                seen = get("/api/v1/operations?rank=0").json  # a peer's, from shared memory
                if seen["operations"] and seen["operations"][-1]["state"] == "running":
                    break
            group.all_reduce(x)
            waiting.set()
            return seen
        group.all_reduce(x)
        assert waiting.wait(30)
        asked.set()
        return get("/api/v1/operations").json

    after, before = on_ranks(late)
    running = before["operations"][-1]
    assert running["state"] == "running" and before["next"] == running["number"] - 1
    ended = next(op for op in after["operations"] if op["number"] == running["number"])
    assert ended["state"] == "completed" and ended["finished_ns"] >= ended["created_ns"]


@pytest.mark.parametrize("query", ["since=x", "since=-1", "limit=0", "limit=999999", "rank=2", "since=" + "9" * 30])
def test_bad_numbers(query):
    answer = on_ranks(lambda group, get: get(f"/api/v1/operations?{query}"))[0]
    assert answer.status == 400 and "must be a number of" in answer.json["error"]


def test_groups_peers_memory():
    def look(group, get):
        pair = group.new_group([0, 1], name="pair")
        if pair is not None:
            pair.barrier()
        group.barrier()
        found = get("/api/v1/groups").json, get("/api/v1/peers").json, get("/api/v1/memory").json
        group.barrier()
        return found

    results = on_ranks(look, 3)
    assert [[g["name"] for g in groups] for groups, _, _ in results] == [
        ["pair", "world"],
        ["pair", "world"],
        ["world"],
    ]
    pair = results[1][0][0]
    assert (pair["rank"], pair["size"], pair["ranks"], pair["failure"]) == (1, 2, [0, 1], None)
    for _, peers, memory in results:
        assert [peer["rank"] for peer in peers] == [0, 1, 2]
        assert all(p["state"] == "alive" and p["stalled"] is None and p["last_operation"] for p in peers)
        assert 0 < memory["used"] <= memory["peak"] <= memory["addresses"] and memory["reserved"] > 0


def test_stacks_and_dump():
    def somewhere(group, get):
        return get("/api/v1/stacks").json, get("/api/v1/dump", "POST").json

    for rank, (stacks, dump) in enumerate(on_ranks(somewhere)):
        functions = {frame["function"] for stack in stacks for frame in stack["frames"]}
        assert "somewhere" in functions
        assert [stack["name"] for stack in stacks if stack["is_rank"]] == [f"symcomm-rank-{rank}"]
        assert stacks[0]["is_rank"]
        assert set(dump) == {"rank", "groups", "stacks", "operations", "memory", "peers"}


def test_store_values_only_with_the_token():
    store = HashStore()
    store.set("config/password", b"hunter2\xff")

    def look(group, get):
        return (
            get("/api/v1/store?prefix=config/"),
            get("/api/v1/store?key=config/password"),
            get("/api/v1/store?key=config/password", token="secret"),
            get("/api/v1/store?key=none", token="secret"),
        )

    names, refused, shown, missing = on_ranks(look, 1, store)[0]
    assert names.json == {"keys": ["config/password"], "count": 1}
    assert refused.status == 401 and b"hunter2" not in refused.content and b"aHVudGVyMv8=" not in refused.content
    assert shown.json == {"key": "config/password", "bytes": 8, "value_base64": "aHVudGVyMv8="}
    assert missing.status == 400 and "no key 'none'" in missing.json["error"]


def test_without_a_group():
    with start("unix", gil_seconds=0) as server:
        assert ask(server.address, "GET", "/api/v1/rank").json["rank"] is None
        assert ask(server.address, "GET", "/api/v1/groups").json == []
        for path in ("operations", "memory", "peers", "store"):
            answer = ask(server.address, "GET", f"/api/v1/{path}")
            assert answer.status == 400 and "no" in answer.json["error"]
        assert set(ask(server.address, "POST", "/api/v1/dump").json) == {"rank", "groups", "stacks"}


def test_routes_of_others(monkeypatch):
    monkeypatch.setattr(handlers, "_routes", dict(handlers._routes))

    @handlers.route("GET", "/test/json")
    def answer(request):
        return {"param": request.get_param("a"), "trusted": request.trusted}

    @handlers.route("GET", "/test/open", public=True)
    def page(request):
        return f"rank {request.rank.rank}"

    @handlers.route("GET", "/test/broken")
    def broken(request):
        raise KeyError("x")

    with pytest.raises(ValueError, match="taken already"):
        handlers.route("GET", "/test/json")(answer)
    with pytest.raises(errors.BadArgumentError):
        handlers.route("GET", "test")
    with pytest.raises(errors.BadArgumentError):
        handlers.route("TRACE", "/test")
    with start("tcp", token="secret", gil_seconds=0) as server:
        assert ask(server.address, "GET", "/test/json").status == 401
        assert ask(server.address, "GET", "/test/json?a=1", token="secret").json == {"param": "1", "trusted": True}
        assert ask(server.address, "GET", "/test/open").json == "rank None"
        assert ask(server.address, "GET", "/test/broken", token="secret").json == {"error": "KeyError: 'x'"}


# --- starting and finding ----------------------------------------------------------------------------


def test_found_on_this_host_and_in_the_store():
    store = HashStore()

    def find(group, get):
        group.barrier()
        found = server_registry.on_this_host(), server_registry.of_job(PrefixStore("groups", store), group.size)
        group.barrier()
        return found

    (here, published), _ = on_ranks(find, 2, PrefixStore("a", PrefixStore("b", store)))
    assert [facts["rank"] for facts in here] == [0, 1] and all(facts["token"] == "secret" for facts in here)
    assert set(published) == {0, 1} and all("token" not in facts for facts in published.values())
    assert published[1]["address"] == here[1]["address"] and published[1]["world_size"] == 2
    assert server_registry.on_this_host() == []
    assert sorted(store.list_keys()) == ["symcomm/server/0", "symcomm/server/1"]


JOB = """
import json, os, symcomm
from symcomm.observe import server_registry
group = symcomm.init()
group.barrier()
if group.rank == 0:
    of_job = server_registry.of_job(group.store, group.size)
    print(json.dumps([server_registry.on_this_host(), of_job, os.environ.get("SYMCOMM_TOKEN")]))
group.barrier()
symcomm.destroy()
"""


def run_job(tmp_path, *options: str, **variables: str) -> tuple:
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "symcomm", "run", "-n", "2", "--no-prefix", *options, str(tmp_path / "job.py")],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_launcher_starts_servers(tmp_path):
    here, published, token = run_job(tmp_path, "--server")
    assert [facts["rank"] for facts in here] == [0, 1] and len({facts["job"] for facts in here}) == 1
    assert {facts["token"] for facts in here} == {token} and len(token) >= 40
    assert [facts["address"] for facts in published.values()] == [facts["address"] for facts in here]
    assert all(facts["address"].startswith("unix:") for facts in here)
    assert os.listdir(os.environ["SYMCOMM_RUN_DIR"]) == []


def test_environment_starts_servers_on_ports(tmp_path):
    here, published, token = run_job(tmp_path, SYMCOMM_SERVER="tcp")
    assert len(here) == len(published) == 2
    assert all(facts["address"].startswith("http://127.0.0.1:") for facts in here)
    assert {facts["token"] for facts in here} == {token} and len(token) >= 40  # the job's


def test_ranks_of_a_job_without_a_token_have_one_each(tmp_path):
    here, _, token = run_job(tmp_path, SYMCOMM_SERVER="tcp", SYMCOMM_TOKEN="")
    assert token == "" and len({facts["token"] for facts in here}) == 2


def test_no_servers_unless_asked(tmp_path):
    assert run_job(tmp_path)[:2] == ([], {})


def test_variables_of_the_launcher(monkeypatch):
    job = Job(["x"], 2, server=True)
    variables = job.environment(0, 0, "", 0)
    assert variables["SYMCOMM_SERVER"] == "1" and variables["SYMCOMM_TOKEN"] == job.token
    assert job.environment(1, 0, "", 0)["SYMCOMM_TOKEN"] == job.token != Job(["x"], 2).token
    assert "SYMCOMM_TOKEN" not in Job(["x"], 2, nodes=2, server=True).environment(0, 0, "", 0)
    assert "SYMCOMM_SERVER" not in Job(["x"], 2).environment(0, 0, "", 0)
    monkeypatch.setenv("SYMCOMM_SERVER", "tcp:9000")
    monkeypatch.setenv("SYMCOMM_TOKEN", "mine")
    variables = job.environment(0, 0, "", 0)
    assert (variables["SYMCOMM_SERVER"], variables["SYMCOMM_TOKEN"]) == ("tcp:9000", "mine")


def spawned(group):
    group.barrier()
    found = server_registry.on_this_host()
    group.barrier()
    return found


def test_spawned_processes_serve_and_clean_up(monkeypatch):
    monkeypatch.setenv("SYMCOMM_SERVER", "1")
    found = symcomm.spawn(spawned, 2, deadline=60)[0]
    assert [facts["rank"] for facts in found] == [0, 1] and {facts["job"] for facts in found} == {f"pid{os.getpid()}"}
    assert os.listdir(os.environ["SYMCOMM_RUN_DIR"]) == []


def test_curl():
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with start("unix", gil_seconds=0) as server:
        path = server.address.removeprefix("unix:")
        command = ["curl", "-sS", "--max-time", "20", "--unix-socket", path]
        said = subprocess.run([*command, "http://rank/api/v1/rank"], capture_output=True, timeout=60, check=True).stdout
        assert json.loads(said)["pid"] == os.getpid()
        big = subprocess.run(
            [*command, "--data-binary", "@-", "-w", "%{http_code}", "http://rank/handler/ping"],
            input=b"x" * (2 << 20), capture_output=True, timeout=60,
        )  # fmt: skip
        assert big.stdout.endswith(b"413")


TORCH_JOB = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from datetime import timedelta
import torch, torch.distributed as dist
from symcomm.torch_backend.register import register
from tests.support.control_client import ask
register()
store = dist.TCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("symcomm", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
dist.all_reduce(torch.ones(10))
dist.new_group([0])
published = json.loads(store.get("symcomm/server/0"))
address = published["address"]
keys = ask(address, "GET", "/api/v1/store?prefix=symcomm/").json["keys"]
calls = [op["call"] for op in ask(address, "GET", "/api/v1/operations").json["operations"]]
print(json.dumps([published["rank"], keys, calls, len(ask(address, "GET", "/api/v1/groups").json)]))
dist.destroy_process_group()
"""


def test_torch_backend(tmp_path):
    pytest.importorskip("torch")
    env = {**os.environ, "SYMCOMM_SERVER": "1"}
    command = [sys.executable, "-c", TORCH_JOB, str(SRC.parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rank, keys, calls, groups = json.loads(done.stdout)
    assert (rank, keys, groups) == (0, ["symcomm/server/0"], 2) and "all_reduce" in calls


def test_bad_wishes_in_the_environment():
    def run(value: str, name: str = "SYMCOMM_SERVER") -> str:
        code = "import symcomm; symcomm.init(store=symcomm.HashStore(), rank=0, world_size=1).barrier(); print('on')"
        env = {**os.environ, "SYMCOMM_SERVER": "1", name: value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    assert "SYMCOMM_SERVER must be 1, unix, tcp or tcp:PORT, got 'pigeon'" in run("pigeon")
    assert "SYMCOMM_GIL_SECONDS must be a number of seconds" in run("soon", "SYMCOMM_GIL_SECONDS")
    without = run("/proc/nowhere", "SYMCOMM_RUN_DIR")
    assert "goes on without a server" in without and "on" in without.split()


# --- the interpreter lock ----------------------------------------------------------------------------

STALL = """
import ctypes, sys, threading, time, symcomm
from symcomm.observe.server.server import start
from symcomm.observe.recorder import gil

def sleep_with_the_lock(seconds):
    {how}

def rank(group):
    server = start("unix", group=group, gil_seconds=1)
    time.sleep(0.3)
    if group.rank == 0:
        sleep_with_the_lock(4)
        group.barrier()
    else:
        from tests.support.control_client import ask
        end = time.monotonic() + 40
        while time.monotonic() < end:
            told = ask(server.address, "GET", "/api/v1/peers").json[0]["stalled"]
            if told:
                break
            time.sleep(0.05)
        group.barrier()
        time.sleep(1)
        return told, ask(server.address, "GET", "/api/v1/peers").json[0]["stalled"]

if __name__ == "__main__":
    print(symcomm.spawn(rank, 2, deadline=60)[1])
"""


@pytest.mark.parametrize(
    "how,reason",
    [
        ("ctypes.PyDLL(None).sleep(seconds)", "it is in the system call clock_nanosleep"),
        ("sum(range(10)); ctypes.PyDLL(None).poll(None, 0, seconds * 1000)", "it is in the system call p"),
    ],
)
def test_a_hung_interpreter_lock_is_told_by_the_rank_and_by_its_peers(tmp_path, how, reason):
    script = tmp_path / "stall.py"
    script.write_text(STALL.format(how=how))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    sentence = next(line for line in done.stderr.splitlines() if line.startswith("symcomm: rank 0 (pid "))
    assert "no thread could get Python's interpreter lock for" in sentence
    assert "thread 'MainThread'" in sentence and reason in sentence and sentence.endswith(".")
    assert "in sleep_with_the_lock" in done.stderr  # the Python stacks
    assert "symcomm: rank 0" in done.stderr and "the interpreter lock is back after" in done.stderr
    assert sentence in done.stdout and done.stdout.rstrip().endswith("None)")  # a peer's server, during and afterwards


def test_native_code_that_computes():
    """No system call to blame: the thread runs. A regular expression that backtracks for ever is such code."""
    code = """
    import re, time, symcomm
    from symcomm.observe.server.server import start
    def rank(group):
        with start("unix", group=group, gil_seconds=0.5):
            time.sleep(0.3)
            length, took = 20, 0.0
            while took < 2:
                begun = time.monotonic()
                re.match("(a+)+$", "a" * length + "b")
                length, took = length + 1, time.monotonic() - begun
            time.sleep(0.5)
    symcomm.spawn(rank, 1, mode="threads", deadline=80)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "thread 'symcomm-rank-0'" in done.stderr and "it computes in native code" in done.stderr


def test_watching_can_be_stopped_and_leaves_nothing(monkeypatch):
    monkeypatch.setenv("SYMCOMM_GIL_SECONDS", "0")
    assert gil.seconds_from_environment() == 0
    monkeypatch.delenv("SYMCOMM_GIL_SECONDS")
    assert gil.seconds_from_environment() == gil.DEFAULT_SECONDS

    def body(group):
        before = len(os.listdir("/proc/self/task"))
        stop = gil.watch(group, 20.0)
        during = len(os.listdir("/proc/self/task"))
        stop()
        stop()
        end = time.monotonic() + 10  # the kernel may list a thread a little longer
        while (after := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < end:
            time.sleep(0.01)
        return before, during, after

    before, during, after = symcomm.spawn(body, 1, mode="threads", deadline=30)[0]
    assert during >= before + 2 and after <= before
