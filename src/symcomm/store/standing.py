"""What ranks tell the launcher that keeps their store: whether they are in a group, or wait to be in one.

A newcomer waits for members to let it in, and only the launcher can know that none of them lives any more: then nobody
would ever answer (``symcomm run --restart failed``).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from symcomm import errors

WAITING, MEMBER = "waiting", "member"
LAUNCHED = "SYMCOMM_LAUNCH_ID"  # `symcomm run` started this process
KEEPS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" where the launcher serves the store


def standing_key(rank: int | str, restarts: int | str) -> str:
    """In the store of the attempt that a rank belongs to. A process that replaces another has a higher count."""
    return f"symcomm/standing/{rank}/{restarts}"


def tell_launcher(store: Any, standing: str) -> None:
    """Where ``symcomm run`` keeps ``store``: tell it where this rank stands."""
    environ = os.environ
    if LAUNCHED not in environ or environ.get(KEEPS_STORE) != "True":
        return
    key = standing_key(environ.get("RANK", ""), environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    with contextlib.suppress(errors.PeerError, errors.DeadlineError):  # whoever uses the store next says so
        store.set(key, standing)
