"""What was measured on a machine decides for all ranks of a group; what is no measurement decides nothing."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.collectives.limits import NO_BYTES, Limits
from symcomm.group import calibration
from symcomm.group.calibration import CROWDED, ROOMY
from symcomm.group.process_group import ProcessGroup
from symcomm.observe.recorder import records
from tests.support.faults import join_group, run_group
from tests.support.ranks import returned

WORLD = 4
COUNT = 1 << 13  # elements of a piece


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def keep(sizes: calibration.Sizes) -> None:
    for where in (ROOMY, CROWDED):
        calibration.save(where, sizes)


def test_what_is_kept_is_found():
    assert calibration.load() == {}
    path = calibration.save(ROOMY, (1 << 20, 9, NO_BYTES))
    calibration.save(CROWDED, (5, 6, 7))
    calibration.save(ROOMY, (3, 4, 5))
    assert calibration.load() == {ROOMY: (3, 4, 5), CROWDED: (5, 6, 7)}
    assert {p.name for p in path.parent.iterdir()} == {"attach.json", "attach.lock"}


def test_machines_that_share_a_home_do_not_mix(monkeypatch: pytest.MonkeyPatch):
    calibration.save(ROOMY, (1, 2, 3))
    path = calibration.cache_file()
    monkeypatch.setattr(calibration, "machine_name", lambda: "another")
    assert calibration.load() == {}
    calibration.save(ROOMY, (3, 4, 5))
    assert [known[ROOMY] for known in json.loads(path.read_text()).values()] == [[1, 2, 3], [3, 4, 5]]


def test_machines_that_write_at_once_keep_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "machine_name", lambda: threading.current_thread().name)

    def measure() -> None:
        for size in range(1, 21):
            calibration.save(ROOMY, (size, size, size))

    machines = [threading.Thread(target=measure, name=f"machine {number}") for number in range(8)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join(60)
    kept = json.loads(calibration.cache_file().read_text())
    assert kept == {machine.name: {ROOMY: [20, 20, 20]} for machine in machines}


def test_a_machine_is_named_by_its_cpu_and_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU\nprocessor\t: 1\nmodel name\t: Some CPU\n")
    monkeypatch.setattr(calibration, "CPU_INFO", info)
    assert calibration.machine_name.__wrapped__() == f"{os.uname().machine}, Some CPU, {os.uname().release}"
    monkeypatch.setattr(calibration, "CPU_INFO", tmp_path / "none")
    assert calibration.machine_name.__wrapped__() == f"{os.uname().machine}, {os.uname().release}"


ODD = [
    "1", "[1]", "[1, 2]", "[1, 2, 3, 4]", '["a", 2, 3]', "[1e999, 1, 1]", "[true, 1, 1]", "[0, 1, 1]", "[1, -1, 1]",
    f"[1, 1, {10**400}]",
]  # fmt: skip
ODD_FILES = ["", "{", "[]", "7", "[" * 100_000, '{"NAME": 3}', *(f'{{"NAME": {{"{ROOMY}": {odd}}}}}' for odd in ODD)]


@pytest.mark.parametrize("text", ODD_FILES, ids=lambda text: text[:60])
def test_what_is_no_measurement_is_none(text: str):
    path = calibration.cache_file()
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("NAME", calibration.machine_name()))
    assert calibration.load() == {}
    calibration.save(ROOMY, (1, 2, 3))
    assert calibration.load() == {ROOMY: (1, 2, 3)}


def test_one_odd_figure_does_not_cost_the_other():
    path = calibration.save(ROOMY, (1, 2, 3))
    path.write_text(path.read_text().replace("}", f', "{CROWDED}": [0, "x", 1]}}', 1))
    assert calibration.load() == {ROOMY: (1, 2, 3)}


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nor is there one in /etc/passwd
    assert calibration.load() == {} and not calibration.cache_file().is_relative_to(Path.cwd())


def _choose(group: ProcessGroup, sizes: tuple[int, ...]) -> tuple[Limits, list[str]]:
    """The limits, and which way all_to_alls of these sizes went."""
    plans = []
    group.barrier()  # peers' memory is read once they have introduced themselves
    for count in sizes:
        given = torch.arange(WORLD * count, dtype=torch.float32) + 1000 * group.rank
        got = torch.empty_like(given)
        group.all_to_all_single(got, given)
        begin = group.rank * count
        whole = [torch.arange(begin, begin + count, dtype=torch.float32) + 1000 * rank for rank in range(WORLD)]
        assert torch.equal(got, torch.cat(whole))
        plans.append(records.operations_of(group)[group.rank][-1].plan)
    return group.plan_limits, plans


def _join_with_own_cache(rank: int, world: int, folder: str, timeout: float) -> ProcessGroup:
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, str(rank))
    keep((4 * COUNT, 50 + rank, 100 + rank))
    return join_group(rank, world, folder, timeout)


def test_the_first_rank_decides_for_all():
    found = returned(run_group(_choose, WORLD, (COUNT // 2, COUNT), join=_join_with_own_cache))
    assert [plans for _, plans in found] == [["streamed", "attached"]] * WORLD
    assert len({limits for limits, _ in found}) == 1
    limits = found[0][0]
    assert (limits.attach_bytes, limits.attach_gather_bytes, limits.attach_scatter_bytes) == (4 * COUNT, 50, 100)


def test_never_is_an_answer():
    keep((NO_BYTES, NO_BYTES, NO_BYTES))
    found = returned(run_group(_choose, WORLD, (1 << 18,)))
    assert [plans for _, plans in found] == [["streamed"]] * WORLD


def test_limits_that_somebody_gave_stay():
    keep((1, 2, 3))
    given = replace(Limits(), attach_bytes=1 << 20)
    found = returned(run_group(_choose, WORLD, (COUNT,), join=partial(join_group, limits=given)))
    assert [limits.attach_bytes for limits, _ in found] == [1 << 20] * WORLD


def _join_with_limits_on_one(rank: int, world: int, folder: str, timeout: float) -> ProcessGroup:
    return join_group(rank, world, folder, timeout, Limits(attach_bytes=7) if rank == 1 else None)


def test_limits_on_some_ranks_only_are_refused():
    outcomes = run_group(_choose, 2, (COUNT,), join=_join_with_limits_on_one)
    assert [type(outcome.error) for outcome in outcomes] == [errors.CollectiveMismatchError] * 2


def _limits_of_host(group: ProcessGroup) -> int:
    return group.local.plan_limits.attach_scatter_bytes


def test_every_host_uses_its_own():
    keep((11, 12, 13))
    sizes = symcomm.spawn(_limits_of_host, 6, mode="threads", hosts=[5, 1], deadline=60)
    assert sizes[:5] == [13] * 5
    usual = {Limits().attach_scatter_bytes, Limits().crowded().attach_scatter_bytes}
    assert sizes[5] in usual, "a single rank does not attach"


def test_the_file_is_for_people_too():
    path = calibration.save(ROOMY, (1 << 16, 1 << 17, NO_BYTES))
    assert json.loads(path.read_text()) == {calibration.machine_name(): {ROOMY: [1 << 16, 1 << 17, NO_BYTES]}}
