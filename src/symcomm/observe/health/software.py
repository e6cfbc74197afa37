"""Our C core, torch and its entry point, GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys

from symcomm.observe.health import FAIL, OK, WARN, Finding

__all__ = ["CHECKS"]

OLDEST_TORCH = (2, 10)  # as in pyproject.toml
NVIDIA_DEADLINE = 20.0


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("python", FAIL, found, "symmetric memory needs Linux (memfd, futex)")
    return Finding("python", OK, found)


def core() -> Finding:
    """Load it and let it do a little."""
    fix = "build it: pip install symcomm, or `python setup.py build_ext --inplace` in a checkout (needs a C compiler)"
    try:
        from symcomm._core import native
    except ImportError as error:
        return Finding("C core", FAIL, f"cannot be loaded ({error})", fix)
    if abs(native.ticks_to_ns(0)) < 0:
        return Finding("C core", FAIL, "does not work", fix)
    return Finding("C core", OK, str(native.__file__))


def torch() -> list[Finding]:
    """Without importing it: that takes seconds, and a broken one may crash."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [
            Finding("torch", WARN, "not installed", "pip install symcomm[torch]; the launcher and stores work without")
        ]
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        least = ".".join(map(str, OLDEST_TORCH))
        findings = [Finding("torch", FAIL, version, f"symcomm needs torch {least} or newer")]
    else:
        findings = [Finding("torch", OK, version)]
    return [*findings, entry_point()]


def entry_point() -> Finding:
    """By which torch finds the backend when it is imported."""
    found = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "symcomm"]
    if found:
        return Finding("torch backend", OK, f"torch loads it by itself ({found[0].value})")
    fix = (
        "install the package (pip install -e .), or call symcomm.backend.register.register() before init_process_group"
    )
    return Finding("torch backend", WARN, "torch does not find the backend by itself", fix)


def gpus() -> Finding:
    """As nvidia-smi tells; whether their memory can be shared depends on the kind and on the container."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("gpus", OK, "none seen (no nvidia-smi)")
    query = [program, "--query-gpu=name,compute_mode,mig.mode.current", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_DEADLINE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("gpus", WARN, f"nvidia-smi does not answer ({type(error).__name__})", "check the driver: dmesg")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        reason = (done.stderr or done.stdout).strip().splitlines()[:1] or ["no GPU listed"]
        return Finding("gpus", WARN, f"nvidia-smi: {reason[0]}", "check the driver, and docker run --gpus all")
    return judge_gpus(lines)


def judge_gpus(lines: list[str]) -> Finding:
    """``name, compute mode, MIG mode`` of each."""
    names = {line.split(",")[0].strip() for line in lines}
    found = f"{len(lines)} ({', '.join(sorted(names))})"
    if any("Exclusive" in line or "Prohibited" in line for line in lines):
        return Finding("gpus", WARN, f"{found}, in an exclusive mode", "several ranks on one: nvidia-smi -c DEFAULT")
    if any(line.rsplit(",", 1)[1].strip() == "Enabled" for line in lines):
        return Finding("gpus", WARN, f"{found}, split (MIG)", "IPC does not cross instances: one rank an instance")
    return Finding("gpus", OK, found, "ranks share GPU memory by CUDA IPC; in containers that needs --ipc=host")


def interpreter() -> Finding:
    """A torch that was built for another interpreter is a common surprise."""
    inside = sys.prefix != sys.base_prefix
    return Finding("environment", OK, f"{sys.executable} ({'a virtual environment' if inside else 'the system'})")


CHECKS = (("python", python), ("environment", interpreter), ("C core", core), ("torch", torch), ("gpus", gpus))
