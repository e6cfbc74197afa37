"""The frame of `make programs`: what programs say, what counts as the same, the table. The programs run by hand."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.programs.frame import FOLDER, Part, read, tell, timed
from tests.programs.run import (
    BEGIN,
    END,
    PAGE,
    Found,
    Program,
    as_rows,
    every_program,
    main,
    run_once,
    same,
    with_table,
)

pytestmark = pytest.mark.without_torch
PROGRAM = Program("b", "1.2", ("b==1.2",), ("trains", "saves"))


def found(seconds: float = 0.0034, values: tuple[float, ...] = (1.0, 2.0), said: str = "", missing: int = 0) -> Found:
    return Found([[Part("trains", list(values), seconds, said)] * 2] * (3 - missing), missing)


@pytest.mark.parametrize(
    ("gloos", "expected"),
    [
        (found(0.5), "yes"),
        (found(values=(1.0, 2.0000001)), "to 5e-08"),
        (found(values=(1.0, 2.1)), "no"),
        (found(said="1 failed"), "no"),
        (found(missing=1), "no"),
        (found(missing=3), "no"),
    ],
)
def test_same(gloos: Found, expected: str):
    assert same(found(), gloos) == expected
    assert same(found(values=(float("nan"),)), found(values=(float("nan"),))) == "yes"


def test_rows_are_written_and_those_of_others_stay():
    good, other = (
        {"symcomm": found(), "gloo": found(1.25)},
        {"symcomm": found(missing=1), "gloo": found(0, said="5 passed")},
    )
    page = f"before\n{BEGIN}\n{END}\nafter\n"
    page = with_table(page, "b", as_rows(PROGRAM, {"trains": good, "saves": good}, "2026-01-01"))
    page = with_table(page, "A", [("A 3", "its tests", "fails", "fails", "no", "2026-01-01")])
    page = with_table(page, "b", as_rows(PROGRAM, {"trains": good, "saves": other}, "2026-01-02", ", busy"))
    assert page.splitlines() == [
        "before",
        BEGIN,
        "| program | what ran | Symcomm | Gloo | same | date |",
        "| --- | --- | --- | --- | --- | --- |",
        "| A 3 | its tests | fails | fails | no | 2026-01-01 |",
        "| b 1.2 | trains, busy | 3.4 ms | 1.2 s | yes | 2026-01-02 |",
        "| b 1.2 | saves, busy | fails | 5 passed | no | 2026-01-02 |",
        END,
        "after",
    ]


def test_what_ranks_tell_is_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program", "gloo"])
    for rank in ("10", "2"):
        tell(lambda backend, rank=rank: iter([Part(backend, [float(rank)]), Part("more")]), rank)
    told = read(tmp_path)
    assert list(told) == ["gloo", "more"] and [part.values for part in told["gloo"]] == [[2.0], [10.0]]
    results, seconds = timed(lambda i: i * i, steps=4, warm=1)
    assert results == [0, 1, 4, 9] and 0 < seconds < 1


def test_a_run_that_fails_or_takes_too_long_says_so():
    """There is no such program, so Python fails; and no time."""
    alone = dataclasses.replace(PROGRAM, launch=())
    parts, why = run_once(alone, Path(sys.executable), "gloo")
    assert parts == {} and "No module named tests.programs.b" in why
    assert run_once(dataclasses.replace(alone, limit=0.001), Path(sys.executable), "gloo")[1].startswith(
        "not over after"
    )


def test_every_program_can_be_read_without_what_it_tries(capsys: pytest.CaptureFixture[str]):
    programs = every_program()
    assert {"torchft", "torchrec"} <= {program.name for program in programs}
    assert all(p.parts and p.needs and all("==" in p.version + need or need for need in p.needs) for p in programs)
    assert main("nowhere", "torchrecs") == 2
    assert "there is no program torchrecs" in capsys.readouterr().out


def test_the_page_has_a_place_for_the_table():
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)
