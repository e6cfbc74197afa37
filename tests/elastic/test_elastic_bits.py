"""A transformer is trained while its ranks die and are replaced: the bits of an undisturbed run, and of one process."""

from __future__ import annotations

import re

import pytest

from tests.support.examples import losses, run_example

pytestmark = pytest.mark.long


def trained(*deaths: str, ranks: int = 4) -> tuple[set[str], list[int], list[float]]:
    """SHA-256 of the weights of all ranks that came to the end, numbers of ranks in turn, the first and last loss."""
    options = ("--max-restarts", str(len(deaths)), "--restart", "failed") if deaths else ()
    lines = run_example("elastic_bits.py", *deaths, ranks=ranks, options=options)
    weights = {line.split()[1] for line in lines if line.startswith("weights ")}
    sizes = [int(found[1]) for line in lines if (found := re.match(r"step \d+: (\d+) ranks", line))]
    return weights, sizes, losses(lines)


def test_weights_are_those_of_an_undisturbed_run_and_of_one_process():
    whole, sizes, curve = trained()
    assert sizes == [4] and len(whole) == 1 and curve[1] < curve[0] - 1, "it learns"
    assert trained(ranks=1) == (whole, [1], curve)
    weights, sizes, with_deaths = trained("3:4", "2:5", "0:20")
    assert weights == whole and with_deaths == curve
    assert sizes[0] == 4 and 2 in sizes and 4 in sizes[sizes.index(2) :] and sizes[-1] in (3, 4), sizes
