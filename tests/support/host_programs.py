"""Random programs of messages, collectives and asynchronous works, which are right by construction: they must end.

A program is one list of events in one order; each rank runs those that are its own. What an event waits for was begun
by an earlier one, on whatever rank: so a rank that can be reached by the order of the list can always go on, provided
that a posted message is served whatever its owner does meanwhile. ``run_program`` checks every value.

A message belongs to a *stream* (one sender, one tag: receives of any kind get its messages in order) or to a *crowd*
(several senders, one tag, one receiver that takes whoever comes: of each sender in order).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

SIZES = (0, 1, 40, 900, 1024, 1025, 3072, 16_384, 16_385, 50_000)  # elements of 4 bytes: up to 200 KiB
ANY = -1


@dataclass
class Event:
    """``act(run)`` is what ``rank`` does (None: every rank of the group ``on``)."""

    at: float
    rank: int | None
    act: Callable[[Any], None]
    on: int = 0


@dataclass
class Run:
    """One rank's run: its groups (world first; None if it is no member), its works and its findings."""

    groups: list[Any]
    calls: Any
    works: dict[Any, Any] = field(default_factory=dict)
    tensors: dict[Any, torch.Tensor] = field(default_factory=dict)
    orders: dict[Any, list[int]] = field(default_factory=dict)


class SymcommCalls:
    """A program's calls by our own groups."""

    def isend(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return group.isend(tensor, peer, tag)

    def irecv(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return group.irecv(tensor, peer, tag)

    def send(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> None:
        group.send(tensor, peer, tag)

    def recv(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> int:
        return group.recv(tensor, peer, tag)

    def source(self, work: Any) -> int:
        return work.source

    def collective(self, group: Any, kind: str, tensor: torch.Tensor, root: int, queued: bool) -> Any:
        if kind == "barrier":
            return group.barrier(async_op=queued)
        if kind == "broadcast":
            return group.broadcast(tensor, root, async_op=queued)
        return group.all_reduce(tensor, async_op=queued)


class TorchCalls:
    """The same by torch.distributed, whatever the backend."""

    def _peer(self, group: Any, peer: int) -> int | None:
        import torch.distributed as dist

        return None if peer == ANY else dist.get_global_rank(group, peer)

    def isend(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        import torch.distributed as dist

        return dist.isend(tensor, self._peer(group, peer), group, tag)

    def irecv(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        import torch.distributed as dist

        return dist.irecv(tensor, self._peer(group, peer), group, tag)

    def send(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> None:
        import torch.distributed as dist

        dist.send(tensor, self._peer(group, peer), group, tag)

    def recv(self, group: Any, tensor: torch.Tensor, peer: int, tag: int) -> int:
        import torch.distributed as dist

        source = dist.recv(tensor, self._peer(group, peer), group, tag)
        return dist.get_group_rank(group, source)

    def source(self, work: Any) -> int:
        return work._source_rank()

    def collective(self, group: Any, kind: str, tensor: torch.Tensor, root: int, queued: bool) -> Any:
        import torch.distributed as dist

        if kind == "barrier":
            return dist.barrier(group, async_op=queued)
        if kind == "broadcast":
            return dist.broadcast(tensor, dist.get_global_rank(group, root), group, async_op=queued)
        return dist.all_reduce(tensor, group=group, async_op=queued)


def _payload(count: int, stream: int, sender: int, number: int) -> torch.Tensor:
    return torch.full((count,), stream * 1000 + sender * 100 + number, dtype=torch.int32)


class Program:
    """``members[g]``: the ranks of group g, world first. The same seed is the same program on all ranks.

    ``mix``: also what Gloo cannot: messages to oneself, empty ones from any rank, and receives of both kinds of one
    stream, where it lets messages overtake each other."""

    def __init__(self, seed: int, members: list[list[int]], mix: bool = True, any_source: bool = True):
        self._rng = random.Random(seed)
        self._members, self._mix, self._any_source = members, mix, any_source
        self._sizes = SIZES if mix else SIZES[1:]
        self.events: list[Event] = []
        first = seed % 10_000 * 10  # a rank may be a program ahead of another
        for number in range(first, first + self._rng.randint(2, 6)):
            self._crowd(number) if any_source and self._rng.random() < 0.45 else self._stream(number)
        for number in range(self._rng.randint(2, 8)):
            self._collective(number)
        for _ in range(self._rng.randint(0, 3)):
            rank, seconds = self._rng.randrange(len(members[0])), self._rng.choice((0.0005, 0.005, 0.02))
            self.events.append(Event(self._rng.random(), rank, lambda run, s=seconds: time.sleep(s)))
        self.events.sort(key=lambda event: event.at)

    def of(self, rank: int) -> Iterator[Event]:
        return (e for e in self.events if (rank in self._members[e.on] if e.rank is None else e.rank == rank))

    def _after(self, at: float) -> float:
        return at + (1.2 - at) * self._rng.random()

    def _group(self) -> int:
        usable = [g for g, ranks in enumerate(self._members) if len(ranks) > 1]
        return self._rng.choice(usable)

    # --- messages ---------------------------------------------------------------------------------------------

    def _stream(self, stream: int) -> None:
        """One sender, one receiver, perhaps the same rank; message i meets receive i."""
        rng, g = self._rng, self._group()
        size = len(self._members[g])
        sender, receiver = rng.randrange(size), rng.randrange(size)
        if sender == receiver and not self._mix:
            receiver = (sender + 1) % size
        count, peers = rng.randint(1, 6), [sender, ANY] if self._any_source else [sender]
        kinds = [rng.choice(peers) for _ in range(count)] if self._mix else [rng.choice(peers)] * count
        sizes = [rng.choice(self._sizes) for _ in range(count)]
        posts = sorted(rng.random() for _ in range(count)), sorted(rng.random() for _ in range(count))
        for i in range(count):
            sent, posted = posts[0][i], posts[1][i]
            payload = (sizes[i], stream, sender, i)
            blocking = rng.random() < 0.4  # where everything before it has been begun
            met = max(sent, posted)
            self._send(g, sender, receiver, stream, (stream, i), payload, sent, met, blocking and posted < sent)
            expect = (kinds[i], sender, i, payload)
            self._receive(g, receiver, stream, (stream, i), expect, posted, met, blocking and sent < posted)

    def _crowd(self, stream: int) -> None:
        """Several senders, perhaps also the receiver, which takes messages from any of them."""
        rng, g = self._rng, self._group()
        size = len(self._members[g])
        receiver, count = rng.randrange(size), rng.choice(self._sizes)
        others = [r for r in range(size) if r != receiver or self._mix]
        sends = [(rng.random(), rng.choice(others)) for _ in range(rng.randint(2, 7))]
        posts = sorted(rng.random() for _ in sends)
        sent, posted, numbers = max(at for at, _ in sends), max(posts), dict.fromkeys(range(size), 0)
        met = max(sent, posted)
        late_receiver = rng.random() < 0.3  # which receives one by one, after all sends
        for at, sender in sorted(sends):
            number = numbers[sender]
            numbers[sender] += 1
            name = (stream, sender, number)
            end = 1.21 if late_receiver else met  # after the last receive
            self._send(g, sender, receiver, stream, name, (count, stream, sender, number), at, end, False)
        for i, at in enumerate(posts):
            begun = met + (1.2 - met) * (i + 1) / (len(posts) + 1) if late_receiver else at
            expect = (ANY, None, i, (count, stream, 0, 0))
            self._receive(g, receiver, stream, (stream, "crowd", i), expect, begun, met, late_receiver)

    def _send(
        self, g: int, sender: int, receiver: int, tag: int, name: Any, payload: tuple[int, int, int, int], at: float,
        met: float, blocking: bool,
    ) -> None:  # fmt: skip
        rank = self._members[g][sender]

        def post(run: Run) -> None:
            tensor = _payload(*payload)
            if blocking:
                run.calls.send(run.groups[g], tensor, receiver, tag)
                tensor.fill_(-7)  # it is the caller's again
            else:
                run.tensors["s", name] = tensor
                run.works["s", name] = run.calls.isend(run.groups[g], tensor, receiver, tag)

        def wait(run: Run) -> None:
            run.works.pop(("s", name)).wait()
            run.tensors.pop(("s", name)).fill_(-7)

        self.events.append(Event(at, rank, post))
        if not blocking:
            self.events.append(Event(self._after(met) if met < 1.2 else met, rank, wait))

    def _receive(
        self, g: int, receiver: int, tag: int, name: Any, expect: tuple[int, int | None, int, Any], at: float,
        met: float, blocking: bool,
    ) -> None:  # fmt: skip
        rank, (peer, sender, number, payload) = self._members[g][receiver], expect
        count, stream = payload[:2]

        def check(run: Run, tensor: torch.Tensor, source: int) -> None:
            found = run.orders.setdefault((stream, source), [])
            at = number if sender is not None else len(found)
            found.append(at)
            assert sender in (None, source), f"{name}: from rank {source}, not {sender}"
            if sender is None and count == 0:
                return
            wanted = _payload(count, stream, source, at)
            assert torch.equal(tensor, wanted), f"{name} from {source}: {tensor.unique()}, not {wanted.unique()}"

        def post(run: Run) -> None:
            tensor = torch.full((count,), -1, dtype=torch.int32)
            if blocking:
                check(run, tensor, run.calls.recv(run.groups[g], tensor, peer, tag))
            else:
                run.tensors["r", name] = tensor
                run.works["r", name] = run.calls.irecv(run.groups[g], tensor, peer, tag)

        def wait(run: Run) -> None:
            work = run.works.pop(("r", name))
            work.wait()
            check(run, run.tensors.pop(("r", name)), run.calls.source(work))

        self.events.append(Event(at, rank, post))
        if blocking:
            return
        if sender is None:  # in the order of posting, in which messages of one sender must have come
            self.events.append(Event(1.205 + number / 10_000, rank, wait))
        else:
            self.events.append(Event(self._after(met), rank, wait))

    # --- collectives ------------------------------------------------------------------------------------------

    def _collective(self, number: int) -> None:
        rng, g = self._rng, self._group()
        size, count = len(self._members[g]), rng.choice((1, 1000, 40_000, 300_000))
        kind, queued = rng.choice(("all_reduce", "all_reduce", "broadcast", "barrier")), rng.random() < 0.4
        root, at = rng.randrange(size), rng.random()
        wanted = size * (size - 1) // 2 + number * size if kind == "all_reduce" else root + number

        def check(run: Run, tensor: torch.Tensor) -> None:
            assert kind == "barrier" or (tensor == wanted).all(), f"{kind} {number}: {tensor.unique()}, not {wanted}"

        def begin(run: Run) -> None:
            group = run.groups[g]
            rank = group.rank if hasattr(group, "rank") and not callable(group.rank) else group.rank()
            tensor = torch.full((count,), rank + number, dtype=torch.int32)
            work = run.calls.collective(group, kind, tensor, root, queued)
            if queued:
                run.works["c", number], run.tensors["c", number] = work, tensor
            else:
                check(run, tensor)

        def wait(run: Run) -> None:
            run.works.pop(("c", number)).wait()
            check(run, run.tensors.pop(("c", number)))

        self.events.append(Event(at, None, begin, g))
        if queued:
            for rank in self._members[g]:
                self.events.append(Event(self._after(at), rank, wait))


def run_program(program: Program, groups: list[Any], rank: int, calls: Any) -> None:
    """This rank's part. Raises AssertionError for a wrong value, and what its calls raise."""
    run = Run(groups, calls)
    for event in program.of(rank):
        event.act(run)
    assert not run.works
    for (stream, source), order in run.orders.items():
        assert sorted(order) == sorted(set(order)), f"stream {stream} from {source}: {order}"


def members_of(layout: list[int], rng: random.Random) -> list[list[int]]:
    """The world, and two groups of some of its ranks."""
    ranks = list(range(sum(layout)))
    some = [sorted(rng.sample(ranks, rng.randint(2, len(ranks)))) for _ in range(2)]
    return [ranks, *some]
