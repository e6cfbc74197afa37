"""FlightRecorderHook: leaves a dump behind when a group fails. (The recorder needs no hook to see operations.)"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from symcomm.errors import bad_argument
from symcomm.group.hook_classes import AttachedHook, hooks_of
from symcomm.observe.recorder.dump import note, prefix_from_environment, torchs_prefix, write


class FlightRecorderHook(AttachedHook):
    """``attach(group)``: when the group is aborted or fails, this rank writes its records, in PyTorch's format, to the
    file that ``TORCH_FR_DUMP_TEMP_FILE`` names, or to PyTorch's default file.

    Raises: BadArgumentError from ``attach``."""

    kind = "abort"

    @staticmethod
    def attach(group: Any, global_ranks: Sequence[int] = ()) -> FlightRecorderHook:
        core = hooks_of("FlightRecorderHook.attach", group)
        ranks = list(global_ranks) or list(core.global_ranks)
        if len(ranks) != core.size:
            raise bad_argument("FlightRecorderHook.attach", "global_ranks", ranks, f"one rank for each of {core.size}")
        rank, address = ranks[core.rank], core.flight_address

        def dump() -> None:
            if prefix_from_environment() is None:  # else the tracer writes, for dead peers too
                write(note(rank, os.getpid(), address), f"{torchs_prefix()}{rank}")

        return FlightRecorderHook(core, dump)
