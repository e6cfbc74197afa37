"""Boards: what readers see of versions, who holds memory, and what a death leaves."""

from __future__ import annotations

import gc
import os
import secrets
import threading
import time

import pytest

import symcomm
from symcomm import errors
from symcomm._core import native
from tests.soak.board import soak
from tests.support.children import children

np = pytest.importorskip("numpy", reason="states are of arrays here")
pytestmark = pytest.mark.without_torch

BIG = 1 << 20  # bytes


def state(number: int, nbytes: int = BIG) -> dict:
    """All of its elements tell its number."""
    return {"weight": np.full(nbytes // 8, number, np.int64), "bias": np.full(3, number), "step": number}


def is_whole(snapshot: symcomm.Snapshot) -> bool:
    values = snapshot.state
    return bool(
        (values["weight"] == snapshot.version).all()
        and (values["bias"] == snapshot.version).all()
        and values["step"] == snapshot.version
    )


def memory_of(board: symcomm.Board) -> int:
    return os.fstat(board.fileno()).st_blocks * 512


def test_readers_see_the_newest_and_wait_for_the_next():
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        assert reader.newest() is None
        assert board.publish(state(1)) == 1
        first = reader.newest()
        assert first is not None and is_whole(first) and reader.newest() is first
        with pytest.raises(errors.DeadlineError, match="has published nothing new"):
            reader.wait(timeout=0.05)
        board.publish(state(2))
        assert board.publish(state(7), version=7) == 7
        assert reader.wait(5).version == 7 and is_whole(first) and first.version == 1
        threading.Timer(0.1, board.publish, [state(8)]).start()
        found = reader.wait(30)
        assert found.version == 8 and is_whole(found)


@pytest.mark.parametrize("version", [3, 0, "x", True, 4.5])
def test_versions_grow(version):
    with symcomm.Board() as board:
        board.publish({}, version=3)
        with pytest.raises(errors.BadArgumentError, match="version must be a number above 3, the last one"):
            board.publish({}, version=version)
        assert board.publish({}) == 4


def test_what_a_reader_writes_is_its_own():
    with symcomm.Board() as board:
        one, two = (symcomm.BoardReader(board.fileno()) for _ in range(2))
        board.publish(state(1))
        mine, theirs = one.newest(), two.newest()
        assert mine is not None and theirs is not None
        mine.state["weight"][:] = 9
        assert is_whole(theirs) and (mine.state["weight"] == 9).all()


def test_old_versions_go_when_the_last_reader_lets_go():
    with symcomm.Board() as board:
        readers = [symcomm.BoardReader(board.fileno()) for _ in range(2)]
        held = []
        for number in range(1, 6):
            board.publish(state(number))
            held += [reader.newest() for reader in readers]
        assert board.versions_held == 5 and all(is_whole(snapshot) for snapshot in held)
        del held[0:8:2]
        gc.collect()
        assert board.versions_held == 5  # the other reader has them
        del held[0:4]
        gc.collect()
        assert board.versions_held == 1
        assert memory_of(board) < 2.5 * BIG  # the newest, and a spare
        for number in range(6, 40):
            board.publish(state(number))
        assert memory_of(board) < 4 * BIG


def test_tables_of_parts_do_not_run_out():
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        for number in range(1, 3 * native.REGION_PARTS):
            board.publish({"step": number})
        assert reader.newest().state == {"step": number}


def hold(say, source, count: int) -> None:
    reader = symcomm.BoardReader(source)
    held = []
    for _ in range(count):
        held.append(reader.wait(30))
        assert is_whole(held[-1])
        say(held[-1].version)
    time.sleep(100)


def test_what_a_dead_reader_held_is_taken_back():
    name = secrets.token_hex(8)
    with children() as start, symcomm.Board(name) as board:
        child = start(hold, name, 3)
        for number in (1, 2, 3):
            board.publish(state(number))
            assert child.hear() == number
        assert board.versions_held == 3 and board.readers == [child.pid]
        child.kill()
        end = time.monotonic() + 5
        while board.versions_held > 1 and time.monotonic() < end:
            pass
        assert board.versions_held == 1 and board.readers == []


def publish(say, name: str, first: int, count: int) -> None:
    board = symcomm.Board(name)
    for number in range(first, first + count):
        board.publish(state(number), version=number)
    say(number)
    time.sleep(100)


def test_a_writer_dies_and_another_goes_on():
    name = secrets.token_hex(8)
    with children() as start:
        child = start(publish, name, 1, 5)
        reader = symcomm.BoardReader(name, timeout=30)
        assert child.hear() == 5
        child.kill()
        last = reader.newest()
        assert last is not None and last.version == 5 and is_whole(last)
        begun = time.monotonic()
        with pytest.raises(
            errors.ProcessDiedError, match=rf"its writer, process {child.pid}, ended without closing"
        ) as died:
            reader.wait(30)
        assert died.value.pids == [child.pid] and time.monotonic() - begun < 2
        assert reader.newest() is last and is_whole(last)
        other = start(publish, name, 6, 1)
        assert other.hear() == 6
        found = reader.wait(30)
        assert found.version == 6 and is_whole(found) and is_whole(last) and reader.writer == other.pid


def test_a_writer_that_closes_says_so():
    board = symcomm.Board()
    reader = symcomm.BoardReader(board.fileno())
    board.publish(state(1))
    board.close()
    assert is_whole(reader.wait(5))
    with pytest.raises(errors.QueueClosedError, match=f"process {os.getpid()} closed it"):
        reader.wait(5)
    with pytest.raises(errors.QueueClosedError, match="it was closed here"):
        board.publish(state(2))


def share_of(say, name: str) -> None:
    """What this process has more of once it has read a version: private, and its share of what others have, too."""
    before = resident()
    found = symcomm.BoardReader(name, timeout=30).newest()
    assert found is not None and is_whole(found)
    say("read")
    time.sleep(1)
    after = resident()
    say({which: after[which] - before[which] for which in after})
    time.sleep(100)


def resident() -> dict[str, int]:
    """Of memory that files without a name hold, as boards do: the rest grows when the interpreter tidies up."""
    total, is_counted = {"Pss:": 0, "Private_Dirty:": 0}, False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                is_counted = "/memfd:" in line
            elif is_counted and words[0] in total:
                total[words[0]] += int(words[1]) * 1024
    return total


def test_readers_add_no_memory():
    size, count, name = 64 << 20, 4, secrets.token_hex(8)
    with children() as start, symcomm.Board(name) as board:
        board.publish(state(1, size))
        taken = memory_of(board)
        readers = [start(share_of, name) for _ in range(count)]
        assert [child.hear() for child in readers] == ["read"] * count
        more = [child.hear() for child in readers]
        assert memory_of(board) == taken < 1.1 * size
        assert all(row["Private_Dirty:"] < size / 8 for row in more)
        assert sum(row["Pss:"] for row in more) < 1.2 * size  # N copies would be N times that


def test_a_swap_maps_and_copies_nothing(monkeypatch: pytest.MonkeyPatch):
    """Whatever the size: two calls of the core, and no byte of the arrays."""
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        board.publish(state(1, 64 << 20))
        calls = []
        for name in ("board_take", "map_private", "copy_in", "peek"):
            function = getattr(native, name)
            monkeypatch.setattr(native, name, lambda *a, _n=name, _f=function: (calls.append(_n), _f(*a))[1])
        found = reader.newest()
        assert calls == ["board_take", "map_private"]
        assert found is not None and is_whole(found)


def test_no_version_is_torn_whoever_dies():
    seen = soak(reads=2000, seed=3)
    assert seen["torn"] == seen["left"] == 0 and seen["killed"] > 0
