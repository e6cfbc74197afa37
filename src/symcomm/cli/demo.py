"""`symcomm demo`: several ranks at work on this machine, explained as they go."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from symcomm.bench import llm
from symcomm.bench.run import open_sides
from symcomm.cli.command import Command, option
from symcomm.demo.plot import draw_picture, smooth, text_plot
from symcomm.errors import SymcommError, bad_argument
from symcomm.preflight import check_output_file, need_torch

app = typer.Typer(rich_markup_mode=None, add_completion=False)
console = Console(highlight=False, width=min(80, Console().width))
RANKS = 4
STEPS = 700  # about half a minute on each backend, on two slow cores
COLORS = {"symcomm": "green", "gloo": "yellow"}
TRAINERS = 2  # ranks of each backend; one backend works at a time
WORKER = "symcomm.demo.train"
FASTER = 1.02  # a smaller difference is noise
TURN = 10  # steps that a backend makes before it is the other's turn
# About twenty seconds on two slow cores, most of them to start and to make the model.
WRITING = llm.LlmWorkload(worlds=(TRAINERS,), rounds=3, layers=4, prompt=16, tokens=16, modes=("eager",))


# --- what the ranks do (each function runs on every rank) ----------------------------------------------------------


def add_up(group: Any) -> tuple[list[float], list[float]]:
    import torch

    mine = torch.arange(4.0) + 10 * group.rank
    before = mine.tolist()
    group.all_reduce(mine)
    return before, mine.tolist()


def die_in_the_middle(group: Any, folder: str) -> None:
    """spawn() reports the dead rank, so survivors write what they see into files."""
    import torch

    group.barrier()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started, told = time.perf_counter(), "nothing was noticed"
    try:
        group.all_reduce(torch.ones(1000))
    except SymcommError as error:
        told = f"after {(time.perf_counter() - started) * 1000:.0f} ms: {type(error).__name__}: {error}"
    Path(folder, str(group.rank)).write_text(told)


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
    console.print(f"{RANKS} processes with numbers of their own; all_reduce adds them up, element by element.")
    table = Table("rank", "before", "after all_reduce")
    for rank, (before, after) in enumerate(spawn(add_up, RANKS, deadline=120)):
        table.add_row(str(rank), str(before), str(after))
    console.print(table)


def show_training(steps: int) -> dict[str, list[dict[str, Any]]]:
    """Returns every step of both backends."""
    console.rule("[bold]2. Train a language model on two ranks, on Symcomm and on Gloo")
    console.print(
        "A small transformer learns this package's own source, character by character: Symcomm with its own "
        "DistributedDataParallel, Gloo with torch's, from the same seeds, on the same text. They take turns, so that "
        "whatever else runs on this machine slows both alike. Starting two ranks of each ...\n"
    )
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in COLORS}
    with open_sides(list(COLORS), TRAINERS, pinned=False, worker=WORKER, call="symcomm demo") as sides:
        with Live(console=console, auto_refresh=False) as live:
            for begin in range(0, steps, TURN):
                order = {"do": "train", "count": min(TURN, steps - begin), "steps": steps}
                for backend, side in sides.items():
                    runs[backend] += side.ask("training", order)[0]["lines"]
                    live.update(training_view(runs, steps), refresh=True)
        sample = sides["symcomm"].ask("writing", {"do": "sample"})[0]["sample"]
    say_differences(runs)
    console.print("\nWhat the model writes now, after `def `:")
    shown = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in sample.rstrip())
    console.print(Padding(Text(shown, style="dim", no_wrap=True, overflow="ellipsis"), (0, 2)))
    return runs


def training_view(runs: dict[str, list[dict[str, Any]]], steps: int) -> Group:
    """A row for each backend, and below them the losses over time."""
    table = Table(box=None, pad_edge=False)
    for head in ("backend", "", "steps", "loss", "tokens/s", "communication", "left"):
        table.add_column(head, justify="left" if head in ("backend", "") else "right")
    curves = {}
    for backend, lines in runs.items():
        bar = ProgressBar(total=steps, completed=len(lines), width=24)
        name = f"[{COLORS[backend]}]{backend}[/]"
        if not lines:
            table.add_row(name, bar, f"0/{steps}")
            continue
        last, losses = lines[-1], smooth([line["loss"] for line in lines])
        left = last["seconds"] / last["step"] * (steps - last["step"])
        table.add_row(
            name, bar, f"{last['step']}/{steps}", f"{losses[-1]:.3f}", f"{last['tokens'] / last['seconds']:.0f}",
            f"{last['share']:.1%}", f"{left:.0f} s" if left else "done",
        )  # fmt: skip
        curves[backend] = [(line["seconds"], loss) for line, loss in zip(lines, losses, strict=True)]
    plot = Text("\n").join(
        Text.assemble(*((text, COLORS.get(name, "dim")) for text, name in line)) for line in text_plot(curves)
    )
    return Group(table, Text(), plot)


def say_differences(runs: dict[str, list[dict[str, Any]]]) -> None:
    ours, theirs = runs.values()
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    same = "the same, bit for bit" if apart == 0 else f"at most {apart:.1g} apart"
    speed = format_speed(ours[-1], theirs[-1], *load_and_cores())
    console.print(f"\nThe losses of all {len(ours)} steps are {same}; {speed}")


def load_and_cores() -> tuple[float, int]:
    return os.getloadavg()[0], len(os.sched_getaffinity(0))


def format_speed(ours: dict[str, Any], theirs: dict[str, Any], load: float, cores: int) -> str:
    """Compares the last lines of both trainings; if ours was not faster, says so, and what else was measured."""
    ratio = theirs["seconds"] / ours["seconds"]
    if ratio >= FASTER:
        return f"gloo took {ratio:.2f} times as long as symcomm."
    words = f"symcomm took {ours['seconds']:.1f} s, gloo {theirs['seconds']:.1f} s: no faster in this run. "
    words += f"Communication was {ours['share']:.1%} of a step on symcomm and {theirs['share']:.1%} on gloo."
    if ours["share"] < theirs["share"]:
        words += " Those are medians; the times are sums, which include what other programs took."
    return words + format_load(load, cores)


def format_load(load: float, cores: int) -> str:
    if load <= max(cores, TRAINERS) + 0.5:  # our own ranks are a load too
        return ""
    return f" This machine is busy (load {load:.1f} on {cores} cores): run it again when it is idle."


def show_failures() -> None:
    from symcomm import spawn

    console.rule("[bold]3. When a rank dies")
    console.print("Rank 2 is killed (SIGKILL) while the others wait for it. A survivor sees:")
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(SymcommError):
            spawn(die_in_the_middle, RANKS, (folder,), deadline=120)
        show_error(Path(folder, "0").read_text())
    console.rule("[bold]4. When ranks disagree")
    console.print("Rank 1 calls broadcast where the others call all_reduce. Every rank sees:")
    show_error(spawn(disagree, 3, mode="threads", deadline=60)[0])


def show_error(words: str) -> None:
    console.print(Padding(Text(words, style="red"), (0, 2)))


def show_writing() -> None:
    console.rule("[bold]5. Split a language model over two ranks")
    console.print(
        f"A decoder ({WRITING.layers} layers, {WRITING.width} wide) writes a text: one process on all cores, then two "
        "ranks with half of every layer each, which add up their parts twice a layer. Starting all three ..."
    )
    found = llm.measure(llm.LlmSection("eager", TRAINERS, ("one", "gloo", "symcomm")), WRITING)
    speeds = {figures.side: llm.speeds(figures, WRITING, best=False)[1] for figures in found}
    for side, what in (("symcomm", "two ranks, symcomm"), ("gloo", "two ranks, gloo"), ("one", "one process")):
        console.print(f"  {what:<19}{speeds[side]:6.0f} tokens/s", style=COLORS.get(side))
    if speeds["symcomm"] < FASTER * max(speeds["gloo"], speeds["one"]):
        console.print("Two ranks on symcomm were not the fastest in this run." + format_load(*load_and_cores()))


def show_picture(runs: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    if draw_picture(runs, picture):
        console.print(f"Picture of both trainings: {picture}", soft_wrap=True)
    else:
        console.print("No picture: matplotlib is not installed (`pip install 'symcomm[plot]'`).", markup=False)


@app.command(name="demo", cls=Command)
def demo(
    steps: Annotated[int, option("--steps", "N", "Steps of training on each backend.")] = STEPS,
    picture: Annotated[Path, option("--picture", "FILE", "Where to draw both losses: .png or .svg.")] = Path(
        "symcomm-demo.png"
    ),
) -> None:
    """Several ranks at work on this machine, explained as they go. Takes about three minutes.

    \b
    Examples:
      symcomm demo
      symcomm demo --steps 100 --picture losses.svg
    """
    check_options(steps, picture)
    need_torch("symcomm demo")
    console.print("[bold]Symcomm[/bold]: PyTorch's communication layer on symmetric memory.\n")
    show_collective()
    runs = show_training(steps)
    show_failures()
    show_writing()
    console.print("\nNext: `symcomm run -n 2 your_script.py`, `symcomm bench --help`, docs/.")
    show_picture(runs, picture)


def check_options(steps: int, picture: Path) -> None:
    if steps < 1:
        raise bad_argument("symcomm demo", "--steps", steps, "1 or more")
    if picture.suffix not in (".png", ".svg"):
        raise bad_argument("symcomm demo", "--picture", str(picture), "a file that ends in .png or .svg")
    check_output_file("symcomm demo", "--picture", picture)
