"""Checks for TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks compare their calls before they make them.

Our collectives always compare signatures, but with data already in flight: a difference ends the group. Here the
comparison comes first, on a separate group, so that shapes are compared too, a missing rank is named at once, and the
group stays usable. That costs two small collectives per call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.group.refusal import settled
from symcomm.torch_backend.work import op_type_of

# Calls in which ranks may pass tensors of different shapes.
_UNEVEN = {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"}


class DebugChecks:
    """The checks of one group."""

    def __init__(self, checked: Any):
        self._checked = checked
        self._core = checked.new_group(range(checked.size), f"{checked.name}/detail")
        self._calls = 0

    def close(self) -> None:
        self._core.destroy()

    def check(self, call: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Return once all ranks are about to make the same call; otherwise raise, on all ranks that have arrived."""
        tensors = outputs if call == "scatter" else inputs  # all ranks pass these
        try:
            shapes = [list(t.shape) for t in tensors]
            dtypes = [t.type().rpartition(".")[2].removesuffix("Tensor") for t in tensors]
        except Exception as error:
            self.refuse(error)
            raise settled(error)  # noqa: B904: it is the same one
        self._calls += 1
        self._barrier(call)
        mine = {
            "operation": op_type_of(call).name,
            "SequenceNumber": self._calls,
            "shapes": shapes,
            "dtypes": dtypes,
        }
        everyone = [json.loads(item) for item in self._core.all_gather_bytes(json.dumps(mine).encode())]
        compared = [key for key in mine if key != "shapes" or call not in _UNEVEN]
        differ = [key for key in compared if any(one[key] != everyone[0][key] for one in everyone)]
        if differ:
            told = "; ".join(f"rank {rank}: {_describe(one)}" for rank, one in enumerate(everyone))
            raise errors.CollectiveMismatchError(
                f"{call} on group {self._checked.name!r}: Detected mismatch between collectives on ranks. {told}. "
                f"Collectives differ in the following: {', '.join(differ)}. The group can still be used."
            )

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that are about to make a call that this one makes none, and why."""
        self._calls += 1
        self._core.monitored_barriers.refuse(error)

    def _barrier(self, call: str) -> None:
        """Wait for all ranks, and name those that do not arrive."""
        try:
            self._core.monitored_barrier(self._checked.timeout, wait_all_ranks=True)
        except errors.CallRefusedError as error:
            raise errors.CallRefusedError(f"{call} on group {self._checked.name!r}: {error}", error.ranks) from error
        except (errors.DeadlineError, errors.PeerError) as error:
            # If several are gone, the later ones may have ended because the first was gone.
            missing = getattr(error, "missing", None) or getattr(error, "ranks", [])[:1]
            if self._core.rank == 0:
                who = f"Ranks {format_ranks(missing)} failed to pass monitoredBarrier"
            else:
                who = "Please check rank 0 logs for faulty rank"
            raise errors.DeadlineError(f"{call} on group {self._checked.name!r}: {who}. {error}", missing) from error


def _describe(call: dict[str, Any]) -> str:
    tensors = ", ".join(f"{d} {s}" for d, s in zip(call["dtypes"], call["shapes"], strict=True))
    return f"{call['operation']}({tensors or 'no tensors'}, on cpu, SequenceNumber {call['SequenceNumber']})"
