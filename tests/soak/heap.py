"""Does the shared heap take more memory than malloc? ``python -m tests.soak.heap MINUTES``: the same loop of tensors
that grow and shrink, in two processes at once, one with SYMCOMM_HEAP=1. What both have is compared, RSS and PSS."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time

MIB = 1 << 20
PERIOD = 8.0  # seconds in which the program grows and shrinks once
MOST = 512 * MIB
PART = 0.1  # by which the heap may take more


def live(minutes: float) -> None:
    """Holds more and more tensors of random sizes, then fewer and fewer, again and again; prints what it has."""
    import torch

    torch.set_num_threads(1)
    chance, tensors, held, begun = random.Random(1), [], 0, time.monotonic()
    at_first = resident("Rss")
    print(0, 0, 0, flush=True)
    while (now := time.monotonic() - begun) < 60 * minutes:
        phase = now % PERIOD / PERIOD
        wanted = MOST * min(2 * phase, 2 - 2 * phase)
        while held < wanted:
            tensors.append(torch.ones(chance.choice([5000, 50_000, 500_000, 3_000_000])))
            held += tensors[-1].nbytes
        while held > wanted:
            tensor = tensors.pop(chance.randrange(len(tensors)))
            held -= tensor.nbytes
            del tensor
        print(f"{now:.1f}", resident("Rss") - at_first, resident("Pss") - at_first, flush=True)
        time.sleep(0.25)


def resident(which: str) -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(which + ":"))


def main(minutes: float) -> int:
    sides = {}
    for name, value in (("malloc", "0"), ("heap", "1")):
        command = [sys.executable, "-m", "tests.soak.heap", "live", str(minutes)]
        environment = {**os.environ, "SYMCOMM_HEAP": value}
        sides[name] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    told = {name: [line.split() for line in process.communicate()[0].splitlines()] for name, process in sides.items()}
    if any(process.returncode for process in sides.values()):
        return 1
    bad = 0
    for column, which in ((1, "RSS"), (2, "PSS")):
        taken = {name: [int(row[column]) / MIB for row in rows] for name, rows in told.items()}
        for what, of in (("mean", statistics.mean), ("most", max)):
            malloc, heap = of(taken["malloc"]), of(taken["heap"])
            is_right = heap <= malloc * (1 + PART)
            bad += not is_right
            print(f"{which}, {what}: malloc {malloc:.0f} MiB, heap {heap:.0f} MiB" + ("" if is_right else "  TOO MUCH"))
    return min(bad, 1)


if __name__ == "__main__":
    if sys.argv[1] == "live":
        live(float(sys.argv[2]))
    else:
        sys.exit(main(float(sys.argv[1])))
