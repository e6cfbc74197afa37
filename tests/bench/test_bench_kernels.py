"""`symcomm bench kernels`: sizes that fit the caches, bytes counted alike, rows as they come."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symcomm._core import native
from symcomm.bench import kernels as bench_kernels
from symcomm.bench import table as bench_table
from symcomm.bench.kernels import Buffers, KernelsMeasurement, KernelsWorkload
from symcomm.cli import bench
from symcomm.types import DType, RedOpType

SIZES = {"L1": 4096, "memory": 16384}
TINY = KernelsWorkload(sources=3, rounds=2, seconds=0, dtypes=(DType.FLOAT32, DType.COMPLEX64), sizes=SIZES)


def cli(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench.app, list(args))
    return result.exit_code, result.output


def make_caches(folder: Path, *levels: tuple[str, str, str]) -> Path:
    for number, words in enumerate(levels):
        index = folder / f"index{number}"
        index.mkdir()
        for name, word in zip(("level", "type", "size"), words, strict=True):
            (index / name).write_text(word + "\n")
    return folder


def test_buffers_fit_their_level(tmp_path: Path):
    caches = make_caches(
        tmp_path,
        ("1", "Data", "48K"),
        ("1", "Instruction", "512K"),
        ("2", "Unified", "2048K"),
        ("3", "Unified", "36864K"),
    )
    assert bench_kernels.buffer_sizes(2, caches) == {"L1": 8 << 10, "L2": 256 << 10, "memory": 64 << 20}
    assert bench_kernels.buffer_sizes(7, caches)["L1"] * 8 <= 48 << 10
    nothing = tmp_path / "nothing"  # a virtual machine may not say what it has
    assert bench_kernels.buffer_sizes(2, nothing)["memory"] > bench_kernels.USUAL_CACHES[3]


def test_what_is_timed_is_done():
    """So often, on all sources; with -1 a copy of the first."""
    buffers = Buffers(2, 4096)
    out, first, second = ((ctypes.c_uint32 * 1024).from_address(place) for place in (buffers.out, *buffers.sources))
    first[:], second[:] = range(1024), [7] * 1024
    assert buffers.time(DType.UINT32, RedOpType.SUM, 1) > 0
    assert list(out) == [i + 7 for i in range(1024)]
    assert buffers.time(None, bench_kernels.COPY, 3) > 0
    assert list(out) == list(range(1024))
    places = [place % 4096 for place in (buffers.out, *buffers.sources)]
    assert len(set(places)) == 3, "no two at the same place of a page"
    with pytest.raises(ValueError, match="BAND is not defined for float32"):
        native.time_reduce(DType.FLOAT32, RedOpType.BAND, buffers.out, buffers.sources, 4, 1)


def test_bytes_are_counted_alike(monkeypatch: pytest.MonkeyPatch):
    """Each call takes a microsecond: three sources and a result are twice what a memcpy of one moves."""
    monkeypatch.setattr(Buffers, "time", lambda self, dtype, op, repeats: 1e-6)
    rows = bench_kernels.run_kernels_bench(TINY)
    assert (rows[0].dtype, rows[0].rates["L1"]) == (None, pytest.approx(2 * 4096 / 1e3))
    assert all(row.rates["memory"] == pytest.approx(4 * 16384 / 1e3) for row in rows[1:])
    assert all(row.shares["memory"] == pytest.approx(2) for row in rows[1:])


def test_every_operation_a_type_has_is_measured():
    seen: list[KernelsMeasurement] = []
    rows = bench_kernels.run_kernels_bench(TINY, seen=lambda rows: seen.append(rows[-1]))
    assert seen == rows
    floats = [row.op for row in rows if row.dtype == DType.FLOAT32]
    assert floats == [op for op in RedOpType if op not in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)]
    assert RedOpType.MAX not in [row.op for row in rows if row.dtype == DType.COMPLEX64]
    assert all(rate > 0 for row in rows for rate in row.rates.values())
    lines: list[str] = []
    table = bench_table.GrowingTable("", bench_kernels.head(TINY), lines.append, markdown=False)
    for row in rows:
        table.add(bench_kernels.cells(row))
    assert len(set(map(len, lines[1:]))) == 1, "head and rows are as wide"


def test_what_is_far_from_memcpy_is_marked():
    slow, fast = (
        KernelsMeasurement(DType.FLOAT16, RedOpType.SUM, {"memory": 9.0}, {"memory": share}) for share in (0.5, 0.9)
    )
    other = KernelsMeasurement(DType.INT32, RedOpType.AVG, {"memory": 9.0}, {"memory": 0.5})
    assert [bench_kernels.cells(row)[-1] for row in (slow, fast, other)] == [f"50%{bench_table.MISSED}", "90%", "50%"]
    assert "below 80% of memcpy (1)" in bench_kernels.note([slow, fast, other], TINY)
    assert "below" not in bench_kernels.note([fast, other], TINY)


@pytest.mark.parametrize("markdown", [False, True], ids=["text", "markdown"])
def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, markdown: bool):
    monkeypatch.setattr(bench_kernels, "QUICK", {"dtypes": (DType.BFLOAT16,), "seconds": 0})
    monkeypatch.setattr(bench_kernels, "buffer_sizes", lambda sources: SIZES)
    path = tmp_path / "kernels.json"
    code, output = cli(
        "kernels", "--quick", "--rounds", "1", "--json", str(path), *(["--markdown"] if markdown else [])
    )
    assert code == 0, output
    assert f"2 sources, kernels: {native.reduce_sets()[1]}" in output
    found = json.loads(path.read_text())
    assert [(row["dtype"], row["op"]) for row in found["rows"][:2]] == [(None, None), ("bfloat16", "SUM")]
    shown = [line for line in output.splitlines() if re.search(r"\bbfloat16\b", line)]
    assert len(shown) == len(found["rows"]) - 1 and all(line.startswith("|") is markdown for line in shown)
    [small, large] = bench_kernels.picture(bench_kernels.run_kernels_bench(TINY), TINY)
    assert (small.title, large.title) == ("L1, 4 KiB each", "memory, 16 KiB each")
    assert set(small.groups) == {"memcpy", "float32", "complex64"}


def test_refusals():
    code, output = cli("kernels", "--ranks", "0")
    assert code == 2 and "1 or more for kernels" in output
