"""How a rank ended, and the summary of what happened to a job."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from symcomm.errors import SymcommError, format_exit, format_ranks, format_seconds

# What death by a signal that we did not send usually means.
HINTS: dict[int, str] = {
    signal.SIGKILL: "somebody killed it: the kernel does so when memory runs out (see `dmesg`).",
    signal.SIGBUS: "memory behind a mapping was missing: /dev/shm may be full (see `df -h /dev/shm`).",
    signal.SIGSEGV: "a crash in native code: run with `--env PYTHONFAULTHANDLER=1` to see where.",
    signal.SIGABRT: "native code gave up: run with `--env PYTHONFAULTHANDLER=1` to see where.",
}

# The last line of a traceback whose error blames another rank (torch puts a rank before it), and that rank in it.
_BLAMES = re.compile(r"(\[rank\d+\]: )?(\w+\.)*RankFailedError: ")
_BLAMED = re.compile(r"\brank (\d+) \(pid (\d+)\)")


@dataclass
class RankEnd:
    """One rank's end. ``returncode`` is as in subprocess, None when not even SIGKILL ended it."""

    rank: int
    pid: int
    returncode: int | None
    seconds: float  # how long it ran
    after: int = 0  # the signal that we sent to stop it; 0: it ended by itself

    @property
    def failed_by_itself(self) -> bool:
        return self.returncode != 0 and not self.after


def exit_code(end: RankEnd) -> int:
    """What a shell would report: the rank's code, or 128 + signal."""
    if end.returncode is None:
        return 128 + signal.SIGKILL
    return end.returncode if end.returncode >= 0 else 128 - end.returncode


def find_cause(
    first: RankEnd, ends: Sequence[RankEnd], tail_of: Callable[[int], Sequence[str]], one_node: bool
) -> RankEnd:
    """The root cause. A failed rank may still be exiting when a rank that missed it has ended. So if the first rank
    ended with a RankFailedError, the rank named there is the cause, provided that it failed by itself too."""
    failed = {end.pid: end for end in ends if end.failed_by_itself}
    cause, seen = first, {first.pid}
    while blamed := _find_blamed(tail_of(cause.rank), failed, one_node):
        if blamed.pid in seen:  # they blame each other: only the order in which they ended is left
            return first
        seen.add(blamed.pid)
        cause = blamed
    return cause


def _find_blamed(tail: Sequence[str], failed: dict[int, RankEnd], one_node: bool) -> RankEnd | None:
    last = next((line for line in reversed(tail) if line.strip()), "")
    if not _BLAMES.match(last):
        return None
    for number, pid in _BLAMED.findall(last):
        end = failed.get(int(pid))
        # Numbers belong to a group, which may be a part of the job; pids belong to a node.
        if end and (one_node or end.rank == int(number)):
            return end
    return None


def failure_words(
    first: RankEnd, others: Sequence[RankEnd], tail: Sequence[str], grace: float, log: str = ""
) -> list[str]:
    """The verdict: which rank failed first and how, its last lines, and what became of the others."""
    assert first.returncode is not None
    how = f"{format_exit(first.returncode)} after {format_seconds(first.seconds)} (pid {first.pid})"
    lines = [f"rank {first.rank} failed{' first' if others else ''}: it {how}."]
    if first.returncode < 0 and (hint := HINTS.get(-first.returncode)):
        lines.append(f"  hint: {hint}")
    if tail:
        lines.append("  its last lines on stderr:")
        lines += [f"    {line}" for line in tail]
    else:
        lines.append("  it wrote nothing to stderr.")
    if others:
        lines.append(f"  others: {fates(others, grace)}.")
    if log:
        lines.append(f"  its logs: {log}")
    return lines


def trace_words(folder: str, seconds: float) -> list[str]:
    """What the dumps in ``folder`` say went wrong, when ranks wrote them in the last ``seconds``."""
    from symcomm.observe.analysis.verdict import judge
    from symcomm.observe.recorder.trace import load

    try:
        trace = load(folder)
    except SymcommError:  # no dumps: what failed was not a collective
        return []
    since = time.time_ns() - int((seconds + 1) * 1e9)
    if not any(one.started_wall_ns >= since for one in trace.ranks.values()):
        return []
    return [f"  trace: {judge(trace).sentence}", f"  more of it: `symcomm trace {shlex.quote(folder)}`"]


def stopped_words(signum: int, ends: Sequence[RankEnd], grace: float) -> list[str]:
    """The verdict of a job that was asked to stop."""
    longest = max((end.seconds for end in ends), default=0.0)
    how = fates(ends, grace) or "no rank had started"
    return [f"stopped by {signal.Signals(signum).name} after {format_seconds(longest)}: {how}."]


def fates(ends: Sequence[RankEnd], grace: float) -> str:
    """``ranks 0, 2 stopped on SIGTERM; rank 1 was killed after 5 s`` : ranks with the same fate together."""
    by_fate: dict[str, list[int]] = {}
    for end in ends:
        by_fate.setdefault(_fate(end, grace), []).append(end.rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)} {fate}" for fate, ranks in by_fate.items()
    )


def _fate(end: RankEnd, grace: float) -> str:
    if end.returncode is None:
        return f"cannot be ended (pid {end.pid} hangs in the kernel)"
    if not end.after:
        return "had finished" if end.returncode == 0 else f"also failed ({format_exit(end.returncode)})"
    name = signal.Signals(end.after).name
    if end.after == signal.SIGKILL and end.returncode == -signal.SIGKILL:
        return f"had to be killed (grace {format_seconds(grace)})"
    if end.returncode == -end.after:
        return f"stopped on {name}"
    return f"{format_exit(end.returncode)} on {name}"
