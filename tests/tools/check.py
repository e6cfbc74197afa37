"""Run by ``make check``: the tests that matter most for what changed, in about a minute.

Changed is what differs from the last commit, or the last commit itself where nothing does. Chosen are changed tests,
tests that name a changed module, and a few that look at everything, shortest first while there is time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.tools.selections import TESTS, all_files
from tests.tools.side_by_side import DURATIONS, run

# What looks at the whole package, or at what every call passes through.
ALWAYS = ("layers", "selections", "native_stub", "fast_path", "groups", "p2p", "errors")
UNKNOWN = 15.0  # seconds, of a file that has not been timed here
CORE = "symcomm._core"


def changed_files() -> list[str]:
    """Paths from the checkout's root."""

    def ask(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=TESTS.parent, capture_output=True, text=True, check=True)
        return done.stdout.split()

    now = ask("diff", "--name-only", "HEAD") + ask("ls-files", "--others", "--exclude-standard")
    return now or ask("diff", "--name-only", "HEAD~1", "HEAD")


def modules_of(paths: list[str]) -> list[str]:
    """Modules of the package that these files are; all of C is one."""
    found = []
    for path in paths:
        if path.startswith("src/symcomm/_core/"):
            found.append(CORE)
        elif path.startswith("src/symcomm/") and path.endswith(".py"):
            found.append(path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return sorted(set(found))


def names(text: str, module: str) -> bool:
    """Whether a test's text imports a module, or from it."""
    package, _, last = module.rpartition(".")
    direct = rf"\b{re.escape(module)}\b"
    listed = rf"from {re.escape(package)} import [^\n]*\b{re.escape(last)}\b"
    return re.search(rf"{direct}|{listed}", text) is not None


def choose(paths: list[str], durations: dict[str, float], seconds: float) -> tuple[list[str], list[str]]:
    """Stems of test files that fit into the time, and of those that do not."""
    modules = modules_of(paths)
    own = {
        Path(path).stem
        for path in paths
        if re.fullmatch(r"tests/\w+/test_\w+\.py", path) and (TESTS.parent / path).exists()
    }
    named = {stem for stem, p in all_files().items() if any(names(p.read_text(), module) for module in modules)}
    first = [*(f"test_{name}" for name in ALWAYS), *sorted(own)]
    rest = sorted(named - set(first), key=lambda stem: durations.get(stem, UNKNOWN))
    chosen: list[str] = []
    left_out: list[str] = []
    for stem in dict.fromkeys([*first, *rest]):
        cost = durations.get(stem, UNKNOWN)
        fits = stem in first or cost <= seconds
        seconds -= cost if fits else 0.0
        (chosen if fits else left_out).append(stem)
    return chosen, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for tests, on the clock")
    parser.add_argument("-n", "--processes", type=int, default=3)
    args = parser.parse_args()
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    chosen, left_out = choose(changed_files(), known, args.seconds * min(args.processes, 2))
    print(f"== {len(chosen)} test files; `make test` also runs {len(left_out)} that name what changed, and all others")
    found = all_files()
    return run([str(found[stem]) for stem in chosen], args.processes, Path("build/check"))


if __name__ == "__main__":
    sys.exit(main())
