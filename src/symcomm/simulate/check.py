"""Compares predictions with what ``symcomm bench hosts --json`` measured, to show how far to trust them.

It fits a link to a few all_reduces of the first file; every other figure, of any file, is then a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symcomm.errors import BadArgumentError
from symcomm.simulate.calibrate import fit_link, fitted_sizes
from symcomm.simulate.machine import Machine
from symcomm.simulate.predict import COLLECTIVES, predict
from symcomm.simulate.topology import Link

FITTED = "all_reduce"


@dataclass(frozen=True)
class Measured:
    """One run of the benchmark: its hosts, and the seconds of our side, by collective and bytes."""

    name: str
    hosts: int
    ranks_per_host: int
    cores_per_host: float
    seconds: dict[tuple[str, int], float]

    def link(self, machine: Machine) -> tuple[Link, list[int]]:
        """(the link on which its all_reduces take as long as they did, the sizes that say so)."""
        found = {nbytes: s for (collective, nbytes), s in self.seconds.items() if collective == FITTED}
        link = fit_link(found, self.hosts, self.ranks_per_host, machine=machine, cores_per_host=self.cores_per_host)
        return link, fitted_sizes(found, self.hosts, self.ranks_per_host)


@dataclass(frozen=True)
class Checked:
    """One figure and its prediction, in seconds. ``fitted``: the link was fitted to it."""

    run: str
    hosts: int
    ranks_per_host: int
    collective: str
    nbytes: int
    measured: float
    predicted: float
    fitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def off(self) -> float:
        """How many times too long or too short: 1 is exact."""
        return max(self.ratio, 1 / self.ratio)


def read(path: Path) -> Measured:
    """Read what ``symcomm bench hosts --json`` wrote. Its hosts share the cores of one machine."""
    fix = "write it with `symcomm bench hosts --json FILE`"
    try:
        found = json.loads(path.read_text())
        plan: dict[str, Any] = found["plan"]
        seconds = {
            (row["collective"], row["nbytes"]): row["ms"] / 1e3 for row in found["rows"] if row["side"] == "ours"
        }
        return Measured(str(path), plan["hosts"], plan["ranks"], found["machine"]["cores"] / plan["hosts"], seconds)
    except OSError as error:
        raise BadArgumentError(f"symcomm simulate: --check: {path} cannot be read ({error.strerror}); {fix}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadArgumentError(
            f"symcomm simulate: --check: {path} is no such measurement ({error!r}); {fix}."
        ) from None


def check(runs: Sequence[Measured], machine: Machine) -> tuple[Link, list[Checked]]:
    """The link fitted to the first run, and every figure that can be predicted."""
    link, sizes = runs[0].link(machine)
    found = [
        Checked(
            run.name, run.hosts, run.ranks_per_host, collective, nbytes, seconds,
            predict(
                collective, nbytes, run.hosts, run.ranks_per_host, link, machine=machine,
                cores_per_host=run.cores_per_host,
            ),
            run is runs[0] and collective == FITTED and nbytes in sizes,
        )
        for run in runs
        for (collective, nbytes), seconds in run.seconds.items()
        if collective in COLLECTIVES
    ]  # fmt: skip
    return link, found
