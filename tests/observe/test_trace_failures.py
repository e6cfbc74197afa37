"""Real failures of real processes: the dumps they leave, and the sentence that `symcomm trace` says about them."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from symcomm import errors
from symcomm.observe.analysis.verdict import judge
from symcomm.observe.recorder.trace import load
from tests.support.faults import leftovers, run_group
from tests.support.ranks import run_ranks
from tests.support.traces import symcomm_trace

HERE = Path(__file__)


def line_of(mark: str) -> str:
    """``tests/observe/test_trace_failures.py:12``: the line that ends with the comment ``mark``."""
    lines = HERE.read_text().splitlines()
    return f"tests/observe/{HERE.name}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# ' + mark))}"


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_TRACE_DIR", str(tmp_path / "dumps"))
    yield tmp_path / "dumps"
    assert leftovers() == []


def kill_once_written(dumps, rank):
    """(process ids, to be filled in; what to do meanwhile: kill ``rank`` as soon as its dump is there)"""
    pids = []

    def during(given):
        pids.extend(given)
        deadline = time.monotonic() + 20
        while not (dumps / f"trace_rank_{rank}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(given[rank], signal.SIGKILL)

    return pids, during


def test_the_files_are_whole(dumps):
    outcomes = run_group(disagree, 3)
    assert [o.kind for o in outcomes] == ["raised"] * 3
    assert sorted(os.listdir(dumps)) == ["trace_rank_0", "trace_rank_1", "trace_rank_2"]
    dump = pickle.loads((dumps / "trace_rank_1").read_bytes())
    assert dump["entries"][-1]["timeout_ms"] == 10_000
    assert dump["symcomm"]["errors"] == [str(outcomes[1].error)]
    names = [stack["name"] for stack in dump["symcomm"]["stacks"]]
    assert names[0] == "MainThread" and "symcomm-tracer" in names


def disagree(group):
    group.barrier()
    if group.rank == 1:
        group.broadcast(torch.ones(3), 0)  # broadcast here
    else:
        group.all_reduce(torch.ones(3))  # all_reduce here


def test_mismatch(dumps):
    run_group(disagree, 3)
    code, text = symcomm_trace(str(dumps))
    assert code == 1
    assert text.splitlines()[0] == (
        f"rank 1 called broadcast(float32 x 3, root 0) at {line_of('broadcast here')}, "
        f"where ranks 0, 2 called all_reduce(float32 x 3, SUM) at {line_of('all_reduce here')} (#2 of world)."
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("world ") and "(" in line]
    assert [(row[1], row[2].partition("(")[0], "mismatch" in row) for row in rows] == [
        ("0", "all_reduce", True), ("1", "broadcast", True), ("2", "all_reduce", True),
    ]  # fmt: skip
    assert "rank 1 raised: broadcast #2 (world)" in text


def next_batch():
    time.sleep(60)  # it hangs here


def hang_in_the_loader(group):
    group.barrier()
    if group.rank == 2:
        next_batch()
    group.all_reduce(torch.ones(3))  # the others come here


def test_a_rank_that_never_comes(dumps):
    _, during = kill_once_written(dumps, 2)
    outcomes = run_group(hang_in_the_loader, 3, timeout=1.0, during=during)
    assert [o.kind for o in outcomes] == ["raised", "raised", "died"]
    assert judge(load(dumps)).sentence == (
        f"rank 2 has not called all_reduce #2 (world), which ranks 0, 1 called at {line_of('the others come here')}; "
        f"it is at {line_of('it hangs here')} in next_batch."
    )


def hang_in_native_code(group):
    group.barrier()
    if group.rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # takes for ever, and lets no other thread run
    group.all_reduce(torch.ones(3))  # for whom Python does not run


def test_a_rank_that_cannot_say_where_it_is(dumps):
    pids, during = kill_once_written(dumps, 1)
    outcomes = run_group(hang_in_native_code, 2, timeout=1.0, during=during)
    assert [o.kind for o in outcomes] == ["raised", "died"]
    assert judge(load(dumps)).sentence == (
        f"rank 1 has not called all_reduce #2 (world), which rank 0 called at "
        f"{line_of('for whom Python does not run')}; it (pid {pids[1]}) runs no Python that could tell where it is."
    )


def die(group):
    group.barrier()
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.ones(3))  # while it dies


def test_a_rank_that_dies(dumps):
    pids = []
    outcomes = run_group(die, 3, during=pids.extend)
    assert [o.kind for o in outcomes] == ["died", "raised", "raised"]
    trace = load(dumps)
    assert trace.problems == [] and trace.ranks[0].noted_by in (1, 2)
    assert judge(trace).sentence == (
        f"rank 0 (pid {pids[0]}) died with SIGKILL after barrier #1 (world), "
        f"while ranks 1, 2 waited for it in all_reduce #2 (world) at {line_of('while it dies')}."
    )


def stop_oneself(group):
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.all_reduce(torch.ones(3))  # while it is stopped


def test_a_rank_that_is_stopped(dumps):
    pids, during = kill_once_written(dumps, 1)
    outcomes = run_group(stop_oneself, 2, timeout=1.0, during=during)
    assert [o.kind for o in outcomes] == ["raised", "died"]
    assert judge(load(dumps)).sentence == (
        f"rank 1 (pid {pids[1]}) is stopped after barrier #1 (world), while rank 0 waited for it in all_reduce #2 "
        f"(world) at {line_of('while it is stopped')}; `kill -CONT {pids[1]}` lets it go on."
    )


def leave(group):
    group.barrier()
    if group.rank == 1:
        group.destroy()
        return
    with pytest.raises(errors.RankFailedError):
        group.all_reduce(torch.ones(3))  # after it left


def test_a_rank_that_leaves(dumps):
    assert [o.kind for o in run_group(leave, 2)] == ["returned", "returned"]
    assert judge(load(dumps)).sentence == (
        "rank 1 left after barrier #1 (world) and never called all_reduce #2 (world), "
        f"which rank 0 called at {line_of('after it left')}."
    )


def cross(group):
    a, b = group.new_group([0, 1], "a"), group.new_group([0, 1], "b")
    t = torch.ones(3)
    if group.rank == 0:
        a.all_reduce(t, timeout=2.0)  # rank 0 in a
    else:
        b.all_reduce(t, timeout=2.0)  # rank 1 in b


def test_groups_in_different_order(dumps):
    assert [o.kind for o in run_group(cross, 2)] == ["raised", "raised"]
    assert judge(load(dumps)).sentence == (
        f"ranks 0, 1 wait for each other in different groups: rank 0 is in all_reduce #1 (a) at "
        f"{line_of('rank 0 in a')}, rank 1 is in all_reduce #1 (b) at {line_of('rank 1 in b')}; "
        "make every rank use its groups in the same order."
    )


def fine(group):
    for _ in range(3):
        group.all_reduce(torch.ones(3))
    group.barrier()


def test_nothing_is_written_when_all_is_well(dumps):
    assert [o.kind for o in run_group(fine, 2)] == ["returned", "returned"]
    assert not dumps.exists()


def test_nothing_is_written_when_nobody_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [o.kind for o in run_group(disagree, 2)] == ["raised", "raised"]
    assert os.listdir(tmp_path) == []


def test_torchs_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "nccl_trace_rank_"))
    run_group(disagree, 2)
    assert sorted(os.listdir(tmp_path)) == ["nccl_trace_rank_0", "nccl_trace_rank_1"]


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SYMCOMM_TRACE_DIR", str(tmp_path / "file"))
    outcomes = run_group(disagree, 2)
    assert [type(o.error) for o in outcomes] == [errors.CollectiveMismatchError] * 2


# --- reading ---------------------------------------------------------------------------------------------------------


def test_broken_dumps(dumps):
    run_group(disagree, 3)
    (dumps / "trace_rank_0").write_bytes(b"")
    (dumps / "trace_rank_1").write_bytes(pickle.dumps(os.getcwd))  # it would call something
    code, text = symcomm_trace(str(dumps))
    assert code == 1
    assert f"note: the dump of rank 0 is empty: {dumps}/trace_rank_0" in text
    assert "note: the dump of rank 1 cannot be read (UnpicklingError: it wants posix.getcwd" in text
    os.unlink(dumps / "trace_rank_1")
    assert "note: there is no dump of rank 1." in symcomm_trace(str(dumps))[1]


def test_dumps_of_an_earlier_run(dumps):
    run_group(disagree, 3)
    old = (dumps / "trace_rank_2").read_bytes()
    run_group(disagree, 2)
    (dumps / "trace_rank_2").write_bytes(old)
    trace = load(dumps)
    assert sorted(trace.ranks) == [0, 1]
    assert trace.problems == ["the dump of rank 2 is of an earlier run, and was left out."]


def test_bad_places(tmp_path):
    assert symcomm_trace(str(tmp_path)) == (
        2,
        f"symcomm trace: there are no dumps in {tmp_path}; ranks write them there when an operation fails and "
        "SYMCOMM_TRACE_DIR, or `symcomm run --trace`, names the folder.\n",
    )
    assert symcomm_trace(str(tmp_path / "no" / "where"))[0] == 2
    assert symcomm_trace() == (
        2, "symcomm trace: give the folder with the ranks' dumps, or --live for what runs now.\n",
    )  # fmt: skip


def test_json_and_chrome(dumps, tmp_path):
    run_group(disagree, 2)
    out = tmp_path / "chrome.json"
    code, text = symcomm_trace(str(dumps / "trace_rank_"), "--json", "--chrome", str(out))
    data = json.loads(text)
    assert code == 1 and data["verdict"]["kind"] == "mismatch"
    assert [(row["group"], row["rank"], row["operation"]["seq"]) for row in data["last"]] == [
        ("world", 0, 2), ("world", 1, 2),
    ]  # fmt: skip
    assert {e["ph"] for e in json.loads(out.read_text())["traceEvents"]} >= {"M", "X"}


# --- the launcher ----------------------------------------------------------------------------------------------------

SCRIPT = """
import numpy, time, symcomm

def next_batch():
    time.sleep(60)

group = symcomm.init(timeout=30)
group.barrier()
if group.rank == 1:
    next_batch()
group.all_reduce(numpy.ones(4, "f"), timeout=1.5)
"""


def test_run_with_trace(tmp_path):
    """The launcher ends the rank that hangs; what it did is on disk by then."""
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "symcomm", "run", "-n", "2", "--trace", "dumps", "job.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    sentence = (
        "rank 1 has not called all_reduce #2 (world), which rank 0 called at job.py:11; "
        "it is at job.py:5 in next_batch."
    )
    assert f"  trace: {sentence}\n  more of it: `symcomm trace {tmp_path}/dumps`\n" in done.stderr
    assert symcomm_trace(str(tmp_path / "dumps"))[1].splitlines()[0] == sentence


# --- torch.distributed -----------------------------------------------------------------------------------------------


def torch_ranks_disagree(rank, world, folder):
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    os.environ["SYMCOMM_TRACE_DIR"] = f"{folder}/dumps"
    register()
    dist.init_process_group("symcomm", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    dist.barrier()
    t = torch.ones(2 if rank else 3)
    with pytest.raises(RuntimeError, match="did not make the same call"):
        dist.all_reduce(t)  # of torch's


def test_torch_distributed(tmp_path):
    run_ranks(torch_ranks_disagree, 2, str(tmp_path), deadline=60)
    here = line_of("of torch's")
    verdict = judge(load(tmp_path / "dumps"))
    assert verdict.kind == "mismatch"
    assert verdict.sentence == (
        f"the ranks did not make the same call as #{verdict.seq} of world: "
        f"rank 0 called all_reduce(float32 x 3, SUM) at {here}; rank 1 called all_reduce(float32 x 2, SUM) at {here}."
    )
