"""Works: PyTorch's and ours side by side, and ours in the hands of PyTorch's C++."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.errors import DeadlineError
from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import NEWEST, ours, outcome, same, since_2_15, theirs
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

WORKS = ["m.Work()", "m.FakeWork()", "m.PythonCallbackWork(lambda t: True)", "m.PythonCallbackWork(lambda t: False)"]
CALLS = [
    "is_success()", "exception()", "result()", "source_rank()", "_source_rank()", "_get_op_type()",
    "_get_duration()", "synchronize()", "wait(td(milliseconds=20))", "wait(timeout=td(milliseconds=20))", "wait(3)",
    "get_future_result()", "get_future().done()", "boxed()",
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS)
def test_whether_it_has_ended(work: str):
    if not NEWEST and "Fake" in work:
        pytest.skip("the fake work says so since torch 2.15")
    same(f"{work}.is_completed()")


@since_2_15
@pytest.mark.parametrize("call", ["timeout", "_get_sequence_number()"])
@pytest.mark.parametrize("work", WORKS)
def test_calls_of_newer_works(work: str, call: str):
    same(f"{work}.{call}")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("work", WORKS)
def test_calls(work: str, call: str):
    same(f"{work}.{call}")


OTHERS = [
    "m.PythonCallbackWork(3)",
    "m.PythonCallbackWork()",
    "m.PythonCallbackWork(lambda t: 7).wait()",
    "m.PythonCallbackWork(lambda t: 1 / 0).wait()",
    "said = []\nm.PythonCallbackWork(lambda t: said.append(t) or True).wait()\nsaid",
    "said = []\nm.PythonCallbackWork(lambda t: said.append(t) or True).wait(td(seconds=2))\nsaid",
    "w = m.PythonCallbackWork(lambda t: True)\nf = w.get_future()\nw.wait()\n[f.done(), f.value(), w.is_completed()]",
    "w = m.PythonCallbackWork(lambda t: False)\nf = w.get_future()\nw.wait()\n[f.done(), w.is_completed()]",
    "w = m.PythonCallbackWork(lambda t: True)\nw.wait()\nw.wait()",
    "m.FakeWork().wait()",
    "m.FakeWork().seq_id",
    "w = m.FakeWork()\nw.seq_id = 5\nw.seq_id",
    "m.FakeWork().get_future().wait()",
    "isinstance(m.FakeWork(), m.Work)",
    "isinstance(m.PythonCallbackWork(lambda t: True), m.Work)",
    "isinstance(3, m.Work)",
    "m.WorkInfo()",
    "m._create_work_from_future(3)",
    "m._create_work_from_future()",
    "m._create_work_from_future(torch.futures.Future()).is_completed()",
    "m._create_work_from_future(torch.futures.Future()).is_success()",
    "f = torch.futures.Future()\nw = m._create_work_from_future(f)\nf.set_result([torch.ones(1)])\nw.is_success()",
    "f = torch.futures.Future()\nw = m._create_work_from_future(f)\nf.set_result([torch.ones(1)])\nw.is_completed()",
    "f = torch.futures.Future()\nw = m._create_work_from_future(f)\nf.set_result([torch.ones(1)])\nw.wait()",
    "f = torch.futures.Future()\nw = m._create_work_from_future(f)\nf.set_result([torch.ones(1)])\nw.result()",
    "f = torch.futures.Future()\nf.set_result([torch.ones(1)])\nm._create_work_from_future(f).get_future().wait()",
    "m.Work.unbox(3)",
    "w = m.FakeWork()\nm.Work.unbox(w.boxed()).wait()",
]


@pytest.mark.parametrize("expression", OTHERS)
def test_others(expression: str):
    same(expression)


def test_a_failed_callback_ends_the_work():
    text = "w = m.PythonCallbackWork(lambda t: {}[1])\n"
    text += "try:\n w.wait()\nexcept KeyError: pass\n[w.get_future().done(), w.is_completed()]"
    assert outcome(text, ours)[1] == outcome(text, theirs)[1] == [True, True]


def test_a_future_that_failed_fails_the_work():
    """PyTorch's work of a failed Python future says that all is well."""
    future = torch.futures.Future()
    work = ours._create_work_from_future(future)
    future.set_exception(ValueError("no"))
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="no"):
        work.wait()


def test_waiting_for_a_future_keeps_its_deadline():
    work = ours._create_work_from_future(torch.futures.Future())
    with pytest.raises(DeadlineError, match=r"Work.wait timed out after 20 ms"):
        work.wait(timedelta(milliseconds=20))


def test_somebody_else_finishes_the_work():
    work = ours.Work()
    threading.Timer(0.02, work._finish).start()
    assert work.wait(timedelta(seconds=20)) and work.is_completed()
    failed = ours.Work()
    failed._finish(KeyError("lost"))
    assert not failed.is_success()
    with pytest.raises(KeyError, match="lost"):
        failed.wait()


def test_every_work_is_a_work():
    from symcomm.torch_backend.work import DoneWork

    for work in (ours.Work(), ours.FakeWork(), theirs.FakeWork(), DoneWork()):
        assert isinstance(work, ours.Work) and isinstance(work, theirs.Work)
    assert not isinstance(ours.Work(), ours.FakeWork) and not isinstance(theirs.FakeWork(), ours.FakeWork)


# --- the registry of works ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["m.FakeWork()", "m.PythonCallbackWork(lambda t: True)"])
def test_wait_tensor_waits_for_registered_works(work: str):
    same(
        f"""
a = torch.ones(3)
before = m._get_work_registry_size()
m._register_work(a, {work})
during = m._get_work_registry_size() - before
torch.ops._c10d_functional.wait_tensor(a)
[during, m._get_work_registry_size() - before]
"""
    )


def test_wait_tensor_waits_until_ours_is_finished():
    work, tensor = ours.Work(), torch.zeros(2)
    ours._register_work(tensor, work)

    def finish() -> None:
        time.sleep(0.05)
        tensor.fill_(3)
        work._finish()

    thread = threading.Thread(target=finish)
    thread.start()
    assert torch.ops._c10d_functional.wait_tensor(tensor).tolist() == [3, 3]
    thread.join(20)


def test_inflight_setting():
    same("m._allow_inflight_collective_as_graph_input()")
    same("m._set_allow_inflight_collective_as_graph_input('a')")
    text = "m._set_allow_inflight_collective_as_graph_input({})\nm._allow_inflight_collective_as_graph_input()"
    same(text.format(True))
    same(text.format(False))


def _old_calls(rank: int, n: int, log: Path) -> None:
    """Runs in a fresh process, which has not warned yet. Warnings of C++ and of Python go to the file ``log``."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    ended: Any = torch.futures.Future()
    ended.set_result([torch.ones(1)])
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    engine = TorchGroup(ours.HashStore(), 0, 1, timedelta(seconds=20), "old calls")
    for works in (
        [gloo.allreduce([torch.ones(2)]), theirs.FakeWork(), theirs._create_work_from_future(ended)],
        [engine.allreduce([torch.ones(2)]), ours.FakeWork(), ours._create_work_from_future(ended)],
    ):
        for work in works:
            work.wait()
            with contextlib.suppress(RuntimeError):
                work._source_rank()  # does not warn
        os.write(2, b"===\n")
        for call in OLD:
            for work in works * 2:
                with contextlib.suppress(RuntimeError, TypeError):  # not every build can hand over an exception
                    getattr(work, call)()
    os.write(2, b"===\n")
    engine.shutdown()


def test_old_calls_warn_once_as_pytorchs_do(tmp_path):
    run_ranks(_old_calls, 1, tmp_path / "warnings")
    said = (tmp_path / "warnings").read_text()
    before, by_theirs, by_ours, after = said.split("===\n")
    warned = [
        [name for line in text.splitlines() if "deprecated" in line for name in re.findall(r"Work(?:::|\.)(\w+)", line)]
        for text in (before, by_theirs, by_ours, after)
    ]
    assert warned == [[], OLD, OLD, []], said


OLD = ["is_success", "exception", "source_rank", "result", "synchronize"]
