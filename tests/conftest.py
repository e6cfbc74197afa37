"""What holds for all tests: what one file leaves to the next, how the process ends, and what it says last."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.tools.selections import TESTS
from tests.tools.side_by_side import SHARE, Share

LINES, WIDTH = 12, 400  # of a failure that is told again
NOT_RUN = "not run here"  # a heading
# What would run a test that was skipped, by its reason. Other reasons say so themselves, or nothing would.
RUN_BY = {
    r"CUDA GPU|NCCL": "`make test-gpu` where there is one",
    r"(since|since torch|came with) 2\.15": "`make test-torch TORCH=2.15.0`",
    r"^no browser": "`make browser`, then `make test`,",
    r"^(axe-)?playwright": "`make setup`, then `make test`,",
    r"^(zsh|fish) is not installed": "`make test` with it",
    r"cores": "`make test` where there are more",
}
_status = 0
_share = Share(os.environ.pop(SHARE)) if SHARE in os.environ else None
_failed: Counter[str] = Counter()  # by file


def heed_signals() -> None:
    """A shell may have this process ignore or block signals (nohup, a job in the background), and programs that tests
    start would inherit that. They do not inherit handlers, so this process ignores them by one."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # nobody could wait for a child
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_configure(config: pytest.Config) -> None:
    heed_signals()
    if not all(Path(name).name.startswith(("test_gpu_", "cuda")) for name in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked rank cannot use a GPU that its parent has looked at
    _own_shared_memory()
    paths = [TESTS / "support" / "startup", TESTS.parent / "src", TESTS.parent, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)  # of programs that tests start
    # Inductor asks the C++ compiler for each instruction set in each new cache, which takes it 11 s of CPU time.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    for name in ("OMPI", "PRTE"):  # containers run tests as root, which Open MPI refuses until it is told twice
        os.environ |= {f"{name}_ALLOW_RUN_AS_ROOT": "1", f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _own_shared_memory() -> None:
    """Files that arenas are, where they have names, lie in a directory of this process's own: what another process has
    there, such as another one that ``make test`` runs, is not a leak of ours."""
    os.environ["SYMCOMM_SHM_DIR"] = tempfile.mkdtemp(dir="/dev/shm", prefix="tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at the whole process comes first, before other tests have left ranks and sockets in it. Then files
    that take long, so that processes which share the files end at about the same time."""
    if os.environ.get("SYMCOMM_HEAP"):  # make test-heap
        for item in items:
            if (marker := item.get_closest_marker("ordinary_memory")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not with the shared heap: {marker.args[0]}"))
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("unused_process", "long")])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Nothing is to be done for what another process runs. Which file comes next is not known yet when one ends, so
    that all is torn down."""
    if _share is None:
        return None
    if _share.claims(item.path.stem):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=nextitem if nextitem and nextitem.path == item.path else None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _failed[Path(report.fspath).stem] += report.failed


def pytest_collection_finish() -> None:
    """What is loaded by now stays. Collectors need not look at it, here and in forked ranks, which share its memory."""
    gc.collect()
    gc.freeze()
    if os.environ.get("SYMCOMM_HEAP") and "torch" in sys.modules:
        why_not = importlib.import_module("symcomm").heap_stats().why_not
        assert not why_not, f"SYMCOMM_HEAP is set, but {why_not}"


@pytest.fixture(autouse=True)
def no_module_in_its_forward() -> None:
    """torch notes for its compiler which DistributedDataParallel's forward runs, and puts back what it found before. Of
    ranks that are threads, one may so put back another's, long after that one's has ended."""
    if (module := sys.modules.get("torch.nn.parallel.distributed")) is not None:
        module.DistributedDataParallel._active_ddp_module = None


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Neither children nor files of ours, before and after the test."""
    from tests.support.faults import leftovers

    before = leftovers()
    yield
    assert leftovers() == before == []


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``symcomm.spawn`` forks its ranks from this process, which has loaded torch. tests/group/test_spawn.py is about
    how it starts fresh ones."""
    module: Any = importlib.import_module("symcomm.group.spawn")
    rank_main = module._rank_main

    def forked(*args: Any) -> None:
        if "torch" in sys.modules:  # a forked child has none of its parent's OpenMP threads
            sys.modules["torch"].set_num_threads(1)
        rank_main(*args)

    def pack(fn: Any, args: Any) -> tuple[bytes, str]:
        _await_ending_threads()
        return b"", "fork"

    monkeypatch.setattr(module, "_pack", pack)
    monkeypatch.setattr(module, "_rank_main", forked)


def _await_ending_threads() -> None:
    """A thread that Python has joined may still be running the destructors of libraries. MKL's hold a lock that a
    child, if it is forked at that moment, would wait for without end."""
    ours, end = {thread.native_id for thread in threading.enumerate()}, time.monotonic() + 5
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in ours]
    while any(_is_running(task) for task in others) and time.monotonic() < end:
        time.sleep(0.001)


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False  # it has ended


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Groups that a file forgot are collected at its end. With as many objects as torch has, the collector comes too
    seldom, and their sockets are taken for another test's leak."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # the compiler's modules, say: the next file's collections need not look at them
        if _share is not None:
            _share.is_done(item.path.stem, _failed[item.path.stem])


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)
    shutil.rmtree(os.environ["SYMCOMM_SHM_DIR"], ignore_errors=True)


def _failures_once_more(terminalreporter: pytest.TerminalReporter) -> None:
    """Failures once more, in a few lines each: what is printed last is what people see, and what logs keep."""
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        terminalreporter.section(f"{report.nodeid}, {report.when}", "-", red=True)
        told = [line for line in report.longreprtext.splitlines() if line.startswith(("E ", "> "))]
        terminalreporter.write_line("\n".join(line[:WIDTH] for line in told[-LINES:]))


def what_was_not_run(reasons: Counter[str]) -> list[str]:
    """A line for each reason of skipped tests: how many, why, and what would run them."""
    lines = []
    for reason, count in reasons.most_common():
        by = next((by for words, by in RUN_BY.items() if re.search(words, reason)), "")
        lines.append(f"{count:5d}  {reason}" + (f"; {by} runs it" if by else ""))
    return lines


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        reasons[report.longrepr[2].removeprefix("Skipped: ").removeprefix("SKIP: ")] += 1
    if _share is not None:
        _share.tell({word: len(found) for word, found in terminalreporter.stats.items() if word}, reasons)
    elif reasons:
        terminalreporter.section(NOT_RUN, "=")
        terminalreporter.write_line("\n".join(what_was_not_run(reasons)))
    _failures_once_more(terminalreporter)


def pytest_unconfigure() -> None:
    """PyTorch's table of handlers lets go of Python functions after the interpreter has ended, and crashes. Tests that
    compare with it have put some there, so this process ends before."""
    if "tests.observe.test_control_plane" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
