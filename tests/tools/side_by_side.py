"""Test files in a few pytest processes at once: ``python -m tests.tools.side_by_side [-n 3] [--log DIR] [SELECTION]``.

Each process collects all files and claims one after another, so none is idle while another has files left. A line is
printed for each file that is done; failures and what was not run come last. Logs of the processes are in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHARE = "SYMCOMM_TESTS_SHARE"  # names the directory by which processes tell each other what they run
DURATIONS = Path(__file__).parents[2] / "build" / "durations.json"  # of files, as they were last run here
ORDER = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


class Share:
    """One process's view of the directory."""

    def __init__(self, where: str) -> None:
        self.where = Path(where)
        self.mine: dict[str, float] = {}  # when each file began

    def claims(self, name: str) -> bool:
        if name not in self.mine:
            try:
                os.close(os.open(self.where / f"{name}.claimed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            self.mine[name] = time.monotonic()
        return True

    def is_done(self, name: str, failed: int) -> None:
        words = f"{time.monotonic() - self.mine[name]:.0f} s" + (f", {failed} FAILED" if failed else "")
        (self.where / f"{name}.tmp").write_text(words)
        (self.where / f"{name}.tmp").rename(self.where / f"{name}.done")

    def tell(self, counts: dict[str, int], reasons: Counter[str]) -> None:
        path = self.where / f"{os.getpid()}.result"
        path.write_text(json.dumps({"counts": counts, "reasons": reasons}))


def _show_progress(share: Path, shown: set[str], start: float) -> None:
    for path in sorted(share.glob("*.done"), key=lambda path: path.stat().st_mtime):
        if path.stem not in shown:
            shown.add(path.stem)
            print(f"{time.monotonic() - start:5.0f} s {len(shown):4d}  {path.stem} ({path.read_text()})", flush=True)


def _remember(share: Path) -> None:
    """How long each file took, for ``make check``."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    known |= {path.stem: float(path.read_text().split()[0]) for path in share.glob("*.done")}
    DURATIONS.parent.mkdir(exist_ok=True)
    DURATIONS.write_text(json.dumps(known))


def _summary(share: Path) -> str:
    from tests.conftest import NOT_RUN, what_was_not_run

    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in share.glob("*.result"):
        told = json.loads(path.read_text())
        counts.update(told["counts"])
        reasons.update(told["reasons"])
    lines = [f"== {NOT_RUN}", *what_was_not_run(reasons)] if reasons else []
    return "\n".join([*lines, ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word])])


def _failures(log: Path) -> str:
    """What a log says from its failures on; all of it where pytest came to no end."""
    text = log.read_text(errors="replace")
    at = max(text.find("= FAILURES ="), text.find("= ERRORS ="))
    return text[at:] if at >= 0 else text[-8000:]


def run(files: list[str], processes: int, logs: Path) -> int:
    logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as share:
        running = []
        # Idle threads of OpenMP leave the cores to others; OpenBLAS, of which nobody here computes with much, has none.
        env = {"GOMP_SPINCOUNT": "0", "OPENBLAS_NUM_THREADS": "1", **os.environ, SHARE: share}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile our sources, each for itself
        for i in range(processes):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
            with open(logs / f"test-{i}.log", "w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
        shown: set[str] = set()
        try:
            while any(process.poll() is None for process in running):
                _show_progress(Path(share), shown, start)
                time.sleep(1)
        finally:
            for process in running:
                process.terminate()
                process.wait()
        _show_progress(Path(share), shown, start)
        for i, process in enumerate(running):
            if process.returncode:
                print(f"== process {i} ended with {process.returncode}: {logs}/test-{i}.log", flush=True)
                print(_failures(logs / f"test-{i}.log"), flush=True)
        _remember(Path(share))
        minutes = (time.monotonic() - start) / 60
        print(_summary(Path(share)) + f" in {len(shown)} files, {minutes:.1f} minutes", flush=True)
    return int(any(process.returncode for process in running))


def main() -> int:
    from tests.tools.selections import HEAP, HEAP_SIZES, SELECTIONS, TESTS, selected

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("selection", nargs="?", default="all", choices=["all", HEAP, *SELECTIONS])
    parser.add_argument("-n", "--processes", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path("build"))
    args = parser.parse_args()
    if args.selection == HEAP:
        os.environ.setdefault("SYMCOMM_HEAP", HEAP_SIZES)
    chosen = [str(TESTS)] if args.selection == "all" else selected(args.selection)
    return run(chosen, args.processes, args.log)


if __name__ == "__main__":
    sys.exit(main())
