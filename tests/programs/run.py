"""Runs the programs, one environment after the other, and writes their table into docs/how-to/integrations.md.

``python -m tests.programs.run FOLDER [NAME ...]``: environments are in FOLDER, and kept there."""

from __future__ import annotations

import datetime
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tests.programs
from tests.programs.frame import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "integrations.md"
BEGIN, END = "<!-- programs: begin -->", "<!-- programs: end -->"
OURS = ("typer>=0.12.5", "rich>=13", "h11>=0.16", "setuptools>=68", "torch==2.13.0")
HEADER = ("program", "what ran", "Symcomm", "Gloo", "same", "date")
APART = ("frame", "run")


def environment(folder: Path, name: str, needs: tuple[str, ...]) -> str:
    """The Python of a program's environment, which is made once for what it needs."""
    place = folder / f"programs-{name}"
    python, stamp = place / "bin" / "python", place / ".needs"
    wanted = "\n".join([*OURS, *needs])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"== making {place}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--prefer-binary"]
        subprocess.run([*pip, *OURS, *needs], check=True)
        stamp.write_text(wanted)
    return str(python)


def as_row(program: Any, name: str, ours: Outcome, gloos: Outcome, today: str) -> tuple[str, ...]:
    def told(outcome: Outcome) -> str:
        return f"{outcome.values or 'ran'}, {outcome.seconds:.0f} s" if outcome.works else "fails"

    same = "yes" if ours.works and gloos.works and ours.values == gloos.values else "no"
    return (f"{name} {program.VERSION}", ours.ran, told(ours), told(gloos), same, today)


def with_table(page: str, rows: dict[str, tuple[str, ...]]) -> str:
    """The page with these rows; those of programs that did not run now stay."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [
        tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in old.splitlines()[3:] if "|" in line
    ]
    known = {row[0].split(" ")[0]: row for row in kept} | rows
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER), *(known[n] for n in sorted(known)))]
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}"


def main(folder: str, *names: str) -> int:
    every = [m.name for m in pkgutil.iter_modules(tests.programs.__path__) if m.name not in APART]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    failed = []
    for name in names or every:
        program: Any = importlib.import_module(f"tests.programs.{name}")
        python = environment(Path(folder), name, program.NEEDS)
        found = {backend: program.run(python, backend) for backend in ("symcomm", "gloo")}
        for backend, outcome in found.items():
            print(f"{name} on {backend}: {outcome.values} {outcome.seconds:.1f} s {re.sub(chr(10), ' ', outcome.why)}")
        PAGE.write_text(with_table(PAGE.read_text(), {name: as_row(program, name, *found.values(), today)}))
        failed += [name] if not found["symcomm"].works and found["gloo"].works else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
