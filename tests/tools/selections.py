"""Which test files run where: on another torch (``make test-torch``), on another Python without torch
(``make test-python``).

Each file says so itself, in its ``pytestmark``. Here that is read from its source: a file that imports torch cannot be
imported, and so not asked by pytest, where torch is missing. ``python -m tests.tools.selections torch_versions`` prints
a selection.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# What `make test-heap` runs with the shared heap, from which even the smallest tensors come then: those of tests are
# small, and each is another place for peers to read.
HEAP, HEAP_SIZES = "heap", "1B"
HEAP_FOLDERS = ("c10d", "collectives", "compile", "ddp", "group", "memory", "symm_mem", "torch_backend", "windows")
SELECTIONS = ("torch_versions", "without_torch")  # markers; a file that has neither runs in `make test` only


def all_files() -> dict[str, Path]:
    """All of them, by the names that logs give them."""
    return {path.stem: path for path in sorted(TESTS.rglob("test_*.py"))}


def markers(source: str) -> set[str]:
    """Names of the markers in a file's ``pytestmark``."""
    values = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
    ]
    return {
        node.attr
        for value in values
        for node in ast.walk(value)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }


def selected(marker: str) -> list[str]:
    """Paths of the files that have a marker, or of the folders for the heap, from the checkout's root."""
    if marker == HEAP:
        return [str((TESTS / folder).relative_to(TESTS.parent)) for folder in HEAP_FOLDERS]
    found = [path for path in all_files().values() if marker in markers(path.read_text())]
    return [str(path.relative_to(TESTS.parent)) for path in found]


if __name__ == "__main__":
    print(*selected(sys.argv[1]))
