"""A receive that is held keeps its place and matches no message of its group; one from elsewhere may end it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import symcomm
from symcomm.group.p2p import ANY_SOURCE, Message
from tests.support.ranks import until


def spawn(fn: Any) -> list[Any]:
    return symcomm.spawn(fn, 2, mode="threads", timeout=30, deadline=60)


def _keeps_its_place(g: Any) -> list[float]:
    if g.rank:
        g.barrier()
        for value in (1.0, 2.0, 3.0):
            g.send(np.full(5000, value, "f4"), 0, 4)
        return []
    arrays = [np.zeros(5000, "f4") for _ in range(3)]
    works = [g.irecv(a, ANY_SOURCE, 4) for a in arrays]
    assert works[0].hold() and not works[0].hold()  # held already
    g.barrier()
    for work in works[1:]:
        work.wait()
    assert not works[0].is_completed() and not works[1].hold()  # over
    works[0].resume()
    works[0].wait()
    assert not works[0].fill()
    return [float(a.mean()) for a in arrays]


def test_a_held_receive_gets_no_message_until_it_goes_on():
    assert spawn(_keeps_its_place)[0] == [3.0, 1.0, 2.0]


def _is_filled(g: Any) -> list[float]:
    if g.rank:
        g.send(np.full(10, 6.0, "f4"), 0, 4)
        g.barrier()
        return []
    first, second = np.zeros(10, "f4"), np.zeros(10, "f4")
    work = g.irecv(first, 1, 5)
    assert work.hold()
    work.fill()
    assert work.was_withdrawn and work.is_completed()
    g.recv(second, 1, 4)
    g.barrier()
    return [float(first.mean()), float(second.mean())]


def test_a_filled_receive_is_over_and_not_written_to():
    assert spawn(_is_filled)[0] == [0.0, 6.0]


def held_at_random(g: Any, rounds: int = 200) -> int:
    """Another thread holds receives, and resumes or fills them, while messages come. None is lost, or comes twice."""
    if g.rank:
        for i in range(rounds):
            g.send(np.full(64, i, "i4"), 0, 1)
        g.barrier()
        return rounds
    works: list[tuple[Any, Any]] = []
    over = threading.Event()

    def meddle() -> None:
        turn = 0
        while not over.is_set():
            for _, work in list(works)[-3:]:
                turn += 1
                if work.hold():
                    work.fill() if turn % 3 == 0 else work.resume()

    thread = threading.Thread(target=meddle)
    thread.start()
    found: list[int] = []
    while len(found) < rounds:
        array = np.full(64, -1, "i4")
        work = g.messages.post(Message.receive(array, 1, 1), "irecv", True)
        works.append((array, work))
        assert until(work.is_completed, 30)
        if work.was_withdrawn:
            assert (array == -1).all()
        else:
            assert (array == array[0]).all()
            found.append(int(array[0]))
    over.set()
    thread.join()
    assert found == list(range(rounds))
    g.barrier()
    return rounds


def test_no_message_is_lost_by_holding():
    assert spawn(held_at_random) == [200, 200]
