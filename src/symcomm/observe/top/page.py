"""Serves the live page: one HTML file, the JSON it polls, stacks and store keys on demand, and metrics.

The page shows a program's internals, so it is guarded like the ranks' own servers: it listens on the loopback address;
every request but the (empty) page needs the token; a request must name us as its host, so that a web site that points
its own name at 127.0.0.1 gets nothing; and everything is read-only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from symcomm import errors
from symcomm.observe.server.acceptor import ConnectionAcceptor
from symcomm.observe.server.http_session import Head, HttpSession, load_h11
from symcomm.observe.server.requests import Response
from symcomm.observe.server.server import listen_tcp
from symcomm.observe.top.model import Live
from symcomm.observe.top.snapshot import snapshot

if TYPE_CHECKING:
    from symcomm.observe.top.metrics import Meter

REFRESH_S = 0.5
REQUESTS_AT_ONCE = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@lru_cache(maxsize=1)
def page() -> tuple[bytes, str]:
    """The page, and the policy by which it runs exactly its own script and style, and loads nothing."""
    text = files("symcomm.observe.top").joinpath("top.html").read_text(encoding="utf-8")

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.S)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_tcp(host, port)
    except errors.ResourceError as error:
        why = getattr(error.__cause__, "strerror", None) or error
        fix = "choose another --port, or 0"
        raise errors.ResourceError(f"symcomm top: cannot listen on {host} port {port} ({why}); {fix}.") from error


class PageServer:
    """Reads ``live`` twice a second and serves it until ``close()``. ``url`` is what to open, token and all."""

    def __init__(self, live: Live, host: str = "127.0.0.1", port: int = 0):
        self.live = live
        self.token = secrets.token_urlsafe(24)
        self.lock = threading.Lock()
        self.metrics: Callable[[], tuple[str, bytes]] | None = None
        self.observers: list[Callable[[Live], None]] = []
        self.problem = ""  # why the last refresh failed
        self.slots = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self._stop = threading.Event()
        load_h11()
        listener = _listen(host, port)
        self.port = listener.getsockname()[1]
        names = {host, *(LOOPBACK if host in LOOPBACK else ())}
        self.hosts = {f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}" for name in names}
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.port}/"
        self.url = f"{self.address}#token={self.token}"
        self.refresh()
        self._acceptor = ConnectionAcceptor(listener, lambda _sock: _Connection(self), "symcomm top", None)
        self.watcher = threading.Thread(target=self._watch, name="symcomm-page-feed", daemon=True)
        self.watcher.start()

    def refresh(self) -> None:
        with self.lock:
            try:
                self.live.refresh()
                for observe in self.observers:
                    observe(self.live)
                self.problem = ""
            except Exception as error:  # the page shows it; try again next time
                self.problem = f"{type(error).__name__}: {error}"

    def attach_meter(self, meter: Meter) -> None:
        """Have ``meter`` count operations from now on, and serve it under /metrics."""
        self.observers.append(meter.add)
        self.metrics = meter.render

    def _watch(self) -> None:
        while not self._stop.wait(REFRESH_S):
            self.refresh()

    def close(self) -> None:
        self._stop.set()
        self._acceptor.shutdown()
        self.watcher.join(10)
        self.live.feed.close()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- answers --------------------------------------------------------------------------------------------------

    def answer(self, path: str, query: dict[str, str]) -> Response | None:
        """To an authenticated request; None if there is no such page."""
        if path == "/api/v1/snapshot":
            since = query.get("since", "0")
            with self.lock:
                found = snapshot(self.live, int(since) if since.isdigit() else 0)
            return _json({**found, "problem": self.problem})
        if path == "/api/v1/stacks":
            rank = query.get("rank", "")
            known = {str(fact.rank) for fact in self.live.ranks}
            if rank not in known:
                return _json({"error": f"there is no rank {rank!r} in this job."})
            return _json({"rank": int(rank), "text": self.live.feed.stacks(int(rank))})
        if path == "/api/v1/store":
            try:
                return _json({"keys": self.live.feed.store_keys()})
            except (errors.SymcommError, OSError) as error:
                return _json({"error": str(error)})
        if path == "/metrics" and self.metrics is not None:
            with self.lock:
                kind, text = self.metrics()
            return Response(text, kind)
        return None


def _json(what: Any, status: int = 200) -> Response:
    return Response(json.dumps(what, separators=(",", ":")), "application/json", status)


class _Connection(HttpSession):
    """One browser's connection."""

    fixed_headers = {
        **HttpSession.fixed_headers,
        "Content-Security-Policy": "default-src 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
    }

    def __init__(self, owner: PageServer):
        super().__init__()
        self._owner = owner

    def respond(self, head: Head) -> Response:
        if not self._owner.slots.acquire(timeout=5):
            return _refuse(503, "too many requests at once.")
        try:
            return self._respond(head)
        finally:
            self._owner.slots.release()

    def _respond(self, head: Head) -> Response:
        if head.method not in ("GET", "HEAD"):
            return _refuse(501, "there is nothing here that changes anything.")
        if head.headers.get("Host", "").lower() not in self._owner.hosts:
            return _refuse(421, "this is not the host you asked for.")
        if head.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return _refuse(403, "requests from other sites are refused.")
        try:
            parts = urlsplit(head.target)
            query = {name: values[0] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        except ValueError:
            return _refuse(400, "the address cannot be read.")
        if parts.path == "/":
            text, policy = page()
            response = Response(text, "text/html; charset=utf-8")
            response.headers["Content-Security-Policy"] = policy
            return response
        given = head.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._owner.token}".encode()):
            return _refuse(401, "the token is missing or wrong; open the address that `symcomm top` printed.")
        self.trusted = True
        return self._owner.answer(parts.path, query) or _refuse(404, "there is nothing here.")


def _refuse(status: int, words: str) -> Response:
    response = _json({"error": words}, status)
    response.headers["Connection"] = "close"
    return response
