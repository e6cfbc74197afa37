"""Ranks that come and go, as forked processes that meet in a file.

``ElasticRanks.member(fn, rank, world)`` calls ``fn(group, *args)`` in a rank of the first group,
``ElasticRanks.newcomer(fn)`` calls ``fn(store, *args)`` in a process that is to join.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.store import FileStore
from tests.support.ranks import Crowd


class ElasticRanks(Crowd):
    def __init__(self, folder: Path, timeout: float = 20.0):
        super().__init__("fork")
        self.path = str(folder / "store")
        self.timeout = timeout

    def member(self, fn: Callable, rank: int, world: int, *args: Any) -> int:
        def run() -> Any:
            make = partial(make_group, timeout=self.timeout)
            return fn(join_ranks(FileStore(self.path), rank, world, 20.0, make), *args)

        return self.start(run)

    def newcomer(self, fn: Callable, *args: Any) -> int:
        return self.start(lambda: fn(FileStore(self.path), *args))
