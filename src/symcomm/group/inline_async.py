"""Whether all ranks are at the same call, so that an asynchronous one may run in its caller's thread.

Handing a call to the group's thread and being woken by it costs several times what a small operation costs. When all
other ranks have reached the same call, none of them needs anything from this rank but the operation itself: running it
inline cannot deadlock. So a rank that makes a small asynchronous call announces it (``group_announce`` in
the core), and polls for a moment whether the others do.
"""

from __future__ import annotations

import os

_POLLS = 1000  # about 10 us, less than being woken takes
_MOST_RANKS = 8  # more arrive too far apart for polling to pay


def inline_polls(size: int, own_process: bool) -> int:
    """How often to poll before the call goes to the group's thread after all; 0: it always does."""
    if size > _MOST_RANKS:
        return 0
    # Ranks that are threads of this process cannot arrive while we poll, nor can those that need our core.
    return _POLLS if own_process and size <= len(os.sched_getaffinity(0)) else 1
