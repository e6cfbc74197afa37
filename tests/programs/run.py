"""Runs the programs, one after the other, and writes their rows into the table of docs/how-to/integrations.md.

``python -m tests.programs.run FOLDER [NAME ...]``: environments are in FOLDER, and kept there."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import math
import os
import pkgutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tests.programs
from symcomm.bench.noise import Neighbours, live_beside
from tests.programs.frame import FOLDER, Part, free_port, read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "integrations.md"
BEGIN, END = "<!-- programs: begin -->", "<!-- programs: end -->"
OURS = ("typer>=0.12.5", "rich>=13", "h11>=0.16", "setuptools>=68", "numpy", "torch==2.13.0")
HEADER = ("program", "what ran", "Symcomm", "Gloo", "same", "date")
APART = ("frame", "run", "vllm_engine", "vllm_gloo", "vllm_hosts", "vllm_serve")  # they help
BACKENDS = ("symcomm", "gloo")
BUSY = Neighbours(duty=0.25, burst=0.004)
ROUNDING = 1e-5  # relative: of sums that were taken in another order
LAST = 1500  # characters of what a program wrote, when it failed


@dataclass(frozen=True)
class Program:
    """What a program's file says of it. ``launch``: the words after the environment's Python, those of a launcher (with
    ``{ranks}``, and ``{port}`` for a free one), or none for a program that starts its ranks itself. ``environment``:
    programs whose pins agree share one."""

    name: str
    version: str
    needs: tuple[str, ...]
    parts: tuple[str, ...]
    alone: tuple[str, ...] = ()  # installed without what they ask for
    without: tuple[str, ...] = ()  # taken away again
    environment: str = "common"
    ranks: int = 2
    launch: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}")
    module: str = "-m"  # the launcher's word for a module
    rounds: int = 3
    busy: bool = False  # runs also beside a busy neighbour
    limit: float = 300.0  # seconds of one run
    environ: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, name: str) -> Program:
        module = importlib.import_module(f"tests.programs.{name}")
        said = {key: getattr(module, key.upper()) for key in cls.__dataclass_fields__ if hasattr(module, key.upper())}
        return cls(name, **said)


def every_program() -> list[Program]:
    return [Program.load(m.name) for m in pkgutil.iter_modules(tests.programs.__path__) if m.name not in APART]


def environment(folder: Path, name: str, programs: Sequence[Program]) -> Path:
    """The Python of an environment that these programs share. It is made once, and gets what they need more."""
    place = folder / f"programs-{name}"
    python, stamp = place / "bin" / "python", place / ".needs"
    needs = [*OURS, *dict.fromkeys(need for program in programs for need in program.needs)]
    alone = [need for program in programs for need in program.alone]
    wanted = "\n".join([*needs, *alone])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"== installing into {place} (some minutes): {', '.join([*needs, *alone])}", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--prefer-binary"]
        subprocess.run([*pip, *needs], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        without = [name for program in programs for name in program.without]
        if without:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *without], check=True)
        stamp.write_text(wanted)
    return python


def run_once(program: Program, python: Path, backend: str) -> tuple[dict[str, list[Part]], str]:
    """What the ranks found, and how it failed if it did."""
    with tempfile.TemporaryDirectory(prefix="symcomm-program-") as folder:
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": path, FOLDER: folder}
        environ |= {"OMP_NUM_THREADS": "1", **dict(program.environ)}
        launch = [word.format(ranks=program.ranks, port=free_port()) for word in program.launch]
        command = [str(python), *launch, program.module, f"tests.programs.{program.name}", backend]
        with open(Path(folder) / "output", "w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | str = process.wait(program.limit)
            except subprocess.TimeoutExpired:
                code = f"not over after {program.limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            why = "" if code == 0 else f"{code}: {output.read()[-LAST:]}"
        return read(Path(folder)), why


@dataclass
class Found:
    """Of one part on one backend, in all rounds."""

    rounds: list[list[Part]]
    missing: int = 0  # rounds that did not come to it

    @property
    def works(self) -> bool:
        return bool(self.rounds) and not self.missing

    @property
    def values(self) -> list[list[float]]:
        return [part.values for part in self.rounds[0]]

    @property
    def said(self) -> list[str]:
        return [part.said for part in self.rounds[0]]

    def __str__(self) -> str:
        if not self.works:
            return "fails"
        seconds = statistics.median(max(part.seconds for part in ranks) for ranks in self.rounds)
        return ", ".join([*filter(None, self.said[:1]), *([as_time(seconds)] if seconds else [])]) or "works"


def as_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def same(ours: Found, gloos: Found) -> str:
    if not (ours.works and gloos.works) or ours.said != gloos.said:
        return "no"
    pairs = [
        pair for mine, theirs in zip(ours.values, gloos.values, strict=True) for pair in zip(mine, theirs, strict=True)
    ]
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
        return "yes"
    difference = max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)
    return f"to {difference:.0e}" if difference < ROUNDING else "no"


def try_program(program: Program, python: Path, busy: bool = False) -> dict[str, dict[str, Found]]:
    """By part and backend. The backends take turns, in another order each round."""
    found = {part: {backend: Found([]) for backend in BACKENDS} for part in program.parts}
    cores = sorted(os.sched_getaffinity(0))
    with live_beside(BUSY if busy else Neighbours(), cores):
        for turn in range(program.rounds):
            for backend in BACKENDS if turn % 2 == 0 else BACKENDS[::-1]:
                begun = time.monotonic()
                parts, why = run_once(program, python, backend)
                for name, each in found.items():
                    if len(parts.get(name, ())) > 0:
                        each[backend].rounds.append(parts[name])
                    else:
                        each[backend].missing += 1
                told = f"   {backend}, round {turn + 1} of {program.rounds}: {time.monotonic() - begun:.0f} s"
                print(f"{told}{f', failed: {why}' if why else ''}", flush=True)
    return found


def as_rows(
    program: Program, found: dict[str, dict[str, Found]], today: str, beside: str = ""
) -> list[tuple[str, ...]]:
    title = f"{program.name} {program.version}"
    return [
        (title, f"{part}{beside}", *map(str, each.values()), same(*each.values()), today)
        for part, each in found.items()
    ]


def with_table(page: str, name: str, rows: list[tuple[str, ...]]) -> str:
    """The page with these rows of that program; those of others stay."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [tuple(c.strip() for c in line.strip("| ").split(" | ")) for line in old.splitlines()[3:] if "|" in line]
    known = sorted([row for row in kept if row[0].split(" ")[0] != name] + rows, key=lambda row: row[0].lower())
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER), *known)]
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}"


def rounds_of(program: Program, python: Path) -> Iterator[tuple[dict[str, dict[str, Found]], str]]:
    print(f"== {program.name} {program.version}", flush=True)
    yield try_program(program, python), ""
    if program.busy:
        print(f"== {program.name} {program.version}, beside a busy neighbour", flush=True)
        yield try_program(program, python, busy=True), ", beside a busy neighbour"


def main(folder: str, *names: str) -> int:
    every = every_program()
    unknown = set(names) - {program.name for program in every}
    if unknown:
        print(f"there is no program {', '.join(sorted(unknown))}: {', '.join(p.name for p in every)}")
        return 2
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    worse = False
    for program in [p for p in every if not names or p.name in names]:
        sharing = [p for p in every if p.environment == program.environment]
        python = environment(Path(folder), program.environment, sharing)
        rows = []
        for found, beside in rounds_of(program, python):
            rows += as_rows(program, found, today, beside)
            worse |= any(each["gloo"].works and not each["symcomm"].works for each in found.values())
        PAGE.write_text(with_table(PAGE.read_text(), program.name, rows))
        print("\n".join("   " + ", ".join(row[1:5]) for row in rows), flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
