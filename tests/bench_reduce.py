"""How fast the reduction kernels are: python -m tests.bench_reduce [bytes per source]

Prints GB/s of memory touched (every source read once, the result written once), and the time as a multiple of a
memcpy of one source's bytes. Sizes by default: what fits the L2 cache, and what fits no cache.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

from symcomm._core import native
from symcomm.types import DType, RedOpType


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The best of several rounds: others on this machine can only slow us down."""
    best = float("inf")
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def measure(size: int) -> None:
    repeats = max(1, (8 << 20) // size)
    memory = [ctypes.create_string_buffer(size) for _ in range(17)]
    out, *sources = [ctypes.addressof(m) for m in memory]
    for address in (out, *sources):
        ctypes.memset(address, 1, size)  # memory never written is not there yet
    copy = best_seconds(lambda: ctypes.memmove(out, sources[0], size), repeats)
    print(f"\n{size >> 10} KiB per source; memcpy {size / copy / 1e9:.1f} GB/s copied")

    def line(dtype: DType, op: RedOpType, n: int) -> float:
        call = lambda: native.reduce(dtype, op, out, sources[:n], size // dtype.itemsize, 0.5)  # noqa: E731
        seconds = best_seconds(call, repeats)
        touched = size * (n + 1) / seconds / 1e9
        print(f"  {dtype.label:16}{op.name:11}{n:3} sources {seconds * 1e6:10.1f} us {touched:7.1f} GB/s", end="")
        print(f"{seconds / copy:7.2f} x memcpy")
        return seconds

    for n in (2, 3, 4, 8, 16):
        line(DType.FLOAT32, RedOpType.SUM, n)
    for op in (RedOpType.AVG, RedOpType.MAX, RedOpType.PREMUL_SUM):
        line(DType.FLOAT32, op, 2)
    line(DType.FLOAT32, RedOpType.AVG, 3)
    for dtype in DType:
        line(dtype, RedOpType.SUM, 2)
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        line(dtype, RedOpType.SUM, 8)


if __name__ == "__main__":
    for size in [int(a) for a in sys.argv[1:]] or [128 << 10, 32 << 20]:
        measure(size)
