"""Tells when a rank no longer uses its peers' memory on a GPU, and they no longer use its own.

Shared memory is reused only then. A Departure outlives the group, so it knows neither the group nor its errors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from symcomm.cuda.tensor_views import torch_stream
from symcomm.group.failure import Status


def _has_passed(event: Any) -> bool:
    """Whether the GPU has passed the event. A broken GPU does nothing any more, and raises to its users."""
    try:
        return bool(event.query())
    except RuntimeError:
        return True


class Departure:
    """One rank's departure from one group on one GPU."""

    def __init__(self, handle: Any, rank: int, device: int):
        self.handle, self._rank, self._device = handle, rank, device
        self.flag_words: Any = None  # of the group's collectives, once it has some
        self.last_stream: int | None = None  # of the last collective
        self.windows = 0  # into which peers may put at any time
        self.has_left = False
        self._lock = threading.Lock()
        self._touching: list[Any] = []  # events behind reads and writes of peers' memory

    # --- this rank ----------------------------------------------------------------------------------------------

    def touch(self, event: Any) -> None:
        """A stream of this rank uses peers' memory until it has passed ``event``."""
        with self._lock:
            self._touching = [e for e in self._touching if e is not event and not _has_passed(e)]
            self._touching.append(event)

    def is_touching(self) -> bool:
        with self._lock:
            self._touching = [e for e in self._touching if not _has_passed(e)]
            return bool(self._touching)

    def leave_when_done(self) -> None:
        """Called again and again once the group is over."""
        if self.last_stream is not None:  # its last operation may be using peers' staging areas
            import torch

            with torch.cuda.device(self._device):
                event = torch.cuda.Event()
                event.record(torch_stream(self.last_stream, self._device))
            self.last_stream = None
            self.touch(event)
        if not self.has_left and not self.is_touching():
            self.leave()

    def leave(self) -> None:
        """Say that nothing of this rank uses peers' memory any more."""
        self.has_left = True
        if self.flag_words is not None:
            self.flag_words.publish_left()

    # --- its peers ----------------------------------------------------------------------------------------------

    def dead(self) -> set[int]:
        """Ranks whose processes have died, along with all their work on a GPU."""
        return {r["rank"] for r in self.handle.report()["ranks"] if r["gone"] == Status.DEAD}

    def staying(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that may still use this rank's memory."""
        dead = self.dead()
        return [r for r in ranks if r not in dead and not self.flag_words.has_left(r)]

    def is_left_alone(self) -> bool:
        """Whether no peer uses this rank's memory any more. Until the group is over, some may."""
        if not self.handle.status():
            return False
        self.leave_when_done()
        return not self.staying(r for r in range(self.flag_words.world) if r != self._rank)
