"""Compiles C programs of tests, if there is a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    strict = ["-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*COMPILER.split(), *strict, str(source), "-o", str(target), *flags], check=True, timeout=60)
    return target
