"""Whether all ranks are at the same call, so that an asynchronous one may run in its caller's thread.

Handing a call to the group's thread and being woken by it costs several times what a small operation costs. When all
other ranks have come to their call too, none of them needs anything of this rank but the operation itself: running it
here and now cannot block for good, whoever runs it there. So who makes a small asynchronous call announces it
(``group_announce`` in _core/group/group.c), and looks for a moment whether the others do.
"""

from __future__ import annotations

import os

__all__ = ["looks_for_others"]

_LOOKS = 1000  # about 10 us, less than being woken takes
_MOST_RANKS = 8  # more come too far apart for looking to pay


def looks_for_others(size: int, own_process: bool) -> int:
    """How often to look before the group's thread is asked after all; 0: it always is."""
    if size > _MOST_RANKS:
        return 0
    # Ranks that are threads of this process cannot come while we look, nor can those that need our core.
    return _LOOKS if own_process and size <= len(os.sched_getaffinity(0)) else 1
