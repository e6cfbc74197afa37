"""``python -m tests.tools.live_page docs/images/live-page.png``: takes the picture of `symcomm top`.

The job is really stuck: of its eight ranks, rank 3 is always a little late, and rank 5 reads a batch that never comes.
Needs a browser (`make browser`).
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.browsers import any_browser

TRAIN = """
import time
import numpy
import symcomm
from loader import next_batch

def train(group):
    gradients, shard = numpy.zeros(1 << 20, numpy.float32), numpy.zeros(1 << 17, numpy.float32)
    for step in range(1000):
        next_batch(group.rank, step)
        time.sleep(0.25 + 0.01 * (group.rank % 3))
        group.all_gather_single(gradients, shard)
        time.sleep(0.20 if group.rank != 3 else 0.35)
        group.reduce_scatter_single(shard, gradients)
        time.sleep(0.03)
        group.all_reduce(gradients[:1000])
        if step % 4 == 0:
            group.broadcast(shard, 0)
        if group.rank == 0:
            print("step", step, flush=True)

train(symcomm.init())
"""
LOADER = """
import os

def read_exactly(pipe, count):
    return os.read(pipe, count)

def next_batch(rank, step):
    pipe, writer = os.pipe()
    if rank != 5 or step < 16:
        os.write(writer, bytes(1024))
    return read_exactly(pipe, 1024)
"""


@contextlib.contextmanager
def running(*command: str, cwd: str) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "symcomm", *command], cwd=cwd, **pipes)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def first(pattern: str, process: subprocess.Popen[str]) -> str:
    """What a process prints that fits the pattern."""
    for line in process.stdout or ():
        if found := re.search(pattern, line):
            return found[0]
    raise SystemExit(f"{process.args} ended without printing {pattern}")


def take(tab: Any, url: str, picture: Path) -> None:
    tab.goto(url)
    tab.wait_for_selector("#banner:not([hidden])", timeout=120_000)
    tab.click("#show")
    tab.click("#stacks")
    tab.wait_for_selector("#stack:not([hidden])")
    tab.evaluate("scrollTo(0, 0)")
    below = tab.locator("#stack").bounding_box()["y"] + 120  # the rank's own stack, not those of its other threads
    tab.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1360, "height": below})


def main(picture: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="job-") as folder, any_browser() as browser:
        Path(folder, "train.py").write_text(TRAIN.lstrip())
        Path(folder, "loader.py").write_text(LOADER.lstrip())
        tab = browser.new_page(viewport={"width": 1360, "height": 1200}, color_scheme="light")
        with running("run", "-n", "8", "--server", "train.py", cwd=folder) as job:
            first("step 0", job)
            with running("top", str(job.pid), cwd=folder) as top:
                take(tab, first(r"http://\S+", top), picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
