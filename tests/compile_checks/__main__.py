"""Forks the ranks; torch and Inductor are loaded once, before."""

from __future__ import annotations

import sys

from tests.compile_checks import CHECKS, graphs, on_top, values
from tests.torch_checks.__main__ import main

assert all((graphs, on_top, values))  # importing them is what fills CHECKS

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CHECKS))
