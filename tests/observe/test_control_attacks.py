"""The server under attack: it refuses in a sentence, stays up, and its rank does not notice."""

from __future__ import annotations

import http.client
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from symcomm import errors
from symcomm.observe import server_registry
from symcomm.observe.recorder import gil
from symcomm.observe.server import acceptor, connection, handlers, http_session
from symcomm.observe.server import server as server_module
from symcomm.observe.server.server import start
from tests.fuzz import http as fuzz_http
from tests.support.control_client import ask, connect, exchange
from tests.support.ranks import until

pytestmark = pytest.mark.without_torch

TOKEN = "the-token-of-this-job"


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("SYMCOMM_TOKEN", raising=False)


@pytest.fixture
def tcp():
    with start("tcp", token=TOKEN, gil_seconds=0) as server:
        yield server.address
        assert ask(server.address, "POST", "/handler/ping").content == b"pong", "the server did not survive"


@pytest.fixture
def unix():
    with start("unix", token=TOKEN, gil_seconds=0) as server:
        yield server.address
        assert ask(server.address, "POST", "/handler/ping").content == b"pong", "the server did not survive"


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, f"no HTTP answer: {answer[:100]!r}"
    return int(found[1])


def _serving() -> int:
    return sum(thread.name == "symcomm-request" for thread in threading.enumerate())


# --- who may ask -----------------------------------------------------------------------------------

SECRETS = [
    ("GET", "/"), ("GET", "/handler/"), ("POST", "/handler/dump_traceback"), ("POST", "/handler/no_such"),
    ("GET", "/api/v1/rank"), ("GET", "/api/v1/stacks"), ("GET", "/api/v1/store"), ("GET", "/api/v1/store?key=a"),
    ("GET", "/api/v1/operations"), ("POST", "/api/v1/dump"), ("GET", "/no/such"), ("HEAD", "/api/v1/stacks"),
]  # fmt: skip


@pytest.mark.parametrize("method,path", SECRETS)
def test_nothing_but_ping_without_the_token(tcp, method, path):
    answer = ask(tcp, method, path)
    assert answer.status == 401
    assert method == "HEAD" or b"Authorization: Bearer" in answer.content
    assert TOKEN.encode() not in answer.content


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong", "Bearer ", "Bearer", "", "Basic " + TOKEN, TOKEN, f"Bearer {TOKEN}x", "Bearer " + TOKEN[:-1],
        "Bearer " + TOKEN.upper(), "Bearer \xff\xfe", f"Bearer x {TOKEN}",
    ],
)  # fmt: skip
def test_wrong_tokens(tcp, header):
    assert ask(tcp, "GET", "/api/v1/rank", headers={"Authorization": header}).status == 401


def test_right_token(tcp):
    assert ask(tcp, "GET", "/api/v1/rank", token=TOKEN).json["pid"] == os.getpid()
    assert ask(tcp, "GET", "/api/v1/rank", headers={"Authorization": f"bearer {TOKEN}"}).status == 200


def test_an_empty_token_in_the_environment_opens_nothing(monkeypatch):
    monkeypatch.setenv("SYMCOMM_TOKEN", "")
    with start("tcp", gil_seconds=0) as server:
        assert ask(server.address, "GET", "/", headers={"Authorization": "Bearer "}).status == 401
        made = server_registry.on_this_host()[0]["token"]
        assert len(made) >= 40 and ask(server.address, "GET", "/", token=made).status == 200


def test_token_is_compared_in_constant_time(tcp, monkeypatch):
    compared = []
    real = connection.hmac.compare_digest
    monkeypatch.setattr(connection.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    ask(tcp, "GET", "/", token="guess")
    assert compared == [b"guess"]


def test_own_user_needs_no_token_on_a_unix_socket_but_others_do(unix, monkeypatch):
    assert ask(unix, "GET", "/api/v1/rank").status == 200
    monkeypatch.setattr(connection, "peer_uid", lambda _: os.getuid() + 1)
    assert ask(unix, "GET", "/api/v1/rank").status == 401
    assert ask(unix, "GET", "/api/v1/rank", token=TOKEN).status == 200
    assert ask(unix, "POST", "/handler/ping").status == 200


def test_the_kernel_says_who_is_there(unix):
    with connect(unix) as client:
        assert connection.peer_uid(client) == os.getuid()


def test_files_are_private(unix):
    path = unix.removeprefix("unix:")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    for entry in os.scandir(os.path.dirname(path)):
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_directory_of_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(errors.ResourceError, match="mode 0700"):
        start("unix")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("SYMCOMM_RUN_DIR", str(tmp_path / "link"))
    with pytest.raises(errors.ResourceError, match="mode 0700"):
        start("unix")


# --- browsers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", "[", ""]
)
def test_a_name_that_was_pointed_at_us(tcp, host):
    answer = ask(tcp, "GET", "/api/v1/rank", headers={"Host": host}, token=TOKEN)
    assert answer.status in (400, 421)
    assert ask(tcp, "POST", "/handler/ping", headers={"Host": host}).status in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:5", socket.gethostname()])
def test_our_own_names(tcp, host):
    assert ask(tcp, "GET", "/api/v1/rank", headers={"Host": host}, token=TOKEN).status == 200


def test_hosts_adds_names():
    with start("tcp", token=TOKEN, hosts=["training.example"], gil_seconds=0) as server:
        assert ask(server.address, "GET", "/", headers={"Host": "training.example"}, token=TOKEN).status == 200


def test_no_host_or_two(tcp):
    lines = f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    assert status_of(exchange(tcp, f"{lines}\r\n".encode())) == 400
    assert status_of(exchange(tcp, f"{lines}Host: localhost\r\nHost: evil\r\n\r\n".encode())) == 400


def test_pages_of_other_sites(tcp, unix):
    for address in (tcp, unix):
        for origin in ("http://evil.example", "null", "http://localhost:1", "http://[", ""):
            headers = {"Origin": origin, "Host": "localhost:8000"}
            assert ask(address, "POST", "/handler/ping", headers=headers, token=TOKEN).status == 403
        same = {"Origin": "http://localhost:8000", "Host": "localhost:8000"}
        assert ask(address, "POST", "/handler/ping", headers=same, token=TOKEN).status == 200


# --- too much, too slow, nonsense ------------------------------------------------------------------


def with_token(text: str) -> bytes:
    return text.replace("\r\n", f"\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n", 1).encode()


@pytest.mark.parametrize("length", [http_session.BODY_BYTES + 1, 10**12, 10**30])
def test_bodies_that_are_too_large_are_not_read(tcp, length):
    head = with_token(f"POST /handler/ping HTTP/1.1\r\nContent-Length: {length}\r\n\r\n")
    assert status_of(exchange(tcp, head + b"x" * 100_000)) in (400, 413)
    expecting = with_token(f"POST /handler/ping HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n")
    assert status_of(exchange(tcp, expecting)) in (400, 413)


def test_largest_body_is_taken(tcp):
    body = b"x" * http_session.BODY_BYTES
    assert ask(tcp, "POST", "/handler/ping", body, token=TOKEN).status == 200
    with connect(tcp) as client:
        head = with_token(f"POST /handler/ping HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n")
        client.sendall(head)
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert status_of(client.recv(1000)) == 200


@pytest.mark.parametrize(
    "head,status",
    [
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: +1\r\n\r\na", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: ٣\r\n\r\nabc", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: 0x1\r\n\r\na", 400),
        ("POST /handler/ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        ("POST /handler/ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 501),
        ("GET /" + "a" * 70_000 + " HTTP/1.1\r\n\r\n", 431),
        ("GET / HTTP/1.1\r\nX: " + "a" * 70_000 + "\r\n\r\n", 431),
        ("GET / HTTP/1.1\r\n" + "X: a\r\n" * 20_000 + "\r\n", 431),
        ("GET / HTTP/1.1\r\n" + "X: a\r\n" * 150 + "\r\n", 431),
        ("GET / HTTP/7.9\r\n\r\n", 505),
        ("GET / HTTP/one\r\n\r\n", 400),
        ("GET /\r\n\r\n", 400),
        ("GET http://[ HTTP/1.1\r\n\r\n", 400),
        ("GET http://[::1/x HTTP/1.1\r\n\r\n", 400),
        ("TRACE / HTTP/1.1\r\n\r\n", 501),
        ("GET /?" + "a=1&" * 500 + " HTTP/1.1\r\n\r\n", 400),
        ("GET /api/v1/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n\r\n", 404),
        ("GET /../../../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        ("GET /handler/..%2f..%2fetc%2fpasswd HTTP/1.1\r\n\r\n", 404),
        ("GET //evil.example/%2e%2e HTTP/1.1\r\n\r\n", 404),
        ("GET / HTTP/1.1\r\nX Y: a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nX : a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n: a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nno header at all\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nX: a\0b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nX: a\rb: c\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1 \r\n\r\n", 400),
        ("GET /\t HTTP/1.1\r\n\r\n", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length : 1\r\n\r\na", 400),
        ("POST /handler/ping HTTP/1.1\r\nContent-Length: 1 1\r\n\r\na", 400),
        ("POST /handler/ping HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        ("POST /handler/ping HTTP/1.1\r\nTransfer-Encoding\x0b: chunked\r\n\r\n", 400),
        ("CONNECT localhost:1 HTTP/1.1\r\n\r\n", 501),
        ("POST /handler/..%2fping HTTP/1.1\r\n\r\n", 404),
        ("POST /handler/%00 HTTP/1.1\r\n\r\n", 404),
    ],
)  # fmt: skip
def test_malformed(tcp, head, status):
    assert status_of(exchange(tcp, with_token(head))) == status if status != 404 else True
    if status == 404:
        head = head.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
        answer = exchange(tcp, with_token(head))
        assert status_of(answer) == 404 and b"root:" not in answer


@pytest.mark.parametrize("seed", range(5))
def test_garbage(tcp, seed):
    import random

    noise = random.Random(seed).randbytes(3000)
    for data in (
        noise,
        b"\x16\x03\x01\x02\x00\x01" + noise,
        b"\r\n" * 100,
        b"\0" * 5000,
        b"GET " + noise + b"\r\n\r\n",
    ):
        answer = exchange(tcp, data + b"\r\n\r\n")
        assert answer == b"" or status_of(answer) in (400, 431, 501, 505)


def test_no_pickle_is_ever_loaded():
    """Nothing here reads pickles: what a client sends is text and numbers."""
    modules = [*Path(server_module.__file__).parent.glob("*.py"), Path(server_registry.__file__), Path(gil.__file__)]
    assert len(modules) > 8
    for path in modules:
        assert not re.search(r"\bpickle\.|import pickle|\beval\(|\bexec\(|shell=True", path.read_text()), path.name


def test_second_request_hidden_in_a_refused_one(tcp):
    """A connection is closed once a request was refused, so what follows is never taken for another request."""
    inner = with_token("POST /handler/dump_traceback HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
    outer = with_token("POST /handler/ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert exchange(tcp, outer + inner).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("line", ["no header at all", "X Y: 1", " folded: 1", ": 1", "X: a\0"])
def test_a_body_that_a_bad_header_was_to_hide(tcp, line):
    """A parser that gives up at a bad line does not see the length, and takes the body for another request."""
    inner = with_token("POST /handler/dump_traceback HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
    outer = with_token(f"POST /handler/ping HTTP/1.1\r\n{line}\r\nContent-Length: {len(inner)}\r\n\r\n")
    answer = exchange(tcp, outer + inner + b"GET / HTTP/1.0\r\n\r\n")
    assert b"Thread 0x" not in answer and b"File" not in answer


def test_two_requests_at_once_are_two_answers(tcp):
    one = with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 3\r\n\r\n") + b"abc"
    last = with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert exchange(tcp, one + last).count(b"pong") == 2


def test_a_bad_request_after_one_for_the_head(tcp):
    first = with_token("HEAD / HTTP/1.1\r\n\r\n")
    answer = exchange(tcp, first + b"no request\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 1 and answer.count(b"HTTP/1.1 400 ") == 1
    assert b"illegal request line" in answer.rpartition(b"\r\n\r\n")[2]


def test_ten_thousand_odd_requests():
    fuzz_http.run(inputs=10_000, seed=1)


def test_slow_clients_are_hung_up_on(tcp, monkeypatch):
    monkeypatch.setattr(http_session, "FIRST_SECONDS", 0.5)
    with connect(tcp) as drip, connect(tcp) as silent:
        drip.settimeout(0.02)
        begun, ended = time.monotonic(), False
        while time.monotonic() - begun < 15 and not ended:
            try:
                drip.sendall(b"X")
                ended = drip.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
        assert ended, "a client that sends a byte now and then kept its connection"
        assert silent.recv(1) == b""


def test_slow_body(tcp, monkeypatch):
    monkeypatch.setattr(http_session, "FIRST_SECONDS", 0.5)
    assert exchange(tcp, with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 1000\r\n\r\n") + b"x" * 10) == b""


def test_many_connections(tcp):
    held = []
    try:
        for _ in range(3 * acceptor.CONNECTIONS):
            held.append(connect(tcp))
        assert ask(tcp, "POST", "/handler/ping").content == b"pong"  # strangers that wait make room
        assert ask(tcp, "GET", "/api/v1/rank", token=TOKEN).status == 200
        assert until(lambda: _serving() <= acceptor.STRANGERS, 20)
    finally:
        for client in held:
            client.close()


def test_everybodys_first_request_has_to_come_soon(unix, monkeypatch):
    monkeypatch.setattr(http_session, "FIRST_SECONDS", 0.3)
    with connect(unix) as silent, connect(unix) as later:
        later.sendall(b"POST /handler/ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert status_of(later.recv(1000)) == 200
        assert silent.recv(1) == b"", "also our own user has to say something"
        later.sendall(b"POST /handler/ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert status_of(later.recv(1000)) == 200, "who was trusted may wait between requests"


def test_what_ends_a_connection_is_counted(monkeypatch, caplog):
    monkeypatch.setattr(http_session, "FIRST_SECONDS", 0.3)
    monkeypatch.setattr(acceptor, "STRANGERS", 2)
    caplog.set_level("INFO", "symcomm.server")
    with start("tcp", token=TOKEN, gil_seconds=0) as server:
        address = server.address
        exchange(address, b"nonsense\r\n\r\n")
        exchange(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        exchange(address, b"GET / HT")  # and then nothing
        held = [connect(address) for _ in range(4)]
        assert until(lambda: set(_counts(address)) >= {"refused", "too slow", "made room"}, 20)
        assert _counts(address)["refused"] == 2
        for client in held:
            client.close()
    assert "a connection was closed: refused 400" in caplog.text


def _counts(address: str) -> dict[str, int]:
    return ask(address, "GET", "/api/v1/server", token=TOKEN).json["closed"]


def test_what_no_one_thought_of_ends_one_connection_only(tcp, monkeypatch, caplog):
    """Whatever a parser may raise."""
    real = http_session.HttpSession._next_event

    def break_now(self, piece):
        event = real(self, piece)
        if getattr(event, "target", b"") == b"/odd":
            raise MemoryError("as if")
        return event

    monkeypatch.setattr(http_session.HttpSession, "_next_event", break_now)
    for _ in range(3):
        assert exchange(tcp, with_token("GET /odd HTTP/1.1\r\n\r\n")) == b""
    assert until(lambda: _counts(tcp).get("failed") == 3, 20)
    assert caplog.text.count("MemoryError: as if") == 1, "said once"


def test_no_descriptors_pause_the_server_and_are_said(caplog):
    """In a process of its own, since the limit is a process's."""
    code = f"""
import logging, os, resource, socket, sys, time
from symcomm.observe.server.server import start
from symcomm.observe.server import acceptor
from tests.support.control_client import ask
acceptor.PAUSE = 0.01
server = start("unix:" + sys.argv[1], token="{TOKEN}", gil_seconds=0)
assert ask(server.address, "POST", "/handler/ping").content == b"pong"
while server._acceptor.connections:  # its end of that
    time.sleep(0.01)
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
held = [os.open("/dev/null", os.O_RDONLY)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(held[0], *map(int, os.listdir("/proc/self/fd"))) + 9,) * 2)
try:
    while True:
        held.append(os.dup(held[0]))
except OSError:
    pass
client.connect(sys.argv[1])
client.sendall(b"POST /handler/ping HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
before = time.process_time()
end = time.monotonic() + 20
while not server._acceptor.pauses:
    assert time.monotonic() < end
    time.sleep(0.01)
time.sleep(0.5)
assert time.process_time() - before < 0.3, "it does not spin"
assert server._acceptor.thread.is_alive()
for fd in held:
    os.close(fd)
assert b"pong" in client.recv(1000), "it goes on by itself"
assert ask(server.address, "POST", "/handler/ping").content == b"pong"
"""
    path = os.path.join(os.environ["SYMCOMM_RUN_DIR"] + "-socket")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("takes no clients for now: Too many open files; raise the limit on open files") == 1


def test_trusted_connections_are_not_pushed_out(tcp, monkeypatch):
    monkeypatch.setattr(acceptor, "CONNECTIONS", 4)
    with connect(tcp) as mine:
        mine.sendall(with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 0\r\n\r\n"))
        assert status_of(mine.recv(1000)) == 200
        held = [connect(tcp) for _ in range(12)]
        mine.sendall(with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 0\r\n\r\n"))
        assert status_of(mine.recv(1000)) == 200
        for client in held:
            client.close()


def test_strangers_are_slowed_down_without_slowing_us(monkeypatch):
    monkeypatch.setattr(server_module, "STRANGER_RATE", 0.1)
    monkeypatch.setattr(server_module, "STRANGER_BURST", 5.0)
    with start("tcp", token=TOKEN, gil_seconds=0) as server:
        answers = [ask(server.address, "GET", "/", token="guess").status for _ in range(20)]
        assert answers[:5] == [401] * 5 and answers.count(429) >= 10
        assert ask(server.address, "GET", "/", token=TOKEN).status == 200


def test_we_are_slowed_down_too(monkeypatch):
    monkeypatch.setattr(server_module, "TRUSTED_RATE", 0.1)
    monkeypatch.setattr(server_module, "TRUSTED_BURST", 5.0)
    with start("unix", gil_seconds=0) as server:
        assert [ask(server.address, "GET", "/").status for _ in range(6)] == [200] * 5 + [429]


def test_answers_to_clients_that_go_away(tcp):
    for _ in range(20):
        with connect(tcp) as client:
            client.sendall(with_token("GET /api/v1/stacks HTTP/1.1\r\n\r\n"))
    with connect(tcp) as client:
        client.sendall(with_token("POST /handler/ping HTTP/1.1\r\nContent-Length: 100\r\n\r\n") + b"x")
    assert ask(tcp, "GET", "/", token=TOKEN).status == 200  # others are answered all the same


# --- the end ---------------------------------------------------------------------------------------


def test_shutdown_while_everybody_asks():
    server = start("tcp", token=TOKEN, gil_seconds=0)
    stop, surprises = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                ask(server.address, "GET", "/api/v1/stacks", token=TOKEN)
            except (OSError, http.client.HTTPException):
                pass
            except Exception as error:
                surprises.append(error)

    clients = [threading.Thread(target=keep_asking) for _ in range(6)]
    for client in clients:
        client.start()
    time.sleep(0.2)
    enders = [threading.Thread(target=server.shutdown) for _ in range(4)]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join(20)
        assert not ender.is_alive()
    stop.set()
    for client in clients:
        client.join(30)
    assert surprises == []
    with pytest.raises(OSError):
        connect(server.address)
    assert [t for t in threading.enumerate() if t.name == "symcomm-server" and t is server._acceptor.thread] == []
    server.shutdown()


def test_a_handler_may_shut_its_server_down():
    server = start("unix", gil_seconds=0)
    handlers.register_handler("test_shutdown", lambda request, response: server.shutdown())
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server.address, "POST", "/handler/test_shutdown")
    finally:
        handlers._handlers.pop("test_shutdown")
    assert not os.path.exists(server.address.removeprefix("unix:"))


def test_descriptors_and_threads_are_given_back():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with start("unix", gil_seconds=0) as server:
        ask(server.address, "POST", "/handler/ping")
    before = open_files(), threading.active_count()
    for _ in range(10):
        with start("unix", gil_seconds=0) as server:
            ask(server.address, "POST", "/handler/ping")
    assert until(lambda: open_files() <= before[0] and threading.active_count() <= before[1], 20)


def test_a_forked_child_serves_nothing_and_removes_nothing():
    with start("unix", token=TOKEN, gil_seconds=0) as server:
        path = server.address.removeprefix("unix:")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                inherited = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _link(fd)]
                server.shutdown()
                code = 0 if os.path.exists(path) and f"socket:[{_inode(path)}]" not in inherited else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(server.address, "POST", "/handler/ping").content == b"pong"


def _link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def _inode(path: str) -> str:
    with open("/proc/net/unix") as file:
        return next(line.split()[6] for line in file if line.rstrip().endswith(path))


def test_forks_while_clients_ask():
    """A child is born while locks of the server may be held; it must neither hang nor serve."""
    with start("unix", token=TOKEN, gil_seconds=0) as server:
        stop = threading.Event()

        def keep_asking() -> None:
            while not stop.is_set():
                ask(server.address, "POST", "/handler/ping")

        clients = [threading.Thread(target=keep_asking) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    server.shutdown()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            for client in clients:
                client.join(30)
        assert ask(server.address, "POST", "/handler/ping").content == b"pong"


def test_what_a_killed_server_left_is_replaced(tmp_path):
    path = str(tmp_path / "socket")
    code = f"from symcomm.observe.server.server import start; import os; start('unix:{path}'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert os.path.exists(path)
    with start(f"unix:{path}", gil_seconds=0) as server:
        assert ask(server.address, "POST", "/handler/ping").content == b"pong"
        with pytest.raises(errors.CallerError, match="already exists"):
            start(f"unix:{path}")
        assert server_registry.on_this_host()[0]["pid"] == os.getpid()  # and its note is swept
        assert len(server_registry.on_this_host()) == 1


def test_program_ends_though_a_server_runs(tmp_path):
    path = str(tmp_path / "socket")
    code = f"""
import socket
from symcomm.observe.server.server import start
start('unix:{path}')
client = socket.socket(socket.AF_UNIX)
client.connect('{path}')
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.path.exists(path)


def test_bad_arguments():
    for where, words in [("pigeon", "'unix', 'unix:/path', 'tcp'"), ("tcp:x", "tcp:PORT"), ("tcp:70000", "tcp:PORT")]:
        with pytest.raises(errors.BadArgumentError, match=words):
            start(where)
    with pytest.raises(errors.BadArgumentError, match="cert"):
        start("tcp", key="x")
    with pytest.raises(errors.BadArgumentError, match="readable PEM"):
        start("tcp", cert="/no/such", key="/no/such")


def test_opening_to_a_network_is_said():
    with pytest.warns(UserWarning, match="open to a network without TLS"):
        start("tcp", bind="0.0.0.0", token=TOKEN, gil_seconds=0).shutdown()


def test_tls(tmp_path):
    import shutil
    import ssl
    import urllib.request

    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with start("tcp", cert=cert, key=key, token=TOKEN, gil_seconds=0) as server:
        assert server.address.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        request = urllib.request.Request(f"{server.address}/api/v1/rank", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, context=trusting, timeout=20) as answer:
            assert answer.status == 200
        plain = server.address.replace("https", "http")
        assert exchange(plain, b"GET / HTTP/1.1\r\n\r\n")[:5] != b"HTTP/"
        silent = connect(plain)  # in the middle of a handshake when the server ends
    silent.close()
