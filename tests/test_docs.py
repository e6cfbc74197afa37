"""Every Python block of the documentation runs, top to bottom, page by page; every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_turn import parts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
ids = [page.name for page in PAGES]


def blocks_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))


WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """What each page's blocks did: an exit code, and what they said."""
    scripts = [tmp_path_factory.mktemp("pages") / f"{page.name}.py" for page in WITH_BLOCKS]
    for page, script in zip(WITH_BLOCKS, scripts, strict=True):
        script.write_text(blocks_of(page))
    programs = [str(script) for script in scripts]
    command = [sys.executable, str(ROOT / "tests" / "in_turn.py"), *programs]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=environment, text=True, timeout=500, **both)
    return dict(zip([page.name for page in WITH_BLOCKS], parts(done.stdout.splitlines(), programs), strict=True))


@pytest.mark.timeout(550)
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, ran: dict[str, tuple[str, list[str]]]):
    code, said = ran[page.name]
    assert code == "0", "\n".join([f"{page.name} does not run:", *said])


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
