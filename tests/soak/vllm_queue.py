"""Does anybody ever wait for a dead one? ``python -m tests.soak.vllm_queue KILLS [SEED]``: an engine and its workers,
as vLLM has them, talk over the plugin's message queues until one of them is killed. Every other one must then be told
who it was, after messages that are all there and whole. In some rounds nobody is killed, and they end in peace."""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from symcomm import errors
from symcomm.integrations.vllm.message_queue import MessageQueue
from tests.support.children import Child, children, shared_memory

LIMIT = 30.0  # seconds: a process that says nothing for so long hangs
MOST_WORKERS, MOST_AHEAD = 3, 6
LONGEST_RUN = 0.03  # seconds before the kill


def body(number: int) -> bytes | np.ndarray:
    """Of every length: in slots, copied, mapped. Its elements tell whether it is whole."""
    length = 1 + (number * 7919) % (500 << 10 if number % 9 == 0 else 6000)
    return np.full(length, number % 251, np.uint8) if number % 2 else bytes([number % 251]) * length


def check(expected: tuple[int, ...], got: tuple[Any, ...]) -> None:
    *head, data = got
    assert tuple(head) == expected, f"{head} in the place of {expected}"
    whole = body(expected[-1])
    same = np.array_equal(data, whole) if isinstance(whole, np.ndarray) else data == whole
    assert same, f"message {expected} is torn"


def told(say: Callable[[Any], None], run: Callable[[], None]) -> None:
    """Run until an error, and say which and when."""
    try:
        run()
    except (errors.SymcommError, RuntimeError) as error:
        say((type(error).__name__, str(error), getattr(error, "pids", []), time.monotonic()))


def engine(say, pipes: list[Connection], ahead: int, steps: int) -> None:
    """Sends work to all, and reads an answer of each, like vLLM's executor."""
    requests = MessageQueue(len(pipes), len(pipes))
    for pipe in pipes:
        pipe.send(requests.export_handle())
    answers = [MessageQueue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
    for queue in (requests, *answers):
        queue.wait_until_ready()
    say("there")

    def run() -> None:
        for number in range(steps + ahead):
            if number < steps:
                requests.enqueue((number, body(number)))
            for rank, queue in enumerate(answers if number >= ahead else ()):
                check((rank, number - ahead), queue.dequeue(timeout=LIMIT))
        say("done")
        for pipe in pipes:
            pipe.close()  # by which vLLM's workers learn that they are to end
        answers[0].dequeue(timeout=LIMIT)  # the first of them leaves

    told(say, run)
    for queue in (requests, *answers):
        queue.shutdown()


def worker(say, rank: int, pipe: Connection) -> None:
    requests = MessageQueue.create_from_handle(pipe.recv(), rank)
    answers = MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    for queue in (requests, answers):
        queue.wait_until_ready()
    say("there")

    def watch() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            time.sleep(0.001 * rank)
            for queue in (requests, answers):
                queue.shutdown()

    threading.Thread(target=watch, daemon=True).start()

    def run() -> None:
        for number in range(10**9):
            check((number,), requests.dequeue(indefinite=True))
            answers.enqueue((rank, number, body(number)))

    told(say, run)
    for queue in (requests, answers):
        queue.shutdown()


@dataclass
class Seen:
    kills: dict[str, int] = field(default_factory=lambda: {"engine": 0, "worker": 0})
    peaceful: int = 0
    seconds: list[float] = field(default_factory=list)  # from each kill until each of the others knew
    wrong: list[str] = field(default_factory=list)
    left: int = 0  # files in /dev/shm

    def __str__(self) -> str:
        times = sorted(self.seconds) or [0.0]
        return (
            f"{self.kills['engine']} engines and {self.kills['worker']} workers killed, {self.peaceful} in peace, "
            f"{len(self.wrong)} wrong, {self.left} left; told after {statistics.median(times) * 1e3:.1f} ms (median), "
            f"{times[int(0.99 * len(times))] * 1e3:.1f} (99 %), {times[-1] * 1e3:.1f} (most)"
        )


def start_all(start: Callable[..., Child], workers: int, ahead: int, steps: int) -> list[Child]:
    """The engine, and its workers, of whom each has one end of a pipe and no copy of the others'."""
    pairs = [Pipe() for _ in range(workers)]
    crowd = [start(engine, [ours for ours, _ in pairs], ahead, steps)]

    def alone(say, rank: int) -> None:
        for number, (ours, theirs) in enumerate(pairs):
            ours.close()
            if number != rank:
                theirs.close()
        worker(say, rank, pairs[rank][1])

    crowd += [start(alone, rank) for rank in range(workers)]
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    for child in crowd:
        assert child.hear(LIMIT) == "there"
    return crowd


def play(chance: random.Random, seen: Seen) -> None:
    workers, ahead = chance.randint(1, MOST_WORKERS), chance.randint(0, MOST_AHEAD)
    in_peace = chance.random() < 0.1
    with children() as start:
        crowd = start_all(start, workers, ahead, chance.randint(5, 40) if in_peace else 10**9)
        if in_peace:
            assert crowd[0].hear(LIMIT) == "done"
            seen.peaceful += 1
            for child in crowd:
                kind, words, *_ = child.hear(LIMIT)
                assert kind == "QueueClosedError" or words == "cancelled", f"in peace: {kind}: {words}"
                assert child.end() == 0
            return
        time.sleep(chance.random() * LONGEST_RUN)
        victim = crowd[0] if chance.random() < 0.4 else chance.choice(crowd[1:])
        if chance.random() < 0.3:
            victim.stop()
            time.sleep(chance.random() * 0.01)  # the others fill their queues and wait
        killed = time.monotonic()
        victim.kill()
        seen.kills["engine" if victim is crowd[0] else "worker"] += 1
        for child in crowd:
            if child is not victim:
                hear_the_end(child, victim, child is crowd[0] or victim is crowd[0], killed, seen)


def hear_the_end(child: Child, victim: Child, is_told: bool, killed: float, seen: Seen) -> None:
    """What one of the others was told: who died, by that one's own queue, or that the engine has ended."""
    kind, words, pids, when = child.hear(LIMIT)
    seen.seconds.append(when - killed)
    if is_told:
        good = kind == "ProcessDiedError" and pids == [victim.pid] and str(victim.pid) in words
        good |= words == "cancelled"  # vLLM's pipe was faster
    else:
        good = kind in ("QueueClosedError", "RuntimeError")
    if not good:
        seen.wrong.append(f"process {victim.pid} was killed, and {child.pid} was told: {kind}: {words}")
    assert child.end() == 0


def soak(kills: int, seed: int = 1, progress: bool = False) -> Seen:
    before, seen, chance = shared_memory(), Seen(), random.Random(seed)
    begun = time.monotonic()
    while sum(seen.kills.values()) < kills:
        play(chance, seen)
        if progress and sum(seen.kills.values()) % 20 == 0:
            print(f"\r{time.monotonic() - begun:.0f} s: {seen} ", end="", flush=True)
    seen.left = len(shared_memory() - before)
    return seen


if __name__ == "__main__":
    found = soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, progress=True)
    print(f"\n{found}", *found.wrong, sep="\n")
    sys.exit(bool(found.wrong or found.left))
