"""tensordict: its own messages and reductions, broadcasts and sums of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed

VERSION = "0.15.3"
NEEDS = (f"tensordict=={VERSION}",)
PARTS = ("send, isend and init_remote", "broadcast and all_reduce", "reduce to one rank")


def example(seed: int):
    import torch
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(8, *shape, generator=generator)  # noqa: E731
    return TensorDict({"x": draw(64), "inner": {"y": draw(32, 4), "n": torch.arange(8)}}, [8])


def values(found) -> list[float]:
    return numbers(*(found[key] for key in sorted(found.keys(True, True), key=str)))


def messages(rank: int) -> Part:
    from tensordict import TensorDict

    def one_way(i: int) -> list[float]:
        if rank == 0:
            example(i).send(1, init_tag=10)
            example(i + 1).isend(1, init_tag=20)
            example(i + 2).init_remote(1)
            return []
        first, second = example(0).zero_(), example(0).zero_()
        first.recv(0, init_tag=10)
        second.recv(0, init_tag=20)
        return values(first) + values(second) + values(TensorDict.from_remote_init(0))

    found, seconds = timed(one_way)
    return Part(PARTS[0], [value for each in found for value in each], seconds)


def together(rank: int) -> Part:
    import torch.distributed as dist

    def step(i: int) -> list[float]:
        mine = example(i + rank)
        del mine["inner", "n"]
        for tensor in mine.values(True, True):
            dist.broadcast(tensor, 0)
        mine.apply_(lambda t: t + rank)
        for tensor in mine.values(True, True):
            dist.all_reduce(tensor)
        return values(mine)

    found, seconds = timed(step)
    return Part(PARTS[1], [value for each in found for value in each], seconds)


def reduced(rank: int) -> Part:
    """Torch says nothing of what the other ranks have afterwards."""

    def step(i: int) -> list[float]:
        mine = example(10 * i + rank)
        mine.reduce(0)
        return values(mine) if rank == 0 else []

    found, seconds = timed(step)
    return Part(PARTS[2], [value for each in found for value in each], seconds)


def main(backend: str) -> Iterator[Part]:
    import torch.distributed as dist

    with joined(backend):
        for part in (messages, together, reduced):
            yield part(dist.get_rank())


if __name__ == "__main__":
    tell(main)
