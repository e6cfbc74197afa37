"""What a server answers: handlers by name, as in PyTorch, and routes by path, which are ours.

A named handler is called ``handler(request, response)`` at ``POST /handler/NAME``. A route is a function of a request
that returns something JSON can hold, or a Response; ``route("GET", "/api/v1/metrics")`` is how other modules add one.

The names PyTorch has are here: ``ping``, ``dump_traceback``, ``fr_trace_json``, ``dump_nccl_trace_json``,
``dump_nccl_trace_pickle``, ``pyspy_dump``, ``wait_counter_values``, ``c10d_health_check``. Names that only PyTorch's
own table has, because a C++ library put them there, work too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from symcomm.arguments import as_text
from symcomm.errors import bad_argument, wrong_type
from symcomm.group.hook_classes import unhealthy_backends
from symcomm.memory.arena import has_arena
from symcomm.observe.recorder.dump import this_rank
from symcomm.observe.recorder.torch_format import as_json, as_pickle
from symcomm.observe.server.requests import Request, Response

Handler = Callable[[Any, Any], Any]
PY_SPY_SECONDS = 60

_handlers: dict[str, Handler] = {}
_routes: dict[tuple[str, str], Route] = {}
_lock = threading.Lock()


# --- by name -------------------------------------------------------------------------------------


def register_handler(name: str, handler: Handler) -> None:
    """Serve ``handler(request, response)`` at ``POST /handler/NAME`` of every server of this process.

    Raises: WrongTypeError, ValueError for a name that is taken."""
    name = _named("_register_handler", name)
    if not callable(handler):
        raise wrong_type("_register_handler", "handler", handler, "a function of request and response")
    with _lock:
        if name in _handlers:
            raise ValueError(f"Handler {name} already registered")
        _handlers[name] = handler


def get_handler(name: str) -> Handler:
    """The handler of that name, ours or PyTorch's. Raises: WrongTypeError, ValueError when there is none."""
    name = _named("_get_handler", name)
    handler = _handlers.get(name) or _torchs_handler(name)
    if handler is None:
        raise ValueError(f"Failed to find handler {name}")
    return handler


def _named(call: str, name: Any) -> str:
    found = as_text(name)
    if found is None:
        raise wrong_type(call, "name", name, "a str")
    return found


def get_handler_names() -> list[str]:
    """Names of all handlers, ours and PyTorch's. Raises: nothing."""
    theirs = _torch()._get_handler_names() if _torch() else []
    return sorted({*_handlers, *theirs})


def _torch() -> Any:
    """PyTorch's binding, if the program has loaded it."""
    return sys.modules.get("torch._C._distributed_c10d")


def _torchs_handler(name: str) -> Handler | None:
    """A handler of PyTorch's own table, which takes its own kinds of request and response."""
    binding = _torch()
    if binding is None or name not in binding._get_handler_names():
        return None
    handler = binding._get_handler(name)
    request_type: Any = binding._Request
    response_type: Any = binding._Response

    class TorchRequest(request_type):
        def __init__(self, request: Any):
            super().__init__()
            self.body, self.get_param = request.body, request.get_param

    class TorchResponse(response_type):
        def __init__(self, response: Any):
            super().__init__()
            self.set_content, self.set_status = response.set_content, response.set_status

    return lambda request, response: handler(TorchRequest(request), TorchResponse(response))


# --- by path -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    answer: Callable[[Request], Any]
    public: bool


def route(method: str, path: str, *, public: bool = False) -> Callable[[Callable[[Request], Any]], Any]:
    """Decorator: serve a function at ``path``. ``public``: also without the token, so it must reveal nothing."""
    if method not in ("GET", "POST"):
        raise bad_argument("route", "method", method, "'GET' or 'POST'")
    if not path.startswith("/") or path.startswith("/handler/"):
        raise bad_argument("route", "path", path, "a path that begins with / and is not below /handler/")

    def add(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        with _lock:
            if (method, path) in _routes:
                raise ValueError(f"route: {method} {path} is taken already.")
            _routes[method, path] = Route(answer, public)
        return answer

    return add


def routes() -> dict[tuple[str, str], Route]:
    return dict(_routes)


# --- those that PyTorch has ----------------------------------------------------------------------


def _reply(response: Any, content: str | bytes, kind: str, status: int = 200) -> None:
    response.set_content(content, kind)
    response.set_status(status)


def _ping(_request: Any, response: Any) -> None:
    _reply(response, "pong", "text/plain")


def _dump_traceback(_request: Any, response: Any) -> None:
    """Every thread's Python stack, as faulthandler writes it."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        _reply(response, file.read(), "text/plain")


def _flag(request: Any, name: str, default: bool) -> bool:
    text = request.get_param(name).lower()
    if text in ("", "true", "1", "false", "0"):
        return default if not text else text in ("true", "1")
    raise bad_argument("flight recorder", name, text, "true or false")


def _flight_dump(request: Any, stacks: bool) -> dict[str, Any]:
    """This rank's records, in PyTorch's format."""
    collectives, only_active = _flag(request, "includecollectives", True), _flag(request, "onlyactive", False)
    group = getattr(getattr(request, "rank", None), "group", None)
    if group is None and not has_arena():
        collectives = False
    return this_rank(collectives, stacks, only_active, group and group.arena)


def _fr_trace_json(request: Any, response: Any) -> None:
    _reply(response, as_json(_flight_dump(request, False)), "application/json")


def _fr_trace_pickle(request: Any, response: Any) -> None:
    dump = _flight_dump(request, _flag(request, "includestacktraces", True))
    _reply(response, as_pickle(dump), "application/octet-stream")


def _pyspy_dump(request: Any, response: Any) -> None:
    """py-spy's view of this process. Parameters: ``native``, ``subprocesses``, ``nonblocking``."""
    program = shutil.which("py-spy")
    if program is None:
        _reply(response, "py-spy was not found; `pip install py-spy`, or ask dump_traceback.", "text/plain", 500)
        return
    options = [f"--{name}" for name in ("native", "subprocesses", "nonblocking") if request.get_param(name)]
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(os.getpid()), *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PY_SPY_SECONDS,
        )  # fmt: skip
        content, status = done.stdout, 200 if done.returncode == 0 else 500
    except subprocess.TimeoutExpired:
        content, status = f"py-spy did not end within {PY_SPY_SECONDS} s.".encode(), 500
    _reply(response, content, "text/plain", status)


def _wait_counter_values(request: Any, response: Any) -> None:
    """PyTorch's counters of waits, if PyTorch is loaded."""
    with contextlib.suppress(ValueError):
        if theirs := _torchs_handler("wait_counter_values"):
            theirs(request, response)
            return
    _reply(response, "{}", "application/json")


def _c10d_health_check(request: Any, response: Any) -> None:
    """Whether a group that a HealthCheckHook watches has failed in this process, ours or PyTorch's."""
    unhealthy, found = set(unhealthy_backends()), Response()
    if theirs := _torchs_handler("c10d_health_check"):  # since 2.15
        theirs(request, found)
        unhealthy |= set(json.loads(found.content or "{}").get("unhealthy_backends", ()))
    told = {"healthy": not unhealthy, "unhealthy_backends": sorted(unhealthy)}
    _reply(response, json.dumps(told, separators=(",", ":")), "application/json")


for _name, _handler in {
    "ping": _ping,
    "dump_traceback": _dump_traceback,
    "fr_trace_json": _fr_trace_json,
    "dump_nccl_trace_json": _fr_trace_json,
    "dump_nccl_trace_pickle": _fr_trace_pickle,
    "pyspy_dump": _pyspy_dump,
    "wait_counter_values": _wait_counter_values,
    "c10d_health_check": _c10d_health_check,
}.items():
    register_handler(_name, _handler)
