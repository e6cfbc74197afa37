"""Programs in processes that have torch already, in place of ``subprocess.Popen([sys.executable, ...])``.

Loading torch takes 1.5 s of CPU time, longer than most of what tests have programs do. The process is forked by the one
that forks the ranks of tests/support/ranks.py, and becomes what an interpreter with that command would be. Programs
that it starts in turn, a launcher's ranks say, are copies of it. How programs start is tested without this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import multiprocessing as mp
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NamedTuple, NoReturn

from tests.support.ranks import become

CLONE_NEWNET = 0x40000000


class Program(NamedTuple):
    flag: str  # -c, -m, or none for a file
    what: str
    words: Sequence[str]


def parse(command: Any) -> Program | None:
    """None for other programs, and for an interpreter that is told more than what to run."""
    words = list(map(os.fspath, command)) if isinstance(command, (list, tuple)) else []
    if not words or words.pop(0) != sys.executable:
        return None
    if words[:1] == ["-u"]:
        words.pop(0)
    if words[:1] in (["-c"], ["-m"]):
        return Program(*words[:2], words[2:])
    return Program("", words[0], words[1:]) if words and Path(words[0]).is_file() else None


# --- becoming a program ------------------------------------------------------------------------------------------

_at_exit: list[Callable] = []  # what this program has registered
_others: list[Any] = []  # streams of the process that was copied, which flushes them itself


def _register(function: Callable, *args: Any, **kwargs: Any) -> Callable:
    _at_exit.append(function)
    return _atexit_register(function, *args, **kwargs)


_atexit_register = atexit.register


def _play(program: Program, environment: dict[str, str]) -> NoReturn:
    """Do all that an interpreter does with a program, to its end."""
    code: Any = 1
    try:
        become(environment)
        _forget_the_forking()
        try:
            _execute(program)
            code = 0
        except SystemExit as error:
            code = error.code
            if code is not None and not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


def _forget_the_forking() -> None:
    """Drop streams, handlers and signals of the process that this one was copied from."""
    for name, fd, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        file: Any = open(fd, mode, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(file, "utf-8", errors, line_buffering=True)
        _others.append(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    dynamo = sys.modules.get("torch._dynamo.utils")
    for function in [*_at_exit, getattr(dynamo, "dump_compile_times", None)]:  # this takes 50 ms to find nothing
        atexit.unregister(function)
    _at_exit.clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    mp.util._finalizer_registry.clear()
    atexit.register = _register
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    subprocess.Popen = Copying  # type: ignore[misc]
    mp.context._concrete_contexts["spawn"] = mp.context.ForkContext()  # type: ignore[attr-defined]


def _execute(program: Program) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    folder = "" if program.flag == "-c" else os.getcwd() if program.flag else str(Path(program.what).resolve().parent)
    sys.path[:0] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [program.flag or program.what, *program.words]
    if program.flag == "-m":
        runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        return
    if program.flag == "-c":
        exec(compile(program.what, "<string>", "exec"), main.__dict__)
        return
    main.__file__ = program.what
    exec(compile(Path(program.what).read_text(), program.what, "exec"), main.__dict__)


# --- started by a program ----------------------------------------------------------------------------------------


class Copying(subprocess.Popen):
    """Forks this process where it would start another interpreter."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        program = None if executable else parse(args)
        if program is None:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        names = ("preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell")
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        others = ("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group")
        how = dict(zip((*names, *pipes, *others), rest, strict=False))  # Python 3.10 has no process_group
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _take_over(how)
                _play(program, dict(how["env"] if how["env"] is not None else os.environ))
            finally:
                os._exit(255)
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in pipes))  # type: ignore[attr-defined]


def _take_over(how: dict[str, Any]) -> None:
    """Do what happens between fork and exec."""
    if how["start_new_session"]:
        os.setsid()
    if how.get("process_group", -1) >= 0:
        os.setpgid(0, how["process_group"])
    for fd, given in ((0, how["p2cread"]), (1, how["c2pwrite"]), (2, how["errwrite"])):
        if given >= 0:
            os.dup2(given, fd)
    if how["close_fds"]:
        kept = sorted({2, *how["pass_fds"]})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    if how["cwd"] is not None:
        os.chdir(how["cwd"])
    if how["preexec_fn"]:
        how["preexec_fn"]()


# --- started by a test -------------------------------------------------------------------------------------------


def _run(
    command: Sequence[str], environment: dict[str, str], cwd: Path | None, network: str, output: Any, errors: Any
) -> None:
    os.setsid()
    if network:
        fd, libc = os.open(f"/run/netns/{network}", os.O_RDONLY), ctypes.CDLL(None, use_errno=True)
        assert libc.setns(fd, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.detach(), 1)
    os.dup2(errors.detach() if errors else 1, 2)
    if cwd is not None:
        os.chdir(cwd)
    program = parse(command)
    assert program is not None
    _play(program, environment)


class Loaded:
    """As much of a Popen as benchmarks use; in a ``network`` of that name, if there is one. Other programs, such as
    mpiexec, are started as ever."""

    def __new__(cls, command: Sequence[str], **how: Any) -> Any:
        return super().__new__(cls) if parse(command) else subprocess.Popen(command, **how)

    def __init__(
        self, command: Sequence[str], *, stdout: IO | int, stderr: IO | int | None = None,
        env: Mapping[str, str] | None = None, cwd: Path | None = None, network: str = "", **_: Any,
    ):  # fmt: skip
        self.args = command
        context: Any = mp.get_context("forkserver")
        errors = None if stderr is None or isinstance(stderr, int) else DupFd(stderr.fileno())
        environment = dict(os.environ if env is None else env)
        with contextlib.ExitStack() as opened:
            arguments = (command, environment, cwd, network, DupFd(self._output(stdout, opened)), errors)
        self._process = context.Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def _output(self, stdout: IO | int, opened: contextlib.ExitStack) -> int:
        if not isinstance(stdout, int):
            return stdout.fileno()
        if stdout == subprocess.PIPE:
            reader, writer = os.pipe()
            self.stdout = open(reader)  # noqa: SIM115
        else:
            assert stdout == subprocess.DEVNULL
            writer = os.open(os.devnull, os.O_WRONLY)
        opened.callback(os.close, writer)
        return writer

    def kill(self) -> None:
        self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode


def stand_in() -> SimpleNamespace:
    """Replaces the module subprocess in one of our modules."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": Loaded})


def run(
    command: Sequence[str], *, timeout: float, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """As ``subprocess.run(command, capture_output=True, text=True)``; one that is late has its code, -9."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Loaded(command, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())
