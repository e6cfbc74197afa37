"""What ranks tell the launcher that keeps their store: whether they are in a group or wait for one.

A newcomer waits until members let it in. If no member lives any more, no one would ever answer, and only the launcher
can know that (``symcomm run --restart failed``).
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
    """The key in the store of the rank's attempt. A process that replaces another has a higher ``restarts``."""
    return f"symcomm/standing/{rank}/{restarts}"


def tell_launcher(store: Any, standing: str) -> None:
    """Where ``symcomm run`` keeps ``store``: tell it where this rank stands."""
    environ = os.environ
    if LAUNCHED not in environ or environ.get(KEEPS_STORE) != "True":
        return
    key = standing_key(environ.get("RANK", ""), environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    with contextlib.suppress(errors.PeerError, errors.DeadlineError):  # the next user of the store reports it
        store.set(key, standing)
