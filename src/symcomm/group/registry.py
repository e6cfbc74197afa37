"""Groups by name, as long as the program holds them.

Where threads are ranks, a process has a group of the same name for each of them; its arena tells which rank's it is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from symcomm.memory.arena import current_arena

if TYPE_CHECKING:
    from symcomm.group.process_group import ProcessGroup

_groups: weakref.WeakValueDictionary[tuple[bytes, str], ProcessGroup] = weakref.WeakValueDictionary()


def add(group: ProcessGroup, name: str = "") -> None:
    """Register a group by its own name, or by ``name``. A later group of that name takes it over."""
    _groups[group.arena.nonce, name or group.name] = group


def find(name: str) -> ProcessGroup | None:
    """This rank's group of that name."""
    return _groups.get((current_arena().nonce, name))


def of_rank(nonce: bytes) -> list[ProcessGroup]:
    """The groups of the rank whose arena has that nonce."""
    return sorted((group for (n, _), group in list(_groups.items()) if n == nonce), key=lambda group: group.name)


def names() -> list[str]:
    """The names of this rank's groups."""
    mine = current_arena().nonce
    return sorted(name for nonce, name in list(_groups) if nonce == mine)
