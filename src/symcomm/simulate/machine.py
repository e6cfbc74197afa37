"""How fast one host moves and combines bytes, and how long its ranks take to meet.

Numbers come from ``symcomm simulate --calibrate`` (calibrate.py), which writes them to the user's cache directory, or
from DEFAULT, which is such a measurement of the machine named in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from symcomm.errors import BadArgumentError, bad_argument
from symcomm.preflight import cache_directory

RATES = ("cached", "memory", "host_memory")
POSITIVE = (*RATES, "between", "nodes")


@dataclass(frozen=True)
class Machine:
    """One host. Rates are bytes a second of one core, counting every byte read and every byte written.

    Additions have no rate of their own: float32 sums of bytes in a cache took no longer than their reads and writes.
    """

    name: str
    call: float  # seconds that a call costs before its plan runs
    meet: float  # seconds: two ranks say how far they are and see each other (a barrier, or a signal and a wait)
    peer: float  # seconds that each rank beyond the second adds
    cached: float  # bytes/s: bytes that a cache holds
    memory: float  # bytes/s: bytes that none holds
    host_memory: float  # bytes/s: what all cores together get from memory
    cache: int = 1 << 20  # bytes: tensors up to here stay in a core's cache between calls
    switch: float = 11e-6  # seconds that a wait takes longer when ranks outnumber cores (BENCHMARKS.md, 4 ranks on 2)
    nodes: int = 1  # parts of its memory (NUMA), each with as many ranks, one after the other
    between: float = 25e9  # bytes/s: what all cores of a node together get of another's memory; assumed, one way
    cores: float = 0  # of a host; 0: as many as ranks; a fraction where hosts share cores, as emulated ones do

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int | float) and value >= 0):
                raise bad_argument("Machine", field.name, value, "a number of 0 or more")
            if field.name in POSITIVE and value == 0:
                raise bad_argument("Machine", field.name, value, "more than 0")

    def crowding(self, ranks: int) -> float:
        """Ranks per core, at least 1."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def wait(self, ranks: int) -> float:
        """One synchronisation of ``ranks`` ranks."""
        if ranks < 2:
            return 0.0
        return self.meet + self.peer * (ranks - 2) + (self.switch if self.crowding(ranks) > 1 else 0.0)

    def touch(self, nbytes: float, ranks: int, in_cache: bool) -> float:
        """Reading or writing ``nbytes`` on one rank while ``ranks`` ranks do the same."""
        busy = min(ranks, self.cores or ranks)
        rate = self.cached if in_cache else min(self.memory, self.host_memory / busy)
        return nbytes / rate * self.crowding(ranks)

    def node(self, rank: int, ranks: int) -> int:
        return rank * self.nodes // ranks

    def cross(self, nbytes: float, ranks: int) -> float:
        """Reading or writing ``nbytes`` of another node while all ranks of this one do the same."""
        sharing = max(1.0, min(ranks, self.cores or ranks) / self.nodes)
        return nbytes / min(self.memory, self.between / sharing) * self.crowding(ranks)

    def add(self, nbytes: float, ranks: int, in_cache: bool) -> float:
        """Combining ``nbytes`` that arrived with as many of ours, into ours."""
        return self.touch(3 * nbytes, ranks, in_cache)


DEFAULT = Machine(
    # what calibrate.py makes of the times in BENCHMARKS.md: 2 ranks on an idle virtual machine
    name="2 Neoverse N1 cores",
    call=0.97e-6,
    meet=0.62e-6,
    peer=0.1e-6,  # assumed: two cores have no third rank
    cached=42.6e9,
    memory=24.7e9,
    host_memory=150e9,  # assumed: two cores do not exhaust a host's memory
)


def cache_file() -> Path:
    """Where a calibration is kept: ``$XDG_CACHE_HOME/symcomm/machine.json``."""
    return cache_directory() / "machine.json"


def save(machine: Machine, path: str | os.PathLike[str] | None = None) -> Path:
    path = cache_file() if path is None else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(dataclasses.asdict(machine), indent=1) + "\n")
    fresh.replace(path)  # a reader sees the old file or the new one
    return path


def load(path: str | os.PathLike[str] | None = None) -> Machine:
    """The calibration of this machine, or DEFAULT when there is none. A file that you name must exist.

    Raises: BadArgumentError."""
    wanted = cache_file() if path is None else Path(path)
    if path is None and not wanted.exists():
        return DEFAULT
    fix = "run `symcomm simulate --calibrate` to write one" if path is None else "name a file that --calibrate wrote"
    try:
        return Machine(**json.loads(wanted.read_text()))
    except OSError as error:
        raise BadArgumentError(f"symcomm simulate: {wanted} cannot be read ({error.strerror}); {fix}.") from None
    except (TypeError, ValueError) as error:
        raise BadArgumentError(f"symcomm simulate: {wanted} does not describe a machine ({error}); {fix}.") from None
