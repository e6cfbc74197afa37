"""``symcomm bench``: options in, tables out. bench/run.py runs ranks, bench/table.py words results."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from symcomm import errors
from symcomm.bench import pictures
from symcomm.bench import table as bench_table
from symcomm.bench.estimate import TimeLeft, in_words
from symcomm.bench.frame import Asked, check_numbers, has_core_each
from symcomm.bench.peers import parse_peers, setup_peers
from symcomm.bench.run import OURS, PLACES, Case, CaseResult, Effort, make_cases, measure, open_sides
from symcomm.bench.worker import ONE_SIDED
from symcomm.cli.command import LATE, Command, argument, flag, option
from symcomm.cli.progress import progress
from symcomm.memory.limits import format_bytes
from symcomm.preflight import check_output_file, need_torch
from symcomm.simulate.units import parse_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# --- options -----------------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "p2p",
)  # fmt: skip
# Each in a file of its own.
OTHERS = (
    "store", "queue", "kernels", "attach", "groups", "ddp", "shards", "steps", "compile", "gpu", "hosts", "noise",
    "sites", "torch", "llm",
)  # fmt: skip
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
OPS = ("sum", "prod", "min", "max", "avg")

Collective = Annotated[
    str,
    argument(
        "WHAT",
        f"One of {', '.join(COLLECTIVES)}, all, window, {', '.join(OTHERS)}.",
        *COLLECTIVES,
        "all",
        "window",
        *OTHERS,
    ),
]
Minbytes = Annotated[str, option("-b --minbytes", "SIZE", "Smallest size.")]
Maxbytes = Annotated[str, option("-e --maxbytes", "SIZE", "Largest size.")]
Factor = Annotated[int, option("-f --stepfactor", "N", "Each size is N times the last.")]
Step = Annotated[str, option("-i --stepbytes", "SIZE", "Add this instead.")]
Dtype = Annotated[str, option("-d --datatype", "TYPE", "Element type, torch's name or NCCL's.", *DTYPES)]
Op = Annotated[str, option("-o --op", "OP", "sum, prod, min, max or avg.", *OPS)]
Root = Annotated[int, option("-r --root", "RANK", "Root of broadcast, reduce, gather, scatter.")]
Iters = Annotated[int, option("-n --iters", "N", "Calls per repetition. [default: what fills 25 ms]")]
Warmup = Annotated[int, option("-w --warmup", "N", "Calls before timing.")]
Check = Annotated[int, option("-c --check", "0|1", "Check values before timing.")]
Ranks = Annotated[
    int | None,
    option(
        "--ranks",
        "N",
        "Ranks on each side; hosts, sites: of each; kernels: sources. "
        "[default: 2; sites: 1; attach: cores, 16 at most; llm: 2, then 4]",
    ),
]
Rounds = Annotated[
    int | None,
    option(
        "--rounds",
        "N",
        "Turns that the sides take. "
        "[default: 3; kernels, llm: 7; attach: 9; ddp, shards, steps, compile, groups: 10; hosts: 5; torch: 15]",
    ),
]
Symmetric = Annotated[bool, flag("--symmetric", "Only tensors in symmetric memory.")]
Ordinary = Annotated[bool, flag("--ordinary", "Only ordinary tensors.")]
Heap = Annotated[bool, flag("--heap", "Also with tensors in the shared heap (SYMCOMM_HEAP=1); of steps, too.")]
Async = Annotated[bool, flag("--async", "Also ordinary tensors with async_op=True, waited for at once.")]
Against = Annotated[
    str,
    option(
        "--against",
        "NAMES",
        "Also measure gloo, mpich, openmpi (with commas); noise: the MPIs there.",
        "gloo",
        "mpich",
        "openmpi",
    ),
]
Collectives = Annotated[
    str,
    option(
        "--collectives",
        "NAMES",
        "hosts: which, with commas, or all but p2p: all.",
        *(name for name in COLLECTIVES if name != "p2p"),
        "all",
    ),
]
Neighbours = Annotated[
    str, option("--neighbours", "KINDS", "noise: none or PERCENT:MS, with commas: awake so much, in bursts so long.")
]
Python = Annotated[str, option("--python", "PATHS", "torch: interpreters with another torch, with commas.")]
Layers = Annotated[int, option("--layers", "N", "llm: of the model. [default: 8]")]
Width = Annotated[int, option("--width", "N", "llm: of the model, a multiple of 256. [default: 1024]")]
Batch = Annotated[int, option("--batch", "N", "llm: texts at once. [default: 1]")]
Quick = Annotated[bool, flag("--quick", "Seven sizes, short repetitions, one summary.")]
Best = Annotated[bool, flag("--best", "Show fastest repetitions: for noisy machines.")]
Pin = Annotated[bool, flag("--pin/--no-pin", "Keep each rank, of every side, on a core of its own if it can.")]
Markdown = Annotated[bool, flag("--markdown", "Print tables as Markdown.")]
JsonFile = Annotated[Path | None, option("--json", "FILE", "Write all figures there.")]
PlotFile = Annotated[Path | None, option("--plot", "FILE", "Draw them: .png or .svg.")]
Setup = Annotated[bool, flag("--setup-peers", "Install the MPIs to measure against.")]

FAMILIES = {"all": COLLECTIVES, "window": ONE_SIDED}
WITHOUT_TORCH = ("store", "queue", "kernels")
NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
QUICK_SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
QUICK = Effort(rounds=3, repetitions=6, seconds=0.003)


# --- reading options ---------------------------------------------------------------------------------------------


def sizes_between(low: int, high: int, factor: int, step: int) -> list[int]:
    """low, low * factor, ... up to high; or, with ``step``, low, low + step, ..."""
    if low > high:
        raise errors.bad_argument("symcomm bench", "--minbytes", low, f"at most --maxbytes, {high}")
    if not step and factor < 2:
        raise errors.bad_argument("symcomm bench", "--stepfactor", factor, "2 or more")
    if step:
        return list(range(low, high + 1, step))
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return sizes


def pick_sizes(minbytes: str, maxbytes: str, factor: int, step: str, quick: bool) -> list[int]:
    given = (("--minbytes", minbytes), ("--maxbytes", maxbytes), ("--stepbytes", step))
    low, high, more = (parse_bytes("symcomm bench", option, text) if text else 0 for option, text in given)
    sizes = sizes_between(low, high, factor, more)
    return [size for size in QUICK_SIZES if low <= size <= high] if quick else sizes


def check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise errors.bad_choice("symcomm bench", option, value, allowed)


@dataclass(frozen=True)
class What:
    """One collective, or all of them, on elements of one type."""

    collective: str
    dtype: str
    op: str
    root: int


@dataclass(frozen=True)
class Wanted:
    """How to hand over results, whatever was measured."""

    markdown: bool
    best: bool
    json_file: Path | None
    plot_file: Path | None

    def check_files(self) -> None:
        """Refuse files that we cannot write, before anything is measured."""
        if self.json_file:
            check_output_file("symcomm bench", "--json", self.json_file)
        if self.plot_file:
            pictures.check_picture("symcomm bench", "--plot", self.plot_file)

    def write(self, heading: str, to_json: Callable[[], Any], picture: Callable[[], Sequence[pictures.Panel]]) -> None:
        if self.json_file:
            self.json_file.write_text(json.dumps(to_json(), indent=1) + "\n")
        if self.plot_file and (panels := picture()):
            pictures.draw(self.plot_file, heading, panels)


@dataclass
class Question:
    """What was asked, checked."""

    cases: list[Case]
    world: int
    kinds: list[str]
    peers: list[str]
    effort: Effort
    pinned: bool
    summary: bool

    @property
    def series(self) -> list[str]:
        return [*self.kinds, *self.peers]


def make_question(
    what: What, sizes: list[int], world: int, kinds: list[str], against: str, effort: Effort, *, pin: bool,
    summary: bool,
) -> Question:  # fmt: skip
    least = 2 if what.collective in ("p2p", *FAMILIES) else 1
    check_numbers(what.collective, world, least, effort.rounds, iters=effort.iterations, warmup=effort.warmup)
    if not 0 <= what.root < world:
        raise errors.bad_argument("symcomm bench", "--root", what.root, f"a rank, 0 to {world - 1}")
    check_choice("WHAT", what.collective, [*COLLECTIVES, *FAMILIES, *OTHERS])
    check_choice("--datatype", what.dtype, DTYPES)
    check_choice("--op", what.op, OPS)
    names = FAMILIES.get(what.collective, (what.collective,))
    cases = [case for n in names for case in make_cases(n, sizes, world, what.dtype, what.op, what.root, summary)]
    return Question(cases, world, kinds, parse_peers(against), effort, pin and has_core_each(world), summary)


# --- running -----------------------------------------------------------------------------------------------------


class Report:
    """The tables of a question; prints a line as soon as its cases are measured."""

    def __init__(self, question: Question, wanted: Wanted, say: Callable[[str], None]):
        self._question, self._wanted, self._say = question, wanted, say
        self._table: bench_table.GrowingTable | None = None
        self._collective = ""
        self._unshown: list[CaseResult] = []  # of a size whose placements are not all measured yet

    def add(self, results: list[CaseResult]) -> None:
        kinds, peers = self._question.kinds, self._question.peers
        collective = results[0].case.collective
        if self._question.summary:
            if self._table is None:
                self._table = self._new_table("summary", bench_table.summary_head(kinds, peers))
            self._table.add(bench_table.summary_row(results, kinds, peers, self._wanted.best))
            return
        if self._table is None or collective != self._collective:
            if self._table is not None:
                self._say("")
            title = f"{collective}, {self._question.world} ranks"
            self._table = self._new_table(title, bench_table.case_head(collective, kinds, peers))
            self._collective = collective
        self._unshown += results
        if len(self._unshown) == len(PLACES[collective]) * len(self._question.series):
            for row in bench_table.case_rows(self._unshown, self._question.world, kinds, peers, self._wanted.best):
                self._table.add(row)
            self._unshown = []

    def _new_table(self, title: str, head: list[str]) -> bench_table.GrowingTable:
        return bench_table.GrowingTable(title, head, self._say, markdown=self._wanted.markdown)


def run(question: Question, wanted: Wanted) -> list[CaseResult]:
    """Measure every case on every series, and print rows as they come."""
    results: list[CaseResult] = []
    turns = len(question.cases) * len(question.series) * question.effort.rounds
    sides = [*(["symcomm"] if question.kinds else []), *question.peers]
    estimate = TimeLeft(question.cases, len(question.series), question.effort)
    rows = f"{len(question.cases)} measurements of {' and '.join(question.series)}"
    print(f"# {rows}, about {in_words(estimate.seconds_left())}", file=sys.stderr, flush=True)
    with progress(turns, estimate.seconds_left) as bar, open_sides(sides, question.world, question.pinned) as opened:
        what = "fastest repetition" if wanted.best else "median of repetitions"
        bar.say(f"# {question.world} ranks, {on_cores(question.pinned)}; {what}\n")
        report = Report(question, wanted, bar.say)
        for case in question.cases:
            advance = functools.partial(bar, f"{case.collective} {format_bytes(case.nbytes)}")
            begun = time.monotonic()
            found = measure(opened, case, question.series, question.effort, advance)
            estimate.took(time.monotonic() - begun)
            report.add(found)
            results += found
    return results


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def on_cores(pinned: bool) -> str:
    facts = bench_table.machine()
    return f"{'pinned to' if pinned else 'free on'} {facts['cores']} cores, {facts['system']}"


def print_foot(question: Question, results: list[CaseResult]) -> None:
    print(f"# {load()} when done")
    for reason in bench_table.reasons(results):
        print(f"# -: {reason}")
    if said := bench_table.ways(results):
        print(f"# {said}")
    wrong = sum(result.wrong or 0 for result in results)
    if question.effort.check:
        print(f"# wrong elements: {wrong}" + (" (values are NOT right)" if wrong else ""))
    if question.summary and question.peers:
        goals = f"{bench_table.MPI_GOAL:g}x the best MPI, {bench_table.GLOO_GOAL:g}x gloo"
        print(f"# ratios: their time / our time; {bench_table.MISSED} marks what is below {goals}")


def answer(question: Question, wanted: Wanted) -> None:
    results = run(question, wanted)
    print_foot(question, results)
    wanted.write(
        f"{question.world} ranks on {os.uname().nodename}: time of one call, lower is better",
        lambda: bench_table.to_json(results, question.world, question.pinned),
        lambda: bench_table.picture(results, question.series, wanted.best),
    )
    if any(result.stood_still for result in results):
        raise typer.Exit(LATE)


def _module_of(name: str) -> Any:
    return importlib.import_module(f"symcomm.bench.{'torch_calls' if name == 'torch' else name}")


def bench_program(name: str, workload: Any, wanted: Wanted) -> None:
    """Measure with a program's module. Rows are printed as soon as they are known."""
    module = _module_of(name)
    table: bench_table.GrowingTable | None = None
    shown = 0

    with progress(workload.turns) as bar:

        def show(found: Sequence[Any]) -> None:
            nonlocal table, shown
            title, head, rows = module.as_table(found, workload, wanted.best)
            if table is None:
                how = workload.how(wanted.best)
                bar.say(f"# {on_cores(workload.pinned)}{how and '; '}{how}\n")
                table = bench_table.GrowingTable(title, head, bar.say, markdown=wanted.markdown, like=rows)
            for row in rows[shown:]:
                table.add(row)
            shown = len(rows)

        found = getattr(module, f"run_{name}_bench")(workload, bar, show)
        show(found)
    print(f"# {load()} when done")
    if hasattr(module, "note") and (note := module.note(found, workload)):
        print(f"# {note}")
    if hasattr(module, "keep"):
        print(f"# {module.keep(found, workload)}")
    wanted.write(
        module.as_table(found, workload, wanted.best)[0],
        lambda: module.to_json(found, workload) if hasattr(module, "to_json") else workload.to_json(found),
        lambda: module.picture(found, workload, wanted.best),
    )


# --- the command -------------------------------------------------------------------------------------------------


@app.command(name="bench", cls=Command)
def bench(
    collective: Collective = "all_reduce",
    minbytes: Minbytes = "8",
    maxbytes: Maxbytes = "64M",
    factor: Factor = 2,
    step: Step = "",
    dtype: Dtype = "float32",
    op: Op = "sum",
    root: Root = 0,
    iters: Iters = 0,
    warmup: Warmup = 5,
    check: Check = 1,
    ranks: Ranks = None,
    rounds: Rounds = None,
    symmetric: Symmetric = False,
    ordinary: Ordinary = False,
    heap: Heap = False,
    with_async: Async = False,
    against: Against = "",
    collectives: Collectives = "all_reduce",
    neighbours: Neighbours = "none,2:1,10:1,25:4",
    python: Python = "",
    layers: Layers = 0,
    width: Width = 0,
    batch: Batch = 0,
    quick: Quick = False,
    best: Best = False,
    pin: Pin = True,
    markdown: Markdown = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    setup: Setup = False,
) -> None:
    """Measure this machine: collectives, messages, the store, data parallel training; ours alone or beside others.

    \b
    Examples:
      symcomm bench all_reduce -b 4 -e 64M -f 4
      symcomm bench all --quick --against gloo,mpich,openmpi --json new.json
      symcomm bench p2p --plot p2p.svg
      symcomm bench all --quick --heap -b 64K
      symcomm bench all --quick --ordinary --async
      symcomm bench window --quick --against mpich,openmpi
      symcomm bench queue
      symcomm bench groups --ranks 4
      symcomm bench ddp
      symcomm bench shards
      symcomm bench steps --heap
      symcomm bench compile --quick
      symcomm bench llm --ranks 2
      symcomm bench gpu
      symcomm bench kernels --quick
      symcomm bench attach
      symcomm bench hosts --ranks 4 --collectives all_reduce,all_gather
      symcomm bench noise --ranks 2 --neighbours none,25:4
      symcomm bench sites
      symcomm bench torch --python other/bin/python
    """
    wanted = Wanted(markdown, best, json_file, plot_file)
    wanted.check_files()
    if setup:
        setup_peers(lambda line: print(line, file=sys.stderr, flush=True))
    elif collective in OTHERS:
        shape = {"layers": layers, "width": width, "batch": batch}
        asked = Asked(
            collective, ranks, rounds, iters, quick, pin, against, collectives, neighbours, python, shape, heap
        )
        workload = _module_of(collective).ask(asked)
        if collective not in WITHOUT_TORCH:
            need_torch(f"symcomm bench {collective}")
        bench_program(collective, workload, wanted)
    else:
        pace = QUICK if quick else Effort()
        effort = replace(
            pace, rounds=pace.rounds if rounds is None else rounds, iterations=iters, warmup=warmup, check=check != 0
        )
        what = What(collective, NCCL_DTYPES.get(dtype, dtype), op, root)
        kinds = [kind for kind in OURS[:2] if ordinary == symmetric or ordinary == (kind == "ordinary")]
        kinds += [kind for kind, wanted_too in (("heap", heap), ("async", with_async)) if wanted_too]
        if collective == "window":
            kinds = kinds[:1]  # the place of the tensor that is put does not matter
        sizes, ranks = pick_sizes(minbytes, maxbytes, factor, step, quick), 2 if ranks is None else ranks
        question = make_question(what, sizes, ranks, kinds, against, effort, pin=pin, summary=quick)
        need_torch(f"symcomm bench {collective}")
        answer(question, wanted)
