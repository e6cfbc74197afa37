"""`symcomm bench attach`: both ways are measured, and the answer is one that groups use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from symcomm import errors
from symcomm.bench import attach
from symcomm.bench.attach import AttachMeasurement, AttachWorkload
from symcomm.cli import bench
from symcomm.collectives.limits import NO_BYTES, Limits
from symcomm.group import calibration
from tests.support.faults import join_group, run_group
from tests.support.ranks import returned

KIB = 1 << 10


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def rows(call: str, gains: dict[int, float]) -> list[AttachMeasurement]:
    return [AttachMeasurement(call, piece * KIB, gain * 100, 100) for piece, gain in gains.items()]


@pytest.mark.parametrize(
    ("gains", "least"),
    [
        ({16: 0.5, 32: 1.1, 64: 2.0}, 32 * KIB),
        ({16: 1.2, 32: 0.7, 64: 2.0}, 64 * KIB),  # what is gained at 16 KiB is lost at 32
        ({16: 0.9, 32: 1.5, 64: 0.9}, 32 * KIB),
        ({16: 0.9, 32: 1.14, 64: 0.95}, NO_BYTES),  # gains 4 % in the mean
        ({16: 1.04, 32: 1.04, 64: 1.04}, NO_BYTES),
        ({16: 1.5, 32: 1.5, 64: 0.89}, NO_BYTES),  # and larger ones?
        ({16: 0.5, 32: 0.9, 64: 1.0}, NO_BYTES),
    ],
)
def test_from_where_on_it_gains(gains: dict[int, float], least: int):
    never, always = ({16: gain, 32: gain, 64: gain} for gain in (0.9, 1.1))
    found = [*rows("all_to_all", gains), *rows("all_gather", never), *rows("scatter", always)]
    assert attach.thresholds(found) == (least, NO_BYTES, 16 * KIB)


@pytest.mark.timeout(300)  # many starts of ranks, which busy neighbours make slow
def test_it_measures_and_groups_use_the_answer(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "SIZES", (16 * KIB, 32 * KIB))
    file = own_cache / "found.json"
    result = CliRunner().invoke(bench.app, ["attach", "--rounds", "1", "--ranks", "4", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = [AttachMeasurement(**row) for row in json.loads(file.read_text())["rows"]]
    assert [(row.call, row.piece) for row in found] == [(call, size) for call in attach.CALLS for size in attach.SIZES]
    assert all(row.copied > 0 and row.attached > 0 for row in found)
    assert all(" ".join(attach.cells(row)) in " ".join(result.output.split()) for row in found)
    assert calibration.load() == {AttachWorkload(4).where: attach.thresholds(found)}
    assert attach.note(found, AttachWorkload(4)) in result.output and str(calibration.cache_file()) in result.output


def test_a_place_that_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    monkeypatch.setattr(attach, "run_attach_bench", pytest.fail)
    result = CliRunner().invoke(bench.app, ["attach"])
    assert result.exit_code == 2
    assert "XDG_CACHE_HOME must be a folder that can be written or made, got '/proc/self/symcomm'" in result.output


def test_a_quick_look_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        attach, "run_attach_bench", lambda *args: [AttachMeasurement(call, KIB, 200, 100) for call in attach.CALLS]
    )
    result = CliRunner().invoke(bench.app, ["attach", "--quick"])
    assert result.exit_code == 0 and "not kept" in result.output, result.output
    assert calibration.load() == {}


def test_too_few_and_too_many_ranks():
    least = Limits.attach_ranks
    for ranks, words in ((0, f"{least} or more"), (least - 1, f"{least} or more"), (129, "128 at most")):
        result = CliRunner().invoke(bench.app, ["attach", "--ranks", str(ranks)])
        assert result.exit_code == 2 and f"{words} for attach" in result.output


def test_without_ranks_it_takes_a_rank_for_every_core(monkeypatch: pytest.MonkeyPatch):
    for cores, ranks in ((1, Limits.attach_ranks), (8, 8), (64, 16)):
        monkeypatch.setattr(attach.os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert attach.usual_ranks() == ranks
        assert AttachWorkload(ranks).where == (calibration.CROWDED if cores == 1 else calibration.ROOMY)


def _copied(group):
    group.all_to_all_single(torch.empty(4 * KIB), torch.ones(4 * KIB))
    with pytest.raises(errors.ResourceError, match="lets no rank read another's memory; .*ptrace_scope"):
        attach._need_attached(group)
    return True


def test_a_kernel_that_refuses_is_named():
    never = partial(join_group, limits=Limits(attach_bytes=NO_BYTES))
    assert returned(run_group(_copied, 4, join=never)) == [True] * 4
