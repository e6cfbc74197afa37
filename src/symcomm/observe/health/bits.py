"""What must be equal on two machines for the bits of what programs compute to be equal. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# By whose words libraries choose their kernels and how they divide work among threads.
CHOOSING = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "SYMCOMM_WIDE_SUMS",
)  # fmt: skip
LIBRARIES = ("torch", "numpy")


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """As the kernel names it; on arm64 the numbers of maker and part."""
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" in facts:
        return facts["model name"]
    parts = [facts[name] for name in ("CPU implementer", "CPU part", "CPU variant") if name in facts]
    return " ".join(parts) or platform.machine()


def instruction_set() -> str:
    """The widest of our kernels that this CPU runs. Ours all give the same bits; torch's matmuls need not."""
    from symcomm._core import native

    return native.reduce_sets()[0][-1]


def version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def what_must_be_equal() -> dict[str, str]:
    """By name; the last is a hash of the others, for comparing machines at a glance."""
    threads = os.environ.get("OMP_NUM_THREADS") or f"not set: all {len(os.sched_getaffinity(0))} cores of a rank"
    found = {
        "CPU": cpu_model(),
        "instruction set": instruction_set(),
        **{library: version_of(library) for library in LIBRARIES},
        "threads per rank": threads,
        **{name: os.environ[name] for name in CHOOSING if name in os.environ},
    }
    told = "\n".join(f"{name} {value}" for name, value in found.items())
    return {**found, "all of it": hashlib.sha256(told.encode()).hexdigest()[:12]}
