"""`symcomm demo`: several ranks at work on this machine, explained as they go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from symcomm.errors import SymcommError

app = typer.Typer(rich_markup_mode=None, add_completion=False)
console = Console(highlight=False)
RANKS = 4


# --- what the ranks do (each function runs on every rank) ----------------------------------------------------------


def add_up(group: Any) -> tuple[list[float], list[float]]:
    import torch

    mine = torch.arange(4.0) + 10 * group.rank
    before = mine.tolist()
    group.all_reduce(mine)
    return before, mine.tolist()


def die_in_the_middle(group: Any) -> str:
    import torch

    group.barrier()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    try:
        group.all_reduce(torch.ones(1000))
    except SymcommError as error:
        return f"after {(time.perf_counter() - started) * 1000:.0f} ms: {type(error).__name__}: {error}"
    return "nothing was noticed"


def disagree(group: Any) -> str:
    import torch

    try:
        if group.rank == 1:
            group.broadcast(torch.ones(3), 0)
        else:
            group.all_reduce(torch.ones(1000))
    except SymcommError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


# --- what the demo shows -------------------------------------------------------------------------------------------


def show_collective() -> None:
    from symcomm import spawn

    console.rule("[bold]1. Four ranks, one collective")
    console.print(f"Starting {RANKS} processes. Each has its own numbers; all_reduce adds them up, element by element.")
    table = Table("rank", "before", "after all_reduce")
    for rank, (before, after) in enumerate(spawn(add_up, RANKS, deadline=120)):
        table.add_row(str(rank), str(before), str(after))
    console.print(table)


def train(backend: str, progress: Progress) -> dict:
    """Run the training job on two ranks and draw its progress; returns the last line it printed."""
    task = progress.add_task(f"{backend:8}", total=None, note="starting")
    command = [
        sys.executable,
        "-m",
        "symcomm",
        "run",
        "-n",
        "2",
        "--no-prefix",
        "-m",
        "symcomm.cli.demo_train",
        backend,
    ]
    last: dict = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            last = json.loads(line)
            note = f"loss {last['loss']:.2f}   {last['examples'] / last['seconds']:.0f} examples/s"
            progress.update(task, total=60, completed=last["step"], note=note)
    if job.returncode or not last:
        raise typer.Exit(job.returncode or 1)
    return last


def show_training() -> None:
    console.rule("[bold]2. A data-parallel training, on Symcomm and on Gloo")
    console.print(
        "A small language model with torch's DistributedDataParallel on 2 ranks; only the backend's name differs."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results = {backend: train(backend, progress) for backend in ("symcomm", "gloo")}
    table = Table("backend", "time per step", "of it communication", "examples/s", "last loss")
    for backend, last in results.items():
        step = last["seconds"] / last["step"]
        share = max(0.0, step - last["alone"])
        table.add_row(
            backend, f"{step * 1000:.1f} ms", f"{share * 1000:.1f} ms", f"{last['examples'] / last['seconds']:.0f}",
            f"{last['loss']:.4f}",
        )  # fmt: skip
    console.print(table)
    ratio = (results["gloo"]["seconds"]) / results["symcomm"]["seconds"]
    console.print(f"The same losses, in {ratio:.1f}x less time.\n" if ratio > 1 else "")


def show_failures() -> None:
    from symcomm import spawn

    console.rule("[bold]3. When a rank dies")
    console.print("Rank 2 is killed (SIGKILL) while the others wait for it. What a survivor is told:")
    console.print(f"  [red]{_survivors_word(spawn)}[/red]", soft_wrap=True)
    console.rule("[bold]4. When ranks disagree")
    console.print("Rank 1 calls broadcast where the others call all_reduce. What everybody is told:")
    console.print(f"  [red]{spawn(disagree, 3, mode='threads', deadline=60)[0]}[/red]", soft_wrap=True)


def _survivors_word(spawn: Any) -> str:
    """spawn() reports the dead rank itself; the survivors' words come through a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_tell, RANKS, (folder,), deadline=120)
        except SymcommError:
            pass
        with open(os.path.join(folder, "0")) as file:
            return file.read()


def _tell(group: Any, folder: str) -> None:
    words = die_in_the_middle(group)
    with open(os.path.join(folder, str(group.rank)), "w") as file:
        file.write(words)


@app.command()
def demo() -> None:
    """Several ranks at work on this machine, explained as they go. Takes about a minute.

    \b
    Example:
      symcomm demo
    """
    console.print("[bold]Symcomm[/bold]: PyTorch's communication layer on symmetric memory.\n")
    show_collective()
    show_training()
    show_failures()
    console.print("\nNext: `symcomm run -n 2 your_script.py`, `symcomm bench --help`, docs/.")
