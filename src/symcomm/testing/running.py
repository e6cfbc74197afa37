"""Ranks that run a test: threads of this process, or forks of it, which take milliseconds to start.

Nothing is left behind: ranks meet in memory without a name, and forks end with the thread that made them. A failure
shows the rank's own traceback; for ranks that do not end it says who waits for whom, and where.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import itertools
import os
import pickle
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from symcomm import errors
from symcomm.group.spawn import spawn
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.testing.faults import Fault, Faults, Killed, happen, happen_in_thread
from symcomm.testing.schedule import Schedule

DEADLINE = 60.0
GRACE = 5.0  # seconds that the others have, once a rank has failed
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
MODES, BACKENDS = ("threads", "processes"), ("symcomm", "gloo")


@dataclass
class End:
    """How a rank ended. ``kind``: returned, raised, skipped, died, killed (as its script says) or stuck."""

    rank: int
    kind: str
    value: Any = None
    text: str = ""  # its traceback, or where it is
    calls: list[str] = field(default_factory=list)  # of its group, as far as they are known

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}" + (f":\n{self.text.rstrip()}" if self.text else "")


class RanksFailed(AssertionError):
    """Ranks of a test failed; ``ends`` says what each did."""

    def __init__(self, text: str, ends: Sequence[End] = ()):
        super().__init__(text)
        self.ends = list(ends)


class Skip(Exception):
    """A rank skipped the test."""


@dataclass(frozen=True)
class per_rank:
    """What a fixture returns so that each rank has a value of its own: ``make(group)``, called in the rank. If it is a
    generator, it yields the value, and goes on when the rank has ended.

    Raises: nothing; what ``make`` raises fails the rank."""

    make: Callable[[Any], Any]

    def enter(self, group: Any, stack: contextlib.ExitStack) -> Any:
        if inspect.isgeneratorfunction(self.make):
            return stack.enter_context(contextlib.contextmanager(self.make)(group))
        return self.make(group)


@dataclass
class _Setting:
    test: Callable[..., Any]
    n: int
    given: Mapping[str, Any]
    backend: str
    deadline: float
    timeout: float
    faults: Faults
    schedule: Schedule | None
    allowed: tuple[type[BaseException], ...]
    on_error: Callable[[int, BaseException], None] | None


def run(
    test: Callable[..., Any],
    n: int,
    given: Mapping[str, Any] | None = None,
    *,
    mode: str = "threads",
    backend: str = "symcomm",
    deadline: float = DEADLINE,
    timeout: float | None = None,
    faults: Faults | None = None,
    schedule: Schedule | None = None,
    allowed: tuple[type[BaseException], ...] = (),
    on_error: Callable[[int, BaseException], None] | None = None,
) -> list[End]:
    """Run ``test(group, **given)`` on ``n`` ranks; returns how each ended, if all did as they should.

    ``timeout`` is the group's, by default three quarters of the ``deadline``. ``allowed``: what ranks may raise.
    ``on_error(rank, error)`` is called in the rank that raised.

    Raises: RanksFailed; Skip; BadArgumentError."""
    __tracebackhide__ = True  # by pytest: what went wrong is in the ranks' own tracebacks
    if mode not in MODES:
        raise errors.bad_choice("symcomm.testing", "mode", mode, MODES)
    if backend not in BACKENDS:
        raise errors.bad_choice("symcomm.testing", "backend", backend, BACKENDS)
    faults = faults or Faults()
    faults.check(n, mode)
    if backend == "gloo" and (mode == "threads" or faults.faults or schedule):
        fix = "mode='processes', and faults and schedules are for backend='symcomm'"
        raise errors.bad_argument("symcomm.testing", "backend", backend, "a backend of processes", fix)
    seconds = 0.75 * deadline if timeout is None else timeout
    setting = _Setting(test, n, given or {}, backend, deadline, seconds, faults, schedule, allowed, on_error)
    ends = _run_threads(setting) if mode == "threads" else _run_processes(setting)
    skipped = next((end for end in ends if end.kind == "skipped"), None)
    if any(end.kind in ("raised", "died", "stuck") for end in ends):
        raise RanksFailed("\n\n".join(str(end) for end in ends if end.kind != "returned"), ends)
    if skipped is not None:
        raise Skip(skipped.text)
    return ends


def _perform(setting: _Setting, rank: int, group: Any, happens: Callable[[Fault], None]) -> End:
    """What a rank does, in its own thread or process."""
    calls: Callable[[], list[str]] = list
    if setting.backend == "symcomm":
        if setting.schedule is not None:
            setting.schedule.attach(group, rank)
        calls = setting.faults.attach(group, rank, happens)
    try:
        with contextlib.ExitStack() as stack:
            own = {name: v.enter(group, stack) for name, v in setting.given.items() if isinstance(v, per_rank)}
            setting.test(group, **{**setting.given, **own})
    except Killed:
        return End(rank, "killed", calls=calls())
    except BaseException as error:
        if type(error).__name__ == "Skipped":
            return End(rank, "skipped", text=str(error), calls=calls())
        if isinstance(error, setting.allowed):
            return End(rank, "returned", repr(error), calls=calls())
        if setting.on_error is not None:
            setting.on_error(rank, error)
        shown = error.__traceback__ and error.__traceback__.tb_next  # from the test on
        return End(rank, "raised", text="".join(traceback.format_exception(type(error), error, shown)), calls=calls())
    return End(rank, "returned", calls=calls())


# --- threads ---------------------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Ends a rank's thread early, so that the other ranks notice."""


def _run_threads(setting: _Setting) -> list[End]:
    ends: dict[int, End] = {}

    def rank(group: Any) -> None:
        end = ends[group.rank] = _perform(setting, group.rank, group, happen_in_thread)
        if end.kind in ("raised", "killed"):
            raise _Ended

    try:
        spawn(rank, setting.n, mode="threads", timeout=setting.timeout, deadline=setting.deadline)
    except (_Ended, errors.SymcommError) as error:
        if not ends and not isinstance(error, errors.DeadlineError):
            raise RanksFailed(str(error)) from error
    hung = [r for r in range(setting.n) if r not in ends]
    if hung:
        sentence, _ = _look([os.getpid()])
        ends |= _stuck(hung, sentence, {rank: _where_thread(rank) for rank in hung})
    return [ends[r] for r in range(setting.n)]


def _where_thread(rank: int) -> str:
    name = f"symcomm-rank-{rank}"
    ident = next((t.ident for t in reversed(threading.enumerate()) if t.name == name), None)
    frame = sys._current_frames().get(ident) if ident is not None else None
    shown = traceback.extract_stack(frame) if frame is not None else []
    ours = [at for at, one in enumerate(shown) if one.filename == __file__]
    return "".join(traceback.format_list(shown[ours[-1] + 1 if ours else 0 :]))  # from the test on


# --- processes -------------------------------------------------------------------------------------------------------


@functools.cache
def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


@functools.cache
def _load() -> None:
    """Once in this process, what every fork would load and look up for itself."""
    for name in LOADED:
        importlib.import_module(name)
    if _has_torch():
        for name in LOADED_WITH_TORCH:
            package = importlib.import_module(name)
            for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
                importlib.import_module(f"{name}.{module.name}")
    spawn(_look_up, 1, mode="threads")


def _look_up(group: Any) -> None:
    Faults(counts=True).attach(group, 0, happen_in_thread)
    group.barrier()
    if "torch" in sys.modules:
        import torch

        from symcomm.torch_backend import versions

        group.all_reduce(torch.zeros(1))
        versions.functional_operators(("all_gather_into_tensor_out", "batch_p2p_ops"))


LOADED = ("symcomm.store.file", "symcomm.group.default", "symcomm.group.hook_classes", "symcomm.windows.hosts")
LOADED_WITH_TORCH = (
    "symcomm.torch_backend.torch_patches", "symcomm.torch_backend.group", "symcomm.torch_backend.stores",
    "symcomm.symm_mem.groups", "symcomm.torch_versions", "torch._subclasses.schema_check_mode",
)  # fmt: skip


def _run_processes(setting: _Setting) -> list[End]:
    _load()
    file = os.memfd_create("store-of-ranks", os.MFD_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pids: list[int] = []
    receivers: list[Connection] = []
    try:
        for rank in range(setting.n):
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                _live(setting, rank, file, sender, os.getppid())
            sender.close()
            pids.append(pid)
            receivers.append(receiver)
        return _watch(setting, pids, receivers)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # a zombie, at least: nobody has waited for it
        for pid in pids:
            os.waitpid(pid, 0)
        for receiver in receivers:
            receiver.close()
        os.close(file)


def _live(setting: _Setting, rank: int, file: int, sender: Any, parent: int) -> None:
    """A fork's whole life."""
    try:
        _write_whole_lines()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        n = str(setting.n)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=n, LOCAL_WORLD_SIZE=n)

        def stopping(seconds: float) -> None:
            sender.send_bytes(pickle.dumps(seconds))

        try:
            group = _join(setting, rank, f"/proc/self/fd/{file}")
            end = _perform(setting, rank, group, lambda fault: happen(fault, stopping))
        except BaseException:
            end = End(rank, "raised", text=traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        sender.send_bytes(pickle.dumps(end))
        sender.close()
    finally:
        if parent == os.getppid():
            signal.pause()  # until the parent kills it: its end must not look like a fault to the others
        os._exit(0)


def _write_whole_lines() -> None:
    """Pytest's streams write each word that is printed at once, and so would mix those of several ranks."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # --capture=sys keeps it in memory
            descriptor = getattr(sys, name).fileno()
        setattr(sys, name, os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False))


def _join(setting: _Setting, rank: int, path: str) -> Any:
    if not _has_torch():
        from symcomm.group.default import join_ranks, set_default
        from symcomm.group.factory import make_group
        from symcomm.store import FileStore

        make = partial(make_group, timeout=setting.timeout)
        group = join_ranks(FileStore(path, setting.n), rank, setting.n, setting.timeout, make, tidy=False)
        set_default(group)
        return group
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from symcomm.store import FileStore as OurStore
    from symcomm.symm_mem.groups import of
    from symcomm.torch_backend.stores import as_torch_store

    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
    timeout = timedelta(seconds=setting.timeout)
    store: Any = as_torch_store(OurStore(path, setting.n))
    dist.init_process_group(setting.backend, store=store, rank=rank, world_size=setting.n, timeout=timeout)
    return of() if setting.backend == "symcomm" else dist.group.WORLD


def _watch(setting: _Setting, pids: Sequence[int], receivers: Sequence[Connection]) -> list[End]:
    ends: dict[int, End] = {}
    stopped: dict[int, float] = {}  # pid -> when it goes on
    end = time.monotonic() + setting.deadline
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting and (left := end - time.monotonic()) > 0:
        for ready in wait(list(waiting), min([left, *(at - time.monotonic() for at in stopped.values())])):
            rank = waiting[ready]  # type: ignore[index]
            told = _read(setting, rank, pids[rank], ready)
            if isinstance(told, End):
                ends[rank] = told
                del waiting[ready]  # type: ignore[arg-type]
                if told.kind in ("raised", "died") and setting.on_error is None:  # else another may be in a debugger
                    end = min(end, time.monotonic() + GRACE)
            else:
                stopped[pids[rank]] = time.monotonic() + told
        for pid in [pid for pid, at in stopped.items() if at <= time.monotonic()]:
            os.kill(pid, signal.SIGCONT)
            del stopped[pid]
    if waiting:
        ends |= _stuck(sorted(waiting.values()), *_look(pids))
    return [ends[rank] for rank in range(setting.n)]


def _read(setting: _Setting, rank: int, pid: int, receiver: Any) -> End | float:
    """How it ended, or for how many seconds it is about to stop."""
    try:
        told: End | float = pickle.loads(receiver.recv_bytes())
        return told
    except EOFError:
        if rank in setting.faults.killed():
            return End(rank, "killed")
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert how is not None  # it waits
        code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        return End(rank, "died", text=errors.format_exit(code))


def _look(pids: Sequence[int]) -> tuple[str, dict[int, str]]:
    """The sentence that says why ranks do not end, and where each is."""
    from symcomm.observe.analysis.verdict import judge
    from symcomm.observe.top.ask import format_stacks
    from symcomm.observe.top.jobs import JobFacts
    from symcomm.observe.top.live import look

    try:
        trace = look(JobFacts("test", list(pids)))
        sentence = judge(trace, patience=0.0).sentence
    except errors.SymcommError as error:
        return str(error), {}
    return sentence, {
        rank: format_stacks([_from_the_test_on(s) for s in one.stacks[:1]]) for rank, one in trace.ranks.items()
    }


def _from_the_test_on(stack: ThreadStack) -> ThreadStack:
    return replace(stack, frames=tuple(itertools.takewhile(lambda frame: frame.file != __file__, stack.frames)))


def _stuck(hung: Sequence[int], sentence: str, places: Mapping[int, str]) -> dict[int, End]:
    """The ends of ranks that did not end. The sentence is about all of them, so the first has it."""
    return {r: End(r, "stuck", text=f"{sentence}\n" * (r == hung[0]) + places.get(r, "")) for r in hung}
