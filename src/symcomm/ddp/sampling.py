"""The samples and random numbers of a logical shard, the same on whichever rank it runs."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from symcomm import errors


class ShardSampler(Sampler[list[int]]):
    """Which samples each logical shard gets in each step: the same, whatever the number of ranks.

    ``samples``     how many there are, or a dataset
    ``shards``      how many logical shards a step has
    ``batch_size``  samples of one shard in one step
    ``mine``        this rank's shards, for a DataLoader's ``batch_sampler=``, which gets their batches, step by step
    ``start``       the step to begin with there

    Each epoch has its own order, unless ``shuffle`` is False. Samples at its end that do not fill a step are left out.

    Raises: BadArgumentError."""

    def __init__(
        self, samples: Any, shards: int, batch_size: int, *, mine: Sequence[int] = (), start: int = 0,
        shuffle: bool = True, seed: int = 0,
    ):  # fmt: skip
        count = samples if isinstance(samples, int) else len(samples)
        for name, value in (("shards", shards), ("batch_size", batch_size)):
            if type(value) is not int or value < 1:
                raise errors.bad_argument("ShardSampler", name, value, "1 or more")
        if count < shards * batch_size:
            allowed = f"at least those of one step, {shards} shards of {batch_size}"
            raise errors.bad_argument("ShardSampler", "samples", count, allowed)
        self.shards, self.batch_size, self.mine, self.start = shards, batch_size, mine, start
        self.steps = count // (shards * batch_size)  # of an epoch
        self._count, self._shuffle, self._seed = count, shuffle, seed
        self._order: tuple[int, list[int]] = -1, []  # epoch, and its order

    def batch(self, step: int, shard: int) -> list[int]:
        """The samples of one shard in one step, counted over all epochs."""
        if not 0 <= shard < self.shards:
            raise errors.bad_argument("ShardSampler.batch", "shard", shard, f"0 to {self.shards - 1}")
        epoch, within = divmod(step, self.steps)
        first = (within * self.shards + shard) * self.batch_size
        return self._in_order(epoch)[first : first + self.batch_size]

    def _in_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._count)) if self._order[0] < 0 else self._order[1]
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of("samples", self._seed, epoch))
            self._order = epoch, torch.randperm(self._count, generator=generator).tolist()
        return self._order[1]

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank's shards, from ``start`` to the end of its epoch."""
        for step in range(self.start, (self.start // self.steps + 1) * self.steps):
            for shard in self.mine:
                yield self.batch(step, shard)

    def __len__(self) -> int:
        return (self.steps - self.start % self.steps) * len(self.mine)


def seed_of(*what: int | str) -> int:
    """A seed of 63 bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


class RandomState:
    """The random generators of torch, Python and, if it is loaded, numpy."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"].cpu())
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(state["cuda"])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])


@contextlib.contextmanager
def shard_seed(shard: int, step: int, seed: int = 0) -> Iterator[None]:
    """Within it, the random generators of torch, Python and, if it is loaded, numpy are those of this shard in this
    step: its dropout is the same on whichever rank it runs. Afterwards they are as they were.

    Raises: nothing."""
    generators = RandomState()
    before = generators.state_dict()
    own = seed_of("shard", seed, step, shard)
    torch.manual_seed(own)
    random.seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own & 0xFFFFFFFF)
    try:
        yield
    finally:
        generators.load_state_dict(before)
