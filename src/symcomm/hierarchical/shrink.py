"""Shrinking a group across hosts. Members of an attempt build its group, then vote, and use the group once the attempt
is decided (membership/succession.py). A member that cannot build it says for which ranks it waited in vain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.hierarchical.rounds import ControlExchange
from symcomm.membership.succession import Attempt, Succession, agree
from symcomm.memory.share import Exchange, GroupNotBuilt

Make = Callable[[Sequence[int], Exchange], Any]


class MembersLost(errors.RankFailedError):
    """Members of an attempt are gone; ``ranks`` are those of the group that shrinks."""


class MembersLate(errors.DeadlineError):
    """Members of an attempt did not arrive."""


def shrink(group: Any, timeout: float, exclude: Collection[int], quorum: int | None, make: Make) -> Any:
    """The group that ``make(members, exchange)`` returns; it has the same members on all of them."""
    group.board.begin(timeout, quorum)
    smaller = agree(
        group.board, timeout, exclude, lambda succession, attempt: _build(group, succession, attempt, make)
    )  # fmt: skip
    group.rounds.forget("shrink/")
    return smaller


def _build(group: Any, succession: Succession, attempt: Attempt, make: Make) -> Any:
    board, members, timeout = succession.board, attempt.living(group.size), succession.timeout
    standing = board.now()

    def check() -> None:
        if board.now() != standing:
            raise GroupNotBuilt("there is another attempt")
        if lost := set(members).intersection(board.gone()):
            raise MembersLost(f"rank {format_ranks(lost)} is gone", sorted(lost))

    topic, late = f"shrink/{attempt.number}", lambda missing: MembersLate("they did not come", missing)
    exchange = ControlExchange(group.rounds, members, topic, timeout, check, late)
    try:
        smaller = make(members, exchange)
    except GroupNotBuilt:
        raise
    except MembersLost as error:
        _go_on_without(succession, attempt, error.ranks)
    except MembersLate as error:
        _go_on_without(succession, attempt, board.find_culprits(attempt, error.missing))
    except (errors.PeerError, errors.DeadlineError):  # its ranks are the new group's; the next attempt knows more
        _go_on_without(succession, attempt, ())
    try:
        succession.vote(attempt)
    except BaseException:
        smaller.leave()
        raise
    board.publish(done=attempt.number)
    return smaller


def _go_on_without(succession: Succession, attempt: Attempt, culprits: Collection[int]) -> NoReturn:
    standing = succession.board.now()
    if standing.attempt == attempt:
        succession.fail(standing, culprits)
    raise GroupNotBuilt(f"attempt {attempt.number} could not be built")
