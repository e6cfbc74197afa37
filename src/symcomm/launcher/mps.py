"""NVIDIA's Multi-Process Service for one job: with it, ranks that share a GPU use it at the same time instead of in
turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from symcomm.errors import CallerError, ResourceError

PROGRAM = "nvidia-cuda-mps-control"
START_S, STOP_S = 20, 20


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """Starts the service in folders of its own, yields the variables that lead ranks to it, and stops it at the end."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}  # another process already runs one
        return
    program = shutil.which(PROGRAM)
    if program is None:
        raise CallerError(
            f"symcomm run: --mps needs {PROGRAM}, which comes with NVIDIA's driver and was not found on the PATH; "
            "install it, or run without --mps."
        )
    folder = tempfile.mkdtemp(prefix="symcomm-mps-")
    names = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in names.values():
        os.mkdir(path)
    environment = {**os.environ, **names}
    try:
        _start(program, environment)
        try:
            yield names
        finally:
            _stop(program, environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(program: str, environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            [program, "-d"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S
        )
        said = (done.stderr or done.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        done, said = None, str(error)
    if done is None or done.returncode:
        raise ResourceError(
            f"symcomm run: --mps: {PROGRAM} did not start ({said or 'it said nothing'}); the GPU may be in exclusive "
            "mode, or not yours to share. Run without --mps."
        )


def _stop(program: str, environment: dict[str, str]) -> None:
    """Stops the service with the job. If it does not answer, it exits after its last client."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([program], env=environment, input="quit\n", capture_output=True, text=True, timeout=STOP_S)
