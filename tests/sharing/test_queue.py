"""Queues: what readers get, when calls wait, and how processes come to read."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.sharing.mappings import MOST_KEPT
from tests.support.children import children

pytestmark = pytest.mark.without_torch

LONG = 1 << 20


def new_name() -> str:
    return secrets.token_hex(8)


def read_all(say, source, **options):
    with symcomm.QueueReader(source, **options) as reader:
        say("there")
        for message in reader:
            say(message)
    say("closed")


def heard(child) -> list:
    said = []
    while (message := child.hear()) != "closed":
        said.append(message)
    return said


MESSAGES = [b"", b"short", b"x" * 4079, b"x" * 4080, os.urandom(LONG), "text", {"a": [1, 2.5, None]}, list(range(9999))]


def test_all_readers_get_all_messages_in_order():
    name = new_name()
    with children() as start, symcomm.Queue(name) as queue:
        readers = [start(read_all, name) for _ in range(3)]
        queue.await_readers(3, timeout=30)
        assert sorted(queue.readers) == sorted(child.pid for child in readers)
        for message in MESSAGES:
            queue.put(message)
        queue.close()
        for child in readers:
            assert heard(child) == ["there", *MESSAGES]
            assert child.end() == 0


def test_a_reader_gets_what_is_sent_once_it_is_there():
    with symcomm.Queue(readers=0) as queue:
        queue.put("nobody's")
        with symcomm.QueueReader(queue.fileno()) as first:
            queue.put(1)
            with symcomm.QueueReader(queue.fileno()) as second:
                queue.put(2)
                assert [first.get(), first.get(), second.get()] == [1, 2, 2]
            assert len(queue.readers) == 2
            queue.put(3)  # the writer learns that it left, and does not wait for it
            assert queue.readers == [os.getpid()] and first.get() == 3


def test_places_of_readers_that_left_are_used_again():
    with symcomm.Queue(readers=0) as queue:
        for number in range(3 * native.REGION_READERS):
            with symcomm.QueueReader(queue.fileno()) as reader:
                queue.put(number)
                assert reader.get(5) == number
        kept = []
        with pytest.raises(errors.ResourceError, match=f"has {native.REGION_READERS} readers, and takes no more"):
            while True:
                queue.put("a reader that left is dropped by this")
                kept.append(symcomm.QueueReader(queue.fileno()))
        assert len(kept) == native.REGION_READERS


@pytest.mark.parametrize("size", [10, LONG])
def test_a_full_queue_waits_and_names_the_slow_reader(size: int, caplog: pytest.LogCaptureFixture):
    message = b"x" * size
    with symcomm.Queue(capacity=16 * LONG + 65536) as queue, symcomm.QueueReader(queue.fileno()) as reader:
        fits = 0
        with caplog.at_level(logging.WARNING, "symcomm.sharing"), pytest.raises(errors.DeadlineError) as late:
            while True:
                queue.put(message, timeout=1.2)
                fits += 1
        assert fits == (64 if size == 10 else 16)
        assert f"process {os.getpid()}, which has {fits} messages to read" in str(late.value)
        assert "nothing was sent" in str(late.value)
        assert [record.getMessage() for record in caplog.records if "has waited 1 s for process" in record.getMessage()]
        assert queue.backlog == {os.getpid(): fits}
        assert reader.get() == message
        queue.put(b"last", timeout=10)
        assert [reader.get(0) for _ in range(fits)] == [message] * (fits - 1) + [b"last"]
        with pytest.raises(errors.DeadlineError, match="has sent nothing"):
            reader.get(0)


def test_what_a_reader_keeps_is_not_written_over():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(LONG // 8)
    with symcomm.Queue(capacity=4 * LONG + 65536) as queue:
        reader = symcomm.QueueReader(queue.fileno())
        queue.put(array)
        kept = reader.get()
        kept[0] = 77  # its own
        for number in range(20):
            queue.put(numpy.full_like(array, number), timeout=10)
            assert (reader.get() == number).all()
        assert kept[0] == 77 and (kept[1:] == array[1:]).all()
        reader.close()
        queue._region.drop_gone()
        assert (kept[1:] == array[1:]).all() and queue.readers == []
        del kept
        gc.collect()
        other = symcomm.QueueReader(queue.fileno())
        for _ in range(8):
            queue.put(array, timeout=10)
            assert (other.get() == array).all()


@pytest.mark.parametrize("kernel_tells", [True, False])
def test_mappings_are_kept_for_the_next_message_unless_their_reader_wrote_there(
    kernel_tells: bool, monkeypatch: pytest.MonkeyPatch
):
    made, looked = [], []
    map_private, look = native.map_private, native.has_own_pages
    monkeypatch.setattr(native, "map_private", lambda *a: (made.append(a), map_private(*a))[1])
    monkeypatch.setattr(native, "has_own_pages", lambda *a: (looked.append(a), look(*a) or not kernel_tells)[1])
    with symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:
        for number in range(12):  # of different lengths in one place
            queue.put(np.full((2 << 20) - 4096 * number, number))
            got = reader.get()
            assert (got == number).all()
            if number in (4, 5):
                got[-1] = -1
            del got
            gc.collect()
    assert len(made) == (3 if kernel_tells else 12) and len(looked) == 12


def test_few_mappings_are_kept_and_none_of_a_reader_that_is_closed():
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("symcomm-sharing")

    with symcomm.Queue() as queue:
        with symcomm.QueueReader(queue.fileno()) as reader:
            empty = mapped()
            for number in range(MOST_KEPT + 3):
                queue.put(np.full(LONG, number, np.uint8))
            got = [reader.get() for _ in range(MOST_KEPT + 3)]
            assert mapped() == empty + MOST_KEPT + 3
            del got
            assert mapped() == empty + MOST_KEPT
        assert mapped() == empty


def test_what_is_too_long_is_refused():
    with symcomm.Queue(capacity=LONG) as queue, symcomm.QueueReader(queue.fileno()) as reader:
        with pytest.raises(errors.BadArgumentError, match=r"put: obj must be smaller, got .*capacity"):
            queue.put(b"x" * LONG)
        queue.put("next")
        assert reader.get() == "next"


def test_the_first_message_waits_for_readers():
    with symcomm.Queue(readers=2) as queue, symcomm.QueueReader(queue.fileno()):
        with pytest.raises(errors.DeadlineError):
            queue.put(1, timeout=0.05)
        with pytest.raises(errors.DeadlineError, match="There are 1 of 2"):
            queue.await_readers(2, timeout=0.05)
        with symcomm.QueueReader(queue.fileno()) as second:
            queue.put(2, timeout=10)
            assert second.get() == 2


def test_names_are_one_writers():
    name = new_name()
    with symcomm.Queue(name), pytest.raises(errors.CallerError, match=rf"the name is taken \(pid {os.getpid()}\)"):
        symcomm.Queue(name)
    symcomm.Queue(name).close()


def test_a_reader_may_come_before_the_writer():
    name = new_name()
    with children() as start:
        child = start(read_all, name)
        time.sleep(0.05)
        with symcomm.Queue(name) as queue:
            assert child.hear() == "there"
            queue.put(5)
        assert heard(child) == [5]
    with pytest.raises(errors.DeadlineError, match="No process on this host has opened it"):
        symcomm.QueueReader(name, timeout=0.05)


def test_only_who_holds_the_token_reads(monkeypatch: pytest.MonkeyPatch):
    name = new_name()
    monkeypatch.setenv("SYMCOMM_TOKEN", "ours")
    with symcomm.Queue(name) as queue:
        with pytest.raises(errors.CallerError, match="holds another token; set SYMCOMM_TOKEN"):
            symcomm.QueueReader(name, token="guessed", timeout=10)
        assert queue.readers == []
        with symcomm.QueueReader(name, timeout=10) as reader:
            queue.put(1)
            assert reader.get() == 1


def test_descriptors_that_are_none_are_refused(tmp_path):
    with pytest.raises(errors.BadArgumentError, match="source must be an open descriptor"):
        symcomm.QueueReader(-1)
    fds = [os.open(tmp_path, os.O_RDONLY), os.memfd_create("other")]
    os.ftruncate(fds[1], 1 << 20)
    for fd in fds:
        with pytest.raises((errors.CallerError, errors.ResourceError)):
            symcomm.QueueReader(fd)
        os.close(fd)
    with symcomm.Board() as board, pytest.raises(errors.CallerError):
        symcomm.QueueReader(board.fileno())


BAD = {
    "name": ["", 3],
    "capacity": [0, True, 2.5, "1", 1 << 70],
    "readers": [-1, 64, True, "1"],
    "timeout": [-1, True, "1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_arguments(name: str, value):
    with pytest.raises(errors.BadArgumentError, match=name):
        symcomm.Queue(**{name: value})


@pytest.mark.parametrize("count", [-1, 64, True, "x", None, 1.0])
def test_counts_of_readers_that_are_none(count):
    with symcomm.Queue() as queue, symcomm.Board() as board:
        for end in (queue, board):
            with pytest.raises(errors.BadArgumentError, match="count must be a number from 0 to 63"):
                end.await_readers(count, timeout=0)
            end.await_readers(0, timeout=0)


def test_numbers_may_be_numpys():
    with symcomm.Queue(capacity=np.int64(LONG), readers=np.uint8(1)) as queue:
        assert queue.capacity == LONG
        with pytest.raises(errors.DeadlineError, match="There are 0 of 1"):
            queue.await_readers(np.int32(1), timeout=0)
    with symcomm.Board() as board:
        assert board.publish({}, version=np.int64(11)) == 11


def test_closed_ends_say_so():
    queue = symcomm.Queue()
    reader = symcomm.QueueReader(queue.fileno())
    queue.put("last")
    queue.close()
    with pytest.raises(errors.QueueClosedError, match="put on the queue: it was closed here"):
        queue.put(1)
    assert list(reader) == ["last"]
    with pytest.raises(EOFError, match=rf"process {os.getpid()} closed it; 1 messages were read"):
        reader.get()
    reader.close()
    with pytest.raises(errors.QueueClosedError, match="it was closed here"):
        reader.get()


def test_a_forked_child_has_no_end_of_its_parents():
    def use(say, end, call):
        try:
            getattr(end, call)()
        except errors.CallerError as error:
            say(str(error))

    with children() as start, symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:
        assert "from which this one was forked" in start(use, reader, "get").hear()
        queue.put(1)
        assert reader.get() == 1


def test_threads_share_an_end():
    got = []
    with symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:

        def take() -> None:
            for message in reader:
                got.append(message)

        def send(start: int) -> None:
            for number in range(start, start + 500):
                queue.put(number, timeout=30)

        takers = [threading.Thread(target=take) for _ in range(3)]
        senders = [threading.Thread(target=send, args=(500 * i,)) for i in range(3)]
        for thread in takers + senders:
            thread.start()
        for thread in senders:
            thread.join(60)
        queue.close()
        for thread in takers:
            thread.join(60)
    assert sorted(got) == list(range(1500))


def after_a_moment(close) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(0.1), close()))
    thread.start()
    return thread


@pytest.mark.parametrize("size", [10, LONG])
def test_closing_an_end_wakes_its_other_threads(size: int):
    with symcomm.Queue(capacity=2 * LONG + 65536) as queue, symcomm.QueueReader(queue.fileno()) as reader:
        closing = after_a_moment(reader.close)
        with pytest.raises(errors.QueueClosedError, match="get on the queue: it was closed here"):
            reader.get(timeout=30)
        closing.join()
        other = symcomm.QueueReader(queue.fileno())
        closing = after_a_moment(queue.close)
        with pytest.raises(errors.QueueClosedError, match="put on the queue: it was closed here"):
            while True:
                queue.put(b"x" * size, timeout=30)
        closing.join()
        assert other.get(5) == b"x" * size
    with symcomm.Queue() as queue:
        closing = after_a_moment(queue.close)
        with pytest.raises(errors.QueueClosedError, match="await_readers on the queue: it was closed here"):
            queue.await_readers(1, timeout=30)
        closing.join()


def test_coroutines():
    async def both() -> tuple[list, bool]:
        with symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:
            waiting = asyncio.create_task(reader.get_async())
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(errors.DeadlineError):
                await reader.get_async(timeout=0.1)

            async def send() -> None:
                for number in range(200):  # more than fit
                    await queue.put_async(number)
                queue.close()

            sending = asyncio.create_task(send())
            got = [message async for message in reader]
            await sending
            return got, reader.taken == 200

    assert asyncio.run(both()) == (list(range(200)), True)


def test_a_small_message_takes_no_part_and_no_pickle(monkeypatch: pytest.MonkeyPatch):
    """The fast path of short messages: one call of the core at each end."""
    calls = []
    for name in ("queue_put", "queue_take", "queue_await", "region_await_room", "map_private", "copy_in"):
        function = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *a, _n=name, _f=function: (calls.append(_n), _f(*a))[1])
    with symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:
        queue.put(b"x" * 1024)
        assert reader.get() == b"x" * 1024
    assert calls == ["queue_put", "queue_take"]
