"""Asynchronous operations of a group across hosts: one thread of the group runs them in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.errors import no_thread
from symcomm.group.buffers import Buffer
from symcomm.group.failure import Site
from symcomm.group.work import FOREVER, LOOK, Work
from symcomm.hierarchical.failure import HierarchicalState


class HierarchicalWork(Work):
    """``act`` performs the operation; it is called once, in the group's thread."""

    def __init__(
        self, state: HierarchicalState, number: int, call: str, site: Site, act: Callable[[], None],
        outputs: Sequence[Buffer] = (), result: Sequence[Any] = (),
    ):  # fmt: skip
        super().__init__(state, call, site, result)
        self.outputs = outputs
        self._number = number
        self._act: Callable[[], None] | None = act
        self._ended = threading.Event()
        self._failed_with: BaseException | None = None

    @property
    def sequence_number(self) -> int:
        return self._number

    def perform(self) -> None:
        try:
            assert self._act is not None
            self._act()
        except BaseException as error:
            self._failed_with = error
        self._act = None
        self._copy_out(0)
        self._ended.set()

    def _copy_out(self, status: int) -> None:
        """The thread that performed the operation has finished its outputs, so only the error is taken over."""
        with self._lock:
            if not self.settled:
                self._error, self.outputs = self._failed_with, []
                self._end()

    def await_end(self) -> None:
        self._ended.wait()

    def _settle_within(self, timeout_ns: int) -> bool:
        if not self._ended.is_set() and (timeout_ns == LOOK or not self._ends_within(timeout_ns)):
            return False
        self.settle(0)
        return True

    def _ends_within(self, timeout_ns: int) -> bool:
        state = self._state
        try:
            return self._ended.wait(None if timeout_ns == FOREVER else timeout_ns / 1e9)
        except BaseException:  # a signal handler raised: do as in a blocking call
            if state is not None:
                state.failures.abort()
            self._ended.wait()
            raise

    def _give_up(self, seconds: float) -> None:
        """Fail the operation that runs as late: this one, or an earlier one that holds it up."""
        state = self._state
        if state is not None:
            others = [r for r in range(state.size) if r != state.rank]
            state.failures.late(min(self._number, state.doing[0]), seconds, others, self._ended.is_set)
        self._ended.wait()
        self.settle(0)


class Runner:
    """The thread. It starts with the first asynchronous operation."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[HierarchicalWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: HierarchicalWork) -> None:
        if self._thread is None:
            thread = threading.Thread(target=_run, args=(self._works,), name="symcomm-hosts", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise no_thread("asynchronous operations", error) from None
            self._thread = thread
        self._works.put(work)

    def stop(self) -> None:
        self._works.put(None)


def _run(works: queue.SimpleQueue[Any]) -> None:
    while (work := works.get()) is not None:
        work.perform()
        del work
