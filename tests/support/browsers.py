"""A browser for tests of pages: Chromium, Chrome or Firefox of this machine, or one that playwright brought itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
NO_BROWSER = "no browser that playwright can drive (Chromium, Chrome, a recent Firefox, or playwright's own)"


def candidates(driver: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(launcher, its options) of all installed browsers."""
    for name in CHROMIUMS:
        if path := shutil.which(name):
            yield driver.chromium, {"executable_path": path, "args": list(QUIET)}
    for kind in (driver.chromium, driver.firefox):
        if os.path.exists(kind.executable_path):
            yield kind, {"args": list(QUIET) if kind is driver.chromium else []}
    if path := shutil.which("firefox"):
        yield driver.firefox, {"executable_path": path, "channel": "moz-firefox"}


@contextmanager
def any_browser() -> Iterator[Any]:
    """The first browser that shows a page; the test is skipped if none does."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        for kind, options in candidates(driver):
            try:
                browser = kind.launch(timeout=60_000, **options)
            except playwright.Error:
                continue
            try:
                browser.new_page().close()
            except playwright.Error:  # a Firefox whose protocol this playwright does not know
                browser.close()
                continue
            yield browser
            browser.close()
            return
    pytest.skip(NO_BROWSER)
