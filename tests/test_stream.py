"""Results that are written past the caches (`_core/stream.c`): the same bits, whatever their size and address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="values are compared with torch's")
ROOT = Path(__file__).parent.parent

REDUCTIONS = """
import torch
from symcomm._core import _native
torch.manual_seed(0)
names = [name for name, _ in _native.reduce_tables()[0]]
for dtype in (torch.float32, torch.bfloat16, torch.uint8):
    number = names.index(str(dtype).removeprefix("torch."))
    for count in (0, 1, 15, 63, 64, 65, 5000, 16384, 40001):
        for shift in (0, 1, 7):
            a, b, out = (torch.randint(0, 9, (count + shift + 1,)).to(dtype) for _ in range(3))
            before, after = out[:shift].clone(), out[shift + count :].clone()
            item = a.element_size()
            sources = [a.data_ptr() + shift * item, b.data_ptr()]
            _native.reduce(number, 0, out.data_ptr() + shift * item, sources, count)
            assert torch.equal(out[shift : shift + count], a[shift : shift + count] + b[:count]), (dtype, count, shift)
            assert torch.equal(out[:shift], before) and torch.equal(out[shift + count :], after)
            into_a = a[shift : shift + count] + b[:count]
            _native.reduce(number, 0, sources[0], sources, count)
            assert torch.equal(a[shift : shift + count], into_a)
print("right")
"""


def run(stream_bytes: str, *command: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "SYMCOMM_STREAM_BYTES": stream_bytes, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stream_bytes", ["0", "100000000000"], ids=["always", "never"])
def test_reductions(stream_bytes: str):
    assert run(stream_bytes, "-c", REDUCTIONS) == "right\n"


@pytest.mark.parametrize("ranks", ["2", "3"])
def test_every_collective_and_messages(ranks: str):
    """Before it measures, a benchmark compares every element."""
    sizes = ("-b", "12", "-e", "3M", "-f", "64")
    said = run("0", "-m", "symcomm", "bench", "all", *sizes, "--ranks", ranks, "--rounds", "1", "-n", "1", "-w", "1")
    assert "# wrong elements: 0" in said
    assert said.count("all_to_all") >= 1 and said.count("p2p") >= 1, said
