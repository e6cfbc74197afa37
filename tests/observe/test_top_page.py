"""The live page's server: what it answers, and to whom it does not."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from symcomm.cli.top_terminal import show
from symcomm.errors import ResourceError
from symcomm.observe.top.metrics import Meter
from symcomm.observe.top.model import Live
from symcomm.observe.top.page import PageServer, page
from symcomm.observe.top.simulate import SimulatedFeed

pytestmark = pytest.mark.without_torch

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def server():
    with PageServer(Live(SimulatedFeed(4, straggler=1, history=3))) as running:
        yield running


def get(server, path, *, method="GET", token=True, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    if token:
        headers.setdefault("Authorization", f"Bearer {server.token}")
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_needs_no_token_and_holds_nothing(server):
    answer, body = get(server, "/", token=False)
    assert answer.status == 200 and body == page()[0] and server.token.encode() not in body
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"
    text = body.decode()
    assert not re.search(r"""(src|href)=["']?https?:""", text) and "@import" not in text and "innerHTML" not in text
    assert not re.search(r"<[a-z]+[^>]*\son[a-z]+=", text), "inline handlers do not run under the policy"


def test_snapshots_and_deltas(server):
    answer, body = get(server, "/api/v1/snapshot?since=0")
    first = json.loads(body)
    assert answer.status == 200 and first["ranks"]["rank"] == [0, 1, 2, 3] and first["meetings"]
    time.sleep(1.2)
    second = json.loads(get(server, f"/api/v1/snapshot?since={first['version']}")[1])
    assert second["version"] > first["version"] and len(second["meetings"]) < len(first["meetings"])
    assert json.loads(get(server, "/api/v1/snapshot?since=nonsense")[1])["since"] == 0


def test_stacks_and_store_on_demand(server):
    assert "train.py" in json.loads(get(server, "/api/v1/stacks?rank=2")[1])["text"]
    assert json.loads(get(server, "/api/v1/stacks?rank=9")[1])["error"] == "there is no rank '9' in this job."
    assert "epoch" in json.loads(get(server, "/api/v1/store")[1])["keys"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \xff"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_who_is_refused(server, headers, status):
    answer, body = get(server, "/api/v1/snapshot", **headers)
    assert answer.status == status
    assert status == 200 or b"ranks" not in body


def test_nothing_else_is_there(server):
    assert get(server, "/api/v1/nothing")[0].status == 404
    assert get(server, "/metrics")[0].status == 404  # nobody attached a meter
    assert get(server, "/", method="HEAD")[1] == b""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(server, "/api/v1/snapshot", method=method)[0].status == 501


def test_other_names_of_the_loopback_address(server):
    assert get(server, "/api/v1/snapshot", Host=f"localhost:{server.port}")[0].status == 200
    assert get(server, "/api/v1/snapshot", Host=f"LOCALHOST:{server.port}")[0].status == 200


def test_metrics_need_the_token():
    with PageServer(Live(SimulatedFeed(2, history=2))) as running:
        running.attach_meter(Meter())
        running.refresh()
        assert get(running, "/metrics", token=False)[0].status == 401
        answer, body = get(running, "/metrics")
        assert answer.status == 200 and b'symcomm_rank_up{rank="1"} 1.0' in body


def test_a_feed_that_breaks_is_told():
    class Broken(SimulatedFeed):
        def poll(self):
            raise OSError("gone")

    with PageServer(Live(Broken(1))) as running:
        assert json.loads(get(running, "/api/v1/snapshot")[1])["problem"] == "OSError: gone"


def test_no_name_is_looked_up(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("the host's full name was asked for"))
    with PageServer(Live(SimulatedFeed(1))) as running:
        assert get(running, "/", token=False)[0].status == 200


def test_the_other_loopback_address():
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    with PageServer(Live(SimulatedFeed(1)), host="::1") as running:
        assert running.address == f"http://[::1]:{running.port}/"
        connection = http.client.HTTPConnection("::1", running.port, timeout=10)
        connection.request("GET", "/", headers={"Host": f"[::1]:{running.port}"})
        assert connection.getresponse().status == 200
        connection.close()


def test_a_port_that_is_taken(server):
    with pytest.raises(ResourceError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
        PageServer(Live(SimulatedFeed(1)), port=server.port)


# --- the command -------------------------------------------------------------------------------------------------


def symcomm(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "symcomm", "top", *arguments],
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "COLUMNS": "120"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_in_the_terminal():
    done = symcomm("--simulate", "40", "--straggler", "3", "--terminal", "--once")
    assert done.returncode == 0, done.stderr
    assert "simulated job, 40 ranks" in done.stdout and "waited for most: rank 3" in done.stdout
    assert "all_reduce" in done.stdout and "24 more" in done.stdout


@pytest.mark.parametrize(
    ("width", "first", "kept"),
    [
        (40, "rank", ["state", "last did"]),
        (24, "rank", ["state"]),
        (10, "rank", []),
        (40, "collective", ["up to", "p50"]),
    ],
)
def test_a_narrow_terminal_keeps_what_matters(width: int, first: str, kept: list[str]):
    """Columns that remain are whole; the one that says whose row it is goes last."""
    live = Live(SimulatedFeed(4, straggler=3))
    console = Console(width=width, file=io.StringIO())
    show(live, once=True, console=console)
    lines = console.file.getvalue().splitlines()
    head = next(line for line in lines if line.split()[:1] == [first])
    assert all(name in head for name in kept), head
    rows = lines[lines.index(head) + 1 :][:4]
    assert all(len(line) <= width for line in rows)
    if first == "rank":
        assert [row.split()[0] for row in rows] == list("0123")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "0"), "--simulate must be 1 rank or more, got 0"),
        (("17", "--simulate", "4"), "JOB must be left out with --simulate"),
        (("--stuck", "1"), "--stuck must be left out without --simulate"),
        (("--simulate", "2", "--port", "70000"), "--port must be 0 to 65535, got 70000"),
        (
            ("--simulate", "2", "--terminal"),
            "--terminal needs a terminal to draw on; add --once to print the page once",
        ),
    ],
)
def test_bad_arguments(arguments, words):
    done = symcomm(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_the_command_prints_an_address_and_serves(tmp_path):
    target = tmp_path / "symcomm.prom"
    process = subprocess.Popen(
        [sys.executable, "-m", "symcomm", "top", "--simulate", "3", "--metrics-file", str(target)],
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "simulated job, 3 ranks\n"
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=(\S+)\n", process.stdout.readline())
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        connection.request("GET", "/api/v1/snapshot", headers={"Authorization": f"Bearer {found[2]}"})
        assert len(json.loads(connection.getresponse().read())["ranks"]["rank"]) == 3
        connection.close()
        assert process.stdout.readline().startswith(f"metrics: http://127.0.0.1:{found[1]}/metrics")
        end = time.monotonic() + 20
        while not target.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert "symcomm_stuck 0.0" in target.read_text()
    finally:
        process.terminate()
        process.wait(10)
