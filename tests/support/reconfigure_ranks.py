"""Processes that form groups by handles, which they pass on to each other through a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.group.reconfigure import ReconfigurableGroup
from symcomm.hierarchical.engines.torch_engine import GlooEngine
from symcomm.membership.replicated_round import Reconfiguration
from symcomm.memory import share
from tests.support.elastic_ranks import ElasticRanks

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
        """(rank, size, the sum of all members' numbers plus one each)."""
        total = torch.tensor([float(self.me + 1)])
        self.group.all_reduce(total)
        return self.group.rank, self.group.size, total.item()


def expected(me: int, who: Sequence[int]) -> tuple[int, int, float]:
    return who.index(me), len(who), float(sum(i + 1 for i in who))


def run_parties(folder: Any, fn: Callable, count: int, *args: Any) -> list[Any]:
    """What ``fn(party, *args)`` did in each of ``count`` processes."""
    forked = ElasticRanks(folder)
    for me in range(count):
        forked.newcomer(lambda store, me=me: fn(Party(store, me), *args))
    return forked.outcomes(deadline=50.0)


def failure(call: Callable[[], Any]) -> tuple[str, str, list[int]]:
    """(class, words, ranks) of the exception that a call raises."""
    with pytest.raises(errors.SymcommError) as caught:
        call()
    error: Any = caught.value
    return type(error).__name__, str(error), getattr(error, "missing", None) or getattr(error, "ranks", [])


def on_hosts(fn: Callable, hosts: Sequence[str]) -> Callable:
    def run(party: Party, *args: Any) -> Any:
        os.environ["SYMCOMM_HOST_ID"] = hosts[party.me]
        return fn(party, *args)

    return run


# --- steps of forming a group, at which a process dies or stops -------------------------------------------------------

Act = Callable[[], None]


def _nothing() -> None:
    pass


def around(owner: Any, name: str, before: Act = _nothing, after: Act = _nothing, item: bytes | None = None) -> None:
    """Call ``before`` and ``after`` around a method from now on; with ``item``, only around calls with that item."""
    call = getattr(owner, name)

    def called(*args: Any) -> Any:
        if item is not None and args[-1] != item:
            return call(*args)
        before()
        result = call(*args)
        after()
        return result

    setattr(owner, name, called)


def before_it_connects(act: Act) -> None:
    around(Reconfiguration, "connect", before=act)


def once_it_is_connected(act: Act) -> None:
    around(Reconfiguration, "connect", after=act)


def after_its_first_exchange(act: Act) -> None:
    around(Reconfiguration, "exchange", after=act)


def before_it_passes_its_memory(act: Act) -> None:
    around(share, "_pass_descriptors", before=act)


def when_it_has_the_memory_of_the_others(act: Act) -> None:
    around(share, "_pass_descriptors", after=act)


def before_it_says_that_it_has_built(act: Act) -> None:
    around(Reconfiguration, "exchange", before=act, item=b"built")


def before_hosts_connect(act: Act) -> None:
    around(GlooEngine, "_join", before=act)


STEPS = [
    before_it_connects, once_it_is_connected, after_its_first_exchange, before_it_passes_its_memory,
    when_it_has_the_memory_of_the_others, before_it_says_that_it_has_built,
]  # fmt: skip
