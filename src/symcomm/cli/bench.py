"""``symcomm bench``: options in, tables out. bench/run.py runs ranks, bench/table.py words results."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from symcomm import errors
from symcomm.bench import pictures
from symcomm.bench import table as bench_table
from symcomm.bench.estimate import Estimate, in_words
from symcomm.bench.peers import parse_peers, setup_peers
from symcomm.bench.run import OURS, PLACES, Case, Effort, Result, make_cases, measure, open_sides
from symcomm.cli import bench_options as options
from symcomm.cli.bench_options import COLLECTIVES, DTYPES, ONE_SIDED, OPS, OTHERS
from symcomm.cli.command import LATE, Command
from symcomm.cli.progress import progress
from symcomm.collectives.limits import Limits
from symcomm.preflight import check_cache_directory, check_output_file, has_torch, need_torch

app = typer.Typer(rich_markup_mode=None, add_completion=False)

NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
QUICK_SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
# Whole programs: turns of a quick run, steps of each
PROGRAMS = {"ddp": (4, 2), "compile": (4, 10), "groups": (4, 10), "hosts": (3, 1), "torch": (3, 50)}
BY_PARTS = ("ddp", "compile", "hosts", "sites", "store", "gpu")  # programs of which some rows are known before others
FAMILIES = {"all": COLLECTIVES, "window": ONE_SIDED}
QUICK = Effort(rounds=3, repetitions=6, seconds=0.003)


# --- reading options ---------------------------------------------------------------------------------------------


def parse_size(option: str, text: str) -> int:
    """``8``, ``64K``, ``64M``, ``1G`` -> bytes."""
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, factor = (text[:-1], factors[text[-1].upper()]) if text[-1:].upper() in factors else (text, 1)
    if not digits.isdigit() or int(digits) == 0:
        raise errors.bad_argument("symcomm bench", option, text, "a number of bytes such as 8, 64K, 64M or 1G")
    return int(digits) * factor


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


def check_choice(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise errors.bad_choice("symcomm bench", option, value, allowed)
    return value


def pick_collectives(text: str) -> tuple[str, ...]:
    """Names of collectives that ``hosts`` can measure, with commas between them, or ``all``."""
    allowed = [name for name in COLLECTIVES if name != "p2p"]
    names = [name.strip() for name in text.split(",")]
    return tuple(allowed if names == ["all"] else (check_choice("--collectives", n, [*allowed, "all"]) for n in names))


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

    def write(self, module: Any, found: Sequence[Any], workload: Any, heading: str) -> None:
        """Write the files that were asked for."""
        if self.json_file:
            self.json_file.write_text(json.dumps(module.to_json(found, workload), indent=1) + "\n")
        if self.plot_file:
            pictures.draw(self.plot_file, heading, module.picture(found, workload, self.best))


@dataclass
class Question:
    """What was asked, checked."""

    collectives: list[str]
    cases: list[Case]
    world: int
    kinds: list[str]
    peers: list[str]
    effort: Effort
    pinned: bool

    @property
    def series(self) -> list[str]:
        return [*self.kinds, *self.peers]


def pick_sizes(minbytes: str, maxbytes: str, factor: int, step: str, quick: bool) -> list[int]:
    low, high = parse_size("--minbytes", minbytes), parse_size("--maxbytes", maxbytes)
    sizes = sizes_between(low, high, factor, parse_size("--stepbytes", step) if step else 0)
    return [size for size in QUICK_SIZES if low <= size <= high] if quick else sizes


def make_question(
    what: What, sizes: list[int], world: int, kinds: list[str], against: str, effort: Effort, *, pin: bool,
    one_place: bool,
) -> Question:  # fmt: skip
    check_choice("WHAT", what.collective, [*COLLECTIVES, *FAMILIES, *OTHERS])
    check_choice("--datatype", what.dtype, DTYPES)
    check_choice("--op", what.op, OPS)
    names = list(FAMILIES.get(what.collective, [what.collective]))
    cases = [case for n in names for case in make_cases(n, sizes, world, what.dtype, what.op, what.root, one_place)]
    pinned = pin and world <= len(os.sched_getaffinity(0))
    return Question(names, cases, world, kinds, parse_peers(against), effort, pinned)


# --- running -----------------------------------------------------------------------------------------------------


class Report:
    """The tables of a question; prints a line as soon as its cases are measured."""

    def __init__(self, question: Question, say: Callable[[str], None], *, summary: bool, markdown: bool, best: bool):
        self._question, self._say = question, say
        self._summary, self._markdown, self._best = summary, markdown, best
        self._table: bench_table.GrowingTable | None = None
        self._collective = ""
        self._unshown: list[Result] = []  # of a size whose placements are not all measured yet

    def add(self, results: list[Result]) -> None:
        """The results of one case."""
        kinds, peers = self._question.kinds, self._question.peers
        collective = results[0].case.collective
        if self._summary:
            if self._table is None:
                self._table = self._new_table("summary", bench_table.summary_head(kinds, peers))
            self._table.add(bench_table.summary_row(results, kinds, peers, self._best))
            return
        if self._table is None or collective != self._collective:
            if self._table is not None:
                self._say("")
            title = f"{collective}, {self._question.world} ranks"
            self._table = self._new_table(title, bench_table.case_head(collective, kinds, peers))
            self._collective = collective
        self._unshown += results
        if len(self._unshown) == len(PLACES[collective]) * len(self._question.series):
            for row in bench_table.case_rows(self._unshown, self._question.world, kinds, peers, self._best):
                self._table.add(row)
            self._unshown = []

    def _new_table(self, title: str, head: list[str]) -> bench_table.GrowingTable:
        return bench_table.GrowingTable(title, head, self._say, markdown=self._markdown)


def tell_time(question: Question, estimate: Estimate) -> None:
    rows = f"{len(question.cases)} measurements of {' and '.join(question.series)}"
    print(f"# {rows}, about {in_words(estimate.seconds_left())}", file=sys.stderr, flush=True)


def run(question: Question, *, summary: bool, markdown: bool, best: bool) -> list[Result]:
    """Measure every case on every series, and print lines as they come."""
    results: list[Result] = []
    turns = len(question.cases) * len(question.series) * question.effort.rounds
    sides = [*(["symcomm"] if question.kinds else []), *question.peers]
    estimate = Estimate(question.cases, len(question.series), question.effort)
    tell_time(question, estimate)
    with progress(turns, estimate.seconds_left) as bar, open_sides(sides, question.world, question.pinned) as opened:
        print_head(question, bar.say, best=best)
        report = Report(question, bar.say, summary=summary, markdown=markdown, best=best)
        for case in question.cases:
            advance = functools.partial(bar, f"{case.collective} {bench_table.short_size(case.nbytes)}")
            begun = time.monotonic()
            found = measure(opened, case, question.series, question.effort, advance)
            estimate.took(time.monotonic() - begun)
            report.add(found)
            results += found
    return results


def print_head(question: Question, say: Callable[[str], None], *, best: bool) -> None:
    what = "fastest repetition" if best else "median of repetitions"
    say(f"# {question.world} ranks, {on_cores(question.pinned)}; {what}\n")


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def on_cores(pinned: bool) -> str:
    facts = bench_table.machine()
    return f"{'pinned to' if pinned else 'free on'} {facts['cores']} cores, {facts['system']}"


def print_foot(question: Question, results: list[Result], *, summary: bool) -> None:
    print(f"# {load()} when done")
    for reason in bench_table.reasons(results):
        print(f"# -: {reason}")
    if said := bench_table.ways(results):
        print(f"# {said}")
    wrong = sum(result.wrong or 0 for result in results)
    if question.effort.check:
        print(f"# wrong elements: {wrong}" + (" (values are NOT right)" if wrong else ""))
    if summary and question.peers:
        goals = f"{bench_table.MPI_GOAL:g}x the best MPI, {bench_table.GLOO_GOAL:g}x gloo"
        print(f"# ratios: their time / our time; {bench_table.MISSED} marks what is below {goals}")


def answer(question: Question, wanted: Wanted, *, summary: bool) -> None:
    """Measure, print, write."""
    results = run(question, summary=summary, markdown=wanted.markdown, best=wanted.best)
    print_foot(question, results, summary=summary)
    if wanted.json_file:
        found = bench_table.to_json(results, question.world, question.pinned)
        wanted.json_file.write_text(json.dumps(found, indent=1) + "\n")
    if wanted.plot_file and (panels := bench_table.picture(results, question.series, wanted.best)):
        heading = f"{question.world} ranks on {os.uname().nodename}: time of one call, lower is better"
        pictures.draw(wanted.plot_file, heading, panels)
    if any(result.stood_still for result in results):
        raise typer.Exit(LATE)


def bench_program(name: str, workload: Any, wanted: Wanted, how: str = "") -> None:
    """Measure with a module of its own, which says what there is to see; ``how`` the figures came about. Rows are
    printed as soon as they are known; where all sides take turns to the end, that is then."""
    module = _module_of(name)
    table: bench_table.GrowingTable | None = None
    shown = 0

    with progress(workload.turns) as bar:

        def show(found: Sequence[Any]) -> None:
            nonlocal table, shown
            title, head, rows = module.as_table(found, workload, wanted.best)
            if table is None:
                bar.say(f"# {on_cores(workload.pinned)}{how and '; '}{how}\n")
                table = bench_table.GrowingTable(title, head, bar.say, markdown=wanted.markdown, like=rows)
            for row in rows[shown:]:
                table.add(row)
            shown = len(rows)

        found = getattr(module, f"run_{name}_bench")(workload, bar, *([show] if name in BY_PARTS else []))
        show(found)
    print(f"# {load()} when done")
    if note := module.note(found):
        print(f"# {note}")
    wanted.write(module, found, workload, module.as_table(found, workload, wanted.best)[0])


def bench_turns(
    name: str, ranks: int, rounds: int | None, iters: int, wanted: Wanted, *, quick: bool, collectives: str, python: str
) -> None:
    """Whole programs (training steps, compiled graphs) on several sides, which take turns. ``collectives`` are for
    hosts, ``python`` is for torch."""
    more: dict[str, Any] = {"collectives": pick_collectives(collectives)} if name == "hosts" else {}
    if name == "torch":
        more = {"pythons": _module_of("torch").find_pythons(python)}
    _check_numbers(ranks, 0, iters, 0, rounds, name)
    if name == "compile" and ranks not in (2, 4, 8):
        raise errors.bad_argument("symcomm bench", "--ranks", ranks, "2, 4 or 8 for compile, which divides 8 heads")
    need_torch(f"symcomm bench {name}")
    usual = _workload_of(name, ranks, *PROGRAMS[name]) if quick else _workload_of(name, ranks)
    workload = _workload_of(name, ranks, rounds or usual.rounds, iters or usual.steps, **more)
    how = "fastest turn" if wanted.best else f"median of {workload.rounds} turns of {workload.steps} steps"
    bench_program(name, workload, wanted, how)


def bench_by_parts(name: str, ranks: int, rounds: int | None, wanted: Wanted, *, quick: bool) -> None:
    """Training across a slow link, method after method; or ranks that share a GPU."""
    _check_numbers(ranks, 0, 0, 0, rounds, name)
    need_torch(f"symcomm bench {name}")
    bench_program(name, _workload_of(name, ranks, **_pace(_module_of(name), rounds, quick)), wanted)


def bench_noise(
    ranks: int, rounds: int | None, neighbours: str, against: str, wanted: Wanted, *, quick: bool, pin: bool
) -> None:
    """With busy neighbours. It takes minutes, so every row is shown as soon as it is known."""
    _check_numbers(ranks, 0, 0, 0, rounds, "noise")
    module = _module_of("noise")
    kinds, peers = module.parse_neighbours(neighbours), module.peers_at_hand(against, parse_peers)
    need_torch("symcomm bench noise")
    workload = _workload_of("noise", ranks, kinds, peers, pin=pin, **_pace(module, rounds, quick))
    how = f"{load()} before; medians of {workload.rounds} turns of {workload.seconds:g} s"
    title = f"{workload.ranks} ranks, {on_cores(workload.pinned)}, {how}"
    with progress(workload.turns) as bar:
        table = bench_table.GrowingTable(title, module.head(workload), bar.say, markdown=wanted.markdown)
        found = module.run_noise_bench(workload, bar, lambda figures: table.add(module.row(figures, workload)))
    if workload.peers:
        goal = f"{bench_table.MISSED} marks what is below {bench_table.MPI_GOAL:g}x"
        print(f"# ratios: the better MPI's time / our time; {goal}")
    wanted.write(module, found, workload, "beside neighbours: time of one call, lower is better")


def bench_llm(ranks: int | None, rounds: int | None, wanted: Wanted, *, quick: bool, **shape: int) -> None:
    """A language model on CPUs. Rows are printed section by section: ways to run, numbers of ranks."""
    _check_numbers(2 if ranks is None else ranks, 0, shape["tokens"], 0, rounds, "llm")
    need_torch("symcomm bench llm")
    module = _module_of("llm")
    given = {name: value for name, value in shape.items() if value} | ({"worlds": (ranks,)} if ranks else {})
    workload = _workload_of("llm", **_pace(module, rounds, quick) | given)
    module.check(workload)
    found = []
    with progress(sum(len(section.sides) * workload.rounds for section in workload.sections)) as bar:
        table = bench_table.GrowingTable(module.note(workload), module.HEAD, bar.say, markdown=wanted.markdown)
        for section in workload.sections:
            here = module.measure(section, workload, bar, bar.begin)
            for figures in here:
                table.add(module.row_of(figures, here, workload, wanted.best))
            found += here
    for reason in dict.fromkeys(f"{figures.side}: {figures.reason}" for figures in found if figures.reason):
        print(f"# -: {reason}")
    what = "fastest prompt and token" if wanted.best else f"median of {workload.rounds} turns"
    print(f"# {on_cores(workload.pinned)}, {load()} when done; {what}")
    print("# all sides wrote the same tokens")
    wanted.write(module, found, workload, module.note(workload))


def bench_store(wanted: Wanted, *, quick: bool) -> None:
    """Against PyTorch's, if that is installed."""
    module = _module_of("store")
    sides = {"sides": tuple(module.SIDES) if has_torch() else ("ours",)}
    bench_program("store", _workload_of("store", **sides | _pace(module, None, quick)), wanted)


def bench_kernels(sources: int, rounds: int | None, wanted: Wanted, *, quick: bool) -> None:
    """The reductions of the C core; a row is printed when it is measured."""
    _check_numbers(sources, 0, 0, 0, rounds, "kernels")
    module = _module_of("kernels")
    workload = _workload_of("kernels", sources, sizes=module.buffer_sizes(sources), **_pace(module, rounds, quick))
    found = _bench_row_by_row(module, workload, module.run_kernels_bench, wanted)
    print(f"# {module.note(found)}")


def bench_attach(ranks: int | None, rounds: int | None, wanted: Wanted, *, quick: bool) -> None:
    """Copies or reads of peers' memory; stores which is faster, for later groups."""
    module = _module_of("attach")
    ranks = module.usual_ranks() if ranks is None else ranks
    _check_numbers(ranks, 0, 0, 0, rounds, "attach")
    if ranks > module.MOST_RANKS:
        raise errors.bad_argument("symcomm bench", "--ranks", ranks, f"{module.MOST_RANKS} at most for attach")
    need_torch("symcomm bench attach")
    check_cache_directory("symcomm bench attach")
    workload = _workload_of("attach", ranks, **_pace(module, rounds, quick))
    found = _bench_row_by_row(module, workload, module.run_attach_bench, wanted)
    print(f"# {module.note(found, workload)}")
    print("# not kept: --quick is too rough" if quick else f"# kept in {module.keep(found, workload)}")


def _bench_row_by_row(module: Any, workload: Any, measure_all: Callable[..., list[Any]], wanted: Wanted) -> list[Any]:
    """A row is printed when it is measured."""
    print(f"# {on_cores(workload.pinned)}, {load()}\n")
    heading = module.title(workload)
    with progress(workload.turns) as bar:
        table = bench_table.GrowingTable(heading, module.head(workload), bar.say, markdown=wanted.markdown)
        found = measure_all(workload, lambda row: table.add(module.cells(row)), bar)
    wanted.write(module, found, workload, heading)
    return found


def _module_of(name: str) -> Any:
    return importlib.import_module(f"symcomm.bench.{'torch_calls' if name == 'torch' else name}")


def _workload_of(name: str, *args: Any, **facts: Any) -> Any:
    return getattr(_module_of(name), f"{name.capitalize()}Workload")(*args, **facts)


def _pace(module: Any, rounds: int | None, quick: bool) -> dict[str, Any]:
    """What ``--quick`` and ``--rounds`` change of a workload."""
    return (module.QUICK if quick else {}) | ({"rounds": rounds} if rounds else {})


def bench_collective(
    what: What, sizes: list[int], ranks: int, kinds: list[str], against: str, effort: Effort, wanted: Wanted, *,
    pin: bool, quick: bool,
) -> None:  # fmt: skip
    _check_numbers(ranks, what.root, effort.iterations, effort.warmup, effort.rounds, what.collective)
    if what.collective == "window":
        kinds = kinds[:1]  # the place of the tensor that is put does not matter
    question = make_question(what, sizes, ranks, kinds, against, effort, pin=pin, one_place=quick)
    need_torch(f"symcomm bench {what.collective}")
    answer(question, wanted, summary=quick)


# --- the command -------------------------------------------------------------------------------------------------


@app.command(name="bench", cls=Command)
def bench(
    collective: options.Collective = "all_reduce",
    minbytes: options.Minbytes = "8",
    maxbytes: options.Maxbytes = "64M",
    factor: options.Factor = 2,
    step: options.Step = "",
    dtype: options.Dtype = "float32",
    op: options.Op = "sum",
    root: options.Root = 0,
    iters: options.Iters = 0,
    warmup: options.Warmup = 5,
    check: options.Check = 1,
    ranks: options.Ranks = None,
    rounds: options.Rounds = None,
    symmetric: options.Symmetric = False,
    ordinary: options.Ordinary = False,
    heap: options.Heap = False,
    against: options.Against = "",
    collectives: options.Collectives = "all_reduce",
    neighbours: options.Neighbours = "none,2:1,10:1,25:4",
    python: options.Python = "",
    layers: options.Layers = 0,
    width: options.Width = 0,
    batch: options.Batch = 0,
    quick: options.Quick = False,
    best: options.Best = False,
    pin: options.Pin = True,
    markdown: options.Markdown = False,
    json_file: options.JsonFile = None,
    plot_file: options.PlotFile = None,
    setup: options.Setup = False,
) -> None:
    """Measure this machine: collectives, messages, the store, data parallel training; ours alone or beside others.

    \b
    Examples:
      symcomm bench all_reduce -b 4 -e 64M -f 4
      symcomm bench all --quick --against gloo,mpich,openmpi --json new.json
      symcomm bench p2p --plot p2p.svg
      symcomm bench all --quick --heap -b 64K
      symcomm bench window --quick --against mpich,openmpi
      symcomm bench groups --ranks 4
      symcomm bench ddp
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
    asked, ranks = ranks, ranks if ranks is not None else 1 if collective == "sites" else 2
    wanted = Wanted(markdown, best, json_file, plot_file)
    wanted.check_files()
    if setup:
        setup_peers(lambda line: print(line, file=sys.stderr, flush=True))
    elif collective == "store":
        bench_store(wanted, quick=quick)
    elif collective == "llm":
        bench_llm(asked, rounds, wanted, quick=quick, layers=layers, width=width, batch=batch, tokens=iters)
    elif collective in ("gpu", "sites"):
        bench_by_parts(collective, ranks, rounds if collective == "gpu" else None, wanted, quick=quick)
    elif collective == "kernels":
        bench_kernels(ranks, rounds, wanted, quick=quick)
    elif collective == "attach":
        bench_attach(asked, rounds, wanted, quick=quick)
    elif collective == "noise":
        bench_noise(ranks, rounds, neighbours, against, wanted, quick=quick, pin=pin)
    elif collective in PROGRAMS:
        bench_turns(collective, ranks, rounds, iters, wanted, quick=quick, collectives=collectives, python=python)
    else:
        what = What(collective, NCCL_DTYPES.get(dtype, dtype), op, root)
        sizes = pick_sizes(minbytes, maxbytes, factor, step, quick)
        effort = _effort(rounds, iters, warmup, check != 0, quick)
        kinds = [kind for kind in OURS[:2] if ordinary == symmetric or ordinary == (kind == "ordinary")]
        kinds += ["heap"] if heap else []
        bench_collective(what, sizes, ranks, kinds, against, effort, wanted, pin=pin, quick=quick)


def _effort(rounds: int | None, iters: int, warmup: int, check: bool, quick: bool) -> Effort:
    pace = QUICK if quick else Effort()
    return Effort(pace.rounds if rounds is None else rounds, pace.repetitions, pace.seconds, iters, warmup, check)


def _check_numbers(ranks: int, root: int, iters: int, warmup: int, rounds: int | None, collective: str) -> None:
    call = "symcomm bench"
    pairs = ("p2p", "all", "window", "groups", "ddp", "compile", "gpu", "noise", "torch", "llm")
    lowest = Limits.attach_ranks if collective == "attach" else 2 if collective in pairs else 1
    if ranks < lowest:
        raise errors.bad_argument(call, "--ranks", ranks, f"{lowest} or more for {collective}")
    if not 0 <= root < ranks:
        raise errors.bad_argument(call, "--root", root, f"a rank, 0 to {ranks - 1}")
    for option, value, least in (("--iters", iters, 0), ("--warmup", warmup, 0), ("--rounds", rounds, 1)):
        if value is not None and value < least:
            raise errors.bad_argument(call, option, value, f"{least} or more")
