"""Requests to a server over a Unix socket or TCP, well formed or not."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any


def connect(address: str, timeout: float = 20.0) -> socket.socket:
    """``unix:/path`` or ``http://host:port``."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


@dataclass
class Answer:
    status: int
    content: bytes
    content_type: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def ask(
    address: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict | None = None,
    token: str | None = None,
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("localhost", timeout=20)
    connection.sock = connect(address)
    sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token is not None else {})}
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        return Answer(response.status, response.read(), response.headers.get("Content-Type"), dict(response.headers))
    finally:
        connection.close()


def exchange(address: str, data: bytes, timeout: float = 20.0) -> bytes:
    """Send raw bytes; returns all that comes back until the server hangs up."""
    with connect(address, timeout) as sock:
        try:
            sock.sendall(data)
            parts = []
            while part := sock.recv(1 << 16):
                parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)
