"""Do tests of the kit ever fail by chance? ``python -m tests.soak.kit RUNS [TESTERS]`` runs as many in pytest, in so
many processes at once (3), beside two that keep the cores busy: ranks as threads and as forks, with kills and without.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUSY = "while True: sum(range(10**6))"
TESTS = """
import pytest, torch
import torch.distributed as dist
from symcomm import testing
from symcomm.errors import RankFailedError

@pytest.mark.parametrize("run", range({threads}))
@testing.ranks(4)
def test_threads(group, run):
    x = torch.full((1000,), float(group.rank + run))
    group.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), 6.0 + 4 * run))

@pytest.mark.parametrize("run", range({forks}))
@testing.ranks(2, mode="processes")
def test_forks(group, run):
    x = torch.full((1000,), float(group.rank + run))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), 1.0 + 2 * run))

@pytest.mark.parametrize("run", range({forks}))
@testing.ranks(3, mode="processes", kill="rank 2 at all_reduce 2")
def test_kills(group, run):
    x = torch.ones(10)
    group.all_reduce(x)
    assert x.tolist() == [3.0] * 10
    with pytest.raises(RankFailedError, match="rank 2"):
        group.all_reduce(x)
"""


def run(runs: int, testers: int) -> int:
    """How many of them failed."""
    each = -(-runs // (testers * 4))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    begun, passed, failed = time.monotonic(), 0, 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_kit.py").write_text(TESTS.format(threads=2 * each, forks=each))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", folder]
            started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(testers)]
            for process in started:
                said, _ = process.communicate()
                counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", said)}
                passed, failed = (
                    passed + counts.get("passed", 0),
                    failed + sum(counts.values()) - counts.get("passed", 0),
                )
                if process.returncode:
                    print(said[-4000:], flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{passed} passed, {failed} failed, in {time.monotonic() - begun:.0f} s")
    return failed + (passed < runs)


if __name__ == "__main__":
    sys.exit(1 if run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3) else 0)
