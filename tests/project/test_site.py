"""The site builds strictly, has every public name, works without a network, and names only what there is."""

from __future__ import annotations

import builtins
import enum
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zlib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="most public names need it")
c10d = importlib.import_module("symcomm.c10d")
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page: page.read_text() for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
REFERENCE = "".join(text for page, text in PAGES.items() if page.parent.name == "reference")
CODE = "".join(block for text in PAGES.values() for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.[pc]*")) if path.suffix in (".py", ".c"))
MODULES = (
    "symcomm", "symcomm.errors", "symcomm.comm", "symcomm.store", "symcomm.symm_mem", "symcomm.windows", "symcomm.ddp",
    "symcomm.ddp.hooks", "symcomm.elastic", "symcomm.compile", "symcomm.ray", "symcomm.simulate",
)  # fmt: skip


def public_names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in module.__all__:
            value = getattr(module, attribute)
            if not inspect.ismodule(value) and (attribute == "__version__" or not attribute.startswith("_")):
                found[f"{name}.{attribute}"] = value
    return found


NAMES = public_names()
# PyTorch's names, those with a leading underscore included; most that begin with one are its own functions.
C10D = {name: getattr(c10d, name) for name in c10d.__all__}
OWN_C10D = {
    f"symcomm.c10d.{name}": value
    for name, value in C10D.items()
    if getattr(value, "__module__", "").startswith("symcomm.")
}


def missing_from(listed: set[str]) -> set[str]:
    """Names that are not listed; what has two names is listed under one."""
    there = [id(value) for name, value in NAMES.items() if name in listed]
    return {name for name, value in NAMES.items() if name not in listed and id(value) not in there}


def can_raise(value: Any) -> bool:
    """Functions and classes that do something; not exceptions, enumerations, plain records and constants."""
    if inspect.isclass(value):
        return not (issubclass(value, (BaseException, enum.Enum, tuple)) or is_dataclass(value))
    return callable(value)


def test_every_public_name_says_what_it_raises():
    assert len(NAMES) > 150 and len(OWN_C10D) > 80
    named = (NAMES | OWN_C10D).items()
    silent = [name for name, value in named if can_raise(value) and "Raises:" not in (inspect.getdoc(value) or "")]
    assert silent == [], "add a line `Raises: ...` to these docstrings"


def test_what_is_raised_exists():
    """Names of errors after ``Raises:`` are ours or Python's."""
    errors = importlib.import_module("symcomm.errors")
    for name, value in (NAMES | OWN_C10D).items():
        text = inspect.getdoc(value) or ""
        for error in re.findall(r"\b\w+Error\b", text.partition("Raises:")[2]):
            assert hasattr(errors, error) or hasattr(builtins, error), (name, error)


def test_every_public_name_has_its_place_and_an_example():
    placed = set(re.findall(r"^::: ([\w.]+)", REFERENCE, re.M))
    assert missing_from(placed) == set(), "add `::: name` to a page of docs/reference"
    words = set(re.findall(r"\w+", CODE))
    errors = {name for name in NAMES if name.startswith("symcomm.errors.")}
    unused = [name for name in NAMES if name not in errors and name.rsplit(".", 1)[1] not in words]
    assert unused == [], "use these in a Python block of the reference"


def test_c10d_names_are_listed_one_by_one():
    page = (DOCS / "reference/c10d-api.md").read_text()
    listed = re.findall(r"^(?:::: symcomm\.c10d\.(\w+)$|\| `(\w+)` \|)", page, re.M)
    names = [own or other for own, other in listed]
    assert len(names) == len(set(names))
    assert {name for name in C10D if not name.startswith("ProcessGroup")} <= set(names)  # newer torch has more engines
    words = set(re.findall(r"\w+", CODE))
    assert [name for name in C10D if not name.startswith(("_", "ProcessGroup", "NCCLX")) and name not in words] == []


def test_environment_variables_are_those_that_are_read():
    page = (DOCS / "reference/environment.md").read_text()
    listed = set(re.findall(r"SYMCOMM_[A-Z_]*[A-Z]", page))
    everywhere = set(re.findall(r"\bSYMCOMM_[A-Z_]*[A-Z]\b", "".join(PAGES.values())))
    assert everywhere - listed == set(), "not on the page of environment variables"
    built_from = {"SYMCOMM_SERVER_CERT", "SYMCOMM_SERVER_KEY", "SYMCOMM_WERROR", "SYMCOMM_SANITIZE"}
    assert {name for name in listed - built_from if f'"{name}"' not in SOURCES} == set(), "nothing reads these"
    read = set(re.findall(r"(?:environ|getenv)[^\n]{0,24}\"(SYMCOMM_[A-Z_]*[A-Z])\"", SOURCES))
    assert read - listed == set(), "on no page"


def test_commands_exist():
    commands = importlib.import_module("symcomm.cli.main").LAZY_COMMANDS
    named = {word for text in PAGES.values() for word in re.findall(r"^(?:\w+\$ )?symcomm (\w+)", text, re.M)}
    assert named and named <= set(commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    made = {word for text in PAGES.values() for word in re.findall(r"^make ([a-z-]+)", text, re.M)}
    assert made and made <= targets


def test_pages_that_the_sources_name_exist():
    for path in set(re.findall(r"\bdocs/[\w/-]+\.md", SOURCES + (ROOT / "Makefile").read_text())):
        assert (ROOT / path).is_file(), path


def test_files_that_pages_name_exist():
    """As `tests/core/litmus.c`, or by the last folders of a file of the package, as `group/grow.py`."""
    pages = PAGES | {ROOT / name: (ROOT / name).read_text() for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")}
    folders = ("src", "tests", "docs", "examples")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    for page, text in pages.items():
        for path in re.findall(r"`([\w-][\w./-]*/[\w.-]+\.(?:py|c|h|md|sh|yaml|ipynb))\b", text):
            assert any(file.endswith(f"/{path}") for file in files), (page.name, path)


def test_code_on_the_home_page_is_not_cut():
    """Between two columns of links, a window of 1,300 pixels shows lines of 78 characters."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", (ROOT / "docs/index.md").read_text(), re.M | re.S)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if len(line) > 78] == []


def test_errors_are_listed_with_their_own_words():
    """Texts of the page of errors stand in the sources, as written."""
    rows = re.findall(r"^\| (`.+?) \| ([\w, ]+?) \|", (DOCS / "how-to/faq.md").read_text(), re.M)
    assert len(rows) > 30
    joined = re.sub(r"\"\s*\n\s*f?\"", "", SOURCES)  # literals that go on in the next line
    for texts, kinds in rows:
        for text in re.findall(r"`([^`]+)`", texts):
            assert text in joined or "accelerate" in kinds, text
        for kind in re.findall(r"\w+Error", kinds):
            assert f"symcomm.errors.{kind}" in NAMES or hasattr(builtins, kind), kind


def test_options_of_the_launcher_exist():
    said = subprocess.run(
        [sys.executable, "-m", "symcomm", "run", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z-]+", said.stdout))
    for page, text in PAGES.items():
        for line in re.findall(r"\bsymcomm run ([^`\n#]*)", text):
            options = re.findall(r"(?<!\S)--[a-z-]+", line.partition(".py")[0])
            assert set(options) <= known, (page.name, line)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            pytest.skip("the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def test_the_reference_has_every_public_name(site: Path):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert missing_from(listed) == set()


def test_signatures_and_errors_are_shown(site: Path):
    text = (site / "reference/collectives.html").read_text()
    assert 'href="errors.html#symcomm.errors.CollectiveMismatchError"' in text
    shown = re.sub(r"<[^>]+>", "", text)
    assert re.search(r"all_reduce\(\s*tensor: Any,\s*op: \w+", shown)


def test_nothing_comes_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text())
        assert fetched == [], page.name


def test_search_works_without_a_server(site: Path):
    index = (site / "search/search_index.js").read_text()
    assert "RankFailedError" in index and "symmetrize" in index
    assert 'src="../assets/iframe-worker.js"' in (site / "reference/groups.html").read_text()
