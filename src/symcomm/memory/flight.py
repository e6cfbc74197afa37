"""The flight recorder's memory: a ring of a rank's last operations, and tables for its numbers.

It lies in the rank's arena, right after the header, so that every peer that has mapped the arena can read it, even if
the owner is stuck or dead. The C core writes the entries (``_core/observe/flight.h``). This file writes names of groups
and call sites, once each::

    page 0     next (u64), capacity (u64), groups (u64: how many were ever named), sites (u64),
               forgotten (u64: operations up to this number are no longer shown)
    page 1..   entries of 64 bytes
    then       groups of 512 bytes: number (u32), length (u32), JSON
    then       sites of 128 bytes: length (u8), "file:line function"
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from symcomm._core import native
from symcomm.errors import bad_argument, notebook_cells
from symcomm.memory.heap import PAGE

DEFAULT_CAPACITY = 2048
ENTRY, NUMBER, GROUP, SITE = struct.Struct("<6Q3I4B"), struct.Struct("<Q"), 512, 128
GROUPS, SITES = 256, 4096
PATHS = native.FLIGHT_PATHS  # bits of an entry's path: how its bytes travelled; the bits above say how the call was run
SIZES = ("SYMCOMM_FLIGHT_ENTRIES", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set


def capacity_from_environment() -> int:
    """How many operations to keep: a power of two; 0: none."""
    name = next((n for n in SIZES if n in os.environ), None)
    if name is None:
        return DEFAULT_CAPACITY
    text = os.environ[name]
    if not text.isdigit() or int(text) > 1 << 24:
        raise bad_argument("flight recorder", name, text, f"a number of operations, 0 to {1 << 24}")
    return 1 << (int(text) - 1).bit_length() if int(text) > 1 else int(text)


CAPACITY = capacity_from_environment()
Peek = Callable[[int, int], bytes]  # (place, length) -> bytes: of this process's memory, or of another's through a file


def flight_bytes(capacity: int) -> int:
    """How many bytes of addresses the recorder takes; pages exist only where something was written."""
    return PAGE + -(-(capacity * ENTRY.size + GROUPS * GROUP + SITES * SITE) // PAGE) * PAGE


@dataclass(frozen=True)
class FlightEntry:
    """One operation, as the core recorded it. Times are ticks of the processor's counter; see
    ``native.ticks_to_ns``."""

    number: int
    seq: int
    signature: int
    count: int
    created: int
    finished: int
    waited_us: int
    site: str
    group: dict[str, Any]
    status: int
    path: int  # enum flight_path of _core/observe/flight.h
    way: int  # enum flight_way
    plan: int
    exact_site: bool

    @classmethod
    def of(cls, fields: tuple[Any, ...], site: str, group: dict[str, Any]) -> FlightEntry:
        """An entry, made of its numbers and of the site and group that they stand for."""
        number, seq, signature, count, created, finished, waited, _, _, status, path, plan, exact = fields
        return cls(
            number, seq, signature, count, created, finished, waited, site, group, status, path & PATHS, path & ~PATHS,
            plan, bool(exact),
        )  # fmt: skip


class Flight:
    """This rank's recorder, which the rank itself writes."""

    def __init__(self, address: int, capacity: int):
        self.address, self.capacity = address, capacity
        self._groups = self._sites = 0
        self._site_numbers: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()  # reentrant, since a signal handler may take it too
        native.poke(address, struct.pack("<5Q", 0, capacity, 0, 0, 0))

    def add_group(self, name: str, rank: int, ranks: list[int]) -> int:
        """The number by which entries refer to this group."""
        with self._lock:
            number = self._groups = self._groups + 1
            self._write_group(number, {"name": name, "rank": rank, "size": len(ranks), "ranks": ranks})
            native.poke(self.address + 16, struct.pack("<Q", number))
        return number

    def describe_group(self, number: int, description: str) -> None:
        """Set what dumps say of a group besides its name, unless newer groups have taken its place."""
        with self._lock:
            raw = native.peek(self._place(number), GROUP)
            written, length = struct.unpack_from("<II", raw)
            if written == number:
                self._write_group(number, {**json.loads(raw[8 : 8 + length]), "description": description})

    def _write_group(self, number: int, facts: dict[str, Any]) -> None:
        text = json.dumps(facts := {"description": "", **facts}).encode()
        if len(text) > GROUP - 8:  # a very long name (a character takes up to 12 bytes), or many ranks
            text = json.dumps(facts | {"description": ""}).encode()
        if len(text) > GROUP - 8:
            text = json.dumps(facts | {"name": facts["name"][:30], "description": "", "ranks": []}).encode()
        native.poke(self._place(number), struct.pack("<II", number, len(text)) + text)

    def _place(self, number: int) -> int:
        return _groups_at(self.address, self.capacity) + (number - 1) % GROUPS * GROUP

    def forget(self) -> None:
        """Forget earlier operations: show only what is recorded from now on."""
        native.poke(self.address + 32, native.peek(self.address, 8))

    def site(self, site: tuple[str, int]) -> int:
        """The number of a call site (file, line), which is added if it is new; 0 if the table is full."""
        known = self._site_numbers.get(site)
        if known is not None:
            return known
        with self._lock:
            if self._sites == SITES - 1:
                return 0
            number = self._sites = self._sites + 1
            text = f"{notebook_cells().get(site[0], site[0])}:{site[1]}".encode(errors="replace")[-(SITE - 1) :]
            native.poke(_sites_at(self.address, self.capacity) + number * SITE, bytes([len(text)]) + text)
            native.poke(self.address + 24, struct.pack("<Q", number))
            self._site_numbers[site] = number
        return number


def _groups_at(address: int, capacity: int) -> int:
    return address + PAGE + capacity * ENTRY.size


def _sites_at(address: int, capacity: int) -> int:
    return _groups_at(address, capacity) + GROUPS * GROUP


def read_groups(address: int, peek: Peek = native.peek) -> dict[int, dict[str, Any]]:
    """The groups that the recorder's rank is or was in, by number: name, rank, size, ranks, description."""
    _, capacity, named = struct.unpack("<3Q", peek(address, 24))
    groups = {}
    for place in range(min(named, GROUPS)):
        raw = peek(_groups_at(address, capacity) + place * GROUP, GROUP)
        number, length = struct.unpack_from("<II", raw)
        if number:
            with contextlib.suppress(ValueError):  # the owner is just writing it
                groups[number] = json.loads(raw[8 : 8 + length])
    return groups


def read_site(address: int, capacity: int, number: int, peek: Peek) -> str:
    """The file and line that a number in entries stands for."""
    raw = peek(_sites_at(address, capacity) + number * SITE, SITE)
    return raw[1 : 1 + raw[0]].decode(errors="replace")


def read_flight(address: int, peek: Peek = native.peek) -> list[FlightEntry]:
    """The operations of the recorder at ``address`` (one's own or a peer's), oldest first."""
    _, capacity, _, _, forgotten = struct.unpack("<5Q", peek(address, 40))
    if not capacity:
        return []
    groups, sites = read_groups(address, peek), {0: ""}
    entries = []
    for fields in _consistent(address, capacity, peek):
        number, site, group = fields[0], fields[7], fields[8]
        if number <= forgotten:
            continue
        if site not in sites:
            sites[site] = read_site(address, capacity, site, peek)
        entries.append(FlightEntry.of(fields, sites[site], groups.get(group, {})))
    return sorted(entries, key=lambda e: e.number)


def _consistent(address: int, capacity: int, peek: Peek) -> Iterator[tuple[Any, ...]]:
    """The entries that did not change while they were read."""
    before, raw, after = (peek(address + PAGE, capacity * ENTRY.size) for _ in range(3))
    for at in range(0, len(raw), ENTRY.size):
        fields = ENTRY.unpack_from(raw, at)
        if fields[0] and fields[0] == NUMBER.unpack_from(before, at)[0] == NUMBER.unpack_from(after, at)[0]:
            yield fields
