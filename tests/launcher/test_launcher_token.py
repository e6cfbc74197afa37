"""The job's token: who makes it, who gets it, and where a job does not start without one."""

from __future__ import annotations

import re
import socket

import pytest

from symcomm.errors import BadArgumentError, StoreAuthError
from symcomm.launcher.job import Job, reserve_port
from symcomm.store.bootstrap import rendezvous
from symcomm.store.tcp import TCPStore
from tests.support.tcp import serve

pytestmark = pytest.mark.without_torch

FAR = ("node0", 29500)


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    for name in ("SYMCOMM_TOKEN", "SYMCOMM_LAUNCH_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def token_of(job: Job) -> str | None:
    job.check()
    return job.environment(0, 0, "", 0).get("SYMCOMM_TOKEN")


# --- who has which ----------------------------------------------------------------------------------------------------


def test_one_node_makes_its_own_and_what_is_given_wins(monkeypatch):
    job = Job(["x"], 2)
    assert token_of(job) == job.token and len(job.token) >= 40 and job.token != Job(["x"], 2).token
    assert job.admits_unauthenticated  # a store that the launcher keeps; PyTorch's clients know of no token
    assert token_of(Job(["x"], 2, env={"SYMCOMM_TOKEN": "from --env"})) == "from --env"
    monkeypatch.setenv("SYMCOMM_TOKEN", "mine")
    assert token_of(job) == "mine" and not job.admits_unauthenticated
    assert token_of(Job(["x"], 2, nodes=2, endpoint=FAR)) == "mine"
    assert Job(["x"], 2, insecure=True).admits_unauthenticated
    monkeypatch.setenv("SYMCOMM_TOKEN", "")
    assert token_of(job) == ""  # who says that there is none is believed


@pytest.mark.parametrize("kind", [{"nodes": 2}, {"nodes": 2, "min_nodes": 1}], ids=["fixed", "that come and go"])
def test_several_nodes_are_told_one_to_pass(kind, monkeypatch):
    job = Job(["x"], 2, endpoint=FAR, **kind)
    with pytest.raises(BadArgumentError, match="meet at node0:29500, where anybody can connect") as info:
        job.check()
    [offered] = re.findall(r"`export SYMCOMM_TOKEN=(\S{40,})`", str(info.value))
    assert offered == job.token and "--insecure" in str(info.value)
    for endpoint in (("localhost", 1), ("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1)):
        assert token_of(Job(["x"], 2, endpoint=endpoint, **kind)) is None
    for endpoint in (("localhost.evil.example", 1), ("0.0.0.0", 1), ("10.0.0.1", 1), ("::", 1)):
        with pytest.raises(BadArgumentError, match="has no token"):
            Job(["x"], 2, endpoint=endpoint, **kind).check()
    assert token_of(Job(["x"], 2, endpoint=FAR, insecure=True, **kind)) is None
    monkeypatch.setenv("SYMCOMM_TOKEN", offered)
    assert token_of(Job(["x"], 2, endpoint=FAR, **kind)) == offered


def test_the_command_line_refuses_and_says_what_to_do(jobs):
    options = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "192.0.2.1:29500")
    result = jobs.run("print('started')", *options)
    assert result.returncode == 2 and "started" not in result.stdout
    assert "the job has no token" in result.stderr and "export SYMCOMM_TOKEN=" in result.stderr
    assert "started" in jobs.run("print('started')", *options, "--insecure").stdout
    assert "started" in jobs.run("print('started')", *options, SYMCOMM_TOKEN="x").stdout


# --- what it protects -------------------------------------------------------------------------------------------------

STRANGER = """
import symcomm
from symcomm.errors import StoreAuthError
from symcomm.store.tcp import TCPStore
group = symcomm.init()
group.barrier()
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
try:
    TCPStore(*where, token="", timeout=20).num_keys()
    print("a stranger came in", flush=True)
except StoreAuthError:
    print("a stranger was refused", flush=True)
token = os.environ["SYMCOMM_TOKEN"].encode()
assert all(token not in group.store.get(key) for key in group.store.list_keys())
group.barrier()
"""


def test_the_store_of_a_job_is_closed_to_strangers_by_itself(jobs):
    result = jobs.run(STRANGER, "-n", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("a stranger was refused") == 2


@pytest.mark.parametrize(
    ("token", "options", "said"),
    [("", (), "came in"), ("given", (), "was refused"), ("given", ("--insecure",), "came in")],
)
def test_a_store_that_the_launcher_keeps(jobs, token, options, said):
    variables = {"SYMCOMM_TOKEN": token} if token else {}
    result = jobs.run(STRANGER, "-n", "2", "--restart", "failed", *options, **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"a stranger {said}") == 2


def test_programs_that_use_pytorchs_store_run_as_before(jobs):
    pytest.importorskip("torch")
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("symcomm")
        x = torch.ones(3)
        dist.all_reduce(x)
        print("sum", x.tolist(), flush=True)
        dist.destroy_process_group()
    """
    result = jobs.run(script, "-n", "2", "--restart", "failed")  # where the launcher keeps the store
    assert result.returncode == 0 and result.stdout.count("sum [2.0, 2.0, 2.0]") == 2, result.stderr


def test_a_token_that_is_optional_is_still_proved_to_those_who_ask():
    store = serve(token="a", token_is_optional=True)
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, token="a").get("key") == b"value"
    assert TCPStore("127.0.0.1", store.port, token="").get("key") == b"value"
    with pytest.raises(StoreAuthError, match="holds another job token"):
        TCPStore("127.0.0.1", store.port, token="b", timeout=5)
    with socket.create_connection(("127.0.0.1", store.port)) as sock:  # a proof that is none, of one who asked for it
        sock.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\xa7" + bytes(32))
        assert len(sock.recv(65, socket.MSG_WAITALL)) == 65
        sock.sendall(b"\xa8" + bytes(32))
        assert sock.recv(100) == b"AUTH" and sock.recv(1) == b""
    assert "holds another job token" in store.server_stats()["reasons"][-1]


@pytest.mark.parametrize("launcher", ["torchrun", "symcomm run"])
def test_torchruns_store_is_used_as_it_is_and_ours_is_not_trusted_without_a_proof(monkeypatch, launcher):
    """A job token under torchrun is for the control channel: the agent's store has none."""
    monkeypatch.setenv("SYMCOMM_TOKEN", "the job's")
    store = serve(token="")
    environ = {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        **({"SYMCOMM_LAUNCH_ID": "x"} if launcher == "symcomm run" else {}),
    }  # fmt: skip
    if launcher == "torchrun":
        rendezvous("env://", environ=environ).store.set("key", "value")
        assert store.get("attempt_0/key") == b"value"
    else:
        with pytest.raises(StoreAuthError, match="has no job token"):
            rendezvous("env://", environ=environ, timeout=5)


def test_launchers_of_nodes_that_come_and_go_prove_it_to_each_other(jobs):
    """A launcher with another token, or none, takes no part."""
    with reserve_port() as holder:
        port = holder.getsockname()[1]
    script = jobs.write(
        """
        open("begun", "w").close()
        while not os.path.exists("go"): time.sleep(0.01)
        print("worked", flush=True)
        """
    )
    options = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", script)
    first = jobs.start(*options, SYMCOMM_TOKEN="a")
    jobs.wait_for("begun")
    stranger = jobs.finish(jobs.start(*options, SYMCOMM_TOKEN="b"))
    assert stranger.returncode != 0 and "another job token" in stranger.stderr and "worked" not in stranger.stdout
    (jobs.path / "go").touch()
    result = jobs.finish(first)
    assert result.returncode == 0 and result.stdout.count("worked") == 1, result.stderr
