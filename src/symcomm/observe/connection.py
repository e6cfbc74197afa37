"""One client's connection: what may be asked, how much, how fast and by whom.

Parsing is the standard library's ``http.server``: maintained, always there, loaded in milliseconds, and it brings no
event loop into a training process. This file adds what it leaves open: limits on sizes, a deadline for every request,
who is trusted, and checks against web pages that would use a browser on this host to reach us.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import io
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
from symcomm.observe.handlers import get_handler, get_handler_names, routes
from symcomm.observe.requests import Request, Response

HEAD_BYTES = 32 << 10  # request line and headers
BODY_BYTES = 1 << 20
PARAMETERS = 100
STRANGER_SECONDS = 5.0  # for a whole request, from the moment we wait for it
TRUSTED_SECONDS = 30.0  # the same, for a connection that was trusted before: a page that asks now and then
PAGE = '<h1>symcomm worker server</h1>\n<a href="/handler/">Handler names</a>\n'


class TooMuch(Exception):
    """The head of a request is too long."""


class TimedReader(io.RawIOBase):
    """Reads from a socket until a moment, and at most so many bytes; a client that drips bytes gains nothing."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.deadline = 0.0
        self.budget = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self.budget <= 0:
            raise TooMuch
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer, min(len(buffer), self.budget))
        self.budget -= count
        return count


class Bucket:
    """So many requests a second, and some more at once."""

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
    """The user at the other end of a Unix socket, as the kernel knows it."""
    if connection.family != socket.AF_UNIX:
        return None
    pid_uid_gid = struct.Struct("3i")
    return pid_uid_gid.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size))[1]


def is_known_host(header: str, names: Iterable[str]) -> bool:
    """Whether a Host header names us. A page that had its own name point here (DNS rebinding) comes with that name,
    so numeric addresses are safe, and of names only our own."""
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost" or host in {name.lower() for name in names}


def words_for_exception(error: BaseException) -> str:
    """What failed and where, in the form that PyTorch's server answers with."""
    frames = [f"  {f.filename}({f.lineno}): {f.name}\n" for f in reversed(traceback.extract_tb(error.__traceback__))]
    ours = [frame for frame in frames if not frame.startswith(f"  {__file__}(")]
    return f"{type(error).__name__}: {error}\n\nAt:\n{''.join(ours)}"


class Connection(http.server.BaseHTTPRequestHandler):
    """Serves one client until either side closes."""

    protocol_version = "HTTP/1.1"
    server: Any  # a server.Server
    server_version, sys_version = "symcomm", ""

    # --- reading and writing ---------------------------------------------------------------------

    def setup(self) -> None:
        self.connection = self.request
        if self.server.tls is not None:
            self.connection.settimeout(STRANGER_SECONDS)
            self.connection.do_handshake()
        self._reader = TimedReader(self.connection)
        self.rfile: Any = io.BufferedReader(self._reader)
        self.wfile: Any = io.BytesIO()  # an answer leaves in one piece
        self._same_user = peer_uid(self.connection) == os.getuid()
        self.trusted = self._same_user

    def handle_one_request(self) -> None:
        self._reader.deadline = time.monotonic() + (TRUSTED_SECONDS if self.trusted else STRANGER_SECONDS)
        self._reader.budget = HEAD_BYTES
        self._expects_100 = False
        self.requestline, self.command, self.request_version = "", "", ""
        try:
            super().handle_one_request()
        except TooMuch:
            self.send_error(431)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        self._send()

    def _send(self) -> None:
        content, self.wfile = self.wfile.getvalue(), io.BytesIO()
        if content:
            self.connection.settimeout(TRUSTED_SECONDS if self.trusted else STRANGER_SECONDS)
            self.connection.sendall(content)

    def handle_expect_100(self) -> bool:
        self._expects_100 = True  # answered when we know that we want the body
        return True

    def finish(self) -> None:
        self.rfile.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a rank's output belongs to the program."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse, and hang up: what else is on the line may not be what it seems."""
        self.close_connection = True
        response = Response()
        response.status = int(code)
        if text := message or explain or self.responses.get(code, ("",))[0]:
            response.set_content(text, "text/plain")
        self._answer(response)

    def _answer(self, response: Response) -> None:
        if self.request_version == "HTTP/0.9":
            self.request_version = self.protocol_version  # which knows neither status nor headers
        self.send_response(response.status)
        if response.content_type:
            self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        for name, value in response.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.content)

    # --- who asks, and may they --------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(400, "The address cannot be read.")
            return
        path = unquote(url.path, errors="replace")
        has_token = self._has_token()
        trusted = self._same_user or has_token
        refusal = self._refusal(path, trusted)
        if refusal is not None:
            self.send_error(*refusal)
            return
        self.trusted = trusted
        try:
            body = self._body()
            params = self._params(url.query, body)
        except ValueError as error:
            self.send_error(400, str(error))
            return
        if body is None:
            return
        request = Request(
            body, params, method=self.command, path=path, headers=self.headers, trusted=trusted, has_token=has_token,
            rank=self.server.rank,
        )  # fmt: skip
        self._answer(self._respond(request))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _serve

    def _has_token(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        given = given.strip()
        matches = hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())
        return scheme.lower() == "bearer" and bool(self.server.token) and matches

    def _refusal(self, path: str, trusted: bool) -> tuple[int, str] | None:
        """Why this request is not answered, before any of its body is read."""
        headers = self.headers
        on_network = self.connection.family != socket.AF_UNIX
        if self.request_version == "HTTP/0.9":
            return 400, "HTTP/1.0 or 1.1 is needed."
        if on_network and self.request_version != "HTTP/1.0" and len(headers.get_all("Host", [])) != 1:
            return 400, "One Host header is needed."
        if on_network and "Host" in headers and not is_known_host(headers["Host"], self.server.hosts):
            return 421, "The Host header names another machine; use this one's address, or pass hosts= to start()."
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != headers.get("Host"):
            return 403, "Pages of other sites may not ask."
        bucket = self.server.trusted_bucket if trusted else self.server.stranger_bucket
        if not bucket.take():
            return 429, "Too many requests; wait a second."
        if not trusted and not self._is_public(path):
            return 401, "The job's token is needed: send `Authorization: Bearer TOKEN` with what SYMCOMM_TOKEN holds."
        return None

    def _is_public(self, path: str) -> bool:
        if self.command == "POST" and path == "/handler/ping":
            return True
        known = routes().get((self.command, path))
        return known is not None and known.public

    # --- what is asked ---------------------------------------------------------------------------

    def _body(self) -> bytes | None:
        """The body; None when it was refused."""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers:
            self.send_error(501, "A body needs a Content-Length; transfer codings are not taken.")
            return None
        if len(set(lengths)) > 1 or any(not (text.isascii() and text.isdecimal()) for text in lengths):
            self.send_error(400, "Content-Length must be one number.")
            return None
        length = int(lengths[0][:20]) if lengths else 0
        if length > BODY_BYTES:
            self.send_error(413, f"A body may have {BODY_BYTES} bytes.")
            return None
        if self._expects_100:
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._reader.budget = length + HEAD_BYTES
        body = self.rfile.read(length) if length else b""
        if len(body) < length:
            raise ConnectionError("the client went away in the middle of its body")
        return body

    def _params(self, query: str, body: bytes | None) -> dict[str, str]:
        """Of the query and of a form; the first of a name counts."""
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS)
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if body and kind == "application/x-www-form-urlencoded":
            form = body.decode(errors="replace")
            pairs += parse_qsl(form, keep_blank_values=True, max_num_fields=PARAMETERS)
        return dict(reversed(pairs))

    def _respond(self, request: Request) -> Response:
        response = Response()
        method = "GET" if request.method == "HEAD" else request.method
        known = routes().get((method, request.path))
        if known is not None:
            self._call_route(known.answer, request, response)
        elif method == "GET" and request.path == "/":
            response.set_content(PAGE, "text/html")
        elif method == "GET" and request.path == "/handler/":
            response.set_json(get_handler_names())
        elif method == "POST" and request.path.startswith("/handler/"):
            self._call_handler(request.path.removeprefix("/handler/").removesuffix("/"), request, response)
        else:
            response.set_status(404)
        return response

    @staticmethod
    def _call_handler(name: str, request: Request, response: Response) -> None:
        if "/" in name:
            response.set_status(404)
            return
        try:
            handler = get_handler(name)
        except ValueError as error:
            response.set_content(f"Handler {name} not found: {error}", "text/plain")
            response.set_status(404)
            return
        try:
            handler(request, response)
        except Exception as error:
            response.set_content(f"Handler {name} failed: {words_for_exception(error)}", "text/plain")
            response.set_status(500)

    @staticmethod
    def _call_route(answer: Any, request: Request, response: Response) -> None:
        try:
            value = answer(request)
        except CallerError as error:
            response.set_json({"error": str(error)}, 400)
        except Exception as error:
            response.set_json({"error": f"{type(error).__name__}: {error}"}, 500)
        else:
            if isinstance(value, Response):
                response.__dict__.update(value.__dict__)
            else:
                response.set_json(value)
