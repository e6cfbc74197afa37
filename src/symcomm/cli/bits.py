"""``symcomm bits``: the same over ranks, hosts, threads and processes, and hashes of its bits: sums, or a training."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from symcomm import errors
from symcomm.cli import bits_of_hosts, bits_of_training
from symcomm.cli.command import Command, flag
from symcomm.preflight import need_torch

app = typer.Typer(rich_markup_mode=None, add_completion=False)
CALL = "symcomm bits"
DIFFER = 1
SHARDS = 8  # what is added, whatever the number of ranks
COUNTS = (8, 5000 * SHARDS, 40_000 * SHARDS)  # elements; of several algorithms each
TYPES = ("float32", "float64", "float16")
DEADLINE = 600.0  # of a row: each process loads torch, on a machine that may be busy
SHOWN = 12  # digits of a hash

AsJson = Annotated[bool, flag("--json", "Print JSON.")]
Training = Annotated[bool, flag("--training", "Weights of a training and layers split over ranks, instead of sums.")]
Threads = Annotated[bool, flag("--threads", "Ranks as threads only, which start at once.")]
Networked = Annotated[bool, flag("--network", "Also 8 processes on 1 to 8 network namespaces. Needs root.")]


@dataclass(frozen=True)
class Row:
    """One way to run it. ``wide``: sums of small floats cross between hosts in float32."""

    ranks: int
    hosts: int
    mode: str  # threads, processes, or network: processes on hosts that are network namespaces
    wide: bool = False

    def must_agree(self, kind: str) -> bool:
        return kind != "float16" or self.hosts == 1 or self.wide


@dataclass(frozen=True)
class Work:
    """What every rank does: by kind, a hash, and this rank's pieces of a whole that has the same hash."""

    on_rank: Callable[[Any, Sequence[str]], dict[str, tuple[str, list[bytes]]]]
    kinds: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    row: Row
    hashes: dict[str, str]  # by type
    why: str = ""  # there are none


def values(shard: int, count: int, kind: str) -> Any:
    """A shard's numbers, the same on every machine. Their sizes differ so much that another order gives other bits."""
    import numpy as np

    random = np.random.Generator(np.random.PCG64([shard, count]))
    bits, widest = (10, 6) if kind == "float16" else (23, 20)
    numbers = random.integers(-(1 << bits), 1 << bits, count).astype(np.float64)
    return np.ldexp(numbers, random.integers(-widest, widest // 3, count)).astype(kind)


def on_rank(group: Any, kinds: Sequence[str]) -> dict[str, tuple[str, list[bytes]]]:
    """By type: the hash of the sums, and this rank's pieces of them from reduce_scatter. A rank with several shards
    calls the functions for shards, a rank with one shard the plain ones."""
    import numpy as np

    found = {}
    mine = group.shard_range(SHARDS)
    for kind in kinds:
        sums, pieces = hashlib.sha256(), []
        for count in COUNTS:
            own = [values(shard, count, kind) for shard in mine]
            total: Any = np.empty(count, kind)
            piece = np.empty(count // group.size, kind)
            if len(own) > 1:
                group.all_reduce_shards(total, own, SHARDS)
                group.reduce_scatter_shards(piece, own, SHARDS)
            else:
                group.reduce_scatter_single(piece, own[0])
                group.all_reduce(total := own[0])
            sums.update(total.tobytes())
            pieces.append(piece.tobytes())
        found[kind] = sums.hexdigest(), pieces
    return found


@contextmanager
def wide_sums(wanted: bool) -> Iterator[None]:
    before = os.environ.get("SYMCOMM_WIDE_SUMS")
    os.environ["SYMCOMM_WIDE_SUMS"] = str(int(wanted))
    try:
        yield
    finally:
        os.environ.pop("SYMCOMM_WIDE_SUMS")
        if before is not None:
            os.environ["SYMCOMM_WIDE_SUMS"] = before


SUMS = Work(on_rank, TYPES)
TRAINING = Work(bits_of_training.on_rank, bits_of_training.KINDS)


def measure(row: Row, work: Work = SUMS) -> Outcome:
    try:
        with wide_sums(row.wide):
            if row.mode == "network":
                return Outcome(row, bits_of_hosts.hashes_on(row.hosts, row.ranks, work.kinds, work is TRAINING))
            return Outcome(row, hashes_of(_of_ranks(row, work), work.kinds))
    except errors.ResourceError as error:  # no engine between hosts, or no namespaces
        return Outcome(row, {}, str(error))


def _of_ranks(row: Row, work: Work) -> list[Any]:
    from symcomm.group.spawn import spawn

    hosts = None if row.hosts == 1 else [row.ranks // row.hosts] * row.hosts
    return spawn(work.on_rank, row.ranks, (work.kinds,), mode=row.mode, hosts=hosts, deadline=DEADLINE)


def hashes_of(ranks: Sequence[dict[str, tuple[str, list[bytes]]]], kinds: Sequence[str]) -> dict[str, str]:
    """By kind, the one hash of what all ranks have."""
    hashes = {}
    for kind in kinds:
        said = {rank[kind][0] for rank in ranks}
        if pieces := list(zip(*(rank[kind][1] for rank in ranks), strict=True)):
            said.add(hashlib.sha256(b"".join(map(b"".join, pieces))).hexdigest())
        hashes[kind] = said.pop()[:SHOWN] if len(said) == 1 else "ranks differ"
    return hashes


def rows(threads_only: bool, small_floats: bool = True, network: bool = False) -> list[Row]:
    modes = ["threads"] if threads_only else ["threads", "processes"]
    found = [Row(ranks, 1, mode) for mode in modes for ranks in (1, 2, 4, 8)]
    found += [Row(SHARDS, hosts, mode) for mode in modes for hosts in (2, 4)]
    found.append(Row(SHARDS, 8, "threads"))
    found += [Row(SHARDS, hosts, "threads", True) for hosts in (2, 4, 8) if small_floats]
    return found + [Row(SHARDS, hosts, "network", small_floats) for hosts in (1, 2, 4, 8) if network]


def differing(outcomes: Sequence[Outcome], kinds: Sequence[str] = TYPES) -> list[str]:
    """The kinds whose hashes are not one where they must be."""
    return [
        kind
        for kind in kinds
        if len({o.hashes[kind] for o in outcomes if o.hashes and o.row.must_agree(kind) and kind in o.hashes}) > 1
        or any(o.hashes.get(kind) == "ranks differ" for o in outcomes)
    ]


@app.command(name="bits", cls=Command)
def bits(
    threads: Threads = False, training: Training = False, network: Networked = False, as_json: AsJson = False
) -> None:
    """Add the same numbers on 1 to 8 ranks, as threads and processes, on one host and (pretended) several, and print
    hashes of the sums; or train a small model there in 8 logical shards, and split layers into 8, and print hashes of
    weights, of outputs and gradients. Exits with 1 where they differ and must not.

    \b
    Examples:
      symcomm bits
      symcomm bits --training
      symcomm bits --threads --json
      sudo symcomm bits --network
    """
    if importlib.util.find_spec("numpy") is None:
        raise errors.ResourceError(f"{CALL}: numpy is missing, which makes the numbers; install it.")
    if training:
        need_torch(f"{CALL} --training")
    work = TRAINING if training else SUMS
    outcomes = []
    if not as_json:
        typer.echo(line("ranks", "hosts", "as", [f"{kind:{SHOWN}}" for kind in work.kinds]))
    for row in rows(threads, not training, network):
        outcomes.append(measure(row, work))
        if not as_json:
            typer.echo(line_of(outcomes[-1], work.kinds))
    wrong = differing(outcomes, work.kinds)
    if as_json:
        typer.echo(json.dumps({"differing": wrong, "rows": [asdict(o) for o in outcomes]}, indent=1))
    else:
        typer.echo(f"\n{verdict(wrong)}")
    raise typer.Exit(DIFFER if wrong else 0)


def line(ranks: Any, hosts: Any, mode: str, cells: Sequence[str]) -> str:
    return f"{ranks:>5} {hosts:>5}  {mode:9}  {'  '.join(cells)}".rstrip()


def line_of(o: Outcome, kinds: Sequence[str]) -> str:
    cells = [o.why] if o.why else [f"{o.hashes.get(kind, '-'):{SHOWN}}" for kind in kinds]
    return line(o.row.ranks, o.row.hosts, o.row.mode, [*cells, *["SYMCOMM_WIDE_SUMS=1"] * o.row.wide])


def verdict(wrong: Sequence[str]) -> str:
    if wrong:
        return f"Not the same bits: {', '.join(wrong)}. That is a bug of ours: please report it."
    return "The same bits wherever they must be: docs/explanation/bits.md says where."
