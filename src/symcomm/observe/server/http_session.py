"""HTTP/1.1 on one connection: h11 parses it, this file limits sizes and time.

h11 is strict, does no input or output of its own, and needs no other package. What a client sends becomes a request, a
``Refusal`` that we answer before we hang up, or an OSError that ends the connection; nothing else leaves this file.
"""

from __future__ import annotations

import abc
import socket
import time
from collections.abc import Mapping
from email.message import Message
from functools import lru_cache
from http import HTTPStatus
from http.client import responses
from typing import Any, NamedTuple

from symcomm.errors import ResourceError
from symcomm.observe.server.requests import Response

HEAD_BYTES = 32 << 10  # request line and headers
HEADERS = 100
BODY_BYTES = 1 << 20
PIECE = 4096  # bytes read at once while a head is incomplete: what a client may send beyond HEAD_BYTES
FIRST_SECONDS = 5.0  # for a whole request, from when we begin to wait: for the first one, and for strangers
TRUSTED_SECONDS = 30.0  # for later ones of a trusted client, such as a page that asks now and then
WORDS = 200  # characters of its input that a client may see again
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


@lru_cache(maxsize=1)
def load_h11() -> Any:
    """The library, loaded when the first server starts."""
    try:
        import h11
    except ModuleNotFoundError:
        raise ResourceError("server: the package h11 is not installed, which parses HTTP; `pip install h11`.") from None
    return h11


class Refusal(Exception):
    """Why a request gets an error, and its connection is closed."""

    def __init__(self, status: int, words: str = ""):
        super().__init__(words or HTTPStatus(status).phrase)
        self.status = status


class Head(NamedTuple):
    """A request before its body. ``headers``: names in any case, the first of a name counts."""

    method: str
    target: str
    headers: Message


class HttpSession(abc.ABC):
    """Serves one client until either side closes. Subclasses answer: ``respond(head)``."""

    fixed_headers: Mapping[str, str] = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }

    def __init__(self) -> None:
        self.trusted = False
        self.end = ""  # why it ended, unless the client closed it
        self._h11 = load_h11()
        self._http = self._h11.Connection(self._h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._deadline = 0.0
        self._wants_head_only = False
        self.sock: Any = None

    @abc.abstractmethod
    def respond(self, head: Head) -> Response:
        """The answer to a request whose head was read."""

    def serve(self, sock: socket.socket) -> None:
        """Answer requests; raises OSError when the client is gone or too slow."""
        self.sock = sock
        self._deadline = time.monotonic() + FIRST_SECONDS
        if hasattr(sock, "do_handshake"):
            sock.settimeout(FIRST_SECONDS)
            sock.do_handshake()
        while self._serve_one():
            self._http.start_next_cycle()
            self._deadline = time.monotonic() + (TRUSTED_SECONDS if self.trusted else FIRST_SECONDS)

    def _serve_one(self) -> bool:
        """Serve one request; returns whether another may follow."""
        try:
            head = self._read_head()
            if head is None:
                return False
            response = self.respond(head)
            self.read_body()  # else the rest would be taken for the next request
        except Refusal as refusal:
            self.end = f"{refusal.status} {refusal}"
            self._send(Response(str(refusal), "text/plain", refusal.status), close=True)
            return False
        self._send(response, close=False)
        return self._http.our_state is self._h11.DONE and self._http.their_state is self._h11.DONE

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_head(self) -> Head | None:
        """The next request; None when the client has closed."""
        self._wants_head_only = False
        event = self._next_event(PIECE)
        if not isinstance(event, self._h11.Request):
            return None
        head = Head(event.method.decode("ascii"), event.target.decode("latin-1"), Message())
        for name, value in event.headers:
            head.headers.add_header(name.decode("latin-1"), value.decode("latin-1"))
        self._wants_head_only = head.method == "HEAD"
        if event.http_version not in (b"1.0", b"1.1"):
            raise Refusal(505)
        if head.method not in METHODS:
            raise Refusal(501, f"Unsupported method ({head.method[:20]!r})")
        if len(event.headers) > HEADERS:
            raise Refusal(431, f"A request may have {HEADERS} headers.")
        return head

    def check_body(self, head: Head) -> None:
        """Refuse a body that is too large or comes in pieces, before any of it is read."""
        if "Transfer-Encoding" in head.headers:
            raise Refusal(501, "A body needs a Content-Length; transfer codings are not taken.")
        if int(head.headers.get("Content-Length", "0")) > BODY_BYTES:
            raise Refusal(413, f"A body may have {BODY_BYTES} bytes.")

    def read_body(self) -> bytes:
        """The rest of the present request's body."""
        parts: list[bytes] = []
        while self._http.their_state is self._h11.SEND_BODY:
            event = self._next_event(1 << 16)
            if isinstance(event, self._h11.Data):
                parts.append(bytes(event.data))
                if sum(map(len, parts)) > BODY_BYTES:
                    raise Refusal(413, f"A body may have {BODY_BYTES} bytes.")
        return b"".join(parts)

    def _next_event(self, piece: int) -> Any:
        h11 = self._h11
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._http.trailing_data[1]:
                    raise ConnectionError("the client went away in the middle of a request") from None
                raise Refusal(error.error_status_hint, str(error)[:WORDS]) from None
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.sock.sendall(self._http.send(go_on))
            self._http.receive_data(self._receive(piece))

    def _receive(self, piece: int) -> bytes:
        """Every read of a request shares one deadline, however slowly its bytes arrive."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)
        return self.sock.recv(piece)

    # --- writing -------------------------------------------------------------------------------------------------

    def _send(self, response: Response, close: bool) -> None:
        """The whole answer in one piece."""
        if self._http.our_state not in (self._h11.IDLE, self._h11.SEND_RESPONSE):
            return
        content = response.content
        headers = {"Content-Length": str(len(content)), **self.fixed_headers, **response.headers}
        if response.content_type:
            headers["Content-Type"] = response.content_type
        if close:
            headers["Connection"] = "close"
        try:
            fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            reason = responses.get(response.status, "")
            start = self._h11.Response(status_code=response.status, headers=fields, reason=reason.encode())
        except (self._h11.LocalProtocolError, UnicodeEncodeError):  # a handler's headers
            content = b""
            fields = [(b"Content-Length", b"0"), (b"Connection", b"close")]
            start = self._h11.Response(status_code=500, headers=fields, reason=b"Internal Server Error")
        parts = [self._http.send(start)]
        if not self._wants_head_only:
            parts.append(self._http.send(self._h11.Data(data=content)))
        parts.append(self._http.send(self._h11.EndOfMessage()))
        self.sock.settimeout(TRUSTED_SECONDS if self.trusted else FIRST_SECONDS)
        self.sock.sendall(b"".join(part for part in parts if part))
