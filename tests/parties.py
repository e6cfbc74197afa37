"""Processes that form groups by handles, which they pass on to each other through a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.group.reconfigure import ReconfigurableGroup
from tests.comers import Crowd

WAIT = 20.0


class Party:
    """One process of several, and how it learns the handles of the others: through a file."""

    def __init__(self, store: Any, me: int):
        self.store, self.me = store, me
        self.group = ReconfigurableGroup(timeout=WAIT)
        store.set(f"handle/{me}", self.group.get_reconfigure_handle())

    def handles(self, who: Sequence[int]) -> list[str]:
        return [self.store.get(f"handle/{i}").decode() for i in who]

    def become(self, uuid: int, who: Sequence[int], timeout: float | None = None) -> Any:
        return self.group.reconfigure(uuid, self.handles(who), timeout)

    def facts(self) -> tuple[int, int, float]:
        """(rank, size, the sum of everybody's number plus one)."""
        total = torch.tensor([float(self.me + 1)])
        self.group.all_reduce(total)
        return self.group.rank, self.group.size, total.item()


def expected(me: int, who: Sequence[int]) -> tuple[int, int, float]:
    return who.index(me), len(who), float(sum(i + 1 for i in who))


def crowd_of(folder: Any, fn: Callable, count: int, *args: Any) -> list[Any]:
    """What ``fn(party, *args)`` did in each of ``count`` processes."""
    crowd = Crowd(folder)
    for me in range(count):
        crowd.newcomer(lambda store, me=me: fn(Party(store, me), *args))
    return crowd.outcomes(deadline=50.0)


def failure(call: Callable[[], Any]) -> tuple[str, str, list[int]]:
    """(class, words, ranks) of the exception that a call raises."""
    with pytest.raises(errors.SymcommError) as caught:
        call()
    error: Any = caught.value
    return type(error).__name__, str(error), getattr(error, "missing", None) or getattr(error, "ranks", [])
