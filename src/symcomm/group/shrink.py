"""shrink() on one host. Survivors agree in shared memory; a vote says where the rank's part of the new group lies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symcomm import errors
from symcomm.membership.shared_board import Records, SharedBoard
from symcomm.membership.succession import agree


def check_excluded(group: Any, exclude: Collection[int]) -> None:
    """Refuse an ``exclude`` that names no rank of the group, or the caller's own."""
    if any(not isinstance(r, int) or not 0 <= r < group.size for r in exclude):
        raise errors.bad_argument("shrink", "exclude", list(exclude), f"ranks of this group, 0 to {group.size - 1}")
    if group.rank in exclude:
        raise errors.bad_argument(
            "shrink", "exclude", list(exclude), f"without this rank ({group.rank})", "only ranks that stay call it"
        )


def check_quorum(group: Any, quorum: int | None) -> None:
    is_number = isinstance(quorum, int) and not isinstance(quorum, bool)
    if quorum is not None and not (is_number and 1 <= quorum <= group.size):
        raise errors.bad_argument("shrink", "quorum", quorum, f"a number of ranks, 1 to {group.size}, or None")


def shrink(group: Any, timeout: float, exclude: Collection[int], abort: bool) -> Any:
    """See ProcessGroup.shrink. Operations that other ranks still have under way end now with ``abort``, otherwise once
    all ranks that go on have come."""
    board = SharedBoard(Records(group.handle), group.rank, group.size, group.name)
    if abort:
        group.handle.abort()  # a no-op when the group has failed already
    smaller = agree(
        board, timeout, exclude,
        lambda succession, attempt: group.of_members(attempt.living(group.size), succession.exchange_for(attempt)),
    )  # fmt: skip
    group.handle.abort()  # tells the ranks that were left out, should they still use it
    group.reclaim_windows()
    smaller.inherit(group)
    return smaller
