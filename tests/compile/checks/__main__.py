"""Forks the ranks; torch and Inductor are loaded once, before."""

from __future__ import annotations

import sys

from tests.compile.checks import CHECKS, endurance, graphs, on_top, selected, traced, values, waits
from tests.torch_backend.checks.__main__ import main

assert all((endurance, graphs, on_top, selected, traced, values, waits))  # importing them is what fills CHECKS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CHECKS))
