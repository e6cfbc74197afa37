"""Handles: how processes that may form a group find each other.

A handle names a process that serves a small store of its own: where the store listens, the token that opens it, and
which group of the process is meant. Callers pass handles on as they like (a file, a database, a job queue) and keep
them secret: the holder of a handle can talk to that store, and to nothing else.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
import zlib
from typing import NamedTuple

from symcomm import errors
from symcomm.store.address import own_address
from symcomm.store.tcp import TCPStore

KIND, VERSION = "symcomm-handle", "1"


class Handle(NamedTuple):
    """One process, and one group in it."""

    address: str
    port: int
    pid: int
    ident: str
    token: str

    def __str__(self) -> str:
        text = "/".join((KIND, VERSION, self.address, str(self.port), str(self.pid), self.ident, self.token))
        return f"{text}/{_checksum(text)}"

    @classmethod
    def parse(cls, text: object) -> Handle:
        if not isinstance(text, str) or not text.startswith(f"{KIND}/"):
            raise _bad_handle(text, "a handle from get_reconfigure_handle()")
        body, _, checksum = text.rpartition("/")
        fields = body.split("/")
        if fields[1:2] != [VERSION]:
            raise _bad_handle(text, f"of version {VERSION}", "run the same version of symcomm everywhere")
        if len(fields) != 7 or checksum != _checksum(body):
            raise _bad_handle(text, "a complete handle", "it was cut or changed on its way")
        return cls(fields[2], int(fields[3]), int(fields[4]), fields[5], fields[6])


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _bad_handle(got: object, allowed: str, fix: str = "") -> errors.BadArgumentError:
    shown = f"{got[:24]}..." if isinstance(got, str) and len(got) > 24 else got  # the rest holds the token
    return errors.bad_argument("reconfigure", "each handle", shown, allowed, fix)


def members_of(handles: object, own: Handle) -> list[Handle]:
    """The members in rank order: the order of a list, or of a sorted set. ``own`` must be among them."""
    if not isinstance(handles, (list, tuple, set, frozenset)):
        raise errors.bad_argument("reconfigure", "handles", handles, "a list or a set of handles")
    if not handles:
        raise errors.bad_argument("reconfigure", "handles", handles, "at least one handle")
    in_order = sorted(handles, key=str) if isinstance(handles, (set, frozenset)) else handles
    members = [Handle.parse(text) for text in in_order]
    if len({member.ident for member in members}) != len(members):
        twice = next(i for i, member in enumerate(members) if member in members[:i])
        raise errors.BadArgumentError(
            f"reconfigure: handles must be unique; the one at position {twice} occurs before."
        )
    if own not in members:
        raise errors.BadArgumentError(
            f"reconfigure: none of the {len(members)} handles is this process's own; "
            "only members of the new group call it, with each member's get_reconfigure_handle()."
        )
    return members


class HandleServer:
    """This process's own store, which the members of a future group can reach."""

    def __init__(self) -> None:
        self.address = own_address()
        self.token = secrets.token_hex(16)
        self.store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False, token=self.token)

    def new_handle(self) -> Handle:
        return Handle(self.address, self.store.port, os.getpid(), secrets.token_hex(8), self.token)


_lock = threading.Lock()
_current: weakref.ref[HandleServer] | None = None


def handle_server() -> HandleServer:
    """This process's server; it ends with the last group that holds it."""
    global _current
    with _lock:
        found = _current() if _current is not None else None
        if found is None:
            found = HandleServer()
            _current = weakref.ref(found)
        return found


def _after_fork_in_child() -> None:
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
