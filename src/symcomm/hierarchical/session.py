"""Authentication of both ends of a connection between hosts, and of every frame.

Both sides prove that they know a secret, which never travels. Each signs two fresh random numbers, one of either side::

    caller: {"from": its name, "nonce": ..., "group": the group that is to own the connection}
    callee: {"nonce": ..., "proof": its signature of all that}
    caller: {"proof": its signature of all that}

From then on every frame carries a MAC, whose key comes from the secret and both numbers. So no third party can forge,
change, replay, drop or reflect a frame. Nothing is encrypted.

The secret is the job's token (SYMCOMM_TOKEN) if there is one. Otherwise the callee makes a secret, and the caller reads
it from the store; it is then as safe as the store (docs/explanation/security.md).
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import json
import os
import secrets
import struct
from typing import Any

NONCE_SIZE = 32
MAC_SIZE = 16
LONG = 4096  # from so many bytes on, a payload's SHA-256 is signed instead: CPUs have instructions for it
LONGEST_NAME = 128  # of a control channel
LONGEST_KEY = 2048  # of a group

_COUNTER = struct.Struct("<Q")


class ConnectionClosed(Exception):
    """The peer closed the connection."""


class ProtocolViolation(ConnectionClosed):
    """The peer broke the protocol; the text says how, for the log."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def parse(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """A frame's header; anything else ends the connection."""
    try:
        header = _decoder.decode(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"sent a header that is not JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise ProtocolViolation("sent a header that is not an object")
    return header


def job_secret() -> bytes | None:
    """A secret that all ranks of the job share, and that is not in the store; None without a token."""
    token = os.environ.get("SYMCOMM_TOKEN", "")
    return hmac.digest(os.fsencode(token), b"symcomm control channel", "sha256") if token else None


class FrameSigner:
    """Computes the MACs of one direction: the n-th frame has one valid MAC, and no other frame has it."""

    def __init__(self, key: bytes):
        self._base = hashlib.blake2b(key=key, digest_size=MAC_SIZE)
        self._count = 0

    def begin(self, head: bytes | memoryview) -> Any:
        """A hash of a frame's first part; ``update`` adds the payload, or the SHA-256 of a long one."""
        mac = self._base.copy()
        mac.update(_COUNTER.pack(self._count))
        mac.update(head)
        self._count += 1
        return mac

    def sign(self, head: bytes | memoryview, payload: bytes | bytearray | memoryview) -> bytes:
        """The MAC of a complete frame. ``head``: its lengths and its header."""
        mac = self.begin(head)
        mac.update(hashlib.sha256(payload).digest() if len(payload) >= LONG else payload)
        return mac.digest()


class Session(abc.ABC):
    """One side of a handshake. It is ``ready`` once the peer has authenticated; then both signers exist."""

    peer: str
    group: str | None  # the group that owns the connection

    def __init__(self) -> None:
        self.ready = False
        self.outgoing: FrameSigner
        self.incoming: FrameSigner
        self._nonce = secrets.token_hex(NONCE_SIZE)
        self._secret = b""
        self._transcript: list[str] = []  # what both sides sign

    def greeting(self) -> dict[str, Any] | None:
        """This side's first message, if it begins."""
        return None

    @abc.abstractmethod
    def answer(self, header: dict[str, Any]) -> dict[str, Any] | None:
        """Take the peer's next message, return the reply. Raises ProtocolViolation."""

    def _signed(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, json.dumps([f"symcomm {purpose}", *self._transcript]).encode(), "sha256")

    def _check_proof(self, header: dict[str, Any], purpose: str, whom: str) -> None:
        proof = header.get("proof")
        expected = self._signed(purpose).hex()
        if not isinstance(proof, str) or not proof.isascii() or not hmac.compare_digest(proof, expected):
            raise ProtocolViolation(
                f"{whom} holds another job token, or none (SYMCOMM_TOKEN), or is no rank of this job"
            )

    def _agree(self, outgoing: str, incoming: str) -> None:
        self.outgoing, self.incoming = FrameSigner(self._signed(outgoing)), FrameSigner(self._signed(incoming))
        self.ready = True
        self._secret = b""


class Caller(Session):
    def __init__(self, secret: bytes, name: str, peer: str, group: str | None = None):
        super().__init__()
        self._secret, self._name, self.peer, self.group = secret, name, peer, group

    def greeting(self) -> dict[str, Any]:
        return {"from": self._name, "nonce": self._nonce, **({} if self.group is None else {"group": self.group})}

    def answer(self, header: dict[str, Any]) -> dict[str, Any]:
        theirs = _text(header, "nonce", 2 * NONCE_SIZE)
        self._transcript = [self._name, self.peer, self.group or "", self._nonce, theirs]
        self._check_proof(header, "callee", "what answers at its address")
        proof = {"proof": self._signed("caller").hex()}
        self._agree("frames of the caller", "frames of the callee")
        return proof


class Callee(Session):
    """``greeted`` once the caller's greeting has arrived."""

    def __init__(self, secret: bytes, name: str):
        super().__init__()
        self._secret, self._name = secret, name
        self.peer, self.group = "", None
        self.greeted = False

    def answer(self, header: dict[str, Any]) -> dict[str, Any] | None:
        if not self.greeted:
            self.peer = _text(header, "from", LONGEST_NAME)
            self.group = _text(header, "group", LONGEST_KEY) if "group" in header else None
            theirs = _text(header, "nonce", 2 * NONCE_SIZE)
            self._transcript = [self.peer, self._name, self.group or "", theirs, self._nonce]
            self.greeted = True
            return {"nonce": self._nonce, "proof": self._signed("callee").hex()}
        self._check_proof(header, "caller", "it")
        self._agree("frames of the callee", "frames of the caller")
        return None


def _text(header: dict[str, Any], name: str, longest: int) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= longest or any("\ud800" <= c <= "\udfff" for c in value):
        raise ProtocolViolation(f"sent no greeting ({name!r} is missing, or is not what it should be)")
    return value
