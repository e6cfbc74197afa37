"""The table that `make programs` writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.programs import torchft
from tests.programs.frame import Outcome
from tests.programs.run import BEGIN, END, PAGE, as_row, with_table

pytestmark = pytest.mark.without_torch


def test_rows_are_written_and_those_of_others_stay():
    program = SimpleNamespace(VERSION="1.2")
    good, other = Outcome("its tests", True, 3.4, "5 passed"), Outcome("its tests", True, 2.0, "4 passed")
    page = f"before\n{BEGIN}\n{END}\nafter\n"
    page = with_table(page, {"b": as_row(program, "b", good, good, "2026-01-01")})
    page = with_table(page, {"a": as_row(program, "a", good, other, "2026-01-02")})
    failing = Outcome("its tests", False, 1.0, "", "boom")
    page = with_table(page, {"a": as_row(program, "a", failing, other, "2026-01-03")})
    assert page.splitlines() == [
        "before",
        BEGIN,
        "| program | what ran | Symcomm | Gloo | same | date |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a 1.2 | its tests | fails | 4 passed, 2 s | no | 2026-01-03 |",
        "| b 1.2 | its tests | 5 passed, 3 s | 5 passed, 3 s | yes | 2026-01-01 |",
        END,
        "after",
    ]


def test_the_page_has_a_place_for_the_table():
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)
    assert torchft.VERSION in page
