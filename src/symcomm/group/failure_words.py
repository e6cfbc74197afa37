"""The sentences of failures, for all executors. Each is composed here and nowhere else.

group/failure.py, hierarchical/failure.py and cuda/failure.py find out which ranks failed, and how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from symcomm import errors
from symcomm.errors import format_ranks, format_seconds

GIVE_UP_OR_GO_ON = "destroy the group, or call group.shrink() to go on."


def go_on_without(gone: Sequence[int], left: Iterable[int] | None = None, it: str = "it") -> str:
    """What a caller can do. ``left``: the ranks that live, where all are known."""
    survivors = "" if left is None else f"Survivors: {format_ranks(r for r in left if r not in gone)}. "
    return f"{survivors}Call group.shrink() to go on without {it}."


def ranks_gone(what: str, gone: Sequence[int], left: Iterable[int] | None) -> errors.RankFailedError:
    """``what``: which call failed, and how each rank ended."""
    return errors.RankFailedError(f"{what}. {go_on_without(gone, left)}", gone)


def rank_failed(
    what: str, rank: int, size: int, seconds: float, story: str, gone: Sequence[int]
) -> errors.RankFailedError:
    """``story``: how the ranks in ``gone`` ended, as this ``rank`` saw it."""
    return ranks_gone(f"{what} failed on rank {rank} after {format_seconds(seconds)}: {story}", gone, range(size))


def too_late(what: str, look_at: str, missing: Sequence[int]) -> errors.DeadlineError:
    """A deadline has passed. ``look_at``: where the caller may find out why."""
    fix = f"Look at {look_at}, or give a longer timeout to the call. {go_on_without(missing, it='them')}"
    return errors.DeadlineError(f"{what}. {fix}", missing)


def timed_out(
    what: str, rank: int, seconds: float, origin: int, story: str, missing: Sequence[int]
) -> errors.DeadlineError:
    """Rank ``origin``'s deadline has passed; this ``rank`` says so."""
    who = "" if origin == rank else f" (rank {origin}'s deadline)"
    text = f"{what} timed out on rank {rank} after {format_seconds(seconds)}{who}: {story}"
    error = too_late(text, "what the missing ranks do", missing)
    error.is_own = origin == rank
    return error


def peer_late(what: str, seconds: float, peer: int, pid: int) -> errors.DeadlineError:
    """A wait for one rank, which lives, has reached its deadline."""
    fix = f"Rank {peer} (pid {pid}) lives; look at what it does, or give a longer timeout."
    return errors.deadline(what, seconds, missing=[peer], fix=fix)


def list_calls(sides: dict[str, list[int]]) -> str:
    """``sides``: call -> the ranks that made it."""
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} called {side}" for side, ranks in sides.items()
    )


def mismatched(what: str, listed: str) -> errors.CollectiveMismatchError:
    return errors.CollectiveMismatchError(
        f"{what}: the ranks did not make the same call: {listed}. Make every rank call the same collectives, "
        "with the same dtype, sizes, operation and root, in the same order."
    )


def aborted(what: str, origin: int) -> errors.GroupUnusableError:
    return errors.GroupUnusableError(f"{what} was aborted by rank {origin}; {GIVE_UP_OR_GO_ON}")


def no_result(what: str) -> errors.GroupUnusableError:
    """For asynchronous work that ended with its group."""
    return errors.GroupUnusableError(f"{what}; operations under way hold no result. {GIVE_UP_OR_GO_ON.capitalize()}")
