"""When things happened in an iteration: the reducer's clock, and what people read from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALWAYS_SAMPLED = 10  # the first iterations are timed, each
now = time.time_ns
not_compiled: Any = torch._disable_dynamo  # calls that talk to other ranks stay out of compiled models


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of one iteration; milliseconds after the backward pass began."""

    index: int
    nbytes: int
    launched: float  # its last gradient had come, and it was its turn
    wait_began: float  # backward was over, and only the wait for it was left
    ended: float

    @property
    def waited(self) -> float:
        return self.ended - self.wait_began


@dataclass(frozen=True)
class IterationTimes:
    """One iteration, in milliseconds. ``exposed``: communication that no computation hid."""

    forward: float
    backward: float
    communication: float
    exposed: float
    buckets: tuple[BucketTimes, ...]


class Clock:
    """When an iteration's events happened, in nanoseconds since the epoch; 0 if one did not."""

    def __init__(self) -> None:
        self.forward_start = self.backward_start = self.compute_end = self.comm_start = self.comm_end = 0
        self.inside = 0  # spent communicating inside the backward pass, in its own thread

    def start(self) -> None:
        self.__init__()  # type: ignore[misc]
        self.forward_start = now()


def measure(clock: Clock, buckets: Sequence[Any]) -> IterationTimes:
    """The times of the iteration that has just ended."""

    def ms(ns: int) -> float:
        return ns / 1e6

    begun = clock.backward_start
    rows = tuple(
        BucketTimes(i, b.nbytes, ms(b.launched - begun), ms(b.wait_began - begun), ms(b.ended - begun))
        for i, b in enumerate(buckets)
        if b.ended
    )
    return IterationTimes(
        forward=ms(begun - clock.forward_start) if clock.forward_start else 0.0,
        backward=ms(clock.compute_end - begun),
        communication=ms(max(0, clock.comm_end - clock.comm_start)),
        exposed=ms(clock.inside) + sum(row.waited for row in rows),
        buckets=rows,
    )
