"""torchft's Manager with a lighthouse: replicas train together, and two seconds after all do one of them is killed, and
comes back. They call the Manager's allreduce themselves: torchft's DistributedDataParallel ends its process when an
allreduce fails, on any backend."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from tests.programs.frame import FOLDER, Part, tell

VERSION = "0.2.0"
NEEDS = (f"torchft=={VERSION}",)
PARTS = ("from a kill to the next step", "from a kill to a step of all four", "a step, of all that were made")
ENVIRONMENT = "torchft"
LAUNCH = ()  # replicas are processes without a launcher
ROUNDS = 1
LIMIT = 300.0
BUSY = True
REPLICAS, KILLS, CALM, SECONDS = 4, 8, 2.0, 60.0


def replica(backend: str, number: str, lighthouse: str, steps: str) -> None:
    """Trains until it is killed, and writes a line after each step that all agreed on."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from symcomm.torchft import ProcessGroupSymcomm

    torch.set_num_threads(1)
    kind = ProcessGroupSymcomm if backend == "symcomm" else ProcessGroupGloo
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    inner = torch.optim.AdamW(net.parameters())

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=kind(timeout=timedelta(seconds=5)), load_state_dict=load, min_replica_size=2,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{number}_", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=lighthouse, timeout=timedelta(seconds=5), quorum_timeout=timedelta(seconds=20),
    )  # fmt: skip
    optimizer, gradients = Optimizer(manager, inner), torch.zeros(sum(p.numel() for p in net.parameters()))
    for p, own in zip(net.parameters(), gradients.split([p.numel() for p in net.parameters()]), strict=True):
        p.grad = own.view_as(p)
    with open(steps, "a", buffering=1) as out:
        while True:
            optimizer.zero_grad(set_to_none=False)
            x = torch.randn(16, 64)
            (net(x) - x.flip(1)).square().mean().backward()
            manager.allreduce(gradients).wait()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                print(manager.current_step(), manager.num_participants(), time.monotonic(), file=out)


class Replicas:
    def __init__(self, backend: str, lighthouse: str, folder: Path):
        self.backend, self.lighthouse, self.folder = backend, lighthouse, folder
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, number: int) -> None:
        asked = [self.backend, str(number), self.lighthouse, str(self.folder / f"steps-{number}")]
        command = [sys.executable, "-c", f"from tests.programs.torchft_kills import replica; replica(*{asked!r})"]
        with open(self.folder / f"log-{number}", "a") as log:
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def steps(self) -> list[tuple[int, int, float, int]]:
        """(step, how many took part, when, whose line) of all steps so far, in order of time."""
        found = []
        for number in self.processes:
            with suppress(FileNotFoundError):
                for line in (self.folder / f"steps-{number}").read_text().splitlines():
                    step, together, when = line.split()
                    found.append((int(step), int(together), float(when), number))
        return sorted(found, key=lambda step: step[2])

    def first(self, after: float, together: int) -> float:
        """When the first step of so many was made, after that time."""
        until = time.monotonic() + SECONDS
        while True:
            for _, took_part, when, _ in self.steps():
                if when > after and took_part == together:
                    return when
            assert time.monotonic() < until, f"no step of {together} replicas in {SECONDS:.0f} s"
            time.sleep(0.01)


def main(backend: str) -> Iterator[Part]:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, quorum_tick_ms=50,
                                  heartbeat_timeout_ms=1000)  # fmt: skip
    replicas, seeded = Replicas(backend, lighthouse.address(), Path(os.environ[FOLDER])), random.Random(0)
    shrunk, whole = [], []
    try:
        for number in range(REPLICAS):
            replicas.start(number)
        begun = replicas.first(0.0, REPLICAS)
        first = replicas.steps()[-1][0]
        for _ in range(KILLS):
            time.sleep(CALM)
            victim, killed = seeded.randrange(REPLICAS), time.monotonic()
            replicas.processes[victim].kill()
            replicas.processes[victim].wait()
            shrunk.append(replicas.first(killed, REPLICAS - 1) - killed)
            replicas.start(victim)
            whole.append(replicas.first(killed + shrunk[-1], REPLICAS) - killed)
        took, last = time.monotonic() - begun, replicas.steps()[-1][0]
    finally:
        for process in replicas.processes.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()
    for name, seconds in zip(
        PARTS, (statistics.median(shrunk), statistics.median(whole), took / (last - first)), strict=True
    ):
        yield Part(name, seconds=seconds)


if __name__ == "__main__":
    tell(main)
