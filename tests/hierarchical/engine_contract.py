"""What every engine between hosts must do; this program runs it on the ranks of mpirun.

Each check is called by all ranks at once, with an engine that connects them.
"""

from __future__ import annotations

import array
import json
import sys
import threading
import traceback
from collections.abc import Callable

from symcomm.hierarchical.engines.base import Engine, EngineContext, Move, engine_class

RANKS = 3
LARGE = 3_000_000


def numbers(rank: int, count: int) -> array.array:
    return array.array("q", [rank * 1000 + i % 997 for i in range(count)])


def place_of(data: array.array) -> tuple[int, int]:
    return data.buffer_info()[0], len(data) * data.itemsize


def swap(engine: Engine, rank: int, size: int, count: int, tag: int = 0) -> None:
    """Everybody sends to everybody, in one batch."""
    mine, others = numbers(rank, count), [r for r in range(size) if r != rank]
    came = {r: array.array("q", bytes(8 * count)) for r in others}
    moves = [Move(True, *place_of(mine), r, tag) for r in others]
    moves += [Move(False, *place_of(came[r]), r, tag) for r in others]
    engine.start(moves).wait(30)
    for r in others:
        assert came[r] == numbers(r, count), f"from {r}"


def messages_of_all_sizes(engine: Engine, rank: int, size: int) -> None:
    for count in (0, 1, 1000, LARGE // 8):
        swap(engine, rank, size, count)


def order_is_kept(engine: Engine, rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, came = [numbers(rank + i, 50) for i in range(20)], [array.array("q", bytes(400)) for _ in range(20)]
    transfers = [engine.start([Move(True, *place_of(data), after)]) for data in sent]
    transfers += [engine.start([Move(False, *place_of(data), before)]) for data in came]
    for transfer in transfers:
        transfer.wait(30)
    assert came == [numbers(before + i, 50) for i in range(20)]


def tags_do_not_wait_for_each_other(engine: Engine, rank: int, size: int) -> None:
    """A receive of tag 0 that nobody answers yet does not hold up tag 1."""
    after, before = (rank + 1) % size, (rank - 1) % size
    early, mine = array.array("q", bytes(80)), numbers(rank, 10)
    waiting = engine.start([Move(False, *place_of(early), before, 0)])
    swap(engine, rank, size, 10, tag=1)
    assert not waiting.ended
    swap(engine, rank, size, 1, tag=1)  # nobody sends before everybody has looked
    engine.start([Move(True, *place_of(mine), after, 0)]).wait(30)
    waiting.wait(30)
    assert early == numbers(before, 10)


def what_was_expected_arrives(engine: Engine, rank: int, size: int) -> None:
    """Receives that belong to later starts; other transfers start and end before those."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, came = [numbers(rank + i, 500) for i in range(3)], [array.array("q", bytes(4000)) for _ in range(3)]
    expected = [engine.expect([Move(False, *place_of(data), before, 3)]) for data in came]
    swap(engine, rank, size, 10, tag=4)
    transfers = [
        engine.start([Move(True, *place_of(data), after, 3)], expected=e)
        for data, e in zip(sent, expected, strict=True)
    ]
    last = array.array("q", bytes(800))
    transfers.append(engine.start([], expected=engine.expect([Move(False, *place_of(last), before, 3)])))
    mine = numbers(rank, 100)
    engine.start([Move(True, *place_of(mine), after, 3)]).wait(30)
    for transfer in transfers:
        transfer.wait(30)
    assert came == [numbers(before + i, 500) for i in range(3)] and last == numbers(before, 100)
    assert transfers[0].peers == sorted({before, after}) and transfers[-1].peers == [before]


def callbacks_are_called_once(engine: Engine, rank: int, size: int) -> None:
    called = threading.Semaphore(0)
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, came = numbers(rank, 4), numbers(0, 4)
    moves = [Move(True, *place_of(mine), after), Move(False, *place_of(came), before)]
    transfer = engine.start(moves, lambda ended: called.release() if ended.ended else None)
    transfer.wait(30)
    assert called.acquire(timeout=10) and not called.acquire(blocking=False)
    nothing = engine.start([])
    nothing.wait(30)
    assert nothing.ended and transfer.peers == sorted({after, before})


def threads_may_share_it(engine: Engine, rank: int, size: int) -> None:
    """Two threads, each with a tag of its own."""
    failures: list[BaseException] = []

    def act(tag: int) -> None:
        try:
            for count in (1, 2000, 7):
                swap(engine, rank, size, count, tag)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=act, args=(tag,)) for tag in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def abort_ends_what_is_on_its_way(engine: Engine, rank: int, size: int) -> None:
    """The last check: the engine is of no use afterwards."""
    context = array.array("q", bytes(80))
    transfer = engine.start([Move(False, *place_of(context), (rank - 1) % size)])
    try:
        transfer.wait(0.05)
    except TimeoutError as error:
        assert f"rank {(rank - 1) % size} did not come" in str(error)
    else:
        raise AssertionError("a receive that nobody answered ended")
    engine.abort()
    try:
        transfer.wait(30)
    except TimeoutError:
        raise AssertionError("abort did not end the receive") from None
    except Exception:
        return
    raise AssertionError("an aborted receive ended well")


CHECKS: dict[str, Callable[[Engine, int, int], None]] = {
    check.__name__: check
    for check in (
        messages_of_all_sizes, order_is_kept, tags_do_not_wait_for_each_other, what_was_expected_arrives,
        callbacks_are_called_once, threads_may_share_it, abort_ends_what_is_on_its_way,
    )
}  # fmt: skip


def run_contract(
    name: str, rank: int, size: int, exchange: Callable[[bytes], list[bytes]], address: str = "127.0.0.1"
) -> dict[str, str]:
    """Every check's outcome on this rank: empty, or what went wrong."""
    engine = engine_class(name)(EngineContext(rank, size, address))
    engine.connect([json.loads(endpoint) for endpoint in exchange(json.dumps(engine.endpoint).encode())], 30)
    said = {}
    for check, act in CHECKS.items():
        exchange(b"")
        try:
            act(engine, rank, size)
            said[check] = ""
        except BaseException:
            said[check] = traceback.format_exc()
    exchange(b"")
    engine.close()
    return said


def main() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    said = run_contract(sys.argv[1], world.Get_rank(), world.Get_size(), world.allgather)
    everyone = world.gather(said)
    if everyone is not None:
        print("outcomes:" + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
