"""Ranks' output: lines with a prefix on the terminal, raw bytes in log files, the launcher's own words."""

from __future__ import annotations

import errno
import os
import select
import time
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from symcomm.errors import ResourceError
from symcomm.launcher.job import CALL
from symcomm.launcher.tail import KEPT, last_lines

MAX_LINE = 1 << 20  # a longer line is shown in pieces, so that a rank without newlines cannot fill our memory
REDRAW_S = 1.0  # a progress bar that redraws itself with \r is shown at most this often
COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # rank 0 cyan, rank 1 yellow, ...
STDOUT, STDERR = 1, 2


class LineStream:
    """Turns what a rank writes, in whatever pieces it arrives, into whole lines with a prefix.

    Bytes pass unchanged, valid UTF-8 or not. If a line redraws itself with a carriage return, only its latest state is
    shown: at most once a second while it changes, and once when it ends.
    """

    def __init__(self, prefix: bytes):
        self.tail: deque[bytes] = deque(maxlen=KEPT)
        self._prefix = prefix
        self._held = b""  # the line that has not ended yet
        self._redraw: bytes | None = None  # the state of that line that was shown last
        self._redraw_at = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """What to show after ``data`` arrived."""
        *lines, self._held = (self._held + data).split(b"\n")
        shown = b"".join(map(self._line, lines))
        stripped = self._held.rstrip(b"\r")
        if (start := stripped.rfind(b"\r")) > 0:
            self._held = self._held[start:]  # what preceded it was overwritten
        if len(self._held) > MAX_LINE:
            shown, self._held = shown + self._line(self._held), b""
        return shown + self.tick(now)

    def tick(self, now: float) -> bytes:
        """What to show after some time: the latest state of a line that redraws itself."""
        if b"\r" not in self._held or now - self._redraw_at < REDRAW_S:
            return b""
        text = _visible(self._held)
        if not text or text == self._redraw:
            return b""
        self._redraw, self._redraw_at = text, now
        return self._prefix + text + b"\n"

    def finish(self) -> bytes:
        """What to show at the end: a last line without a newline gets one."""
        held, self._held = self._held, b""
        return self._line(held) if held else b""

    @property
    def waiting(self) -> bool:
        return b"\r" in self._held

    def _line(self, line: bytes) -> bytes:
        text = _visible(line) if b"\r" in line else line
        shown_before, self._redraw = text == self._redraw, None
        self.tail.append(text)
        return b"" if shown_before else self._prefix + text + b"\n"


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def want_color(choice: bool | None, environ: Mapping[str, str], is_terminal: bool) -> bool:
    """--color / --no-color decide; else NO_COLOR (https://no-color.org); else whether this is a terminal."""
    if choice is not None:
        return choice
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def _open_log(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "wb", buffering=0)
    except OSError as error:
        raise ResourceError(f"{CALL}: --log-dir: {path} cannot be written ({error.strerror}).") from None


class Output:
    """A job's output: two descriptors of ours and, if asked for, a file for each stream of each rank."""

    def __init__(
        self, *, color: bool = False, prefix: bool = True, quiet: bool = False, out: int = STDOUT, err: int = STDERR
    ):
        self.broken = False  # no one reads our output any more
        self.failure = ""  # the error, unless the reader is just gone
        self._color = color
        self._prefix = prefix
        self._quiet = quiet
        self._descriptors = {STDOUT: out, STDERR: err}
        self._streams: dict[tuple[int, int], LineStream] = {}
        self._logs: dict[tuple[int, int], FileIO] = {}

    def begin(self, rank: int, widest: int, tag: str, log_dir: Path | None) -> None:
        """A rank starts. ``widest`` is the highest rank, so that all lines start in one column."""
        label = f"[{tag} rank {rank}]" if tag else f"[rank {rank}]"
        padding = " " * (1 + len(str(widest)) - len(str(rank)))
        if self._color:
            label = f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m"
        prefix = (label + padding).encode() if self._prefix else b""
        for which, suffix in ((STDOUT, "out"), (STDERR, "err")):
            self._streams[rank, which] = LineStream(prefix)
            if log_dir is not None:
                self._logs[rank, which] = _open_log(log_dir / f"rank-{rank}.{suffix}")

    def feed(self, rank: int, which: int, data: bytes) -> None:
        if log := self._logs.get((rank, which)):
            try:
                _write_all(log.fileno(), data)
            except OSError as error:  # a full disk must not end the job
                self._logs.pop((rank, which)).close()
                self.say([f"{log.name} ends here: {error.strerror}."], bad=False)
        self._show(which, self._streams[rank, which].feed(data, time.monotonic()))

    def finish(self, rank: int, which: int) -> None:
        if log := self._logs.pop((rank, which), None):
            log.close()
        self._show(which, self._streams[rank, which].finish())

    def tick(self) -> None:
        now = time.monotonic()
        for (_, which), stream in self._streams.items():
            if stream.waiting:
                self._show(which, stream.tick(now))

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to stderr."""
        return last_lines([line.decode(errors="replace").rstrip() for line in self._streams[rank, STDERR].tail])

    def say(self, lines: list[str], *, bad: bool = True) -> None:
        """The launcher's own words, on stderr; the first line is marked."""
        head, rest = f"{CALL}: {lines[0]}", lines[1:]
        if self._color:
            head = f"\x1b[1;{31 if bad else 33}m{head}\x1b[0m"
        self._write(self._descriptors[STDERR], "".join(f"{line}\n" for line in [head, *rest]).encode())

    def _show(self, which: int, data: bytes) -> None:
        if data and not self._quiet:
            self._write(self._descriptors[which], data)

    def _write(self, descriptor: int, data: bytes) -> None:
        try:
            if not self.broken:
                _write_all(descriptor, data)
        except OSError as error:  # the reader is gone (`| head`), or the terminal is, or the disk is full
            self.broken = True
            if error.errno != errno.EPIPE:
                self.failure = str(error.strerror)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # a terminal that some program left non-blocking
            select.select([], [descriptor], [], 1.0)
