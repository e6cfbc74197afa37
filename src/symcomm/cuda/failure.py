"""Failures of work on a GPU: detected by the watchdog, raised to callers.

The first rank that fails tells all others, through the words that hosts and kernels poll. Only then do its streams go
on, and its caller learns of it. So a result read from a peer's memory is valid if nobody had failed by the time the GPU
was done with it. ``found`` checks that afterwards, not before.

Peers may be using this rank's tensors when it fails. It tells them to stop, and raises the error once they have stopped
and its own works have ended, or after LEAVE_S: see docs/explanation/failures.md for what that means.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from symcomm import errors
from symcomm.cuda.departure import Departure
from symcomm.cuda.watchdog import POLL_S, Outstanding, Watchdog
from symcomm.errors import format_ranks, format_seconds
from symcomm.group import failure_words as words
from symcomm.group.failure import Status, how_rank_ended
from symcomm.group.process_group import ProcessGroup

Result = TypeVar("Result")

LEAVE_S = 2.0  # the longest that a caller's error waits for peers: a kernel of theirs that has begun takes milliseconds
CAUSE_S = 1.0  # how long the watchdog has to see why CUDA raised an error
VERDICT_S = 10.0  # the longest that a caller waits for the watchdog, which looks every 10 ms


def _has_passed(work: Any) -> bool:
    try:
        return work.has_passed()
    except RuntimeError:  # the GPU is broken; the work raises that to its users
        return False


def _is_running(work: Any) -> bool:
    try:
        return work.is_queued() and not work.has_passed()
    except RuntimeError:
        return False


class CudaFailures:
    """The watchdog of one group's work on one GPU, and what it found."""

    def __init__(self, core: ProcessGroup, device: int):
        self._core = weakref.ref(core)
        self.handle = core.handle
        self._rank = core.rank
        self.device = device
        self.error: errors.SymcommError | None = None  # set once callers may have it
        self._verdict: errors.SymcommError | None = None
        self._raised = False
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self.departure = Departure(core.handle, core.rank, device)
        self.works: weakref.WeakSet[Any] = weakref.WeakSet()  # works that fail with the group
        self._users: list[int] = []  # ranks that may be using this rank's tensors
        self._since: float | None = None  # when it failed
        self._is_first = False  # whether the failure was found here, before others on this rank knew of it
        self._describe: Callable[[], errors.SymcommError] | None = None  # makes the error that says what went wrong
        self._has_captured = False
        self.watchdog = Watchdog(self)
        ref = weakref.ref(self)
        core.state.letting_go.append(lambda: (this := ref()) is not None and this.found())

    # --- for callers ------------------------------------------------------------------------------------------

    def found(self) -> errors.SymcommError | None:
        """What went wrong so far, on any rank. None: whatever the GPU finished before the call is valid."""
        if self.error is None and (self._verdict is not None or self._describe is not None or self._is_over()):
            self.watchdog.wake()
            if not self._settled.wait(VERDICT_S):  # no success, whatever the reason
                return words.no_result(f"work on cuda:{self.device} on rank {self._rank}: the group has failed")
        if self.error is not None:
            self.handle.let_go()
        return self.error

    def give_up(self, work: Any, call: str, begun: float) -> None:
        """Let the deadline of ``call`` pass now, since its caller waits no longer for what is in a stream. Returns once
        the group has failed and tensors are their owners' again, or once ``work`` has passed after all."""
        sequence = self.watchdog.sequence
        late = (sequence.missing() if sequence is not None else []) or [self._rank]  # or this very GPU takes long
        self.watchdog.add(Outstanding(call, lambda: [] if _has_passed(work) else late, lambda _: None, begun, 0.0))
        end = time.monotonic() + VERDICT_S
        while not _has_passed(work) and not self._settled.wait(POLL_S) and time.monotonic() < end:
            pass

    def raise_if_failed(self) -> None:
        """Raise what went wrong: in full the first time, as a reference to it later."""
        error = self.found()
        if error is None:
            return
        core = self._core()
        if self._raised and core is not None and core.failure is not None:
            raise core.unusable_error()
        self._raised = True
        raise error

    def raise_cause(self, error: RuntimeError, call: str) -> NoReturn:
        """Raise why CUDA raised ``error``: if a rank has died, that is the reason, since MPS then takes the GPU from
        all."""
        if not isinstance(error, errors.SymcommError) and self.gone():
            now = time.monotonic()
            self.watchdog.add(Outstanding(call, self._dead, lambda _: None, now, float("inf")))
            while time.monotonic() < now + CAUSE_S:
                self.raise_if_failed()
                time.sleep(POLL_S)
        raise error

    def check_usable(self, call: str, may_be_captured: bool = False) -> None:
        import torch

        self.check_group()
        try:
            is_captured = torch.cuda.is_current_stream_capturing()
        except RuntimeError as error:
            self.raise_cause(error, call)
        if is_captured and not may_be_captured:
            raise errors.CallerError(
                f"{call}: a CUDA graph is being captured, and cannot hold it: ranks synchronize on the host for it. "
                "Call it outside of the graph."
            )

    def check_group(self) -> None:
        """Raise if the group has failed. Asks CUDA nothing, since CUDA may have errors of its own by then."""
        self.raise_if_failed()
        core = self._core()
        if core is not None:
            core.check_usable()

    def watch_captured(self) -> None:
        """Look for dead ranks from now on, even if nothing is outstanding: the host does not see replays of a graph."""
        if not self._has_captured:
            self._has_captured = True
            self.watchdog.add(
                Outstanding("a captured all_reduce", self._dead, lambda _: None, time.monotonic(), float("inf"), True)
            )

    def _dead(self) -> list[int]:
        return sorted(self.departure.dead())

    def add(self, work: Any) -> None:
        """Let ``work`` fail when the group does, unless it was valid before."""
        with self._lock:
            self.works.add(work)

    # --- called by the watchdog -------------------------------------------------------------------------------

    def gone(self) -> list[int]:
        """Ranks that have died or left."""
        return [r["rank"] for r in self.handle.report()["ranks"] if r["gone"]]

    def is_busy(self) -> bool:
        """Whether peers would wait for us to leave if the group failed."""
        return self.error is None and (self._has_captured or self.departure.windows > 0 or self.departure.is_touching())

    def has_failed(self) -> bool:
        """Works that the GPU finished before the failure stay valid."""
        with self._lock:
            done = [work for work in self.works if _has_passed(work)]
        if self._is_over():
            return True
        for work in done:
            work.succeed()
        with self._lock:
            self.works.difference_update(done)
        return False

    def _is_over(self) -> bool:
        status = self.handle.status()
        if status != Status.LEFT:
            return bool(status)
        return self.handle.report()["culprit"] != self._rank  # otherwise this rank has left in peace

    def fail(self, item: Any, ranks: list[int], died: bool) -> None:
        """The watchdog found that ``ranks`` will not arrive."""
        core = self._core()
        if core is None:
            return
        status = self.handle.report()["ranks"][ranks[0]]["gone"] if died else Status.TIMEOUT
        self.handle.fail(status, ranks[0])
        self._stop()
        self._describe = lambda: self._lost(core, item, ranks) if died else self._late(core, item, ranks)
        self._is_first = True

    def learn(self) -> None:
        """The group failed on another rank, or in a call that is not the GPU's."""
        self._stop()
        if (core := self._core()) is not None:
            self._describe = lambda: self._failed_elsewhere(core)

    def _failed_elsewhere(self, core: ProcessGroup) -> errors.SymcommError:
        report = self.handle.report()
        origin, culprit = report["origin"], report["culprit"]
        what = f"work on cuda:{self.device} of group {core.name!r}"
        if core.failure is not None:
            return core.failure
        if report["status"] in (Status.DEAD, Status.LEFT):
            return self._without(core, f"{what} failed on rank {core.rank}", [culprit], "")
        if report["status"] == Status.TIMEOUT:
            return errors.DeadlineError(
                f"{what} failed on rank {core.rank}: rank {origin}'s deadline passed while it waited for rank {culprit}"
                "; operations under way hold no result. Look at what that rank does, or give a longer timeout.",
                [culprit],
            )
        return words.no_result(f"{what} ended on rank {core.rank}, since the group failed on rank {origin}")

    def _stop(self) -> None:
        """Called before any wait is released. From now on no kernel on any rank waits, or writes to peers."""
        sequence, flag_words = self.watchdog.sequence, self.departure.flag_words
        if flag_words is not None:
            self._users = sequence.users() if sequence is not None else []
            if self.departure.windows:
                self._users = [r for r in range(flag_words.world) if r != self._rank]
            flag_words.stop_kernels()

    def settle(self, now: float) -> bool:
        """Tell peers once this rank no longer uses their memory, and callers once peers no longer use its own.

        The failure is described here, after waits were released. How a process ended is known only a moment after its
        death. Under MPS its memory may be gone by then, and streams released that late would still read it."""
        if self._verdict is None and self._describe is not None:
            self._verdict, self._describe = self._describe(), None
        self._since = now if self._since is None else self._since
        self.departure.leave_when_done()
        in_use = self._is_in_use() or self._has_running_works()
        if self.error is None and (not in_use or now - self._since >= LEAVE_S):
            self._publish()
        return self._settled.is_set() and self.departure.has_left

    def _is_in_use(self) -> bool:
        self._users = self.departure.staying(self._users) if self._users else []
        return bool(self._users)

    def _has_running_works(self) -> bool:
        """Whether one of our own streams, for which no caller's stream waits, may still write to tensors of works."""
        with self._lock:
            return any(_is_running(work) for work in self.works)

    def _publish(self) -> None:
        with self._lock:
            works = list(self.works)
        core, error = self._core(), self._verdict
        if core is not None and error is not None:
            for work in works:
                work.fail(error)
            self.error = error
            if self._is_first:
                core.state.fail(lambda: error)
        self._settled.set()

    # --- descriptions -----------------------------------------------------------------------------------------

    def _what(self, core: ProcessGroup, item: Any) -> tuple[str, str]:
        seconds = format_seconds(max(time.monotonic() - item.begun, 0.001))
        return f"{item.what} on cuda:{self.device} of group {core.name!r}", f"on rank {core.rank} after {seconds}"

    def _lost(self, core: ProcessGroup, item: Any, ranks: list[int]) -> errors.SymcommError:
        what, where = self._what(core, item)
        return self._without(core, f"{what} failed {where}", ranks, " while the GPU waited for it")

    def _without(self, core: ProcessGroup, what: str, ranks: list[int], when: str) -> errors.SymcommError:
        report = self.handle.report()["ranks"]
        left = {r["rank"] for r in report if r["gone"] == Status.LEFT}
        ended = [how_rank_ended(r, core.peers[r].pid, Status.LEFT if r in left else Status.DEAD) for r in ranks]
        story = f"{what}: {'; '.join(ended)}{when}; the tensors of this operation hold no result"
        return words.ranks_gone(story, ranks, range(core.size))

    def _late(self, core: ProcessGroup, item: Any, ranks: list[int]) -> errors.SymcommError:
        what, where = self._what(core, item)
        story = f"{what} timed out {where}: the GPU work of rank {format_ranks(ranks)} did not come so far"
        return words.too_late(story, "what those ranks run on their GPU", ranks)


def explain_cuda_errors(method: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator for methods of objects that have ``failures``. CUDA's own errors then name the rank whose death
    caused them, and a failed group is refused before anything is asked of CUDA."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **more: Any) -> Result:
        failures: CudaFailures = self.failures
        failures.check_group()
        try:
            return method(self, *args, **more)
        except RuntimeError as error:
            failures.raise_cause(error, method.__name__)

    return run


_known: weakref.WeakKeyDictionary[ProcessGroup, dict[int, CudaFailures]] = weakref.WeakKeyDictionary()


def failures_of(core: ProcessGroup, device: int) -> CudaFailures:
    """The one CudaFailures of a group on a GPU."""
    made = _known.setdefault(core, {})
    if device not in made:
        made[device] = CudaFailures(core, device)
    return made[device]
