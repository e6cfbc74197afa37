"""``symcomm bench queue``: every side moves the same messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from symcomm.bench import queue as bench_queue
from symcomm.bench import table as bench_table
from symcomm.bench.queue import MEMCPY, SIDES, QueueWorkload
from tests.support.bench_cli import cli

pytestmark = pytest.mark.without_torch


def test_messages_through_all_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(bench_queue, "QUICK", {"rounds": 1, "steps": 3, "sizes": (100, 300 << 10)})
    path = tmp_path / "queue.json"
    code, output = cli("queue", "--quick", "--json", str(path))
    assert code == 0, output
    assert "symcomm (us)" in output and "multiprocessing / ours" in output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["bytes"]) for row in rows][:2] == [("bytes", 100), ("bytes", 300 << 10)]
    for row in rows:
        assert {"ours", "mp", MEMCPY} <= set(row) and all(t > 0 for side in (*SIDES, MEMCPY) for t in row.get(side, []))


def test_the_table():
    workload = QueueWorkload(sides=("ours", "zmq"))
    row = {"kind": "tensor", "bytes": 1 << 10, "ours": [2e-6, 1e-6, 3e-6], "zmq": [4e-6], MEMCPY: [1e-7]}
    _, head, body = bench_queue.as_table([row], workload)
    assert head == ["message", "size", "symcomm (us)", "ZeroMQ (us)", "memcpy (us)", "ZeroMQ / ours"]
    assert body == [["tensor", "1 KiB", *(bench_table.microseconds(s) for s in (2e-6, 4e-6, 1e-7)), "2.00x"]]
    assert "not installed: multiprocessing, torch.multiprocessing" in bench_queue.note([row], workload)
    assert bench_queue.picture([row], workload)[0].title == "tensor"
