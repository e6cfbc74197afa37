"""How long a benchmark will take: a guess at first, then what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from symcomm.bench.run import Case, Effort

# The cost of a case on today's machines, within a factor of three or so; the first measured cases correct it.
SECONDS_TO_START = 4.0  # all ranks
SECONDS_A_CASE = 0.03  # orders to ranks and their answers, calibration
BYTES_PER_SECOND = 1e9  # of one rank while all call, or fill and check tensors
CALLS, PASSES = 12, 20  # calls that are made at least; passes over tensors to fill and check them


class TimeLeft:
    """Estimates how many seconds are left for ``cases``, measured in this order on so many ``series``.

    A case takes as long as the last one of its size. Without such a case it takes what we guess, corrected by how wrong
    the guesses were so far."""

    def __init__(self, cases: Sequence[Case], series: int, effort: Effort):
        self._left = list(cases)
        self._series = series
        self._effort = effort
        self._of_size: dict[int, float] = {}
        self._took = self._guessed = 0.0

    def took(self, seconds: float) -> None:
        """The next case is done."""
        case = self._left.pop(0)
        self._of_size[case.nbytes] = seconds
        self._took += seconds
        self._guessed += self._guess(case)

    def seconds_left(self) -> float:
        if not self._guessed:
            return SECONDS_TO_START + sum(map(self._guess, self._left))
        wrong_by = self._took / self._guessed
        return sum(self._of_size.get(case.nbytes, self._guess(case) * wrong_by) for case in self._left)

    def _guess(self, case: Case) -> float:
        effort, call = self._effort, case.nbytes / BYTES_PER_SECOND
        timed = effort.rounds * effort.repetitions * (effort.iterations * (1e-5 + call) or effort.seconds)
        return self._series * (SECONDS_A_CASE + timed + call * (CALLS + (PASSES if effort.check else 0)))


def in_words(seconds: float) -> str:
    """To about a tenth: "40 s", "3 min", "2 h"."""
    if seconds < 90:
        return f"{max(1, math.ceil(seconds / 5) * 5 if seconds > 5 else math.ceil(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
