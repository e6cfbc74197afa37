"""Groups across pretended hosts, one for each of many scenarios, all at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.store import FileStore
from tests.support.faults import run_group
from tests.support.ranks import Outcome


def _join(hosts: list[int], rank: int, world: int, folder: str, timeout: float) -> Any:
    """Join the group of the scenario that rank ``rank`` of all belongs to."""
    size = len(hosts)
    scenario, me = divmod(rank, size)
    os.environ["SYMCOMM_HOST_ID"] = str(hosts[me])
    os.environ["SYMCOMM_ENGINE"] = "gloo"
    store = FileStore(os.path.join(folder, f"store{scenario}"), size)
    group = join_ranks(store, me, size, 60.0, partial(make_group, timeout=timeout), tidy=False)
    group.scenario, group.marks = scenario, folder
    return group


def run_on_hosts(
    body: Callable, hosts: list[int], scenarios: list, timeout: float = 20.0, **more: Any
) -> list[list[Outcome]]:
    """Run ``body(group, scenario)`` on each rank of each scenario; returns their outcomes."""

    def rank(group: Any) -> Any:
        return body(group, scenarios[group.scenario])

    size = len(hosts)
    outcomes = run_group(
        rank, size * len(scenarios), timeout=timeout, deadline=90.0, join=partial(_join, hosts), **more
    )
    return [outcomes[i : i + size] for i in range(0, len(outcomes), size)]
