"""The default group: ``init()``, ``destroy()`` and the collectives as plain functions on it.

Where threads are ranks, each thread has a default group of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import symcomm
from symcomm import errors
from symcomm.group import hooks
from symcomm.group.factory import finish_meeting, make_group
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.group.work import Timeout, to_ns
from symcomm.memory.share import naming_shortages
from symcomm.store.handshake import Exchange, decline, handshake
from symcomm.store.lease import Lease
from symcomm.store.standing import MEMBER, WAITING, tell_launcher

JOIN = "SYMCOMM_JOIN"  # set by the launcher in newcomers: the attempt in which the running ranks were started
RENDEZVOUS_SECONDS = 300.0  # the most that ranks wait for each other, unless the group's time-out is shorter
PREFIX = "symcomm/init"  # of keys in the store where ranks meet
LOOK = 0.05  # seconds between two tries
PORT_SECONDS = 2.0  # how long to retry a port that is in use, but not by a store
TELLING = 5.0  # seconds in which a rank that cannot take part may find the store, to say so there
TELLING_TAKES = 8  # descriptors that this takes
_process_group: ProcessGroup | None = None
_thread = threading.local()


def init(
    init_method: str = "env://",
    rank: int = -1,
    world_size: int = -1,
    store: Any = None,
    timeout: Timeout = None,
    name: str = "world",
    engine: str | None = None,
    enable_reconfigure: bool = False,
) -> Any:
    """Join the other ranks and make the default group.

    Under ``symcomm run``, torchrun, mpirun or srun it takes no arguments. ``store`` (with rank and world_size) replaces
    the meeting place that ``init_method`` names. ``engine`` ("gloo", "mpi", "nccl") carries data where ranks are on
    several hosts; without it, or SYMCOMM_ENGINE, one that all of them have is chosen.

    With ``enable_reconfigure`` the call waits for no other rank: the group is a ReconfigurableGroup, which has no
    members until its first ``reconfigure``.

    Raises: RendezvousError, BadArgumentError, RankFailedError, DeadlineError, StoreConnectionError, StoreAuthError,
    GroupUnusableError, ResourceError.
    """
    if _current() is not None:
        raise errors.GroupUnusableError("init: the default group exists already; call symcomm.destroy() first.")
    if enable_reconfigure:
        if store is not None or rank >= 0 or world_size >= 0:
            raise errors.CallerError(
                "init: enable_reconfigure goes without store, rank and world_size; reconfigure() names the members."
            )
        from symcomm.group.reconfigure import ReconfigurableGroup

        empty: Any = ReconfigurableGroup(name, timeout, engine)
        set_default(empty)
        return empty
    seconds = DEFAULT_TIMEOUT if timeout is None else to_ns("init", timeout) / 1e9
    if store is None and is_newcomer():
        raise errors.RendezvousError(
            "init: this process was started to join ranks that already run (SYMCOMM_JOIN is set), which do not wait "
            "in init(); call symcomm.join() here, or let symcomm.elastic.Session choose."
        )
    if store is not None and (rank < 0 or world_size < 1):
        raise errors.bad_argument("init", "rank and world_size", (rank, world_size), "given together with store")
    make = partial(make_group, name=name, timeout=timeout, engine=engine)
    if store is not None:
        group = join_ranks(store, rank, world_size, min(seconds, RENDEZVOUS_SECONDS), make)
    else:
        group = _init_anywhere(init_method, rank, world_size, min(seconds, RENDEZVOUS_SECONDS), make)
    set_default(group)
    hooks.joined(group, group.store)
    return group


def join_ranks(
    store: Any,
    rank: int,
    world_size: int,
    seconds: float,
    make: Callable[..., Any],
    tidy: bool = True,
    check: Callable[[], None] | None = None,
) -> Any:
    """The group that ``make(rank, size, exchange)`` makes together with the other ranks that come to ``store``.

    ``tidy``: leave no keys there, and let the rank that hosts it end it at once. ``check``: raises once a rank cannot
    come any more."""

    def build(exchange: Exchange) -> Any:
        group = make(rank, world_size, exchange)
        if tidy:
            finish_meeting(group, exchange)
        return group

    group = handshake(store, PREFIX, rank, world_size, seconds, build, tidy=tidy, check=check)
    group.store = store
    return group


def _init_anywhere(init_method: str, rank: int, world_size: int, seconds: float, make: Callable[..., Any]) -> Any:
    """Like join_ranks, in a store that this function finds or serves. The store ends with the group.

    A rank that is early for the next group may find the store of the group that ends. When that store goes away, the
    rank looks again."""
    start, lease = time.monotonic(), None
    end = start + seconds
    tell = tell_launcher if init_method.startswith("env://") else _tell_nobody
    while True:
        try:
            place = _find(init_method, rank, world_size, max(1.0, end - time.monotonic()))
            lease = Lease(place.store)
            tell(place.store, WAITING)
            group = join_ranks(place.store, place.rank, place.world_size, max(1.0, end - time.monotonic()), make)
        except BaseException as error:
            if lease is not None:
                lease.release()
                lease = None
            if not isinstance(error, errors.StoreConnectionError) or time.monotonic() > end:
                raise
            if error.errno == errno.EADDRINUSE and time.monotonic() > start + PORT_SECONDS:
                raise
            time.sleep(LOOK)
        else:
            group.lease = lease
            tell(place.store, MEMBER)
            return group


def _find(init_method: str, rank: int, world_size: int, seconds: float) -> Any:
    """The place where the ranks meet. A rank that is out of descriptors raises its soft limit, to tell the others."""

    def find(seconds: float) -> Any:
        with naming_shortages("init"):
            from symcomm.store.bootstrap import rendezvous

            return rendezvous(init_method, rank, world_size, timeout=seconds)

    try:
        return find(seconds)
    except errors.ResourceError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(errors.SymcommError, OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft + TELLING_TAKES, hard))
            place = find(min(seconds, TELLING))
            decline(place.store, PREFIX, place.rank, place.world_size, error)
            Lease(place.store).release()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        raise


def _tell_nobody(store: Any, standing: str) -> None:
    """The launcher does not keep a store that the program names."""


def is_newcomer() -> bool:
    """Whether the launcher started this process to join ranks that already run.

    Raises: nothing."""
    return JOIN in os.environ


def join(store: Any = None, name: str = "world", timeout: float | timedelta = 300.0) -> ProcessGroup:
    """Join ranks that already run, when they call ``group.grow()``, and make the new group the default one.

    Under ``symcomm run`` it takes no arguments; elsewhere ``store`` is the one in which those ranks met.

    Raises: GroupUnusableError when they have ended the job, DeadlineError when they have not let this process in for
    ``timeout`` seconds, RendezvousError, StoreConnectionError."""
    from symcomm.group.grow import join_through

    if _current() is not None:
        raise errors.GroupUnusableError("join: the default group exists already; call symcomm.destroy() first.")
    rank, tell = None, _tell_nobody
    if store is None:
        from symcomm.store.bootstrap import rendezvous

        # the keys of the running ranks carry the attempt in which they started
        environ = {**os.environ, "TORCHELASTIC_RESTART_COUNT": os.environ.get(JOIN, "0")}
        meeting = rendezvous(timeout=min(to_ns("join", timeout) / 1e9, 300.0), environ=environ)
        store, rank, tell = meeting.store, meeting.rank, tell_launcher
    tell(store, WAITING)
    group = join_through(store, name, timeout, rank)
    tell(store, MEMBER)  # before it is handed a state: as its only holder it must not count as a newcomer
    set_default(group)
    return group


def set_default(group: ProcessGroup | None, of_thread: bool = False) -> None:
    global _process_group
    if of_thread or getattr(_thread, "group", None) is not None:
        _thread.group = group
    else:
        _process_group = group


def _current() -> ProcessGroup | None:
    return getattr(_thread, "group", None) or _process_group


def default_group() -> ProcessGroup:
    """The group that init() made.

    Raises: GroupUnusableError before ``init()``."""
    group = _current()
    if group is None:
        raise errors.GroupUnusableError("no default group; call symcomm.init() first.")
    return group


def is_initialized() -> bool:
    """Whether ``init()`` or ``join()`` made a default group that has not been destroyed.

    Raises: nothing."""
    return _current() is not None


def destroy(group: ProcessGroup | None = None) -> None:
    """Leave ``group``, or the default one.

    Raises: GroupUnusableError where there is no group."""
    target = group or default_group()
    target.destroy()
    if target is _current():
        set_default(None)


def rank(group: ProcessGroup | None = None) -> int:
    """This rank's number in ``group``, or in the default group.

    Raises: GroupUnusableError before ``init()``."""
    return (group or default_group()).rank


def world_size(group: ProcessGroup | None = None) -> int:
    """How many ranks ``group``, or the default group, has.

    Raises: GroupUnusableError before ``init()``."""
    return (group or default_group()).size


def _on_default(name: str) -> Callable[..., Any]:
    method = getattr(ProcessGroup, name)

    def call(*args: Any, group: ProcessGroup | None = None, **kwargs: Any) -> Any:
        return getattr(group or default_group(), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"On ``group``, or the default one: {method.__doc__}"
    return call


# Every public name of the package that is also a method of a group calls that method of the default group.
for _name in symcomm.__all__:
    if _name not in globals() and hasattr(ProcessGroup, _name):
        globals()[_name] = _on_default(_name)
