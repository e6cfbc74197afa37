"""``symcomm bench llm``: tokens a second of a language model split over ranks, on CPUs.

The same decoder (symcomm/llama.py) runs eager and compiled: in one process with a thread on every core, and divided
among ranks that add up their parts twice a layer, on Gloo, on the symcomm backend, and by Symcomm's own call. A
*section* is one mode (eager, compiled) with one number of ranks; its sides take turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload, in_turns
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Side, Tick, open_sides, quiet

SIDES = {
    "one": "one process",
    "gloo": "gloo",
    "deepspeed": "deepspeed",
    "symcomm": "symcomm",
    "direct": "symcomm, own call",
}
EAGER_ONLY = ("deepspeed", "direct")  # compiled graphs make their calls themselves
WORKER = "symcomm.bench.llm_worker"
START_SECONDS = 60.0  # DeepSpeed builds its operator
PREPARE_SECONDS = {"eager": 60.0, "compiled": 300.0}  # on a busy machine
QUICK = {"layers": 2, "width": 256, "rounds": 3, "prompt": 32, "tokens": 16}
FIGURES = ("prefill", "decode", "reducing")
HEAD = ["mode", "ranks", "side", "prefill (tokens/s)", "decode (tokens/s)", "all_reduce (ms/token)"]
HEAD += ["decode / gloo's", "decode / one process's"]


def has_deepspeed() -> bool:
    """Whether it is installed; does not load it."""
    return importlib.util.find_spec("deepspeed") is not None


@dataclass(frozen=True)
class LlmWorkload(Workload):
    """``rounds`` turns of every side; in each, it reads a prompt and writes tokens for every text."""

    worlds: Sequence[int] = (2, 4)
    rounds: int = 7
    layers: int = 8
    width: int = 1024
    batch: int = 1
    prompt: int = 128
    tokens: int = 32
    modes: Sequence[str] = ("eager", "compiled")

    def how(self, best: bool) -> str:
        return "fastest prompt and token" if best else f"median of {self.rounds} turns"

    @property
    def turns(self) -> int:
        return sum(len(section.sides) * self.rounds for section in self.sections)

    @property
    def config(self) -> dict[str, int]:
        facts = {name: getattr(self, name) for name in ("layers", "width", "batch")}
        return facts | {"vocabulary": 8 * self.width, "length": self.prompt + self.tokens}

    @property
    def sections(self) -> list[LlmSection]:
        return [LlmSection(mode, world) for mode in self.modes for world in self.worlds]


@dataclass(frozen=True)
class LlmSection:
    mode: str
    ranks: int
    among: Sequence[str] = tuple(SIDES)

    @property
    def sides(self) -> list[str]:
        names = [name for name in self.among if name != "deepspeed" or has_deepspeed()]
        return [name for name in names if self.mode == "eager" or name not in EAGER_ONLY]


@dataclass
class LlmMeasurement:
    """One side in one section: the slowest rank's seconds of every prompt and, turn by turn, of every token."""

    mode: str
    ranks: int
    side: str
    reason: str = ""  # why it cannot run here
    prefill: list[list[float]] = field(default_factory=list)
    decode: list[list[float]] = field(default_factory=list)
    reducing: list[list[float]] = field(default_factory=list)  # of each token's, inside all_reduce

    def seconds(self, what: str, best: bool = False) -> float:
        """Of a turn's median token, the median of turns; or of the fastest token of all."""
        turns = getattr(self, what)
        return min(map(min, turns)) if best else statistics.median(map(statistics.median, turns))


def ask(asked: Asked) -> LlmWorkload:
    worlds: dict[str, Any] = {"worlds": (asked.ranks,)} if asked.ranks else {}
    shape = {name: value for name, value in {**asked.shape, "tokens": asked.iters}.items() if value}
    workload = asked.workload(LlmWorkload, QUICK, **worlds, **shape)
    check(workload)
    return workload


def check(workload: LlmWorkload) -> None:
    """Refuse shapes that cannot be divided among the ranks."""
    from symcomm.llama import Config

    for option, value in (("--layers", workload.layers), ("--batch", workload.batch)):
        if value < 1:
            raise errors.bad_argument("symcomm bench", option, value, "1 or more")
    if workload.width < 256 or workload.width % 256:
        raise errors.bad_argument("symcomm bench", "--width", workload.width, "a multiple of 256")
    heads = Config(**workload.config).kv_heads
    for world in workload.worlds:
        if heads % world:
            raise errors.bad_argument("symcomm bench", "--ranks", world, f"a divisor of the model's {heads} key heads")


def threads_of(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextlib.contextmanager
def _open(section: LlmSection) -> Iterator[dict[str, Side]]:
    others = [name for name in section.sides if name != "one"]
    with open_sides(["one"], 1, False, WORKER) as one, open_sides(others, section.ranks, False, WORKER) as divided:
        yield one | divided


def run_llm_bench(workload: LlmWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[LlmMeasurement]:
    found: list[LlmMeasurement] = []
    for section in workload.sections:
        found += measure(section, workload, tick, getattr(tick, "begin", quiet))
        seen(found)
    return found


def measure(
    section: LlmSection, workload: LlmWorkload, tick: Tick = quiet, begin: Tick = quiet
) -> list[LlmMeasurement]:
    """Every side of a section, in turns; ``begin`` is called before models are made."""
    what = f"{section.mode}, {section.ranks} ranks"
    with _open(section) as sides:
        found = [_start(section, side, what) for side in sides.values()]
        able = [figures for figures in found if not figures.reason]
        _prepare([sides[figures.side] for figures in able], section, workload, what, begin)
        for figures in in_turns(able, workload.rounds):
            answers = sides[figures.side].ask(what, {"do": "time"})
            for name in FIGURES:
                ranks = [answer[name] for answer in answers]
                getattr(figures, name).append([max(seconds) for seconds in zip(*ranks, strict=True)])
            tick(f"{what}, {SIDES[figures.side]}")
    return found


def _start(section: LlmSection, side: Side, what: str) -> LlmMeasurement:
    answers = side.ask(f"starting, {what}", {"do": "start"}, START_SECONDS)
    reason = next((answer["unsupported"] for answer in answers if "unsupported" in answer), "")
    return LlmMeasurement(section.mode, side.world, side.name, reason)


def together(sides: Sequence[Side]) -> list[Sequence[Side]]:
    """Sides that make their models at once: all, if every rank has a core. Else one side after the other, so that each
    finds what the compiler made for the one before."""
    enough = sum(side.world for side in sides) <= len(os.sched_getaffinity(0))
    return [sides] if enough else [[side] for side in sides]


def _prepare(sides: Sequence[Side], section: LlmSection, workload: LlmWorkload, what: str, begin: Tick) -> None:
    """Make the model on every side; refuse to time one that writes other tokens than a single process."""
    for some in together(sides):
        begin(f"preparing {what}, {', '.join(SIDES[side.name] for side in some)}")
        for side in some:
            order = {"do": "prepare", "config": workload.config, "prompt": workload.prompt, "tokens": workload.tokens}
            order |= {"threads": threads_of(side.world), "compiled": section.mode == "compiled"}
            side.tell(order)
        for side in some:
            side.hear(f"preparing, {what}", PREPARE_SECONDS[section.mode])
    expected = None
    for side in sides:
        for answer in side.ask(what, {"do": "check"}):
            expected = expected or answer["tokens"]
            if answer["tokens"] != expected:
                raise errors.SymcommError(
                    f"symcomm bench: {SIDES[side.name]}, {what}, does not write the tokens that one process writes; "
                    "nothing was timed."
                )


# --- words -------------------------------------------------------------------------------------------------------


def speeds(figures: LlmMeasurement, workload: LlmWorkload, best: bool) -> tuple[float, float]:
    """Tokens a second: read, and written."""
    prefill, decode = figures.seconds("prefill", best), figures.seconds("decode", best)
    return workload.batch * workload.prompt / prefill, workload.batch / decode


def row_of(
    figures: LlmMeasurement, section: Sequence[LlmMeasurement], workload: LlmWorkload, best: bool = False
) -> list[str]:
    """``section``: all figures of the section; ratios are to its sides."""
    if figures.reason:
        return [figures.mode, str(figures.ranks), SIDES[figures.side], *["-"] * 5]
    prefill, decode = speeds(figures, workload, best)
    reducing = figures.seconds("reducing", best)
    row = [figures.mode, str(figures.ranks), SIDES[figures.side], f"{prefill:.0f}", f"{decode:.1f}"]
    row.append(f"{reducing * 1e3:.2f}" if reducing and figures.side != "one" else "-")
    for other in ("gloo", "one"):
        base = next(speeds(f, workload, best)[1] for f in section if f.side == other)
        row.append("-" if figures.side == other else bench_table.times(decode / base))
    return row


def as_table(found: Sequence[LlmMeasurement], workload: LlmWorkload, best: bool = False) -> bench_table.Table:
    sections: dict[tuple[str, int], list[LlmMeasurement]] = {}
    for figures, ranks in _with_section(found):
        sections.setdefault((figures.mode, ranks), []).append(figures)
    rows = [row_of(figures, section, workload, best) for section in sections.values() for figures in section]
    return _title(workload), HEAD, rows


def note(found: Sequence[LlmMeasurement], workload: LlmWorkload) -> str:
    reasons = dict.fromkeys(f"-: {figures.side}: {figures.reason}" for figures in found if figures.reason)
    return "\n# ".join([*reasons, "all sides wrote the same tokens"])


def _title(workload: LlmWorkload) -> str:
    threads = ", ".join(f"{threads_of(world)} in each of {world} ranks" for world in workload.worlds)
    texts = "a text" if workload.batch == 1 else f"{workload.batch} texts"
    return (
        f"{workload.layers} layers, {workload.width} wide, float32; {texts} of {workload.prompt} tokens and "
        f"{workload.tokens} more; threads: {threads_of(1)} in one process, {threads}"
    )


def picture(found: Sequence[LlmMeasurement], workload: LlmWorkload, best: bool = False) -> list[Panel]:
    shown = [(f, f"{f.mode}, {ranks} ranks") for f, ranks in _with_section(found) if not f.reason]
    return [
        Bars.of(title, "tokens/s", [(name, SIDES[f.side], speeds(f, workload, best)[index]) for f, name in shown])
        for index, title in ((1, "decode"), (0, "prefill"))
    ]


def _with_section(found: Sequence[LlmMeasurement]) -> Iterator[tuple[LlmMeasurement, int]]:
    """Every side with the ranks of its section; the single process takes part in each section."""
    for number, figures in enumerate(found):
        ranks = next(f.ranks for f in found[number:] if f.side != "one")
        yield figures, ranks


def to_json(found: Sequence[LlmMeasurement], workload: LlmWorkload) -> dict[str, Any]:
    rows = []
    for figures, ranks in _with_section(found):
        row = asdict(figures) | {"section_ranks": ranks}
        if not figures.reason:
            row["prefill_per_s"], row["decode_per_s"] = speeds(figures, workload, best=False)
        rows.append(row)
    return workload.to_json(rows)
