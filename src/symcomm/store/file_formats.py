"""How a FileStore's changes lie in its file. Both formats are logs: a change is added at the end, nothing is rewritten.

FRAMES, our own, opens with eight bytes that say what it is; then come frames, each one a change (or several that belong
together), which are seen whole or not at all::

    head     length of the body, checksum of the body, checksum of the head and of its place in the file
    body     one or more of: kind, length of key, length of value, key, value

A frame that is whole but does not match its checksums is damage, and is reported rather than guessed at.

RECORDS is PyTorch's: length of key, key, length of value, value. A byte before the key says what it is: ``/`` sets it,
``-/`` deletes it; ``refcount/`` and ``cleanup/`` count the stores that are open and those that were closed. PyTorch's
file store has no queues. Ours puts them under ``+/`` (push) and ``~/`` (pop), which to PyTorch's look like other keys.
There are no checksums, so readers read only while no process can write.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

from symcomm.store.hash import Table

HEAD = struct.Struct("<III")
CHANGE = struct.Struct("<BII")
LENGTH = struct.Struct("<I")
KINDS = ("set", "append", "delete", "push", "pop", "open", "close")

Change = tuple[str, str, bytes]


class LoggedTable(Table):
    """A table that keeps its changes until they are written, and counts the stores that use the file."""

    def __init__(self) -> None:
        super().__init__()
        self.unwritten: list[Change] = []
        self.open_stores = 0
        self.closed_stores = 0

    def change(self, kind: str, key: str, value: bytes = b"") -> None:
        self.replay(kind, key, value)
        self.unwritten.append((kind, key, value))

    def replay(self, kind: str, key: str, value: bytes) -> None:
        if kind == "open":
            self.open_stores += 1
        elif kind == "close":
            self.open_stores -= 1
            self.closed_stores += 1
        elif kind == "refcount/":
            self.open_stores = int(value)
        elif kind == "cleanup/":
            self.closed_stores = int(value)
        else:
            super().change(kind, key, value)


class Format(Protocol):
    """A way to write changes down."""

    first: bytes  # every file begins with this
    opening: bytes  # as much of it as stands before the first change
    is_checked: bool  # whether a reader can tell what is whole while others write

    def encode(self, table: LoggedTable, place: int) -> bytes:
        """What ``table`` has unwritten, to be written at byte ``place``."""

    def decode(self, data: bytes, place: int) -> tuple[list[Change], int, str]:
        """The changes in ``data``, which begins at byte ``place`` of the file.

        Returns them with the number of bytes they took, and what follows: ``"end"``, ``"torn"`` (a piece of a change)
        or ``"damaged"`` (what no store has written).
        """


def format_of(data: bytes) -> Format | None:
    """The format of a file that begins with ``data``, which may be incomplete."""
    return next((kind for kind in (FRAMES, RECORDS) if kind.first.startswith(data[: len(kind.first)])), None)


# --- our own --------------------------------------------------------------------------------------------


class _Frames:
    first = opening = b"SymStor1"
    is_checked = True

    def encode(self, table: LoggedTable, place: int) -> bytes:
        parts = []
        for kind, key, value in table.unwritten:
            name = key.encode("utf-8", "surrogatepass")
            parts += [CHANGE.pack(KINDS.index(kind), len(name), len(value)), name, value]
        body = b"".join(parts)
        return _head(body, place) + body

    def decode(self, data: bytes, place: int) -> tuple[list[Change], int, str]:
        changes: list[Change] = []
        done = 0
        while done < len(data):
            if len(data) - done < HEAD.size:
                return changes, done, "torn"
            length, _, _ = HEAD.unpack_from(data, done)
            head, body = data[done : done + HEAD.size], data[done + HEAD.size : done + HEAD.size + length]
            if head[8:] != _seal(head[:8], place + done):
                return changes, done, "damaged"
            if len(body) < length:
                return changes, done, "torn"
            if head != _head(body, place + done):
                return changes, done, "damaged"
            changes += _changes(body)
            done += HEAD.size + length
        return changes, done, "end"


def _head(body: bytes, place: int) -> bytes:
    start = struct.pack("<II", len(body), zlib.crc32(body))
    return start + _seal(start, place)


def _seal(start: bytes, place: int) -> bytes:
    return struct.pack("<I", zlib.crc32(start, place & 0xFFFFFFFF))


def _changes(body: bytes) -> Iterator[Change]:
    at = 0
    while at < len(body):
        kind, key_length, value_length = CHANGE.unpack_from(body, at)
        key_end = at + CHANGE.size + key_length
        key = body[at + CHANGE.size : key_end].decode("utf-8", "surrogatepass")
        yield KINDS[kind], key, body[key_end : key_end + value_length]
        at = key_end + value_length


# --- PyTorch's ------------------------------------------------------------------------------------------

_MARKS = {"set": "/", "append": "/", "delete": "-/", "push": "+/", "pop": "~/"}
_MEANT = {b"/": "set", b"-/": "delete", b"+/": "push", b"~/": "pop"}
_COUNTS = {b"refcount/": "refcount/", b"cleanup/": "cleanup/"}


class _Records:
    first = LENGTH.pack(9) + b"refcount/"  # whoever makes a file counts itself first
    opening = b""
    is_checked = False

    def encode(self, table: LoggedTable, place: int) -> bytes:
        return b"".join(self._records(table))

    def _records(self, table: LoggedTable) -> Iterator[bytes]:
        for kind, key, value in table.unwritten:
            if kind == "close":
                yield _record("cleanup/", b"%d" % table.closed_stores)
            if kind in ("open", "close"):
                yield _record("refcount/", b"%d" % table.open_stores)
            else:
                yield _record(_MARKS[kind] + key, table.values[key] if kind == "append" else value)

    def decode(self, data: bytes, place: int) -> tuple[list[Change], int, str]:
        changes: list[Change] = []
        done = 0
        while done < len(data):
            name, after = _field(data, done)
            if name is None:
                return changes, done, "torn"
            value, end = _field(data, after)
            change = _meaning(name, value or b"0")
            if change is None:
                return changes, done, "damaged"
            if value is None:
                return changes, done, "torn"
            changes.append((*change, value))
            done = end
        return changes, done, "end"


def _record(name: str, value: bytes) -> bytes:
    key = name.encode("utf-8", "surrogateescape")
    return LENGTH.pack(len(key)) + key + LENGTH.pack(len(value)) + value


def _field(data: bytes, at: int) -> tuple[bytes | None, int]:
    """A length and so many bytes, and where they end; None if they are not all there."""
    start = at + LENGTH.size
    end = start + LENGTH.unpack_from(data, at)[0] if start <= len(data) else start
    return (data[start:end], end) if end <= len(data) else (None, end)


def _meaning(name: bytes, value: bytes) -> tuple[str, str] | None:
    """The kind of change and its key; None for what no store writes."""
    if name in _COUNTS:
        return (_COUNTS[name], "") if value.isdigit() else None
    mark, slash, key = name.partition(b"/")
    kind = _MEANT.get(mark + slash)
    return (kind, key.decode("utf-8", "surrogateescape")) if kind else None


FRAMES: Format = _Frames()
RECORDS: Format = _Records()
