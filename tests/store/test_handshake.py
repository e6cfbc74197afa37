"""How ranks meet in a store: again and again, after failures, and without leaving anything behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from symcomm import errors
from symcomm.store import FileStore, HashStore, TCPStore
from symcomm.store.handshake import _StartOver, handshake

pytestmark = pytest.mark.torch_versions


def stores(kind: str, tmp_path: Path, size: int) -> list[Any]:
    """One store for each rank."""
    if kind == "hash":
        return [HashStore()] * size
    if kind == "file":
        return [FileStore(str(tmp_path / "store")) for _ in range(size)]
    if kind == "torch hash":
        return [dist.HashStore()] * size
    if kind == "torch file":
        return [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(size)]
    make = TCPStore if kind == "tcp" else dist.TCPStore
    server = make("127.0.0.1", 0, None, True, wait_for_workers=False)
    return [server, *(make("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(1, size))]


def together(size: int, rank_main: Callable[[int], Any]) -> list[Any]:
    """What ``rank_main(rank)`` returns or raises, on a thread for each rank."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = rank_main(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return found


def meet(
    store: Any, rank: int, size: int, said: bytes, timeout: float = 30.0, barrier: Any = None
) -> list[list[bytes]]:
    def build(exchange: Callable[[bytes], list[bytes]]) -> list[list[bytes]]:
        turns = [exchange(said), exchange(b""), exchange(said * 2)]
        if barrier is not None:
            barrier.wait(30)
        return turns

    return handshake(store, "here", rank, size, timeout, build)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "torch hash", "torch file", "torch tcp"])
def test_ranks_meet_again_and_again_in_one_place(kind: str, tmp_path: Path):
    size, rounds = 3, 8
    each, barrier = stores(kind, tmp_path, size), threading.Barrier(size)
    before = each[0].num_keys()

    def rank_main(rank: int) -> list[Any]:
        lags, seen = random.Random(rank), []
        for number in range(rounds):
            time.sleep(lags.random() * 0.01)
            seen.append(meet(each[rank], rank, size, b"%d %d" % (number, rank), barrier=barrier))
        return seen

    expected = []
    for number in range(rounds):
        said = [b"%d %d" % (number, rank) for rank in range(size)]
        expected.append([said, [b""] * size, [item * 2 for item in said]])
    assert together(size, rank_main) == [expected] * size
    assert each[0].num_keys() == before, "a meeting leaves no keys"


def test_who_does_not_come_is_named():
    store = HashStore()
    found = together(2, lambda rank: meet(store, rank, 4, b"", timeout=0.3))
    assert all(isinstance(error, errors.DeadlineError) and error.missing == [2, 3] for error in found), found
    assert "init timed out after 300 ms: ranks 2, 3 did not come." in str(found[0])


@pytest.mark.parametrize("early", [0, 1])
def test_an_attempt_that_failed_is_not_taken_for_the_next(early: int):
    """One rank gave up before the other came; both come again."""
    store = HashStore()
    with pytest.raises(errors.DeadlineError):
        meet(store, early, 2, b"old", timeout=0.1)
    barrier = threading.Barrier(2)
    found = together(2, lambda rank: meet(store, rank, 2, b"new%d" % rank, barrier=barrier)[0])
    assert found == [[b"new0", b"new1"]] * 2
    assert store.num_keys() == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_died_and_comes_again_is_met(victim: int):
    """It said its first item and was killed: nothing withdrew it. The others are in a generation that is dead."""
    store, size = HashStore(), 3
    barrier, first = threading.Barrier(size), threading.Event()

    def dying(exchange: Callable[[bytes], list[bytes]]) -> None:
        exchange(b"dying")
        first.set()
        raise SystemExit  # a kill would not even run what follows

    def rank_main(rank: int) -> Any:
        if rank == victim:
            proxy = _NeverWithdraws(store)
            with pytest.raises(SystemExit):
                handshake(proxy, "here", rank, size, 30.0, dying)
            first.wait(10)
            time.sleep(0.05)
        return meet(store, rank, size, b"alive%d" % rank, barrier=barrier)[0]

    assert together(size, rank_main) == [[b"alive0", b"alive1", b"alive2"]] * size


class _NeverWithdraws:
    """A store as a rank leaves it that is killed."""

    def __init__(self, store: Any):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        if not str(value).startswith("!"):
            self._store.set(key, value)


def test_a_rank_that_gives_up_is_named_to_those_who_wait_for_it():
    store = HashStore()

    def rank_main(rank: int) -> Any:
        def build(exchange: Callable[[bytes], list[bytes]]) -> Any:
            exchange(b"")
            if rank == 1:
                raise errors.ResourceError("no memory here")
            return exchange(b"")

        return handshake(store, "here", rank, 3, 30.0, build)

    zero, one, two = together(3, rank_main)
    assert isinstance(one, errors.ResourceError)
    for error in (zero, two):
        assert isinstance(error, errors.RankFailedError) and error.ranks == [1], error
        assert str(error) == "init: rank 1 gave up: no memory here"


def test_one_rank_needs_no_store():
    assert handshake(None, "", 0, 1, 1.0, lambda exchange: exchange(b"alone")) == [b"alone"]


def test_nothing_of_attempts_that_were_begun_anew_stays() -> None:
    """Items may be secret: those of a generation that came to nothing are removed with the others."""
    store, tried = HashStore(), [0, 0]
    done = threading.Barrier(2)

    def rank_main(rank: int) -> list[bytes]:
        def build(exchange: Any) -> list[bytes]:
            items = exchange(f"secret {rank}".encode()) + exchange(f"another secret {rank}".encode())
            done.wait(20)
            tried[rank] += 1
            if tried[rank] == 1:
                raise _StartOver("once more")
            return items

        return handshake(store, "p", rank, 2, 20, build)

    expected = [b"secret 0", b"secret 1", b"another secret 0", b"another secret 1"]
    assert together(2, rank_main) == [expected] * 2
    assert tried == [2, 2] and store.list_keys() == []
