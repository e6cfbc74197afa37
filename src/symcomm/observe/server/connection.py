"""One client of a rank's server: what it may request, and how often.

http_session.py does HTTP. This file says who is trusted, and refuses web pages that reach us through a browser here.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from symcomm.errors import CallerError
from symcomm.observe.server.handlers import get_handler, get_handler_names, routes
from symcomm.observe.server.http_session import Head, HttpSession, Refusal
from symcomm.observe.server.requests import Request, Response

PARAMETERS = 100
PAGE = '<h1>symcomm worker server</h1>\n<a href="/handler/">Handler names</a>\n'


class RateLimit:
    """A rate limit: requests per second, with a burst."""

    def __init__(self, rate: float, burst: float):
        self._rate, self._burst, self._level = rate, burst, burst
        self._filled = time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = time.monotonic()
            self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
            self._filled = now
            if self._level < 1:
                return False
            self._level -= 1
            return True


def peer_uid(connection: socket.socket) -> int | None:
    """The user at the other end of a Unix socket, by the kernel."""
    if connection.family != socket.AF_UNIX:
        return None
    pid_uid_gid = struct.Struct("3i")
    return pid_uid_gid.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size))[1]


def is_known_host(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header names us. A page that points its own name here (DNS rebinding) sends that name, so only
    numeric addresses and our own names are safe."""
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost" or host in {name.lower() for name in names}


def _params(query: str, body: bytes, content_type: str) -> dict[str, str]:
    """Parameters of the query and of a form; the first of a name counts."""
    pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS)
    if body and content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded":
        form = body.decode(errors="replace")
        pairs += parse_qsl(form, keep_blank_values=True, max_num_fields=PARAMETERS)
    return dict(reversed(pairs))


def format_exception(error: BaseException) -> str:
    """What failed and where, in the form of PyTorch's server."""
    frames = [f"  {f.filename}({f.lineno}): {f.name}\n" for f in reversed(traceback.extract_tb(error.__traceback__))]
    ours = [frame for frame in frames if not frame.startswith(f"  {__file__}(")]
    return f"{type(error).__name__}: {error}\n\nAt:\n{''.join(ours)}"


class RankSession(HttpSession):
    """Serves one client until either side closes."""

    def __init__(self, sock: socket.socket, server: Any):  # a server.Server
        super().__init__()
        self._server = server
        self._on_network = sock.family != socket.AF_UNIX
        self._same_user = peer_uid(sock) == os.getuid()
        self.trusted = self._same_user

    # --- who asks, and may they --------------------------------------------------------------------

    def respond(self, head: Head) -> Response:
        try:
            url = urlsplit(head.target)
        except ValueError:
            raise Refusal(400, "The address cannot be read.") from None
        path = unquote(url.path, errors="replace")
        has_token = self._has_token(head)
        trusted = self._same_user or has_token
        self._check(head, path, trusted)
        self.trusted = trusted
        self.check_body(head)
        body = self.read_body()
        try:
            params = _params(url.query, body, head.headers.get("Content-Type", ""))
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        request = Request(
            body, params, method=head.method, path=path, headers=head.headers, trusted=trusted, has_token=has_token,
            rank=self._server.rank,
        )  # fmt: skip
        return _answer(request)

    def _has_token(self, head: Head) -> bool:
        scheme, _, given = head.headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(errors="replace"), self._server.token.encode())
        return scheme.lower() == "bearer" and bool(self._server.token) and matches

    def _check(self, head: Head, path: str, trusted: bool) -> None:
        """Refuse what we may not answer, before we read its body."""
        host, origin = head.headers.get("Host"), head.headers.get("Origin")
        if self._on_network and host is not None and not is_known_host(host, self._server.hosts):
            raise Refusal(
                421, "The Host header names another machine; use this one's address, or pass hosts= to start()."
            )
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, "Pages of other sites may not ask.")
        bucket = self._server.trusted_bucket if trusted else self._server.stranger_bucket
        if not bucket.take():
            raise Refusal(429, "Too many requests; wait a second.")
        known = routes().get((head.method, path))
        is_public = known.public if known else (head.method, path) == ("POST", "/handler/ping")
        if not trusted and not is_public:
            raise Refusal(
                401, "The job's token is needed: send `Authorization: Bearer TOKEN` with what SYMCOMM_TOKEN holds."
            )


# --- what is asked -------------------------------------------------------------------------------


def _answer(request: Request) -> Response:
    method = "GET" if request.method == "HEAD" else request.method
    known = routes().get((method, request.path))
    if known is not None:
        return _call_route(known.answer, request)
    if method == "GET" and request.path == "/":
        return Response(PAGE, "text/html")
    if method == "GET" and request.path == "/handler/":
        return Response.of_json(get_handler_names())
    if method == "POST" and request.path.startswith("/handler/"):
        return _call_handler(request.path.removeprefix("/handler/").removesuffix("/"), request)
    return Response(status=404)


def _call_handler(name: str, request: Request) -> Response:
    if "/" in name:
        return Response(status=404)
    try:
        handler = get_handler(name)
    except ValueError as error:
        return Response(f"Handler {name} not found: {error}", "text/plain", 404)
    response = Response()
    try:
        handler(request, response)
    except Exception as error:
        return Response(f"Handler {name} failed: {format_exception(error)}", "text/plain", 500)
    return response


def _call_route(answer: Any, request: Request) -> Response:
    try:
        value = answer(request)
    except CallerError as error:
        return Response.of_json({"error": str(error)}, 400)
    except Exception as error:
        return Response.of_json({"error": f"{type(error).__name__}: {error}"}, 500)
    return value if isinstance(value, Response) else Response.of_json(value)
