"""Churn under ``symcomm run --restart failed``: ``python -m tests.soak.churn --minutes 10 --seed 7``.

Ranks are killed and stopped in every phase of their lives (tests/soak/churn_rank.py has the phases), one after the
other and several at once, while the launcher replaces them. They must go on making steps, every step must give the
right numbers, and once they are left alone they must all be there again and end well. Of ``--seeds`` seeds each runs as
long as ``--minutes`` says; a seed repeats what is done to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from symcomm.observe.recorder.processes import is_running
from tests.support import loaded

PHASES = ("start", "meet", "join", "agree", "hand-over", "step")  # of tests/soak/churn_rank.py
RANKS = 3
STANDS_STILL = 45.0  # seconds without a step that any rank made, on a busy machine
LEFT_ALONE = 3.0  # seconds without a step after which nothing more is done to the ranks until there is one
LONGEST_STOP = 2.0
PATIENCE = 1.5  # seconds for a rank to come to the phase that an order names
END = 60.0  # seconds for all to be there again, and for the job to end


class Churn:
    """One job, and what is done to it."""

    def __init__(self, seed: int, folder: Path):
        self._dice = random.Random(seed)
        self._folder = folder
        self._stopped: dict[int, float] = {}  # processes that go on again, and when
        self._ordered = 0.0
        self.done: Counter[str] = Counter()
        self.steps, self._moved = 0, time.monotonic()

    def run(self, seconds: float) -> list[str]:
        """What went wrong; nothing, one hopes."""
        command = [sys.executable, "-m", "symcomm", "run", "-n", str(RANKS), "--restart", "failed", "--grace", "1"]
        command += ["--max-restarts", "1000000", "--no-prefix", str(Path(__file__).parent / "churn_rank.py")]
        with open(self._folder / "out", "w+") as out:
            job = loaded.Loaded([*command, str(self._folder)], stdout=out, stderr=out, env=self._environment())
            try:
                wrong = self._disturb(job, time.monotonic() + seconds) or self._finish(job)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait(END)
        for found in self._folder.glob("wrong-*"):
            wrong += found.read_text().splitlines()[:3]
        return wrong + ([self._tail()] if wrong else [])

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def _disturb(self, job: Any, end: float) -> list[str]:
        while time.monotonic() < end:
            if job.poll() is not None:
                return [f"the job ended with code {job.poll()}"]
            if why := self._standstill():
                return [why]
            self._carry_out()
            time.sleep(0.01)
        return []

    def _standstill(self) -> str:
        if (steps := self.count_steps()) > self.steps:
            self.steps, self._moved = steps, time.monotonic()
        if time.monotonic() - self._moved < STANDS_STILL:
            return ""
        return f"no step was made for {STANDS_STILL:g} s: {self.describe()}"

    def count_steps(self) -> int:
        return sum(int.from_bytes(found.read_bytes(), "little") for found in self._folder.glob("made-*"))

    def _carry_out(self) -> None:
        """Takes note of orders that were taken, lets stopped ranks go on, and gives the next order."""
        now = time.monotonic()
        for found in self._folder.glob("taken-*"):
            order, pid = json.loads(found.read_text()), int(found.name.partition("-")[2])
            found.unlink()
            self._ordered = now + self._dice.choice(
                (0.0, 0.0, 0.3, 1.0)
            )  # while ranks are busy with this one, or later
            self.done[f"{order['action']} {order['phase']}"] += 1
            if order["action"] == "stop":
                self._stopped[pid] = now + order["seconds"]
        for pid in [pid for pid, until in self._stopped.items() if now >= until]:
            del self._stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if now > self._moved + LEFT_ALONE:
            (self._folder / "order").unlink(missing_ok=True)
        elif now > self._ordered:
            self._order(now)

    def _order(self, now: float) -> None:
        """A new order, in place of one for which nobody came; or several are killed at once."""
        self._ordered = now + PATIENCE
        if self._dice.random() < 0.15:
            for pid in self._dice.sample(living := self._living(), self._dice.randint(0, len(living))):
                os.kill(pid, signal.SIGKILL)
                self.done["kill at once"] += 1
        order = {
            "phase": self._dice.choice(PHASES),
            "action": self._dice.choice(("kill", "stop")),
            "seconds": self._dice.uniform(0.05, LONGEST_STOP),
        }
        new = self._folder / "new"
        new.write_text(json.dumps(order))
        new.rename(self._folder / "order")

    def _living(self) -> list[int]:
        return [pid for pid in (int(found.name[5:]) for found in self._folder.glob("made-*")) if is_running(pid)]

    def _finish(self, job: Any) -> list[str]:
        """Left alone, all must be there again and make steps; then they end."""
        (self._folder / "order").unlink(missing_ok=True)
        self._ordered = float("inf")
        before, end = self.count_steps(), time.monotonic() + END
        while time.monotonic() < end and (self.count_steps() < before + 100 or self._stopped):
            self._carry_out()
            time.sleep(0.01)
        (self._folder / "enough").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END)
        self.steps = self.count_steps()
        if job.poll() is None:
            return [f"the job did not end: {self.describe()}"]
        return [] if job.poll() == 0 else [f"the job ended with code {job.poll()}"]

    def describe(self) -> str:
        return f"{self.steps} steps, {sum(self.done.values())} faults"

    def _tail(self) -> str:
        return "  " + "\n  ".join((self._folder / "out").read_text(errors="replace").splitlines()[-60:])


def churn(seed: int, seconds: float) -> tuple[Churn, list[str]]:
    with tempfile.TemporaryDirectory(prefix="symcomm-churn-") as folder:
        job = Churn(seed, Path(folder))
        return job, job.run(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Ranks that are killed and stopped; exit code 1 when a job went wrong."
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="of each seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="the first; the others count on from it")
    options = parser.parse_args()
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    bad = []
    for seed in range(first, first + options.seeds):
        job, wrong = churn(seed, options.minutes * 60)
        faults = ", ".join(f"{number} {what}" for what, number in sorted(job.done.items()))
        print(f"seed {seed}: {job.describe()} ({faults})", *wrong, sep="\n  ", flush=True)
        bad += [seed] * bool(wrong)
    print(f"{len(bad)} bad{': seeds ' + ', '.join(map(str, bad)) if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
