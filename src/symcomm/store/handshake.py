"""How the ranks of a new group tell each other what they need to know, through a store.

Any store will do, ours or PyTorch's. The same ranks may meet under the same prefix again and again, also after a failed
attempt, and may arrive at any distance. So a rank reads only what was written for this meeting: each brings a fresh
token, and the leader (rank 0) opens a *generation* for the tokens that it found::

    here/R        rank R's token and first item; "!" before the token: R gave up, and why ("?" before that: because of
                  others, who may say more)
    failed        the last rank that found that it cannot take part, its token, and when
    told          how many have been told that a rank gave up; the leader, who may serve the store, waits for them
    go/TOKEN      for the rank that brought this token: everybody's tokens and first items; the leader's token is G
    G/T/R         in generation G, turn T: rank R's item
    G/T/all       everybody's items

A rank removes its keys when all have read them. If a rank of a generation arrives once more, that generation is dead,
and the others start over.

A rank that cannot take part (it has no memory, no descriptors) says why. The others raise that within a second; so do
those that come later, once each, unless their process is newer than the failure: it belongs to the next attempt. A rank
that only missed the others in time may come again, so the ranks that wait for it are not told.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from symcomm import errors
from symcomm.store.lease import root_of

Exchange = Callable[[bytes], list[bytes]]  # everybody's bytes, in rank order
T = TypeVar("T")

LOOK_FIRST, LOOK_LAST = 0.0001, 0.02  # seconds between two looks
LOOK_FOR_STALE = 0.25  # seconds between checks whether another rank has started over
LOOK_FOR_DEAD = 0.1  # seconds between checks whether all others live
HEARSAY = 0.4  # seconds to wait for a rank's own reason if others say that they gave up because of it
LOOK_FOR_FAILED = 0.25  # seconds between checks whether one of them cannot take part
TELLING = 1.0  # seconds that a leader stays until the others know, because it may serve the store
ABSENT = "-"
TOKEN = 16  # characters
POLL = 0.005  # seconds between checks for the arrival of a rank that had given up


_answered: deque[str] = deque(maxlen=4096)  # tokens that this process has answered, as a leader: never twice
_told: deque[tuple[int, str]] = deque(maxlen=4096)  # who in this process was told, and the token of whom: never twice
_failed: set[str] = set()  # keys "failed" that this process has written
_counted: set[str] = set()  # keys "told" that this process has waited at


@functools.cache
def _started(pid: int) -> float:
    """The wall-clock time at which this process started."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def handshake(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    timeout: float,
    build: Callable[[Exchange], T],
    call: str = "init",
    tidy: bool = True,
    check: Callable[[], None] | None = None,
) -> T:
    """Return what ``build(exchange)`` makes, together with the other ranks that call this on the same ``prefix``.

    When ``build`` returns, all ranks must know that all have built theirs (a barrier does this), because keys are
    removed then; unless ``tidy`` is False, for a store that is not used again. ``check``, if given, raises once one of
    the ranks cannot come any more. Raises DeadlineError, naming the ranks that did not come within ``timeout``
    seconds."""
    if size == 1:
        return build(lambda item: [item])
    deadline = time.monotonic() + timeout
    written: list[str] = []  # by all attempts: what one of them told may be secret, so it is removed at the end
    while True:
        attempt = _Attempt(store, prefix, rank, size, deadline, timeout, call, [check] if check else [], written)
        try:
            built = build(attempt)
        except _StartOver:
            continue
        except BaseException as error:
            if isinstance(error, errors.SymcommError) and attempt.is_stale() and time.monotonic() < deadline:
                continue  # with what a rank that started over left behind
            has_left = isinstance(error, errors.PeerError) and not isinstance(error, _GaveUp)
            reason = attempt.find_reason() if has_left else None
            if reason is not None:
                raise reason from error  # a rank left because it cannot take part
            attempt.give_up(error)
            raise
        if tidy:
            attempt.clean_up()
        return built


def decline(store: Any, prefix: str, rank: int, size: int, error: Exception) -> None:
    """Tell the others on ``prefix`` that this rank does not come, and why."""
    _Attempt(store, prefix, rank, size, time.monotonic() + TELLING, TELLING, "init", [], []).give_up(error)


def _ends_with_leader(store: Any) -> bool:
    """Whether this process may serve the store; torch's does not say."""
    root = root_of(store)
    return bool(getattr(root, "is_serving", type(root).__name__ == "TCPStore"))


class _StartOver(errors.PeerError):
    """Another rank has left this generation, and arrived anew."""


class _GaveUp(errors.RankFailedError):
    """Another rank will not go on; each rank sees that for itself."""


@dataclass(eq=False)
class _Attempt:
    """One rank's part in one meeting."""

    store: Any
    prefix: str
    rank: int
    size: int
    deadline: float
    timeout: float
    call: str
    checks: list[Callable[[], None]]  # each raises once a rank is gone
    mine: list[str]  # keys that we wrote and must remove ourselves
    token: str = field(default_factory=lambda: secrets.token_hex(TOKEN // 2))
    tokens: list[str] = field(default_factory=list)  # of the generation's ranks, once there is one
    generation: str = ""
    turn: int = 0
    look_at: float = 0.0
    has_given_up: bool = False
    heard_at: float = 0.0  # when another rank was first found to have given up because of others

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _here(self, rank: int) -> str:
        return self._key(f"here/{rank}")

    def __call__(self, item: bytes) -> list[bytes]:
        try:
            return self._exchange(item)
        except (errors.PeerError, RuntimeError):
            self.check_ranks()  # a rank that is gone is a better reason; it may have been the store's host
            raise

    def _exchange(self, item: bytes) -> list[bytes]:
        self.turn += 1
        if self.turn == 1:
            self._take_back()
            items = self._lead(item) if self.rank == 0 else self._arrive(item)
            self.look_at = time.monotonic() + LOOK_FOR_STALE
            return items
        whole = self._key(f"{self.generation}/{self.turn}/all")
        if self.rank:
            self._set(self._key(f"{self.generation}/{self.turn}/{self.rank}"), b"." + item)  # never an empty value
            self._watch([whole])
            return _unpack(self.store.get(whole))[1]
        keys = [self._key(f"{self.generation}/{self.turn}/{r}") for r in range(1, self.size)]
        self._watch(keys)
        items = [item, *(value[1:] for value in self._get_all(keys))]
        self._set(whole, _pack([], items))
        return items

    # --- the first turn ---------------------------------------------------------------------------------------

    def _arrive(self, item: bytes) -> list[bytes]:
        self.store.set(self._here(self.rank), self.token.encode() + item)
        answer = self._key(f"go/{self.token}")
        self._await([answer])
        self.tokens, items = _unpack(self.store.get(answer))
        self.generation = self.tokens[0]
        self.mine += [answer, self._here(self.rank)]
        return items

    def _lead(self, item: bytes) -> list[bytes]:
        self.store.set(self._here(0), self.token.encode())
        self.mine.append(self._here(0))  # so that ranks in a dead generation can see it change
        keys = [self._here(r) for r in range(1, self.size)]
        self._await(keys)
        arrivals = [self._fresh(r, value) for r, value in enumerate(self._get_all(keys), 1)]
        items = [item, *(value[TOKEN:] for value in arrivals)]
        self.tokens = [self.token, *(value[:TOKEN].decode() for value in arrivals)]
        self.generation = self.token
        _answered.extend(self.tokens[1:])
        self._answer(_pack(self.tokens, items))
        return items

    def _answer(self, value: bytes) -> None:
        keys = [self._key(f"go/{token}") for token in self.tokens[1:]]
        if len(keys) > 1 and self.store.has_extended_api():
            self.store.multi_set(keys, [value] * len(keys))
        else:
            for key in keys:
                self.store.set(key, value)

    def _get_all(self, keys: list[str]) -> list[bytes]:
        if len(keys) > 1 and self.store.has_extended_api():
            return [bytes(value) for value in self.store.multi_get(keys)]
        return [bytes(self.store.get(key)) for key in keys]

    def _fresh(self, rank: int, value: bytes) -> bytes:
        """A rank's token and item. One that gave up may come again; one that was answered still removes its keys."""
        while value.startswith(b"!") or value[:TOKEN].decode() in _answered:
            if time.monotonic() > self.deadline:
                raise errors.deadline(self.call, self.timeout, missing=[rank])
            time.sleep(POLL)
            self._await([self._here(rank)])
            self._check_failed()
            value = self._left_by(rank) or value
        return value

    def _left_by(self, rank: int) -> bytes:
        """What a rank has left where it arrives, or nothing. Does not wait."""
        value = bytes(self.store.compare_set(self._here(rank), ABSENT, ABSENT))
        return b"" if value == ABSENT.encode() else value

    def add_check(self, check: Callable[[], None]) -> None:
        """What else raises once a rank is gone: those that have met see more of each other."""
        self.checks.append(check)

    def check_ranks(self) -> None:
        for check in self.checks:
            check()

    # --- waiting ----------------------------------------------------------------------------------------------

    def _await(self, keys: list[str]) -> None:
        """Wait for the others to arrive, which may take long."""
        look = LOOK_FOR_DEAD if self.checks else LOOK_FOR_FAILED
        while True:
            left = max(0.001, self.deadline - time.monotonic())
            try:
                self.store.wait(keys, timedelta(seconds=min(left, look)))
                return
            except errors.PeerError:
                raise
            except RuntimeError:  # the time is over, or PyTorch's store is lost: then this raises, too
                if self.store.check(keys):
                    return
            if time.monotonic() >= self.deadline:
                raise errors.deadline(self.call, self.timeout, missing=self._missing())
            self.check_ranks()
            self._check_failed()

    def _watch(self, keys: list[str]) -> None:
        """Wait for ranks of the generation, and check that they are still in it."""
        pause, self.look_at = LOOK_FIRST, time.monotonic() + LOOK_FOR_STALE
        while not self.store.check(keys):
            if time.monotonic() > self.deadline:
                raise errors.deadline(self.call, self.timeout, missing=self._missing())
            self.check()
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_LAST)

    def is_stale(self) -> bool:
        """Whether another rank of our generation has arrived anew since."""
        marks = {b"", *(token.encode() for token in self.tokens), *(f"!{token}".encode() for token in self.tokens)}
        return any(value[: TOKEN + value.startswith(b"!")] not in marks for value in self._left_here().values())

    def _left_here(self) -> dict[int, bytes]:
        """What the other ranks of our generation have left where they arrive: a token, or one after "!" and why they
        gave up, or nothing."""
        found: dict[int, bytes] = {}
        for rank in (r for r in range(len(self.tokens)) if r != self.rank):
            with contextlib.suppress(RuntimeError, errors.SymcommError):  # no store any more, or one that cannot tell
                found[rank] = self._left_by(rank)
        return found

    def check(self) -> None:
        """Raises once another rank cannot or will not go on. For any code that waits for the others."""
        self.check_ranks()
        if (now := time.monotonic()) > self.look_at:
            self._check_others()
            self.look_at = now + LOOK_FOR_STALE

    def _check_others(self) -> None:
        if self.is_stale():
            raise _StartOver(f"{self.call}: another rank started over.")
        gave_up = {rank: value for rank, value in self._left_here().items() if value.startswith(b"!")}
        for rank, value in gave_up.items():
            if not self._is_hearsay(value):
                raise self._hear(rank, value)
        if gave_up:
            self.heard_at = self.heard_at or time.monotonic()
            if time.monotonic() > self.heard_at + HEARSAY:
                raise self._hear(*next(iter(gave_up.items())))

    @staticmethod
    def _is_hearsay(value: bytes) -> bool:
        return value[TOKEN + 1 : TOKEN + 2] == b"?"

    def _check_failed(self) -> None:
        """Before there is a generation: raises if a rank said that it cannot take part."""
        key = self._key("failed")
        if not self.store.check([key]):
            return
        rank, token, when = bytes(self.store.get(key)).decode().split()
        if int(rank) == self.rank or (self.rank, token) in _told or float(when) < _started(os.getpid()):
            return
        value = self._left_by(int(rank))
        if value.startswith(f"!{token}".encode()):  # else it has come again
            raise self._hear(int(rank), value)

    def find_reason(self) -> errors.SymcommError | None:
        """Why another rank of the generation gave up, if one did for a reason of its own."""
        end = time.monotonic() + HEARSAY
        while self.tokens and time.monotonic() < end:
            for rank, value in self._left_here().items():
                if value.startswith(b"!") and not self._is_hearsay(value):
                    return self._hear(rank, value)
            time.sleep(LOOK_LAST)
        return None

    def _hear(self, rank: int, value: bytes) -> _GaveUp:
        """An error of this rank from what ``rank`` left when it gave up."""
        _told.append((self.rank, value[1 : TOKEN + 1].decode()))
        if self.rank:
            with contextlib.suppress(RuntimeError, errors.SymcommError):
                self.store.add(self._key("told"), 1)
        why = value[TOKEN + 1 :].decode(errors="replace").removeprefix("?")
        return _GaveUp(f"{self.call}: rank {rank} gave up: {why}", [rank])

    def _missing(self) -> list[int]:
        """The ranks that have not come to this turn, as far as this rank can tell."""
        if self.turn == 1:
            keys = {r: self._here(r) for r in range(self.size)}
        else:  # the leader writes no item of its own
            keys = {r: self._key(f"{self.generation}/{self.turn}/{r}") for r in range(1, self.size)}
        missing = [r for r, key in keys.items() if r != self.rank and not self.store.check([key])]
        return missing or ([0] if self.rank else [])

    # --- keys -------------------------------------------------------------------------------------------------

    def _set(self, key: str, item: bytes) -> None:
        self.mine.append(key)
        self.store.set(key, item)

    def clean_up(self) -> None:
        """Remove keys: all ranks have read everything."""
        for key in self.mine:
            self._remove(key)

    def _remove(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, errors.SymcommError, NotImplementedError):  # some stores cannot
            self.store.delete_key(key)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank does not go on. What it wrote stays: they may be reading it."""
        if self.has_given_up or isinstance(error, _StartOver):
            return
        self.has_given_up = True
        with contextlib.suppress(RuntimeError, errors.SymcommError):  # the store may be what failed
            if isinstance(error, _GaveUp):  # all ranks have been told that, or will be
                self._await_told(error.ranks)
            else:
                self._tell(error)

    def _tell(self, error: BaseException) -> None:
        # the others notice late and dead ranks themselves, and a late rank may come again
        hearsay = isinstance(error, (errors.DeadlineError, errors.PeerError))
        why = f"{'?' * hearsay}{str(error) or type(error).__name__}"
        self.store.set(self._here(self.rank), f"!{self.token}{why}")
        if hearsay:
            return
        key = self._key("failed")
        _failed.add(key)
        self.store.set(key, f"{self.rank} {self.token} {time.time()}")
        self._await_told([])

    def _await_told(self, others: list[int]) -> None:
        """If the store ends with the leader, the leader stays for a moment: until the ranks that are not in ``others``
        know which rank gave up."""
        if self.rank or not _ends_with_leader(self.store):
            return
        key, end = self._key("told"), time.monotonic() + TELLING
        _counted.add(key)
        while self.store.add(key, 0) < self.size - 1 - len(others) and time.monotonic() < end:
            time.sleep(LOOK_LAST)

    def _take_back(self) -> None:
        """Remove what an earlier attempt in this process wrote, that it could not take part."""
        for name, written in (("failed", _failed), ("told", _counted)):
            if (key := self._key(name)) in written:
                written.discard(key)
                self._remove(key)


def _pack(tokens: list[str], items: list[bytes]) -> bytes:
    return json.dumps([tokens, [item.decode("latin-1") for item in items]]).encode()


def _unpack(value: Any) -> tuple[list[str], list[bytes]]:
    tokens, items = json.loads(bytes(value))
    return tokens, [item.encode("latin-1") for item in items]
