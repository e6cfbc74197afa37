"""Every Python block of the documentation runs alone, every link leads somewhere, every picture is described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S) for page in PAGES}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).replace("/", "-")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What went wrong in blocks, each of which begins with its page and number. All run in forks of one process."""
    folder = tmp_path_factory.mktemp("blocks")
    for page, blocks in BLOCKS.items():
        for number, block in enumerate(blocks):
            (folder / f"{name_of(page)}-{number}.py").write_text(block)
    command = [sys.executable, "-m", "tests.support.run_blocks", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=450)
    found = [text for text in done.stdout.split("\0") if text.strip()]
    assert done.returncode == len(found), done.stderr
    return found


@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", [p for p in PAGES if BLOCKS[p]], ids=name_of)
def test_python_blocks_run_alone(page: Path, failures: list[str]):
    assert [text for text in failures if re.match(rf"{name_of(page)}-\d+\.py ", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_contributing_names_exists():
    """Files by their path in the checkout or the package, or by their name; anything else somewhere in the sources."""
    sources = [*ROOT.glob("src/symcomm/**/*.py"), *ROOT.glob("src/symcomm/**/*.[ch]"), *ROOT.glob("tests/**/*.py")]
    paths = [str(path.relative_to(ROOT)) for path in sources]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    how = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].partition("## Tests")[0]
    for named in re.findall(r"`(?!NAME)([\w./]+)`", how):
        if "/" in named or named.endswith((".py", ".c", ".h")):
            assert any(f"/{named}" in f"/{path}" for path in paths), (
                f"CONTRIBUTING.md names {named}, which is not there"
            )
        else:
            assert named.rpartition(".")[2] in words, f"CONTRIBUTING.md names {named}, which no source has"


def test_pictures_are_shown_and_described():
    shown = [found for page in PAGES for found in re.findall(r"!\[(.*?)\]\([^)]*images/([\w.-]+)\)", page.read_text())]
    assert {name for _, name in shown} == {path.name for path in (ROOT / "docs/images").iterdir()}
    assert all(len(text) > 30 for text, _ in shown)
