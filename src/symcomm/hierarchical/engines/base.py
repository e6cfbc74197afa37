"""Engines: the transports between hosts.

An engine moves bytes between ranks: it starts batches of sends and receives, and says when they have ended. All else
(which bytes, in which order, combined how) is the same for all engines, so a new one is a hundred lines. Third parties
add theirs by an entry point of the group ``symcomm.engines``, whose name is the engine's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from symcomm import errors
from symcomm.memory.share import Deadline

T = TypeVar("T")

# Built in, the best first. The modules are loaded when an engine is asked for.
BUILT_IN = {
    "gloo": ("symcomm.hierarchical.engines.torch_engine", "GlooEngine"),
    "mpi": ("symcomm.hierarchical.engines.mpi_engine", "MpiEngine"),
    "nccl": ("symcomm.hierarchical.engines.torch_engine", "NcclEngine"),
}
ENTRY_POINTS = "symcomm.engines"
TAGS = 8


class Move(NamedTuple):
    """One message. Between two ranks, messages of one tag arrive in the order in which they were started, and do not
    wait for those of another tag. All moves of a batch have the same tag, one of TAGS, and the same ``match``.

    ``match``: a number of up to 27 bits, which must be the same at both ends."""

    is_send: bool
    address: int
    nbytes: int
    peer: int
    tag: int = 0
    match: int = 0

    def label(self, most: int) -> int:
        """Tag and match as one number, for networks that have only one. ``most``: the largest that they take."""
        return self.tag + TAGS * (self.match % (most // TAGS))


@dataclass
class EngineContext:
    """What an engine is told when it is made. ``address``: where other hosts reach this rank. ``check``: raises once a
    rank cannot arrive any more; None when the engine has connected."""

    rank: int
    size: int
    address: str
    check: Callable[[], None] | None = None


def in_background(
    act: Callable[[], T], timeout: float, context: EngineContext, how: str, absent: Callable[[], Sequence[int]] = list
) -> T:
    """Connect the ranks by ``how``: call ``act()`` in a thread, and return or raise what it does. The thread is left
    behind when the time is over, or ``context.check`` raises. ``absent()``: the ranks that did not come."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((act(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="symcomm-connect", daemon=True).start()
    try:
        found, error = Deadline(timeout, context.check).get(answers)
    except queue.Empty:
        raise errors.deadline(f"connecting rank {context.rank} by {how}", timeout, missing=absent()) from None
    if error is not None:
        raise error
    return found


class Expected:
    """Receives that belong to a later ``start``. ``begun``: what the engine has begun of them."""

    def __init__(self, moves: Sequence[Move]):
        self.moves = [m for m in moves if m.nbytes]
        self.begun: list[Any] = []


class Transfer:
    """Moves in flight. ``then(transfer)`` is called once they have ended, in a thread of the engine."""

    def __init__(self, peers: Sequence[int] = (), then: Callable[[Transfer], None] | None = None):
        self.peers = sorted(set(peers))
        self.error: BaseException | None = None
        self._then = then
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """Called by the engine, once."""
        self.error = error
        self._ended.set()
        if self._then is not None:
            self._then(self)

    def wait(self, timeout: float) -> None:
        """Return once it has completed; raise what went wrong, or DeadlineError."""
        if not self._ended.wait(timeout):
            raise errors.deadline("transfer between hosts", timeout, missing=self.peers)
        if self.error is not None:
            raise self.error


class Engine(ABC):
    """Connects ``context.size`` ranks. Built in two steps, between which the ranks exchange their ``endpoint``."""

    name: str = ""
    endpoint: dict[str, Any]
    # Bytes of a host that travel with its arrival message, over TCP, instead of through the engine. Gloo, which uses
    # TCP itself, wants more; for faster networks this is a guess.
    eager_host_max = 32 << 10
    has_tags = True  # False: messages find receives in the order in which both were started, whatever their tag

    @staticmethod
    @abstractmethod
    def why_not() -> str:
        """Why this engine cannot be used here, as the end of a sentence; empty when it can."""

    @abstractmethod
    def __init__(self, context: EngineContext):
        """Get ready, and put what the others need to know into ``self.endpoint`` (of JSON's types)."""

    @abstractmethod
    def connect(self, endpoints: Sequence[dict[str, Any]], timeout: float) -> None:
        """All ranks call this at once, with the endpoints of all."""

    @abstractmethod
    def start(
        self, moves: Sequence[Move], then: Callable[[Transfer], None] | None = None, expected: Expected | None = None
    ) -> Transfer:
        """Begin all ``moves``, which proceed at the same time, and return. Several threads may call this.

        ``expected``: receives that belong to it, begun already or not."""

    @abstractmethod
    def abort(self) -> None:
        """End every transfer now, with an error; the engine cannot be used afterwards. As far as the network allows, no
        transfer uses its memory any more when this returns: callers get their tensors back."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads. No transfer is in flight any more."""

    def expect(self, moves: Sequence[Move]) -> Expected:
        """Announce receives that a later ``start`` will be given. An engine that can begin them now, while other
        transfers start and end, gets its bytes half a round trip sooner."""
        return Expected(moves)


# --- the choice ---------------------------------------------------------------------------------------------------


def _entry_points() -> dict[str, Any]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def engine_class(name: str) -> type[Engine]:
    """The engine of that name: ours, or a third party's."""
    if name in BUILT_IN:
        module, symbol = BUILT_IN[name]
        return getattr(importlib.import_module(module), symbol)
    others = _entry_points()
    if name not in others:
        known = ", ".join([*BUILT_IN, *others])
        raise errors.bad_argument(
            "groups across hosts", "engine", name, f"one of {known}", "others come with their own package"
        )
    return others[name].load()


def wanted_engine(given: str | None) -> str:
    """The engine that the caller or SYMCOMM_ENGINE asks for, checked; empty when any will do."""
    name = (given if given else os.environ.get("SYMCOMM_ENGINE", "")).lower()
    if name and (reason := engine_class(name).why_not()):
        raise errors.ResourceError(f"groups across hosts: engine {name} cannot be used: {reason}.")
    return name


def available_engines() -> list[str]:
    """The engines for host memory that can be used here, the best first. NCCL is used only when it is asked for."""
    return [name for name in [*BUILT_IN, *_entry_points()] if name != "nccl" and not engine_class(name).why_not()]
