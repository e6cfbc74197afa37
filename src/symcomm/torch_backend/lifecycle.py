"""Ends torch's default group in order: its store must not end before all ranks have left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from symcomm.store.lease import root_of

LAG = 10.0  # seconds that the others have to leave a group before this rank makes the next one
_previous: list[Callable[[float], None]] = []  # waits until all ranks have left the last default group


def await_previous_group() -> None:
    """Wait until rank 0 has left the last default group: its store's server could be mistaken for the next one's."""
    while _previous:
        _previous.pop()(LAG)


def ends_with_rank_0(store: Any) -> bool:
    """Whether the store in which the default group met ends when rank 0 destroys that group."""
    return isinstance(root_of(store), dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def leave_in_order(core: Any) -> None:
    """Rank 0, whose store ends with it, waits for the others to leave first."""
    if core.rank == 0:
        core.await_departures()
    else:
        _previous.append(core.departures())
