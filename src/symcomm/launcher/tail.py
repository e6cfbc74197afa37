"""The last lines that a rank wrote: those in which its user looks for the cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

KEPT = 400  # lines of a rank's stderr: more than a traceback has
SHOWN = 10
WIDTH = 400  # characters of a line

# torch's hook for exceptions puts the rank before each line.
_FRAME = re.compile(r'(\[rank\d+\]: )?  File "(.+)", line \d+, in ')
_UNDER_FRAME = re.compile(r"(\[rank\d+\]: )?    ")
_OURS = str(Path(__file__).parents[1]) + "/"
_TORCHS = ("/torch/distributed/c10d_logger.py", "/torch/distributed/distributed_c10d.py")


def last_lines(lines: Sequence[str]) -> list[str]:
    """The last of ``lines``, without the frames of ours through which a call of the user's went."""
    return [line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in _users(lines)[-SHOWN:]]


def _users(lines: Sequence[str]) -> list[str]:
    kept: list[str] = []
    inside = False  # a frame of ours, below one of the user's
    of_a_frame = False  # whether the line kept last is
    for line in lines:
        frame, under = _FRAME.match(line), _UNDER_FRAME.match(line)
        if frame:
            inside = (inside or of_a_frame) and (frame[2].startswith(_OURS) or frame[2].endswith(_TORCHS))
        elif not under:
            inside = False
        if not inside:
            kept.append(line)
            of_a_frame = bool(frame or under)
    return kept
