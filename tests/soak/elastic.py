"""Run by hand: ``python -m tests.soak.elastic [MINUTES]``. Small trainings, on one host or on pretended ones, while
ranks are killed at random moments and others come, some of which are killed as they do. One rank is spared, any of the
first ones; it must end with the losses of an undisturbed run, and so must everybody else that ends."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

START = "forkserver"
STEPS, BATCH = 40, 24
HOSTS = (["a"] * 3, ["a", "b"], ["a", "a", "b"], ["a", "b", "c"])  # of the first ranks
DEADLINE = 90.0


def _train(enter: Any, pause: float, data_parallel: bool) -> list[float]:
    import torch

    from symcomm import elastic

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # sums in another order then differ only in the last digits
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step(session: Any) -> float:
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(session.step))[session.share(BATCH)]
        loss = (session.model(x) - x.sum(1, keepdim=True)).square().sum() / BATCH
        optimizer.zero_grad()
        (loss * session.size if data_parallel else loss).backward()
        if not data_parallel:
            for parameter in model.parameters():
                session.group.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(pause)
        session.group.all_reduce(total := loss.detach().clone())
        return total.item()

    # Most may be killed before the others have agreed to go on. Who cannot be reached here is dead, so one is enough.
    with elastic.Session(
        model=model, optimizer=optimizer, data_parallel=data_parallel, enter=enter, quorum=1
    ) as session:
        return session.run(step, STEPS)


def _rank(path: str, rank: int | None, world: int, host: str, pause: float, ddp: bool, told: Connection) -> None:
    import symcomm

    os.environ["SYMCOMM_HOST_ID"] = host
    if rank is None:
        os.environ["SYMCOMM_JOIN"] = "0"  # as the launcher does: who comes too late is no failure

    def enter() -> Any:
        store = symcomm.FileStore(path)
        if rank is None:
            return symcomm.join(store=store, timeout=60)
        group = symcomm.init(store=store, rank=rank, world_size=world, timeout=30)
        told.send("begun")
        return group

    told.send(_train(enter, pause, ddp))


class _Round:
    def __init__(self, seed: int, path: str):
        self.dice = random.Random(seed)
        self.path = path
        self.hosts = self.dice.choice(HOSTS)
        self.pause, self.ddp = self.dice.choice((0.0, 0.02, 0.05)), self.dice.random() < 0.5
        self.spared = self.dice.randrange(len(self.hosts))
        self.ranks: list[Any] = []
        self.readers: list[Connection] = []
        self.killed: set[int] = set()
        self.begun = 0  # of the first ranks

    def start(self, rank: int | None, host: str) -> None:
        context: Any = multiprocessing.get_context(START)
        reader, writer = context.Pipe(duplex=False)
        args = (self.path, rank, len(self.hosts), host, self.pause, self.ddp, writer)
        process = context.Process(target=_rank, args=args, daemon=True)
        process.start()
        writer.close()
        self.ranks.append(process)
        self.readers.append(reader)

    def disturb(self) -> None:
        """One comes, or one goes."""
        victims = [i for i, p in enumerate(self.ranks) if i != self.spared and p.is_alive()]
        if len(victims) < 4 and (not victims or self.dice.random() < 0.5):
            self.start(None, self.dice.choice(self.hosts))
        elif victims:
            victim = self.dice.choice(victims)
            self.killed.add(victim)
            self.ranks[victim].kill()

    def run(self) -> list[Any]:
        """What each rank told: its losses, or None."""
        for rank, host in enumerate(self.hosts):
            self.start(rank, host)
        end, told = time.monotonic() + DEADLINE, {}
        while len(told) < len(self.ranks) and time.monotonic() < end:
            waiting = {reader: i for i, reader in enumerate(self.readers) if i not in told}
            for reader in wait(list(waiting), self.dice.uniform(0.05, 0.8)):
                try:
                    said = reader.recv()  # type: ignore[union-attr]
                except EOFError:
                    said = None
                if said == "begun":
                    self.begun += 1
                else:
                    told[waiting[reader]] = said  # type: ignore[index]
            if self.begun == len(self.hosts) and self.spared not in told:
                self.disturb()
        for process in self.ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
        return [told.get(i, "did not end") for i in range(len(self.ranks))]

    def verdict(self, expected: list[float]) -> str:
        """What went wrong, or ""."""
        wrong = []
        for i, losses in enumerate(self.run()):
            if i in self.killed and losses is None:
                continue
            came_too_late = i >= len(self.hosts) and losses == []
            if not came_too_late and not _is_close(losses, expected):
                wrong.append(f"process {i}{' (spared)' * (i == self.spared)}: {losses}")
        return "; ".join(wrong)


def _is_close(losses: Any, expected: list[float]) -> bool:
    return (
        isinstance(losses, list)
        and len(losses) == len(expected)
        and all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(losses, expected, strict=True))
    )


def main() -> None:
    import symcomm

    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    multiprocessing.get_context(START).set_forkserver_preload(["torch.distributed", "symcomm.hierarchical.group"])
    expected = symcomm.spawn(lambda group: _train(lambda: group, 0.0, False), 1, mode="threads")[0]
    end, rounds, came, went, first = time.monotonic() + minutes * 60, 0, 0, 0, int(time.time())
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            now = _Round(first + rounds, f"{folder}/store")
            wrong = now.verdict(expected)
        if wrong:
            print(f"round {rounds}, seed {first + rounds}, hosts {now.hosts}: {wrong}")
            sys.exit(1)
        rounds, came, went = rounds + 1, came + len(now.ranks) - len(now.hosts), went + len(now.killed)
    print(f"{rounds} rounds, {came} came, {went} were killed, all ended right")


if __name__ == "__main__":
    main()
