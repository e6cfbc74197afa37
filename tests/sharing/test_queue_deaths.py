"""Readers and writers of queues that are killed or stopped, anywhere: one exact outcome for the others."""

from __future__ import annotations

import logging
import os
import random
import secrets
import time

import pytest

import symcomm
from symcomm import errors
from tests.support.children import children, shared_memory

pytestmark = pytest.mark.without_torch

SOON = 2.0  # seconds that a busy machine may take; what is promised is milliseconds
CAPACITY = 8 << 20


def body(number: int) -> bytes:
    """Of every length: in slots, copied, mapped. Its bytes tell whether it is whole."""
    return bytes([number % 251]) * (1 + (number * 7919) % (400 << 10 if number % 5 == 0 else 3000))


def is_whole(number: int, message: tuple[int, bytes]) -> bool:
    return message[0] == number and message[1] == body(number)


def read(say, name: str, pause: float = 0.0) -> None:
    reader = symcomm.QueueReader(name, timeout=30)
    say("there")
    taken = first = 0
    try:
        while True:
            number, data = reader.get(timeout=30)
            first = first if taken else number
            assert is_whole(first + taken, (number, data)), f"{number} after {first + taken - 1}"
            taken += 1
            if pause:
                time.sleep(pause)
    except errors.SymcommError as error:
        say((type(error).__name__, str(error), getattr(error, "pids", []), taken))


def write(say, name: str, count: int = 10**9, readers: int = 1) -> None:
    queue = symcomm.Queue(name, capacity=CAPACITY)
    queue.await_readers(readers, timeout=30)
    say("there")
    for number in range(count):
        queue.put((number, body(number)), timeout=30)
        if number % 20 == 0:
            say(number)
    os._exit(0)  # without closing it


def test_a_writer_that_is_killed_is_named_and_what_it_sent_is_whole():
    before, name = shared_memory(), secrets.token_hex(8)
    with children() as start:
        readers = [start(read, name) for _ in range(2)]
        writer = start(write, name, 10**9, 2)
        assert [child.hear() for child in [*readers, writer]] == ["there"] * 3
        while writer.hear() != 60:
            pass
        writer.kill()
        killed = time.monotonic()
        for child in readers:
            kind, words, pids, taken = child.hear()
            assert kind == "ProcessDiedError" and pids == [writer.pid] and taken > 60
            assert (
                f"get on queue {name!r}: its writer, process {writer.pid}, ended without closing it; {taken} messages"
                in words
            )
        assert time.monotonic() - killed < SOON
    assert shared_memory() <= before


def test_a_writer_that_ends_without_closing_is_named_once_all_is_read():
    name = secrets.token_hex(8)
    with children() as start:
        reader = start(read, name)
        start(write, name, 50)
        assert reader.hear() == "there"
        kind, _, _, taken = reader.hear()
        assert (kind, taken) == ("ProcessDiedError", 50)


def test_a_writer_that_is_stopped_is_named_and_goes_on(caplog: pytest.LogCaptureFixture):
    name = secrets.token_hex(8)
    with children() as start:
        writer = start(write, name)
        reader = symcomm.QueueReader(name, timeout=30)
        writer.hear()
        assert is_whole(0, reader.get(30))
        writer.stop()
        count = 1
        with caplog.at_level(logging.WARNING, "symcomm.sharing"), pytest.raises(errors.DeadlineError) as late:
            while True:
                assert is_whole(count, reader.get(timeout=1.2))
                count += 1
        assert f"Process {writer.pid} (stopped) has sent nothing" in str(late.value)
        assert f"has waited 1 s for process {writer.pid} (stopped)" in caplog.text
        writer.go_on()
        for number in range(count, count + 50):
            assert is_whole(number, reader.get(30))


def test_a_reader_that_is_killed_is_named_once_and_the_others_miss_nothing():
    before, name = shared_memory(), secrets.token_hex(8)
    with children() as start, symcomm.Queue(name, capacity=CAPACITY) as queue:
        doomed, other = start(read, name, 0.01), start(read, name)
        queue.await_readers(2, timeout=30)
        number = 0
        while number < 30:
            queue.put((number, body(number)), timeout=30)
            number += 1
        doomed.kill()
        with pytest.raises(errors.ProcessDiedError) as died:
            queue.put((number, body(number)), timeout=30)
        assert died.value.pids == [doomed.pid]
        assert f"put on queue {name!r}: its reader process {doomed.pid} ended without closing it; nothing" in str(
            died.value
        )
        while number < 300:  # more than fit while anything was still held for the dead one
            queue.put((number, body(number)), timeout=30)
            number += 1
        assert queue.readers == [other.pid]
        queue.close()
        assert other.hear() == "there"
        kind, words, _, taken = other.hear()
        assert (kind, taken) == ("QueueClosedError", 300), words
    assert shared_memory() <= before


def test_a_blocked_writer_hears_of_the_death_at_once():
    name = secrets.token_hex(8)
    with children() as start, symcomm.Queue(name) as queue:
        reader = start(read, name)
        queue.await_readers(1, timeout=30)
        reader.stop()
        with pytest.raises(errors.DeadlineError, match=rf"process {reader.pid} \(stopped\), which has \d+ messages"):
            for number in range(1000):
                queue.put((number, b""), timeout=0.2)
        reader.kill()
        begun = time.monotonic()
        with pytest.raises(errors.ProcessDiedError):
            queue.put(0, timeout=30)
        assert time.monotonic() - begun < SOON


def test_a_stopped_reader_goes_on_where_it_was():
    name = secrets.token_hex(8)
    with children() as start, symcomm.Queue(name, capacity=CAPACITY) as queue:
        reader = start(read, name)
        queue.await_readers(1, timeout=30)
        sent = 0
        for _ in range(5):
            reader.stop()
            with pytest.raises(errors.DeadlineError):
                while True:
                    queue.put((sent, body(sent)), timeout=0.05)
                    sent += 1
            reader.go_on()
            for _ in range(20):
                queue.put((sent, body(sent)), timeout=30)
                sent += 1
        queue.close()
        assert reader.hear() == "there"
        assert reader.hear()[::3] == ("QueueClosedError", sent)


def kill_at_random(seed: int, rounds: int) -> dict[str, int]:
    """Readers come, are stopped, killed and replaced while one writer sends; then the writer dies. What happened."""
    chance, seen = random.Random(seed), {"killed": 0, "named": 0, "sent": 0}
    name = secrets.token_hex(8)
    with children() as start:
        queue = symcomm.Queue(name, capacity=CAPACITY)
        readers = [start(read, name) for _ in range(2)]
        queue.await_readers(2, timeout=30)
        number = 0
        for _ in range(rounds):
            for _ in range(chance.randrange(40)):
                queue.put((number, body(number)), timeout=30)
                number += 1
            queue.await_readers(2, timeout=30)  # one that has not come is not missed
            victim = chance.choice(readers)
            if chance.random() < 0.3:
                victim.stop()
            victim.kill()
            seen["killed"] += 1
            readers.remove(victim)
            readers.append(start(read, name))
            while True:
                try:
                    queue.put((number, body(number)), timeout=30)
                except errors.ProcessDiedError as error:
                    assert error.pids == [victim.pid]
                    seen["named"] += 1
                else:
                    break
            number += 1
        queue.await_readers(2, timeout=30)
        for _ in range(100):
            queue.put((number, body(number)), timeout=30)
            number += 1
        queue.close()
        for child in readers:
            assert child.hear() == "there"
            assert child.hear()[0] == "QueueClosedError"
        seen["sent"] = number
    return seen


def test_random_kills():
    seen = kill_at_random(seed=1, rounds=25)
    assert seen["killed"] == seen["named"] == 25 and seen["sent"] > 125
