"""What went wrong on a GPU: found by the watch, told in words to the first who asks."""

from __future__ import annotations

import time
import weakref
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import words_for_ranks, words_for_seconds
from symcomm.gpu.watch import Watch
from symcomm.group.failure import how_it_ended
from symcomm.group.process_group import ProcessGroup

__all__ = ["Trouble", "trouble_of"]


class Trouble:
    """The watch of one group's work on one GPU, and what it found."""

    def __init__(self, core: ProcessGroup, device: int):
        self._core = weakref.ref(core)
        self._handle = core._handle
        self.device = device
        self.error: errors.SymcommError | None = None
        self._told = False
        self.works: weakref.WeakSet[Any] = weakref.WeakSet()  # that fail along
        self.watch = Watch(self.gone, self._fail)

    def gone(self) -> list[int]:
        """Ranks that have died or left."""
        return [r["rank"] for r in native.group_report(self._handle)["ranks"] if r["gone"]]

    def _fail(self, item: Any, ranks: list[int], died: bool) -> None:
        """The watch found that ``ranks`` will not come."""
        core = self._core()
        if core is None:
            return
        error = self._lost(core, item, ranks) if died else self._late(core, item, ranks)
        self.error = error
        with core._failure_lock:
            if core._failure is None:
                core._failure = error
        core.run_abort_hooks()
        if not died:
            native.group_abort(self._handle)
        for work in list(self.works):
            work._fail(error)

    def _what(self, core: ProcessGroup, item: Any) -> tuple[str, str]:
        seconds = words_for_seconds(max(time.monotonic() - item.begun, 0.001))
        return f"{item.what} on cuda:{self.device} of group {core.name!r}", f"on rank {core.rank} after {seconds}"

    def _lost(self, core: ProcessGroup, item: Any, ranks: list[int]) -> errors.SymcommError:
        what, where = self._what(core, item)
        pids = {r: core._peers[r].pid for r in ranks}
        who = "; ".join(f"rank {r} (pid {pid}) {how_it_ended(pid)}" for r, pid in pids.items())
        left = words_for_ranks(r for r in range(core.size) if r not in ranks)
        return errors.RankFailedError(
            f"{what} failed {where}: {who} while the GPU waited for it; the tensors of this operation hold no result. "
            f"Survivors: {left}. Call group.shrink() to go on without it.",
            ranks,
        )

    def _late(self, core: ProcessGroup, item: Any, ranks: list[int]) -> errors.SymcommError:
        what, where = self._what(core, item)
        return errors.DeadlineError(
            f"{what} timed out {where}: the GPU work of rank {words_for_ranks(ranks)} did not come so far. Look at "
            "what those ranks run on their GPU, or give a longer timeout to the call.",
            ranks,
        )

    def look(self) -> None:
        """Raise what the watch found, to the first who asks."""
        if self.error is not None and not self._told:
            self._told = True
            raise self.error

    def check_usable(self, call: str) -> None:
        import torch

        self.look()
        core = self._core()
        if core is not None and core._failure is not None:
            core._check_usable()
        if torch.cuda.is_current_stream_capturing():
            raise errors.CallerError(
                f"{call}: a CUDA graph is being captured; ranks meet on the host for every operation, so that a dead "
                "rank is noticed. Call it outside of the graph."
            )


_known: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Trouble]] = weakref.WeakKeyDictionary()


def trouble_of(core: ProcessGroup, device: int) -> Trouble:
    """The one of a group and a GPU."""
    made = _known.setdefault(core, {})
    if device not in made:
        made[device] = Trouble(core, device)
    return made[device]
