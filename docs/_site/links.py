"""Pages and links of the site: what lies outside docs/ comes along.

README.md and its like at the top of the repository become pages under project/. A link to any other file of the
repository leads to a copy of it, as text, under source/. A link to what does not exist stays as it is, and fails the
strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # file at the top -> page of the site
    "ARCHITECTURE.md": "explanation/architecture.md",
    "BENCHMARKS.md": "project/benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "examples/README.md": "project/examples.md",
}
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    pages = {file.src_uri: home(file.src_uri).read_text() for file in files if file.src_uri.endswith(".md")}
    copied = set()
    for uri, text in pages.items():
        for _, target, _ in LINK.findall(outside_code(text)):
            path = Path(os.path.normpath(home(uri).parent / target))
            place = copy_of(path)
            if place and place not in copied:
                copied.add(place)
                files.append(File.generated(config, place, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(home(here).parent / match[2]))
        place = site_page(path) or copy_of(path)
        return f"{match[1]}{os.path.relpath(place, os.path.dirname(here) or '.')}{match[3]}" if place else match[0]

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)


def home(uri: str) -> Path:
    """The file of the repository that a page of the site is made of."""
    return next((ROOT / name for name, page in PAGES.items() if page == uri), ROOT / "docs" / uri)


def site_page(path: Path) -> str | None:
    name = os.path.relpath(path, ROOT)
    if name == "README.md":
        return "index.md"
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") and path.is_file() else None)


def copy_of(path: Path) -> str | None:
    """Where a file that is no page is copied to; None for pages, and for what is not there."""
    name = os.path.relpath(path, ROOT)
    if site_page(path) or name.startswith("..") or not path.is_file():
        return None
    return f"source/{name}.txt"


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
