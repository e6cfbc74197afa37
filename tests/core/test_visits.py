"""Control blocks are reached only through a visit: the compiler refuses everything else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.compiler import compile_c

CORE = Path(__file__).parents[2] / "src" / "symcomm" / "_core"
PROGRAM = """
#include "exec/cma.h"
#include "group/group.h"
#include "sync/sync.h"

int call(struct group *g);
int call(struct group *g) {
    struct visit v;
    if (!visit_begin(&v, g)) return 0;
    int result = RESULT;
    visit_end(&v);
    return result;
}
"""
RIGHT = [
    "sync_fail(&v, STATUS_ABORTED, 0)",
    "sync_aborted(&v)",
    "sync_gone(&v, 0)",
    "cma_can_read(&v, 0)",
    "(int)block_of(&v, 0)->doorbell",
    "*stage_of(&v, 0)",
]
WRONG = [
    "sync_fail(g, STATUS_ABORTED, 0)",
    "sync_aborted(g)",
    "sync_gone(g, 0)",
    "cma_can_read(g, 0)",
    "(int)block_of(g, 0)->doorbell",
    "(int)g->control[0]->doorbell",
    "(int)g->blocks->shared[0]->doorbell",
    "(int)sizeof *g->blocks",
    "*stage_of(g, 0)",
]


def compile_call(folder: Path, result: str) -> None:
    source = folder / "call.c"
    source.write_text(PROGRAM.replace("RESULT", result))
    compile_c(source, folder / "call.o", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-c", f"-I{CORE}")


@pytest.mark.parametrize("result", RIGHT)
def test_with_a_visit_they_are_reached(result: str, tmp_path: Path):
    compile_call(tmp_path, result)


@pytest.mark.parametrize("result", WRONG)
def test_without_a_visit_the_compiler_refuses(result: str, tmp_path: Path):
    with pytest.raises(subprocess.CalledProcessError):
        compile_call(tmp_path, result)
