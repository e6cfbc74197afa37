"""The lists of tests that run on other versions of torch and Python are complete."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.selections import MAIN_ONLY, SELECTIONS, TESTS, TORCH, WITHOUT_TORCH


def test_every_file_has_its_place():
    there = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    listed = {*TORCH, *WITHOUT_TORCH, *MAIN_ONLY}
    assert there - listed == set(), "put these into a list in tests/selections.py"
    assert listed - there == set(), "these are gone"
    assert not set(MAIN_ONLY) & {*TORCH, *WITHOUT_TORCH}


@pytest.mark.parametrize("name", SELECTIONS)
def test_no_file_is_listed_twice(name):
    assert [file for file, times in Counter(SELECTIONS[name]).items() if times > 1] == []
