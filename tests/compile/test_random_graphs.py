"""Twenty random graphs of functional collectives; ``make graphs`` takes hundreds, each compiled by itself."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("torch")

from symcomm.torch_versions import release
from tests.compile.random_graphs.generate import program_of, smaller
from tests.compile.random_graphs.program import text_of
from tests.compile.random_graphs.steps import TABLE
from tests.support import loaded
from tests.support.programs import environment, kernels_of

pytestmark = pytest.mark.torch_versions

ROOT = Path(__file__).parents[2]
FIRST, COUNT = 1000, 20
DEADLINE = 500  # 25 s of CPU time, and as much again where no kernel is known yet


def test_the_seeds_have_every_kind_of_graph():
    programs = [program_of(seed) for seed in range(500)]
    assert {(p.dynamic, p.traced) for p in programs} == {(False, False), (True, False), (False, True)}
    assert {step.op for p in programs for step in p.steps} == set(TABLE)
    assert programs == [program_of(seed) for seed in range(500)], "a seed makes one graph"


def test_a_graph_gets_smaller_and_stays_legal():
    program = program_of(FIRST)
    for candidate in smaller(program):
        assert text_of(candidate, TABLE).count("\n") <= text_of(program, TABLE).count("\n")
        assert candidate != program


@pytest.mark.skipif(
    release(metadata.version("torch")) < (2, 12), reason="Dynamo traces our groups as objects since torch 2.12"
)
@pytest.mark.timeout(DEADLINE + 30)
def test_compiled_graphs_give_what_they_give_uncompiled():
    command = [sys.executable, "-m", "tests.compile.random_graphs", "--quick", "--seed", str(FIRST)]
    command += ["--graphs", str(COUNT), "--together", str(COUNT)]
    extra = {"TORCHINDUCTOR_CACHE_DIR": kernels_of("random_graphs")}
    done = loaded.run(command, env=environment(**extra), cwd=ROOT, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
