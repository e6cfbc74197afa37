"""One rank's state on the boards of all hosts: what their readers see, who refuses what, and a death in the middle."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import symcomm
from symcomm import errors
from tests.support.places import spawn
from tests.support.ranks import run_ranks

PLACES = ["threads", (1, 1, 1), (2, 1)]
HOSTS = 3


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this one cannot be sent")


def state(number: int, count: int = 1 << 20) -> dict:
    """More than one chunk of what travels between hosts, and small things."""
    tied = np.full(count, number, np.float32)
    return {"weight": tied, "tied": tied, "bias": np.arange(number), "name": f"model {number}"}


def seen(reader: symcomm.BoardReader) -> tuple:
    found = reader.newest()
    assert found is not None
    values = found.state
    assert (values["weight"] == found.version).all() and values["tied"].base is not None
    return found.version, values["weight"].size, values["bias"].tolist(), values["name"]


def relay_thrice(group) -> list:
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        said = []
        for number, root in ((3, 0), (4, 2), (9, 1)):
            mine = group.rank == root
            made = symcomm.relay(board, group, state(number) if mine else None, number if mine else None, root=root)
            said.append((made, *seen(reader)))
        return said


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_readers_of_every_host_see_what_the_root_gave(place):
    expected = [(n, n, 1 << 20, list(range(n)), f"model {n}") for n in (3, 4, 9)]
    assert spawn(relay_thrice, HOSTS, place) == [expected] * HOSTS


def refuse(group) -> list:
    said = []
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        symcomm.relay(board, group, state(1))

        def tried(*args) -> None:
            with pytest.raises(errors.SymcommError if group.rank else Exception) as info:
                symcomm.relay(*args)
            said.append((type(info.value).__name__, str(info.value)))

        tried(board, group, {"model": Unpicklable()})
        tried(board if group.rank != 1 else "board", group, state(2))
        if group.rank == 2:
            board.publish(state(5), version=5)  # its host is ahead
        tried(board, group, state(2))
        symcomm.relay(board, group, state(6), 6)
        return [*said, seen(reader)[0]]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_one_rank_refuses_is_refused_on_all(place):
    root, first, second = spawn(refuse, HOSTS, place)
    for rank, number in ((root, 0), (first, 0), (second, 0), (root, 1), (second, 1), (root, 2), (first, 2)):
        assert rank[number][0] == ("TypeError" if rank is root and number == 0 else "CallRefusedError"), rank
    assert "rank 0 refused its call" in first[0][1] and "this one cannot be sent" in second[0][1]
    assert first[1][0] == "WrongTypeError" and "must be a symcomm.Board" in first[1][1]
    assert second[2][0] == "BadArgumentError" and "a number above 5, the last one" in second[2][1]
    assert "a number above 5, the last one" in first[2][1]
    assert [rank[3] for rank in (root, first, second)] == [6] * HOSTS


def relay_until_one_dies(rank: int, world: int, path: str) -> list:
    os.environ["SYMCOMM_HOST_ID"] = str(rank)
    group = symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=30)
    board = symcomm.Board()
    reader = symcomm.BoardReader(board.fileno())
    symcomm.relay(board, group, state(1))
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(errors.RankFailedError) as info:
        while True:
            before = board.version
            symcomm.relay(board, group, state(board.version + 1, 8 << 20))
    assert seen(reader)[0] == board.version == before
    group = group.shrink()
    symcomm.relay(board, group, state(1000), 1000)
    return [info.value.ranks, seen(reader)[0]]


def test_a_host_that_dies_leaves_the_others_whole_versions(tmp_path):
    outcomes = run_ranks(relay_until_one_dies, HOSTS, str(tmp_path / "store"), deadline=90, outcomes=True)
    assert [outcome.kind for outcome in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    assert [outcomes[rank].value for rank in (0, 2)] == [[[1], 1000]] * 2
