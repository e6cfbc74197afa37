"""Admission: the named participants build a group together, and either all go on in it or none does.

They exchange through a store what they need to build it, and each says when it has built its part. Then the round gets
its verdict, in a register that is written once. A rank that has heard from all writes "go"; a rank that met a failure,
or ran out of time, writes why not. The first value holds for all. Here the register is a key of the store;
replicated_round.py has one that survives the death of any participant.

In the store::

    1/i, 2/i ...       the items of participant i in the first, second ... exchange
    verdict            "go", or why not
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm.errors import format_ranks, format_seconds
from symcomm.memory.share import OthersShortage
from symcomm.store.base import poll_until

GO = "go"


class Round:
    """Participant ``index`` of ``size`` that build a group. ``find_failure`` says what has gone wrong, or ""."""

    def __init__(self, store: Any, index: int, size: int, seconds: float, find_failure: Callable[[], str] = str):
        self._store, self.index, self.size, self.seconds = store, index, size, seconds
        self._end = time.monotonic() + seconds
        self._find_failure = find_failure
        self._turn = 0
        self.own_error: BaseException | None = None  # why this participant cannot go on, if the reason is its own

    def exchange(self, item: bytes) -> list[bytes]:
        """Gather all participants' bytes; raises RankFailedError as soon as the round cannot succeed any more."""
        self._turn += 1
        keys = [f"{self._turn}/{i}" for i in range(self.size)]
        self._store.set(keys[self.index], b"." + item)
        for _ in poll_until(self._end - time.monotonic()):
            if self._store.check(keys):
                break
            self.check()
        else:
            if missing := [i for i, key in enumerate(keys) if not self._store.check([key])]:
                raise self.late(missing)
        return [value[1:] for value in self._store.multi_get(keys)]

    def __call__(self, item: bytes) -> list[bytes]:
        return self.exchange(item)

    def check(self) -> None:
        """Raise if the round cannot succeed any more."""
        why = bytes(self._store.get("verdict")).decode() if self._store.check(["verdict"]) else self._find_failure()
        if why and why != GO:  # "go": the missing items have come meanwhile
            raise self.to_error(why)

    def late(self, missing: Sequence[int]) -> errors.SymcommError:
        return errors.RankFailedError(
            f"{format_ranks(missing)} of the new ranks did not come within {format_seconds(self.seconds)}"
        )

    def to_error(self, verdict: str) -> errors.SymcommError:
        return errors.RankFailedError(verdict)

    def to_verdict(self, error: BaseException) -> str:
        """The inverse of to_error()."""
        return str(error)

    def _clean_up(self) -> None:
        """Delete the earlier keys, since some hold secrets. All have built their parts, so no rank reads them."""
        for turn in range(1, self._turn):
            with contextlib.suppress(RuntimeError, errors.SymcommError, NotImplementedError):  # some stores cannot
                self._store.delete_key(f"{turn}/{self.index}")

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def decide(self, verdict: str) -> str:
        """The verdict that holds for all: this one, unless another came first."""
        return bytes(self._store.compare_set("verdict", "", verdict)).decode()

    def build(self, make: Callable[[Round], Any]) -> Any:
        """What ``make(self)`` builds with the others; None if the round fails, and ``why`` is then the verdict."""
        built, self.why = None, GO
        try:
            built = make(self)
            self.exchange(b"built")
        except (errors.SymcommError, OSError, MemoryError) as error:
            self.why = self.to_verdict(self._blame_self(error))
        except BaseException as error:
            why = f"{self.describe(self.index)} was interrupted ({str(error) or type(error).__name__})"
            self.decide(self.to_verdict(errors.RankFailedError(why, [self.index])))
            self._drop(built)
            raise
        try:
            self.why = self.settle(self.why)
        except BaseException:
            self._drop(built)
            raise
        if self.why == GO:
            self._clean_up()
            return built
        self._drop(built)
        return None

    def describe(self, index: int) -> str:
        """A participant, in words."""
        return f"rank {index} of the new group (pid {os.getpid()})"

    def _blame_self(self, error: BaseException) -> BaseException:
        """If only this participant can know of an error, name the participant in it: the others will read it."""
        if isinstance(error, (errors.PeerError, errors.DeadlineError, errors.CallerError, OthersShortage)):
            return error
        self.own_error = error
        return errors.ResourceError(f"{self.describe(self.index)} gave up: {str(error) or type(error).__name__}")

    def settle(self, verdict: str) -> str:
        """The verdict that holds for all. Raises if this rank cannot learn it; the rank is then in neither group."""
        return self.decide(verdict)

    def _drop(self, built: Any) -> None:
        if built is not None:
            built.leave()
