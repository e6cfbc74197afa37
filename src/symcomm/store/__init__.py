"""Key-value stores that ranks meet in, collectives over them, and how a process learns its rank.

base.py         Store: the calls every store has
hash.py         HashStore: threads of one process
file.py         FileStore: processes that share a file system
tcp.py          TCPStore: processes on any host
prefix.py       PrefixStore: a part of another store, for its own use
collectives.py  StoreCollectives: barrier, broadcast, gather, scatter, sum with nothing but a store
rendezvous.py   rendezvous("env://" | "tcp://..." | "file://..."): rank, world size and a store
"""

from __future__ import annotations

import importlib
from typing import Any

from symcomm.store.base import QueueEmptyError, Store

_LAZY = {
    "FileStore": "file",
    "HashStore": "hash",
    "PrefixStore": "prefix",
    "StoreCollectives": "collectives",
    "TCPStore": "tcp",
    "rendezvous": "rendezvous",
}

__all__ = ["QueueEmptyError", "Store", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'symcomm.store' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"symcomm.store.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
