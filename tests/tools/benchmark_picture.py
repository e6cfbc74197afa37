"""``python -m tests.tools.benchmark_picture docs/images/all-reduce-times.svg``: draws a table of BENCHMARKS.md.

The all_reduces of its first table, drawn as `symcomm bench all_reduce --against ... --plot` draws those of a run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from symcomm.bench.pictures import draw
from symcomm.bench.table import over_size
from symcomm.simulate.units import parse_bytes

LABELS = ("symcomm, ordinary tensors", "symcomm, symmetric tensors", "Gloo", "MPICH", "Open MPI")


def lines_of(text: str, collective: str) -> dict[str, list[tuple[int, float]]]:
    """What each side took, in microseconds, by size."""
    lines: dict[str, list[tuple[int, float]]] = {label: [] for label in LABELS}
    table = re.split(r"^## ", text, flags=re.M)[1]
    for row in re.findall(rf"^\| {collective} \| (.*) \|$", table, flags=re.M):
        size, *times = row.split(" | ")
        nbytes = parse_bytes("benchmark_picture", "size", size.replace(" ", ""))
        for label, time in zip(LABELS, times, strict=False):
            lines[label].append((nbytes, float(time)))
    return lines


def main(picture: Path) -> None:
    text = (Path(__file__).parents[2] / "BENCHMARKS.md").read_text()
    panel = over_size("", "microseconds", lines_of(text, "all_reduce"))
    draw(picture, "all_reduce of 2 ranks on 2 cores: time of one call, lower is better", [panel])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
