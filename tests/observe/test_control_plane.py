"""The worker server answers as PyTorch's does: both are asked the same, over the same kind of socket."""

from __future__ import annotations

import json
import os
import sys
from urllib.parse import quote

import pytest

pytest.importorskip("torch")
from tests.support.c10d_compare import ours, theirs
from tests.support.control_client import Answer, ask

MODULES = [theirs, ours]


def echo(request, response):
    names = ("a", "b", "c", "z", "missing")
    response.set_content(json.dumps([request.body(), [request.get_param(n) for n in names]]), "application/json")
    response.set_status(201)


def boom(request, response):
    raise ValueError("boom")


def twice(request, response):
    response.set_content("first", "text/a")
    response.set_content("second", "text/b")


for module in MODULES:
    for handler in (echo, boom, twice):
        module._register_handler(f"test_{handler.__name__}", handler)
    module._register_handler("test_nothing", lambda request, response: None)
    module._register_handler("test a b", echo)
    module._register_handler("test_bytes", lambda request, response: response.set_content(b"\xff\x00b", "x/y"))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    servers = [module._WorkerServer(str(folder / module.__name__[:8])) for module in MODULES]
    yield [f"unix:{folder / module.__name__[:8]}" for module in MODULES]
    for server in servers:
        server.shutdown()


FORM = {"Content-Type": "application/x-www-form-urlencoded"}
REQUESTS = [
    ("POST", "/handler/ping", b"", {}),
    ("POST", "/handler/ping", b"with a body", {}),
    ("POST", "/handler/ping/", b"", {}),
    ("POST", "/handler/%70ing", b"", {}),
    ("GET", "/handler/ping", None, {}),
    ("PUT", "/handler/ping", b"", {}),
    ("DELETE", "/handler/ping", None, {}),
    ("OPTIONS", "/handler/ping", None, {}),
    ("POST", "/handler/no_such", b"", {}),
    ("POST", "/handler/", b"", {}),
    ("POST", "/handler/ping/more", b"", {}),
    ("POST", "/handler/../handler/ping", b"", {}),
    ("GET", "/../../etc/passwd", None, {}),
    ("GET", "/handler", None, {}),
    ("POST", "/", b"", {}),
    ("GET", "/no/such", None, {}),
    ("POST", "/handler/test_echo", b"", {}),
    ("POST", "/handler/test_echo?a=1&b=%20x+y&a=2&c", b"hello", {}),
    ("POST", "/handler/test_echo?a=%C3%A9&b=a%26b%3D", "é".encode(), {}),
    ("POST", "/handler/test_echo?b=1", b"a=9&z=2%20", FORM),
    ("POST", "/handler/test_echo?a=1", b"a=9&z=2+3", FORM),
    ("POST", "/handler/test%20a%20b?a=", b"", {}),
    ("POST", "/handler/test_twice", b"", {}),
    ("POST", "/handler/test_nothing", b"", {}),
    ("POST", "/handler/test_bytes", b"", {}),
    ("POST", "/handler/wait_counter_values", b"", {}),
    ("POST", "/handler/test_boom", b"", {}),
]


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda r: f"{r[0]} {r[1]}")
def test_same_answer(addresses, asked):
    wanted, got = (ask(address, *asked) for address in addresses)
    assert (got.status, got.content, got.content_type) == (wanted.status, wanted.content, wanted.content_type)


def test_body_that_is_no_text(addresses):
    wanted, got = (ask(address, "POST", "/handler/test_echo", b"\xff\xfe") for address in addresses)
    assert got.status == wanted.status == 500
    assert got.content.splitlines()[0] == wanted.content.splitlines()[0]  # the rest are frames, ours one more


def test_front_page_and_list(addresses):
    wanted, got = (ask(address, "GET", "/") for address in addresses)
    assert (got.status, got.content_type) == (wanted.status, wanted.content_type)
    assert b'<a href="/handler/">Handler names</a>' in got.content and b"Handler names" in wanted.content
    wanted, got = (ask(address, "GET", "/handler/") for address in addresses)
    assert (got.status, got.content_type) == (wanted.status, wanted.content_type)
    assert set(wanted.json) <= set(got.json)
    wanted, got = (ask(address, "HEAD", "/") for address in addresses)
    assert (got.status, got.content) == (wanted.status, wanted.content) == (200, b"")


def test_dump_traceback(addresses):
    for address in addresses:
        answer = ask(address, "POST", "/handler/dump_traceback")
        assert answer.status == 200 and answer.content_type == "text/plain"
        assert b"(most recent call first)" in answer.content and b"test_control_plane.py" in answer.content


def test_pyspy(addresses, tmp_path, monkeypatch):
    wanted, got = (ask(address, "POST", "/handler/pyspy_dump") for address in addresses)
    if wanted.status == 500:
        assert got.status == 500 and b"py-spy" in got.content
    tool = tmp_path / "py-spy"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers = [ask(address, "POST", "/handler/pyspy_dump?native=1&nonblocking=1") for address in addresses]
    assert answers[1].content.split()[:3] == answers[0].content.split()[:3]
    assert sorted(answers[1].content.split()) == sorted(answers[0].content.split())


def test_flight_recorder(addresses):
    pytest.importorskip("symcomm.observe.recorder.torch_format")
    wanted, got = (ask(address, "POST", "/handler/fr_trace_json") for address in addresses)
    assert got.status == wanted.status == 200 and got.content_type == wanted.content_type
    assert got.json["version"] == wanted.json["version"]
    refused = ask(addresses[1], "POST", "/handler/fr_trace_json?onlyactive=perhaps")
    assert refused.status == 500 and b"onlyactive must be true or false" in refused.content
    assert ask(addresses[1], "POST", "/handler/dump_nccl_trace_pickle").status == 200


@pytest.mark.parametrize("module", MODULES, ids=["torch", "symcomm"])
def test_registry(module):
    assert {"ping", "dump_traceback", "fr_trace_json", "pyspy_dump", "wait_counter_values"} <= set(
        module._get_handler_names()
    )
    with pytest.raises(ValueError, match="Handler test_echo already registered"):
        module._register_handler("test_echo", echo)
    with pytest.raises(ValueError, match="Failed to find handler nonesuch"):
        module._get_handler("nonesuch")
    with pytest.raises(TypeError):
        module._register_handler("x", 5)
    with pytest.raises(TypeError):
        module._register_handler(5, echo)


@pytest.mark.parametrize("module", MODULES, ids=["torch", "symcomm"])
@pytest.mark.parametrize("name", ["ping", "test_echo", "wait_counter_values"])
def test_handlers_can_be_called_with_classes_of_ones_own(module, name):
    said = []

    class MyRequest(module._Request):
        def __init__(self):
            super().__init__()

        def body(self):
            return "body"

        def get_param(self, name):
            return f"<{name}>"

    class MyResponse(module._Response):
        def __init__(self):
            super().__init__()

        def set_content(self, content, content_type):
            said.append((content, content_type))

        def set_status(self, status):
            said.append(status)

    module._get_handler(name)(MyRequest(), MyResponse())
    assert said[-1] in (200, 201)
    answers = {"ping": "pong", "test_echo": '["body", ["<a>", "<b>", "<c>", "<z>", "<missing>"]]'}
    if name in answers:
        assert said[0][0] == answers[name]
    else:  # whatever PyTorch has counted in this process so far
        assert isinstance(json.loads(said[0][0]), dict)


def test_handlers_that_only_pytorch_has_are_found(addresses):
    theirs._register_handler("test_only_theirs", echo)
    answer = ask(addresses[1], "POST", "/handler/test_only_theirs?a=1", b"x")
    assert (answer.status, answer.json) == (201, ["x", ["1", "", "", "", ""]])
    assert "test_only_theirs" in ours._get_handler_names()


@pytest.mark.parametrize("module", MODULES, ids=["torch", "symcomm"])
def test_bad_places(module, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="already exists"):
        module._WorkerServer(str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="Error binding to"):
        module._WorkerServer(str(tmp_path / "no" / "such"))
    with pytest.raises(TypeError):
        module._WorkerServer(5)


def test_bad_places_that_pytorch_does_not_survive():
    for port in (-2, 70000):
        with pytest.raises(ValueError, match="port must be 0 to 65535"):
            ours._WorkerServer("127.0.0.1", port)
    with pytest.raises(RuntimeError, match="Error binding to no.such.host.invalid"):
        ours._WorkerServer("no.such.host.invalid", 0)
    with pytest.raises(ValueError, match="at most 107 bytes"):
        ours._WorkerServer("/tmp/" + "x" * 200)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::", ""])
def test_tcp(host, monkeypatch):
    monkeypatch.setenv("SYMCOMM_TOKEN", "secret")
    server = ours._WorkerServer(host, 0)
    try:
        place = f"http://localhost:{server.port}" if host != "::" else f"http://[::1]:{server.port}"
        if host == "":
            place = server.address.replace(server.address.split("//")[1].rpartition(":")[0], "localhost")
        assert ask(place, "POST", "/handler/ping").content == b"pong"
        assert ask(place, "POST", "/handler/test_echo", token="secret").status == 201
        assert ask(place, "POST", "/handler/test_echo").status == 401
    finally:
        server.shutdown()


def test_pytorchs_worker_main_with_our_server(tmp_path, monkeypatch):
    """torch.distributed.elastic.control_plane, as it is, serves with our class in the binding's place."""
    from torch.distributed.elastic import control_plane

    path = str(tmp_path / "socket")
    monkeypatch.setenv(control_plane.TORCH_WORKER_SERVER_SOCKET, path)
    monkeypatch.setattr(theirs, "_WorkerServer", ours._WorkerServer)
    asked: list[Answer] = []

    with control_plane.worker_main():
        asked.append(ask(f"unix:{path}", "POST", "/handler/ping"))
    assert asked[0].content == b"pong"
    assert not os.path.exists(path)


def test_names_are_quoted(addresses):
    """A name comes back as plain text, never as a page that a browser would run."""
    answer = ask(addresses[1], "POST", "/handler/" + quote("<script>"))
    assert (answer.status, answer.content_type) == (404, "text/plain")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_import_is_light():
    import subprocess

    code = "import sys, symcomm.observe.server.server; print('torch' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
