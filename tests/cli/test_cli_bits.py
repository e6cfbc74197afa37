"""`symcomm bits` and `symcomm doctor --bits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symcomm.bench.namespaces import why_no_namespaces
from symcomm.cli import bits, bits_of_hosts
from symcomm.cli.bits import TRAINING, Outcome, Row, differing, measure, rows
from symcomm.observe.health.bits import cpu_model, what_must_be_equal
from tests.support.command import symcomm
from tests.support.namespaces import FaultyNetwork

pytestmark = pytest.mark.long
FIELDS = {"CPU", "instruction set", "torch", "numpy", "threads per rank", "all of it"}


def test_one_hash_over_ranks_and_hosts():
    rows = [Row(ranks, 1, "threads") for ranks in (1, 2, 4, 8)]
    rows += [Row(8, 2, "threads"), Row(8, 8, "threads"), Row(8, 2, "threads", wide=True)]
    outcomes = [measure(row) for row in rows]
    assert differing(outcomes) == []
    assert len({o.hashes["float32"] for o in outcomes}) == len({o.hashes["float64"] for o in outcomes}) == 1
    small = [o.hashes.get("float16") for o in outcomes]
    assert len({*small[:4], small[6]}) == 1 and None not in small and small[4] != small[0]


def test_processes_have_the_bits_of_threads():
    assert measure(Row(2, 1, "processes")).hashes == measure(Row(2, 1, "threads")).hashes


def test_a_training_has_one_hash_over_ranks_and_hosts():
    rows = [*(Row(ranks, 1, "threads") for ranks in (1, 2, 4, 8)), Row(8, 2, "threads"), Row(8, 8, "threads")]
    outcomes = [measure(row, TRAINING) for row in rows]
    assert differing(outcomes, TRAINING.kinds) == []
    assert len({(o.hashes["weights"], o.hashes["layers"]) for o in outcomes}) == 1
    assert outcomes[0].hashes["weights"] != outcomes[0].hashes["layers"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_training_of_processes():
    assert measure(Row(2, 1, "processes"), TRAINING).hashes == measure(Row(2, 1, "threads"), TRAINING).hashes


def test_hosts_with_a_network_between_them(monkeypatch: pytest.MonkeyPatch):
    """1 x 8, 2 x 4, 4 x 2 and 8 x 1 ranks: processes in network namespaces, which reach each other by cable only."""
    if reason := why_no_namespaces():
        pytest.skip(f"several hosts: {reason}")
    monkeypatch.setattr(bits_of_hosts, "Network", FaultyNetwork)  # which starts copies of a process that has torch
    networked = [row for row in rows(True, network=True) if row.mode == "network"]
    assert [(row.ranks, row.hosts, row.wide) for row in networked] == [(8, hosts, True) for hosts in (1, 2, 4, 8)]
    one_host = measure(Row(8, 1, "threads"))
    assert [measure(row).hashes for row in networked] == [one_host.hashes] * 4
    trained = measure(Row(8, 1, "threads"), TRAINING)
    assert measure(Row(8, 4, "network"), TRAINING).hashes == trained.hashes


def test_a_machine_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bits_of_hosts, "why_no_namespaces", lambda: "network namespaces need root")
    assert measure(Row(8, 2, "network")) == Outcome(Row(8, 2, "network"), {}, "network namespaces need root")


def test_what_differs_is_found():
    same = [Outcome(Row(n, 1, "threads"), {"float32": "a", "float64": "b"}) for n in (1, 2)]
    assert differing(same) == []
    assert differing([*same, Outcome(Row(4, 1, "threads"), {"float32": "c", "float64": "b"})]) == ["float32"]
    assert differing([*same, Outcome(Row(4, 1, "threads"), {"float32": "a", "float64": "ranks differ"})]) == ["float64"]
    whole, halves = Row(8, 1, "threads"), Row(8, 2, "threads")
    assert differing([Outcome(whole, {"float16": "a"}), Outcome(halves, {"float16": "b"})]) == []
    wide = Row(8, 2, "threads", wide=True)
    assert differing([Outcome(whole, {"float16": "a"}), Outcome(wide, {"float16": "b"})]) == ["float16"]


def test_what_the_command_says(monkeypatch: pytest.MonkeyPatch):
    said = {
        (2, "threads"): Outcome(Row(2, 1, "threads"), {"float32": "abc", "float64": "def"}),
        (8, "threads"): Outcome(Row(8, 4, "threads", True), {"float32": "abc"}),
        (8, "processes"): Outcome(Row(8, 2, "processes"), {}, "no engine"),
    }
    monkeypatch.setattr(bits, "rows", lambda threads, small, network: [o.row for o in said.values()])
    monkeypatch.setattr(bits, "measure", lambda row, work: said[row.ranks, row.mode])
    done = CliRunner().invoke(bits.app, [])
    shown = done.stdout.splitlines()
    assert done.exit_code == 0 and shown[0].split() == ["ranks", "hosts", "as", "float32", "float64", "float16"]
    assert shown[1] == "    2     1  threads    abc           def           -"
    assert shown[2].split() == ["8", "4", "threads", "abc", "-", "-", "SYMCOMM_WIDE_SUMS=1"]
    assert shown[3].endswith("no engine") and shown[-1].startswith("The same bits")
    said[8, "threads"].hashes["float32"] = "other"
    done = CliRunner().invoke(bits.app, [])
    assert done.exit_code == 1 and "Not the same bits: float32." in done.stdout
    assert json.loads(CliRunner().invoke(bits.app, ["--json"]).stdout)["differing"] == ["float32"]


def test_the_doctor_says_what_must_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = json.loads(symcomm("doctor", "--bits", "--json").stdout)
    assert found.keys() >= FIELDS
    assert symcomm("doctor", "--bits").stdout.splitlines()[0].split(None, 1) == ["CPU", found["CPU"]]
    before = what_must_be_equal()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    after = what_must_be_equal()
    assert after["threads per rank"] == "3" and after["all of it"] != before["all of it"]
    (tmp_path / "cpuinfo").write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n")
    assert cpu_model(tmp_path / "cpuinfo") == "0x41 0xd0c"
