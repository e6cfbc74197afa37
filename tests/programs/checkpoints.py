"""torchsnapshot and torch's own DCP: a sharded model saved by two ranks and read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.programs.frame import FOLDER, Part, numbers, tell, timed

VERSION = "of torch 2.13.0 and torchsnapshot 0.1.0"
NEEDS = ("torchsnapshot==0.1.0",)
PARTS = ("DCP, save and load of FSDP2", "DCP, async_save", "torchsnapshot, take and restore")
WIDTH = 256


def make_model():
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def shards(model) -> list[float]:
    return numbers(*(p.to_local() for p in model.parameters()))


def spoil(model) -> None:
    for parameter in model.parameters():
        parameter.data.to_local().zero_()


def dcp(folder: Path) -> Part:
    import torch.distributed.checkpoint as dcp

    model = make_model()

    def save_and_load(i: int) -> list[float]:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"plain{i}")
        spoil(model)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / f"plain{i}")
        return shards(model)

    found, seconds = timed(save_and_load, 5, 1)
    return Part(PARTS[0], found[-1], seconds)


def dcp_async(folder: Path) -> Part:
    import torch.distributed.checkpoint as dcp

    model = make_model()

    def save(i: int) -> None:
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / f"async{i}").result()

    _, seconds = timed(save, 5, 1)
    spoil(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "async4")
    return Part(PARTS[1], shards(model), seconds)


def snapshots(folder: Path, rank: int) -> Part:
    import torch
    from torchsnapshot import Snapshot, StateDict

    state = StateDict(mine=torch.full((WIDTH, WIDTH), float(rank)), shared=torch.ones(8))

    def take(i: int):
        return Snapshot.take(str(folder / f"snapshot{i}"), {"state": state}, replicated=["state/shared"])

    taken, seconds = timed(take, 5, 1)
    state["mine"].zero_(), state["shared"].zero_()
    taken[-1].restore({"state": state})
    return Part(PARTS[2], numbers(state["mine"], state["shared"]), seconds)


def main(backend: str) -> Iterator[Part]:
    import torch
    import torch.distributed as dist

    # DCP's own group for async_save is Gloo's unless the default one has a CPU backend that it can use.
    dist.init_process_group(f"cpu:{backend}")
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    yield dcp(folder)
    yield dcp_async(folder)
    yield snapshots(folder, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    tell(main)
