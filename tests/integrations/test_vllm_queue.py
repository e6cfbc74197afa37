"""The message queue that the plugin gives vLLM, which needs no vLLM: its calls, handles, errors and ends."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest

from symcomm import errors
from symcomm.integrations.vllm import message_queue
from symcomm.integrations.vllm.message_queue import MessageQueue
from tests.soak.vllm_queue import soak
from tests.support.children import children, shared_memory

pytestmark = pytest.mark.without_torch

LONG = 1 << 20


def sent(queue: MessageQueue, rank: int) -> MessageQueue:
    """A reader by a handle as vLLM sends it."""
    return MessageQueue.create_from_handle(pickle.loads(pickle.dumps(queue.export_handle())), rank)


def pair() -> tuple[MessageQueue, MessageQueue]:
    writer = MessageQueue(1, 1)
    reader = sent(writer, 0)
    writer.wait_until_ready()
    reader.wait_until_ready()
    return writer, reader


def test_readers_of_any_ranks_get_what_is_sent():
    before = shared_memory()
    writer = MessageQueue(2, 2, [3, 5], max_chunk_bytes=1 << 10, max_chunks=2)
    readers = [sent(writer, rank) for rank in (3, 5)]
    assert [reader.local_reader_rank for reader in readers] == [0, 1]
    assert writer.export_handle().remote_subscribe_addr is None
    with pytest.raises(AssertionError):
        sent(writer, 4)
    for queue in (writer, *readers):
        queue.wait_until_ready()
    messages = ["step", ("execute", (1, {"a": None}), {}, 0), b"x" * LONG, {"mask": np.arange(LONG)}]
    for message in messages:
        assert writer.broadcast_object(message) is message
    for reader in readers:
        assert [reader.dequeue(timeout=5), reader.dequeue(indefinite=True), reader.broadcast_object()] == messages[:3]
        got = reader.dequeue(timeout=5)["mask"]
        got[0] = 7  # its own
        assert (got[1:] == np.arange(1, LONG)).all()
    with pytest.raises(AssertionError, match="Only writers"):
        readers[0].enqueue(1)
    with pytest.raises(RuntimeError, match="Only readers"):
        writer.dequeue()
    for queue in (writer, *readers):
        queue.shutdown()
    assert shared_memory() <= before


def test_calls_end_at_their_deadlines():
    writer, reader = pair()
    for timeout in (0.0, 0.1):
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=timeout)
    with pytest.raises(TimeoutError):
        while True:
            writer.enqueue(1, timeout=0.1)
    assert reader.dequeue(timeout=0.0) == 1


def test_long_silence_is_told_but_not_where_it_is_usual(monkeypatch: pytest.MonkeyPatch):
    said = []
    monkeypatch.setattr(message_queue, "TELL_AFTER", 0.05)
    monkeypatch.setattr(message_queue.log, "info", lambda words, *args: said.append(words % args))
    writer, reader = pair()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.2, indefinite=True)
    assert said == []
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.2)
    assert said and all("no message from process" in words for words in said)
    writer.shutdown()


def test_shutdown_wakes_who_waits():
    writer, reader = pair()
    threading.Thread(target=lambda: (time.sleep(0.1), reader.shutdown())).start()
    with pytest.raises(RuntimeError, match="^cancelled$"):
        reader.dequeue(indefinite=True)
    with pytest.raises(errors.QueueClosedError, match="its reader process .* closed it"):
        for _ in range(2):
            writer.enqueue(1)
    with pytest.raises(errors.QueueClosedError):  # it does not wait for another reader
        writer.enqueue(2)
    writer.shutdown()
    writer.enqueue(3)  # nobody reads any more, and vLLM's threads may still write
    writer, reader = pair()
    writer.enqueue("last")
    writer.shutdown()
    assert reader.dequeue() == "last"
    with pytest.raises(errors.QueueClosedError, match="closed it"):
        reader.dequeue()


def idle(say, handle) -> None:
    reader = MessageQueue.create_from_handle(handle, 0)
    say("there")
    reader.dequeue(timeout=60)
    reader.dequeue(timeout=60)


def test_a_dead_reader_is_named_by_every_call_from_then_on():
    writer = MessageQueue(1, 1)
    with children() as start:
        child = start(idle, writer.export_handle())
        writer.wait_until_ready()
        child.hear()
        writer.enqueue(0)
        child.kill()
        for _ in range(3):
            with pytest.raises(errors.ProcessDiedError) as died:
                writer.enqueue(1)
            assert died.value.pids == [child.pid]
        assert child.pid in message_queue.found_dead


def test_an_orphan_is_told():
    def write(say) -> None:
        writer = MessageQueue(1, 1)
        say(writer.export_handle())
        writer.enqueue("last")
        say("sent")
        time.sleep(60)

    with children() as start:
        child = start(write)
        reader = MessageQueue.create_from_handle(child.hear(), 0)
        assert child.hear() == "sent"
        child.kill()
        assert reader.dequeue() == "last"
        with pytest.raises(errors.ProcessDiedError) as died:
            reader.dequeue(indefinite=True)
        assert died.value.pids == [child.pid]


def test_some_seconds_of_kills():
    seen = soak(kills=25, seed=5)
    assert seen.wrong == [] and seen.left == 0 and min(seen.kills.values()) > 3 and seen.peaceful > 0
