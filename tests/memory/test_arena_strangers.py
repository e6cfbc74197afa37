"""The sockets and files by which ranks come to map each other's memory: strangers are dropped, shortages are named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from symcomm import errors
from symcomm.group.factory import make_group
from symcomm.memory import arena as arena_module
from symcomm.memory import share
from symcomm.memory.arena import Arena, use_arena
from symcomm.memory.heap import PAGE
from tests.fuzz import arena as fuzz_arena

pytestmark = pytest.mark.without_torch

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


def meet(world: int, before: Callable[[int, dict], None], timeout: float = 20.0) -> list:
    """connect() on threads that are ranks; ``before(rank, info of rank 0)`` runs after infos were exchanged.

    Each begins when the one before it has said which arenas it has mapped. If all arenas of this process were there by
    then, there would be nothing to pass."""
    barrier = threading.Barrier(world, timeout=20)
    begun = [threading.Event() for _ in range(world)]
    items: list[bytes] = [b""] * world
    results: list = [None] * world

    def run(rank: int) -> None:
        def exchange(item: bytes) -> list[bytes]:
            items[rank] = item
            begun[rank].set()
            barrier.wait()
            everyone = list(items)
            before(rank, json.loads(everyone[0]))
            barrier.wait()
            return everyone

        assert rank == 0 or begun[rank - 1].wait(20)
        use_arena(Arena())
        try:
            results[rank] = share.connect(rank, world, exchange, {"rank": rank}, timeout)
        except Exception as error:
            results[rank] = error
        finally:
            use_arena(None)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def all_mapped(results: list) -> bool:
    return all(isinstance(r, tuple) and [e["rank"] for e in r[1]] == list(range(len(results))) for r in results)


class AnotherUser:
    """A process of user "nobody", made before all else, which connects to all it can when told to."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                held = [_connect_to_all(int(theirs.recv(10)))]
                theirs.send(b"%d" % len(held[0]))
                theirs.recv(1)  # until the test is over
                os._exit(0)
            finally:
                os._exit(1)
        theirs.close()
        self.line = ours

    def connect(self, times: int) -> int:
        self.line.sendall(b"%d" % times)
        return int(self.line.recv(10))

    def close(self) -> None:
        self.line.close()
        assert os.waitpid(self.pid, 0)[1] == 0


def _connect_to_all(times: int) -> list[socket.socket]:
    with open("/proc/net/unix") as file:
        names = {line.split()[-1][1:] for line in file if "@symcomm-" in line}
    held = []
    for name in sorted(names) * times:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.setblocking(False)
        with contextlib.suppress(OSError):  # another job's queue may be full
            one.connect(b"\0" + name.encode())
            one.send(bytes(24))
        held.append(one)
    return held


# --- strangers -------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("connections", [1, 40])
def test_another_user_who_connects_first_is_dropped(connections, caplog, monkeypatch):
    monkeypatch.setattr(share, "all_mapped", lambda infos: False)  # though threads that start together know each other
    stranger = AnotherUser()

    def before(rank: int, _card: dict) -> None:
        if rank == 0:
            assert stranger.connect(connections) >= connections, "the sockets' names are public"

    assert all_mapped(meet(3, before))
    assert f"user id {NOBODY}" in caplog.text
    stranger.close()


@pytest.mark.parametrize("words", [None, b"", b"hello", bytes(24), bytes(200)])
def test_our_own_user_saying_nothing_or_nonsense_holds_nobody_up(words, monkeypatch):
    monkeypatch.setattr(share, "GREETING_SECONDS", 20.0)  # longer than a busy machine stands still
    held = []

    def before(rank: int, info: dict) -> None:
        if rank == 0:
            for _ in range(30):
                held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                held[-1].connect(bytes.fromhex(info["socket"]))
                if words is not None:
                    held[-1].send(words)

    begun = time.monotonic()
    assert all_mapped(meet(3, before))
    assert time.monotonic() - begun < share.GREETING_SECONDS, "somebody waited for a stranger"
    for sock in held:
        sock.close()


def test_a_flood_of_connections_only_delays_a_rank(monkeypatch):
    """The kernel answers EAGAIN to whoever connects while the queue is full."""
    monkeypatch.setattr(share, "BACKLOG", 0)
    held: list[socket.socket] = []

    def before(rank: int, info: dict) -> None:
        while rank == 0:
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held[-1].setblocking(False)
            try:
                held[-1].connect(bytes.fromhex(info["socket"]))
            except BlockingIOError:
                return

    assert all_mapped(meet(3, before))
    for sock in held:
        sock.close()


def test_ten_thousand_odd_connections():
    fuzz_arena.run(inputs=10_000, seed=1)


# --- what is mapped --------------------------------------------------------------------------------------------------


@as_root
def test_named_memory_of_another_user_is_not_mapped(tmp_path, monkeypatch):
    """The name is seen by all, so that another user may take it in the moment in which it is free."""
    monkeypatch.setenv("SYMCOMM_SHARE", "named")
    path = tmp_path / "arena"
    mine = Arena()
    with open(path, "wb") as file:
        file.truncate(PAGE)
        file.write(arena_module.native.peek(mine.base, 32))
    info = {"path": str(path), "nbytes": PAGE, "nonce": mine.nonce.hex()}
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(errors.ResourceError, match=rf"belongs to user id {NOBODY}"):
        share._open_named([info], [0])
    os.chown(path, 0, 0)
    assert len(share._open_named([info], [0])) == 1


def test_memory_that_is_too_short_is_an_error_and_not_a_signal(tmp_path):
    with open(tmp_path / "short", "w+b") as file, pytest.raises(errors.ResourceError, match="not an arena"):
        arena_module.Peer.map(file.fileno(), PAGE)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_name_that_is_no_file(tmp_path, make):
    make(tmp_path / "odd")
    info = {"path": str(tmp_path / "odd"), "nbytes": PAGE, "nonce": "00" * 16}
    with pytest.raises(errors.ResourceError):
        share._open_named([info], [0])


@as_root
def test_files_of_others_are_not_swept(tmp_path):
    path = tmp_path / f"{arena_module.NAME}{'0' * 32}"
    path.touch()
    os.utime(path, (1, 1))
    os.chown(path, NOBODY, NOBODY)
    arena_module.sweep(str(tmp_path))
    assert path.exists()


# --- too few descriptors ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open so many descriptors more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.dup(fillers[0]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *fillers) + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def _join_with_few(rank: int, world: int, path: str, short: int, more: int) -> None:
    from functools import partial

    from symcomm.group.default import join_ranks
    from symcomm.store import FileStore

    store = FileStore(path, world)
    arena_module.current_arena()
    real = share._pass_descriptors

    def pass_descriptors(*args):
        with few_descriptors(more) if rank == short else contextlib.nullcontext():
            return real(*args)

    share._pass_descriptors = pass_descriptors
    join_ranks(store, rank, world, 20.0, partial(make_group, timeout=20.0))


@pytest.mark.parametrize(("short", "more"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)])
def test_too_few_descriptors_are_named_on_every_rank(tmp_path, short, more):
    from tests.support.ranks import run_ranks

    begun = time.monotonic()
    found = run_ranks(_join_with_few, 3, str(tmp_path / "store"), short, more, deadline=60, outcomes=True, start="fork")
    for outcome in found:
        assert outcome.kind == "raised" and isinstance(outcome.error, errors.SymcommError), outcome
        assert "ulimit -n" in str(outcome.error) and f"rank {short}" in str(outcome.error), outcome
    assert isinstance(found[short].error, errors.ResourceError)
    assert time.monotonic() - begun < 15, "nobody waited for the deadline"


@pytest.mark.parametrize("number", [errno.ENFILE, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM])
def test_other_shortages_are_named(monkeypatch, number):
    real = socket.send_fds

    def refuse(sock: socket.socket, data: list[bytes], fds: list[int]) -> int:
        if len(fds) == 1:
            return real(sock, data, fds)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "send_fds", refuse)
    for result in meet(2, lambda rank, info: None, timeout=3.0):
        assert isinstance(result, errors.ResourceError) and os.strerror(number) in str(result)


def test_a_late_rank_of_one_host_among_several_is_named_by_its_number_among_all():
    arena = arena_module.current_arena()
    infos = [{"nonce": arena.nonce.hex(), "nbytes": arena.nbytes, "number": number} for number in (2, 3)]
    with share._listen() as listener, pytest.raises(errors.DeadlineError, match="rank 3 did not come") as late:
        share._pass_descriptors(0, arena, listener, infos, share.Deadline(0.1, None))
    assert late.value.missing == [3]
