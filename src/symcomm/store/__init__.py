"""Key-value stores that ranks meet in, collectives over them, and how a process learns its rank.

base.py         Store: the calls every store has
hash.py         HashStore: threads of one process
file.py         FileStore: processes that share a file system; file_formats.py: how its file looks
tcp.py          TCPStore: processes on any host
prefix.py       PrefixStore: a part of another store, for its own use
collectives.py  StoreCollectives: barrier, broadcast, gather, scatter, sum with nothing but a store
handshake.py    how the ranks of a new group tell each other what they need to know
lease.py        who may still need a store that we opened
address.py      where other hosts reach this one
bootstrap.py    rendezvous("env://" | "tcp://..." | "file://..."): rank, world size and a store
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from symcomm.store.base import QueueEmptyError, Store

if TYPE_CHECKING:
    from symcomm.store.bootstrap import rendezvous
    from symcomm.store.collectives import StoreCollectives
    from symcomm.store.file import FileStore
    from symcomm.store.hash import HashStore
    from symcomm.store.prefix import PrefixStore
    from symcomm.store.tcp import TCPStore

__all__ = [
    "FileStore", "HashStore", "PrefixStore", "QueueEmptyError", "Store", "StoreCollectives", "TCPStore", "rendezvous",
]  # fmt: skip

_HOMES = {  # loaded on first use: most programs need one of them, and TCPStore comes with the C core
    "FileStore": "file",
    "HashStore": "hash",
    "PrefixStore": "prefix",
    "StoreCollectives": "collectives",
    "TCPStore": "tcp",
    "rendezvous": "bootstrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'symcomm.store' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"symcomm.store.{_HOMES[name]}"), name)
    return value
