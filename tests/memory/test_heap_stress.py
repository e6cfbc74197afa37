"""The shared heap's C files by themselves: threads and forks, plain and under the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.compiler import compile_c

SOURCE = Path(__file__).parent / "heap_stress.c"
CORE = Path(__file__).parents[2] / "src" / "symcomm" / "_core"
PARTS = [str(CORE / "memory" / f"{name}.c") for name in ("heap", "heap_forks", "page_ranges", "isolate")]


@pytest.mark.parametrize(("sanitizers", "rounds"), [("", 3000), ("address,undefined", 1500), ("thread", 300)])
def test_blocks_keep_their_bytes_and_all_memory_comes_back(sanitizers: str, rounds: int, tmp_path: Path):
    flags = ["-std=gnu11", "-g", "-pthread", "-D_GNU_SOURCE", f"-I{CORE}", *PARTS]
    program = compile_c(SOURCE, tmp_path / "stress", *flags, *([f"-fsanitize={sanitizers}"] if sanitizers else []))
    for seed in range(3):
        command = [str(program), str(seed), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0 and done.stderr == "", done.stderr[-4000:]
