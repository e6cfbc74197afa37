"""Our C core, torch and its entry point, GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from symcomm import errors
from symcomm.observe.health import FAIL, OK, WARN, Finding
from symcomm.torch_versions import NEWEST, OLDEST, TESTED, release

NVIDIA_DEADLINE = 20.0
TRIAL_DEADLINE = 20.0
RANKS_DEADLINE = 90.0  # two imports of torch, and CUDA's start
PARTING = 10.0  # seconds that the launcher has to end its ranks
HEAP_ADVICE = "everything works without it; see docs/how-to/shared-heap.md"
DRIFT_NS = 10_000_000  # ten milliseconds of a tenth of a second: no working counter is that far off


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("python", FAIL, found, "symmetric memory needs Linux (memfd, futex)")
    return Finding("python", OK, found)


def core() -> list[Finding]:
    """The extension, and which of its reduction kernels this CPU gets."""
    try:
        from symcomm._core import native
    except ImportError as error:
        fix = "pip install symcomm, or `python setup.py build_ext --inplace` in a checkout (needs a C compiler)"
        return [Finding("C core", FAIL, f"cannot be loaded ({error})", fix)]
    except ValueError as error:
        return [Finding("C core", FAIL, str(error), "unset that variable: the default is what is best for this CPU")]
    sets, chosen = native.reduce_sets()
    found = f"{chosen} (this CPU has {', '.join(sets)})"
    slow = Finding("kernels", WARN, found, "unset SYMCOMM_KERNELS: the results are the same, and come sooner")
    return [Finding("C core", OK, str(native.__file__)), Finding("kernels", OK, found) if chosen == sets[-1] else slow]


def a_collective() -> list[Finding]:
    """Two ranks, as threads, make a group: arenas, waits, and the counter that times records."""
    from symcomm.group.spawn import spawn

    begun = time.monotonic_ns()
    try:
        times = [when for rank in spawn(_meet, 2, mode="threads", deadline=TRIAL_DEADLINE) for when in rank]
    except (errors.SymcommError, OSError) as error:
        return [Finding("collective", FAIL, str(error), "see docs/explanation/failures.md, or report this")]
    ended = time.monotonic_ns()
    findings = [Finding("collective", OK, "two ranks met in shared memory")]
    off = max((max(begun - when, when - ended) for when in times), default=0)
    if off > DRIFT_NS:
        fix = "times in records are wrong by as much; boot with tsc=reliable"
        return [*findings, Finding("tick counter", WARN, f"{off / 1e6:.0f} ms off CLOCK_MONOTONIC", fix)]
    return [*findings, Finding("tick counter", OK, "runs as CLOCK_MONOTONIC does")]


def _meet(group: Any) -> list[int]:
    """When this rank's operations began, by the records."""
    from symcomm.observe.recorder.records import operations_of

    for _ in range(3):
        group.barrier()
    return [operation.created_ns for operation in operations_of(group)[group.rank] if operation.group == group.name]


def torch() -> list[Finding]:
    """Its version, and whether two ranks meet through it. This process does not import it: a broken one may crash or
    hang."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [Finding("torch", WARN, "not installed", "pip install 'symcomm[torch]'")]
    judged = judge_version(version)
    return [judged, entry_point(), *([] if judged.state == FAIL else [torch_group(), shared_heap()])]


def judge_version(version: str) -> Finding:
    """An untested release may work; the next check finds out."""
    found = f"{version} (tested: {', '.join(TESTED)})"
    if not re.match(r"\d+\.\d+", version):
        return Finding("torch", WARN, found, f"its version cannot be read; pip install 'torch=={NEWEST}' if it fails")
    number = release(version)
    if number < release(OLDEST):
        return Finding("torch", FAIL, found, f"symcomm needs torch {OLDEST} or newer: pip install 'torch=={NEWEST}'")
    if number not in map(release, TESTED):
        fix = f"not tested yet; if it fails: pip install 'torch=={NEWEST}'"
        return Finding("torch", WARN, found, fix)
    return Finding("torch", OK, found)


def torch_group() -> Finding:
    """Two ranks make a group through torch.distributed, sum a tensor, destroy the group, then repeat it."""
    failure = run_two_ranks("cpu")
    if failure is not None:
        fix = f"pip install --force-reinstall 'torch=={NEWEST}'; if that does not help, report this"
        return Finding("torch group", FAIL, f"two ranks cannot use torch.distributed: {failure}", fix)
    return Finding("torch group", OK, "two ranks made a group through torch.distributed, twice")


def shared_heap() -> Finding:
    """The same with tensors in the shared heap, which depends on torch's allocator and the system's memory."""
    failure = run_two_ranks("heap")
    if failure is not None:
        return Finding("shared heap", WARN, f"tensors are ordinary with SYMCOMM_HEAP: {failure}", HEAP_ADVICE)
    return Finding("shared heap", OK, "with SYMCOMM_HEAP=1 tensors lie where peers read them")


def entry_point() -> Finding:
    """The entry point by which torch finds the backend at import."""
    found = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "symcomm"]
    if found:
        return Finding("torch backend", OK, f"torch loads it by itself ({found[0].value})")
    fix = "install the package (pip install symcomm), or call symcomm.torch_backend.register.register() yourself"
    return Finding("torch backend", WARN, "torch does not find the backend by itself", fix)


def gpus() -> Finding | list[Finding]:
    """GPUs as nvidia-smi lists them, and whether two ranks can share the memory of one."""
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
    found = judge_gpus(lines)
    return [found, share_device("cuda:0")] if found.state == OK else found


def share_device(device: str) -> Finding:
    """Two ranks sum a tensor on it."""
    failure = run_two_ranks(device)
    if failure is not None:
        fix = "containers: --ipc=host, and the same pid namespace for all ranks; else see docs/how-to/gpu.md"
        return Finding("gpu memory", FAIL, f"two ranks cannot share {device}: {failure}", fix)
    return Finding("gpu memory", OK, f"two ranks summed a tensor on {device}")


def run_two_ranks(device: str) -> str | None:
    """Why two ranks cannot sum a tensor there, or None. They are separate processes with a deadline: a broken torch or
    driver may crash them or hang."""
    command = [sys.executable, "-m", "symcomm", "run", "-n", "2", "-m", "symcomm.cli.doctor_ranks", device]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            _, told = launcher.communicate(timeout=RANKS_DEADLINE)
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGTERM)  # which it passes on to its ranks
            try:
                launcher.communicate(timeout=PARTING)
            except subprocess.TimeoutExpired:
                launcher.kill()
            return f"not done after {RANKS_DEADLINE:.0f} s"
    if launcher.returncode == 0:
        return None
    lines = [line for line in told.splitlines() if "Error" in line] or told.splitlines() or ["no words"]
    return lines[-1].strip()


def judge_gpus(lines: list[str]) -> Finding:
    """``name, compute mode, MIG mode`` of each."""
    names = {line.split(",")[0].strip() for line in lines}
    found = f"{len(lines)} ({', '.join(sorted(names))})"
    if any("Exclusive" in line or "Prohibited" in line for line in lines):
        return Finding("gpus", WARN, f"{found}, in an exclusive mode", "several ranks on one: nvidia-smi -c DEFAULT")
    if any(line.rsplit(",", 1)[1].strip() == "Enabled" for line in lines):
        return Finding("gpus", WARN, f"{found}, split (MIG)", "IPC does not cross instances: one rank an instance")
    return Finding("gpus", OK, found)


def interpreter() -> Finding:
    """Which interpreter: a torch built for another one is a common mistake."""
    inside = sys.prefix != sys.base_prefix
    return Finding("environment", OK, f"{sys.executable} ({'a virtual environment' if inside else 'the system'})")


CHECKS = (
    ("python", python),
    ("environment", interpreter),
    ("C core", core),
    ("collective", a_collective),
    ("torch", torch),
    ("gpus", gpus),
)
