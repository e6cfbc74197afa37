"""Arrays that show themselves as torch's tensors do take the fast paths, too, where torch, and so autograd, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import numpy as np
import symcomm
from tests.support.exchange_array import ExchangeArray, install

def use(group):
    for count in (3, 3, 3, 20_001):
        parts = [ExchangeArray(np.zeros(count, "f4")) for _ in range(group.size)]
        group.all_gather(parts, ExchangeArray(np.full(count, group.rank + 1, "f4")))
        assert [set(part.values.tolist()) for part in parts] == [{1.0}, {2.0}]
        group.scatter(parts[0], parts if group.rank == 0 else None, 0)
        assert set(parts[0].values.tolist()) == {group.rank + 1.0}

assert install()
symcomm.spawn(use, 2, mode="threads", timeout=60)
print("torch" in sys.modules)
"""


def test_fast_paths_without_torch():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr
