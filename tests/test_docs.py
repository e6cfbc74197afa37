"""Every Python block of the documentation runs, top to bottom, page by page; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
ids = [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_blocks_run(page: Path, tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{page.name} does not run:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
