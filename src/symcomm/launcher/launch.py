"""Starts the ranks of a job on this node, watches them, and ends them all when one fails.

One thread runs one event loop: ranks' output and ranks' exits are both events. It reaps no rank before the attempt is
over, so the kernel cannot give a rank's pid or process group to a stranger while we may still signal it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from symcomm.errors import DeadlineError, PeerError, ResourceError, format_ranks
from symcomm.launcher import verdict
from symcomm.launcher.job import CALL, LOCAL_ADDRESS, Job, reserve_port
from symcomm.launcher.output import STDERR, STDOUT, Output
from symcomm.launcher.reaper import KILL_DEADLINE_S, Reaper, find_processes, kill_processes, signal_processes
from symcomm.memory import numa
from symcomm.store.standing import MEMBER, standing_key

# After a rank failed, the others get this long to fail by themselves and print why (a lost peer breaks every wait
# within milliseconds; a Python traceback and exit take about 0.1 s), before they get SIGTERM.
SETTLE_S = 0.3
IDLE_S = 1.0  # the loop runs at least this often
LOOK_S = 0.2  # and this often where other launchers take part
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # forwarded to process groups; the second one kills
PASSING = (signal.SIGUSR1, signal.SIGUSR2)  # forwarded to the ranks only: they would kill helpers
PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    number: int
    process: subprocess.Popen[Any]
    started: float
    ended: float | None = None
    returncode: int | None = None
    stopping: int = 0  # the last signal that we sent to stop it
    pidfd: int | None = None
    replaced: bool = False  # it was replaced by another process
    restarts: int = 0  # its TORCHELASTIC_RESTART_COUNT

    def end(self, now: float) -> verdict.RankEnd:
        seconds = (self.ended or now) - self.started
        return verdict.RankEnd(self.number, self.process.pid, self.returncode, seconds, self.stopping)


@dataclass
class StopRequest:
    """The signals that the launcher itself receives, from a terminal or a scheduler."""

    signum: int = 0  # the first signal that asks the job to stop
    attempt: JobAttempt | None = None
    pid: int = field(default_factory=os.getpid)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the block, in a main thread. Ignored ones stay ignored: nohup, background jobs."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (*STOPPING, *PASSING):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, self._receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, signum: int, _frame: object) -> None:
        # Acts at once and not in the loop, since the loop may be stuck writing to a terminal that nobody reads.
        if os.getpid() != self.pid:
            return  # a rank between fork and exec; the launcher got the same signal and will forward it
        if signum in PASSING:
            if self.attempt:
                self.attempt.pass_on(signum)
        elif self.signum:
            # a shell that exits sends SIGHUP in addition to the kernel's; that is not a second request
            if self.attempt and signum != signal.SIGHUP:
                self.attempt.kill()
        else:
            self.signum = signum
            if self.attempt:
                self.attempt.forward_stop(signum)


class JobAttempt:
    """All ranks of this node, started once."""

    def __init__(
        self,
        job: Job,
        number: int,
        output: Output,
        reaper: Reaper,
        stop: StopRequest,
        look: Callable[[JobAttempt], str] | None = None,
        late: bool = False,
        store: Any = None,
    ):
        """``look(attempt)`` is polled: why the ranks have to end, or "". ``late`` ranks join those that run. ``store``:
        the ranks' store, if another launcher may serve it."""
        self.job = job
        self.number = number
        self.first_failed: Rank | None = None
        self.ranks: list[Rank] = []
        self._output = output
        self._reaper = reaper
        self._stop = stop
        self._selector = selectors.DefaultSelector()
        self._started = False
        self._next_step: tuple[float, Callable[[], None]] | None = None  # when to send a harsher signal, and how
        self._killing = False
        self._given_up = False
        self.restarts = number  # restarts so far: earlier attempts, and ranks replaced in this one
        self._lost: list[Rank] = []  # failed ranks, and when to replace them ...
        self._replace_at = 0.0
        self._look = look
        self._late = late
        self._store = store
        self._reported = False  # some rank has said in the store where it stands
        self._looked = 0.0
        self.cut_short = ""  # why another launcher ended the attempt
        self._meeting = (LOCAL_ADDRESS, 0)  # where the ranks meet

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Returns when every rank, and every process that a rank has left behind, is gone."""
        host, port = self.job.endpoint or (LOCAL_ADDRESS, 0)
        hosts_store = self.job.node_rank == 0 and self.job.min_nodes is None
        holder = reserve_port(port) if hosts_store else None
        own_store: Any = None
        self._stop.attempt = self
        try:
            self._meeting = (host, holder.getsockname()[1] if holder else port)
            if hosts_store and self.job.keeps_store:
                self._store = own_store = self._serve_store(*self._meeting)
            self._start()
            while (self._live() or self._lost) and not self._given_up:
                self._turn(IDLE_S)
            self._end_leftovers()
        finally:
            self._started = False
            kill_processes(self._groups(), self.job.mark)
            self._drain()
            for rank in self.ranks:
                self._reaper.forget(rank.process.pid)
                rank.process.poll()  # only now may the kernel reuse its pid
                if rank.pidfd is not None:
                    os.close(rank.pidfd)
            self._selector.close()
            if own_store:
                own_store.close()
            if holder:
                holder.close()
            self._stop.attempt = None

    def ends(self) -> list[verdict.RankEnd]:
        now = time.monotonic()
        return [rank.end(now) for rank in self.ranks if not rank.replaced]

    def _serve_store(self, host: str, port: int) -> Any:
        """The ranks' store, in this process."""
        from symcomm.store.tcp import TCPStore

        token = self.job.environment(0, 0, host, port).get("SYMCOMM_TOKEN", "")
        optional = self.job.admits_unauthenticated
        return TCPStore(host, port, is_master=True, wait_for_workers=False, token=token, token_is_optional=optional)

    def _start(self) -> None:
        for local_rank in range(self.job.ranks_here):
            if self._stop.signum:
                break
            self._start_one(local_rank, self.number if self._late else None)
        self._started = True
        if self._stop.signum:  # a signal came while we were starting
            self.forward_stop(self._stop.signum)

    def _start_one(self, local_rank: int, joins: int | None) -> None:
        job, number = self.job, self.job.first_rank + local_rank
        self._output.begin(number, job.world_size - 1, job.tag, job.log_directory(self.restarts))
        environment = job.environment(local_rank, self.restarts, *self._meeting, joins)
        cores = numa.cores_for(local_rank, job.ranks_here) if job.bind_numa else None
        process = _spawn(job, environment, functools.partial(_prepare, ctypes.CDLL(None), os.getpid(), cores))
        self._reaper.watch(process.pid)
        rank = Rank(number, process, time.monotonic(), restarts=self.restarts)
        self.ranks.append(rank)
        self._watch(rank)

    def _watch(self, rank: Rank) -> None:
        for which, pipe in ((STDOUT, rank.process.stdout), (STDERR, rank.process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, functools.partial(self._read, rank, which, pipe))
        with contextlib.suppress(OSError):  # before Linux 5.3: every iteration of the loop polls instead
            rank.pidfd = os.pidfd_open(rank.process.pid)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, functools.partial(self._note_end, rank))

    def _turn(self, timeout: float) -> None:
        now = time.monotonic()
        if self._next_step:
            timeout = min(timeout, max(0.0, self._next_step[0] - now))
        if self._lost:
            timeout = min(timeout, max(0.0, self._replace_at - now))
        if self._look or self.has_lost:
            timeout = min(timeout, LOOK_S)
        live = self._live()
        if any(rank.pidfd is None for rank in live):
            timeout = min(timeout, 0.05)
        for key, _ in self._selector.select(timeout):
            key.data()
        for rank in live:
            if rank.pidfd is None:
                self._note_end(rank)
        self._output.tick()
        if self._output.broken and not self._stop.signum:
            self._stop.signum = signal.SIGPIPE
            self._terminate()
        if self._next_step and time.monotonic() >= self._next_step[0]:
            self._next_step[1]()
        if self._lost and time.monotonic() >= self._replace_at:
            self._replace_lost()
        if now >= self._looked + LOOK_S:
            self._looked = now
            self._look_around()

    def _look_around(self) -> None:
        """Ask whether other launchers want the ranks to end, and whether the ranks wait in vain."""
        if self._look and not self.cut_short and (why := self._look(self)):
            self.cut_short = why
            self._lost = []
            self._terminate()
        elif self._is_deserted() and not self._lost and not self.first_failed:
            self._fail_deserted(next(rank for rank in reversed(self.ranks) if rank.returncode))

    @property
    def has_lost(self) -> bool:
        """Whether a rank has failed, and is to be replaced or has been."""
        return self.job.restart == "failed" and any(rank.returncode for rank in self.ranks)

    def none_is_member(self) -> bool:
        """Whether ranks live and certainly none of them is in a group. A program that reports nothing may meet
        elsewhere; once any of its ranks has reported, the reports are complete."""
        live = self._live()
        try:
            if not live or any(self._standing(rank) == MEMBER for rank in live):
                return False
            self._reported = self._reported or any(self._standing(rank) for rank in self.ranks)
        except (PeerError, DeadlineError):
            return False
        return self._reported

    def _standing(self, rank: Rank) -> str:
        """What a rank has reported (store/standing.py); "" for nothing."""
        if self._store is None:
            return ""
        key = f"attempt_{self.number}/{standing_key(rank.number, rank.restarts)}"  # as in store/bootstrap.py
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def _is_deserted(self) -> bool:
        """Whether all living ranks wait for ranks that are gone. Launchers of several nodes decide that together."""
        is_over = any(rank.returncode == 0 for rank in self.ranks)  # then newcomers hear that the job is over
        return self.has_lost and not (is_over or self._look or self._stop.signum) and self.none_is_member()

    def _fail_deserted(self, rank: Rank) -> None:
        live = [rank.number for rank in self._live()]
        waiting = f"rank{'s' * (len(live) > 1)} {format_ranks(live)}"
        self._output.say([f"no rank is left in a group that {waiting} could join."], bad=False)
        self._fail(rank)

    def _live(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.ended is None]

    def _groups(self) -> set[int]:
        return {rank.process.pid for rank in self.ranks}

    def _read(self, rank: Rank, which: int, pipe: Any) -> bool:
        """Whether there was something to read. At the end of the stream, closes the pipe."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._output.feed(rank.number, which, data)
        else:
            self._selector.unregister(pipe)
            pipe.close()
            self._output.finish(rank.number, which)
        return bool(data)

    def _note_end(self, rank: Rank) -> None:
        """Read how a rank ended, without reaping it. The first failure starts to end the others."""
        how = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if how is None:
            return
        rank.ended = time.monotonic()
        rank.returncode = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
        if rank.returncode == 0 or self.first_failed or (self.cut_short and rank.stopping):
            return
        if self.job.restart == "failed" and not self._stop.signum:
            self._lost.append(rank)
            self._replace_at = rank.ended + SETTLE_S
        else:
            self._fail(rank)

    def _fail(self, rank: Rank) -> None:
        assert rank.ended is not None
        self.first_failed = rank
        if self._stop.signum:  # the job was asked to stop: a SIGTERM now could interrupt what the others save
            self._next_step = self._next_step or (rank.ended + self.job.grace, self.kill)
        else:
            self._next_step = (rank.ended + SETTLE_S, self._terminate)

    # -- replacing --------------------------------------------------------------------------------

    def _replace_lost(self) -> None:
        """Replaces ranks that failed, if any rank is left that the new ones can join."""
        lost, self._lost = self._lost, []
        left = self.job.max_restarts - self.restarts
        if self._stop.signum or len(lost) > left or not self._can_be_joined(lost):
            self._fail(lost[0])
            return
        if self._is_deserted():
            self._fail_deserted(lost[0])
            return
        for rank in lost:
            self.restarts += 1
            words = verdict.failure_words(rank.end(0.0), [], self._output.tail(rank.number), self.job.grace)
            again = f"  starting another rank {rank.number} that joins the others"
            self._output.say([*words, f"{again} (restart {self.restarts} of {self.job.max_restarts})."], bad=False)
            rank.replaced = True
            self._drain(rank)
            self._start_one(rank.number - self.job.first_rank, self.number)

    def _can_be_joined(self, lost: list[Rank]) -> bool:
        if self._look:
            return True  # there may be ranks on other nodes; the launchers find out together
        others = [rank for rank in self.ranks if rank not in lost and not rank.replaced]
        return any(r.ended is None or r.returncode == 0 for r in others)

    # -- ending -----------------------------------------------------------------------------------

    def pass_on(self, signum: int) -> None:
        signal_processes([rank.process.pid for rank in self._live() if self._started], signum)

    def forward_stop(self, signum: int) -> None:
        """A stop from outside: ranks get the full grace period."""
        if self._started:
            self._signal_groups(signum)

    def _terminate(self) -> None:
        self._signal_groups(signal.SIGTERM)
        self._next_step = (time.monotonic() + self.job.grace, self.kill)

    def kill(self) -> None:
        """End everything now."""
        self._killing = True
        self._signal_groups(signal.SIGKILL)
        self._next_step = (time.monotonic() + KILL_DEADLINE_S, self._give_up)

    def _give_up(self) -> None:
        self._given_up = True

    def _signal_groups(self, signum: int) -> None:
        """Also groups whose rank has ended: its children may still run."""
        for rank in self.ranks:
            if rank.ended is None:
                rank.stopping = signum
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signum)

    def _end_leftovers(self) -> None:
        """Processes that ranks left behind get SIGTERM too, and the rest of the grace period."""
        left = find_processes(self._groups(), self.job.mark)
        kill_is_due = self._next_step and self._next_step[1] == self.kill
        end = self._next_step[0] if self._next_step and kill_is_due else time.monotonic() + self.job.grace
        self._next_step = None
        if left and not self._given_up:
            signal_processes(left, signal.SIGTERM)
        while left and time.monotonic() < end and not self._killing:
            self._turn(0.02)
            left = find_processes(self._groups(), self.job.mark)
        if left and not self._given_up:
            self._output.say([f"killed what ranks had left behind: {_names(left)}."], bad=False)

    def _drain(self, ended: Rank | None = None) -> None:
        """Shows what is still in the pipes of a rank that ended, or of all, and closes them."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, int) and (ended is None or key.data.args[0] is ended):
                self._empty(*key.data.args)

    def _empty(self, rank: Rank, which: int, pipe: Any) -> None:
        while self._read(rank, which, pipe):
            pass
        if not pipe.closed:  # a process that we cannot end, or that the rank left behind, still holds the other end
            self._selector.unregister(pipe)
            pipe.close()
            self._output.finish(rank.number, which)


@contextlib.contextmanager
def watched(job: Job) -> Iterator[tuple[StopRequest, Reaper]]:
    """What all attempts at a job share; refuses a job that contradicts itself."""
    job.check()
    stop = StopRequest()
    with stop.listening():
        reaper = Reaper(job.mark)
        try:
            yield stop, reaper
        finally:
            reaper.dismiss()


def launch(job: Job, output: Output) -> int:
    """Runs a job to its end, with its restarts; returns what the program should exit with."""
    restarts = 0
    with watched(job) as (stop, reaper):
        while True:
            attempt = JobAttempt(job, restarts, output, reaper, stop)
            attempt.run()
            code = judge(attempt, stop.signum, output)
            restarts = attempt.restarts + 1
            if code == 0 or stop.signum or restarts > job.max_restarts:
                return code
            output.say([f"restarting all ranks (restart {restarts} of {job.max_restarts})."], bad=False)


def judge(attempt: JobAttempt, stopped_by: int, output: Output) -> int:
    """The exit code of an attempt; prints the reason if it failed."""
    job, ends = attempt.job, attempt.ends()
    first = attempt.first_failed
    if stopped_by == signal.SIGPIPE:
        output.broken = False  # one stream has lost its reader; the other may still have one
    cut_short = stopped_by == signal.SIGPIPE or len(ends) < job.ranks_here or any(e.returncode is None for e in ends)
    failed_before = first is not None and not first.stopping
    if stopped_by and (first or cut_short) and not failed_before:
        why = [f"  What ranks print could not be written: {output.failure}."] if output.failure else []
        output.say([*verdict.stopped_words(stopped_by, ends, job.grace), *why])
        return verdict.exit_code(first.end(0.0)) if first and not cut_short else 128 + stopped_by
    if first is None:
        return 0
    log_dir = job.log_directory(attempt.number)
    cause = verdict.find_cause(first.end(0.0), ends, output.tail, one_node=job.nodes == 1)
    log = f"{log_dir / f'rank-{cause.rank}'}.out, .err" if log_dir else ""
    others = [end for end in ends if end.rank != cause.rank]
    words = verdict.failure_words(cause, others, output.tail(cause.rank), job.grace, log)
    if folder := job.env.get("SYMCOMM_TRACE_DIR") or os.environ.get("SYMCOMM_TRACE_DIR"):
        words += verdict.trace_words(folder, max(end.seconds for end in ends))
    output.say(words)
    return verdict.exit_code(cause)


def _spawn(job: Job, env: dict[str, str], prepare: Callable[[], None]) -> subprocess.Popen[Any]:
    try:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,  # a process group of its own, out of reach of the terminal's Ctrl-C
            preexec_fn=prepare,
            bufsize=0,
        )
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ResourceError(f"{CALL}: {job.command[0]} cannot be started ({why}).") from None


def _prepare(libc: Any, parent: int, cores: set[int] | None) -> None:
    """Runs in the new rank before its program: binds it to cores, and has the kernel kill it when the launcher dies."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before that
        os._exit(1)


def _names(pids: list[int]) -> str:
    """``python (pid 17), sleep (pid 18)``"""
    names = []
    for pid in pids[:5]:
        try:
            with open(f"/proc/{pid}/comm") as file:
                names.append(f"{file.read().strip()} (pid {pid})")
        except OSError:
            names.append(f"pid {pid}")
    return ", ".join(names) + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
