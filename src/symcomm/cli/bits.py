"""``symcomm bits``: the same sum over ranks, hosts, threads and processes, and a hash of its bits."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from symcomm import errors
from symcomm.cli.command import Command, flag

app = typer.Typer(rich_markup_mode=None, add_completion=False)
CALL = "symcomm bits"
DIFFER = 1
SHARDS = 8  # what is added, whatever the number of ranks
COUNTS = (8, 5000 * SHARDS, 40_000 * SHARDS)  # elements; of several algorithms each
TYPES = ("float32", "float64", "float16")
DEADLINE = 120.0
SHOWN = 12  # digits of a hash

AsJson = Annotated[bool, flag("--json", "Print JSON.")]
Threads = Annotated[bool, flag("--threads", "Ranks as threads only, which start at once.")]


@dataclass(frozen=True)
class Row:
    """One way to run it. ``wide``: sums of small floats cross between hosts in float32."""

    ranks: int
    hosts: int
    mode: str
    wide: bool = False

    def must_agree(self, kind: str) -> bool:
        return kind != "float16" or self.hosts == 1 or self.wide


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


def measure(row: Row) -> Outcome:
    from symcomm.group.spawn import spawn

    hosts = None if row.hosts == 1 else [row.ranks // row.hosts] * row.hosts
    try:
        with wide_sums(row.wide):
            ranks = spawn(on_rank, row.ranks, (TYPES,), mode=row.mode, hosts=hosts, deadline=DEADLINE)
    except errors.ResourceError as error:  # no engine between hosts
        return Outcome(row, {}, str(error))
    hashes = {}
    for kind in TYPES:
        whole = hashlib.sha256()
        for k in range(len(COUNTS)):
            whole.update(b"".join(rank[kind][1][k] for rank in ranks))
        said = {whole.hexdigest(), *(rank[kind][0] for rank in ranks)}
        hashes[kind] = said.pop()[:SHOWN] if len(said) == 1 else "ranks differ"
    return Outcome(row, hashes)


def rows(threads_only: bool) -> list[Row]:
    modes = ["threads"] if threads_only else ["threads", "processes"]
    found = [Row(ranks, 1, mode) for mode in modes for ranks in (1, 2, 4, 8)]
    found += [Row(SHARDS, hosts, mode) for mode in modes for hosts in (2, 4)]
    return [*found, Row(SHARDS, 8, "threads"), *(Row(SHARDS, hosts, "threads", True) for hosts in (2, 4, 8))]


def differing(outcomes: Sequence[Outcome]) -> list[str]:
    """The types whose hashes are not one where they must be."""
    return [
        kind
        for kind in TYPES
        if len({o.hashes[kind] for o in outcomes if o.hashes and o.row.must_agree(kind) and kind in o.hashes}) > 1
        or any(o.hashes.get(kind) == "ranks differ" for o in outcomes)
    ]


@app.command(name="bits", cls=Command)
def bits(threads: Threads = False, as_json: AsJson = False) -> None:
    """Add the same numbers on 1 to 8 ranks, as threads and processes, on one host and (pretended) several, and print
    hashes of the sums. Exits with 1 where they differ and must not.

    \b
    Examples:
      symcomm bits
      symcomm bits --threads --json
    """
    if importlib.util.find_spec("numpy") is None:
        raise errors.ResourceError(f"{CALL}: numpy is missing, which makes the numbers; install it.")
    outcomes = [measure(row) for row in rows(threads)]
    wrong = differing(outcomes)
    if as_json:
        typer.echo(json.dumps({"differing": wrong, "rows": [asdict(o) for o in outcomes]}, indent=1))
    else:
        show(outcomes, wrong)
    raise typer.Exit(DIFFER if wrong else 0)


def show(outcomes: Sequence[Outcome], wrong: Sequence[str]) -> None:
    typer.echo(f"{'ranks':>5} {'hosts':>5}  {'as':9}  " + "  ".join(f"{kind:{SHOWN}}" for kind in TYPES))
    for o in outcomes:
        cells = "  ".join(f"{o.hashes.get(kind, '-'):{SHOWN}}" for kind in TYPES) if not o.why else o.why
        note = "  SYMCOMM_WIDE_SUMS=1" if o.row.wide else ""
        typer.echo(f"{o.row.ranks:5} {o.row.hosts:5}  {o.row.mode:9}  {cells}{note}".rstrip())
    if wrong:
        typer.echo(f"\nNot the same bits: {', '.join(wrong)}. That is a bug of ours: please report it.")
    else:
        typer.echo("\nThe same bits wherever they must be: docs/explanation/bits.md says where.")
