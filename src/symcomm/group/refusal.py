"""A call that one rank refuses, for a reason that only it can know, is refused on all.

Its argument is wrong, its object cannot be pickled, or it has no memory for the plan; the others would wait for it. So
the rank takes the operation's number, says what was wrong, and raises at once. The others find its words where they
expected its arrival, and raise ``CallRefusedError``. The group goes on with the next number.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import format_ranks

# Errors that the others know already, or learn of another way.
_SHARED = (
    errors.PeerError, errors.DeadlineError, errors.CollectiveMismatchError, errors.GroupUnusableError,
    errors.CallRefusedError, errors.OutputRefusedError,  # that rank took part
)  # fmt: skip
_MARK = "_symcomm_settled"


class Refusals:
    """``with Refusals(group):`` around what a call does before ranks meet. An error there is told to the others, once,
    also where such blocks are nested."""

    __slots__ = ("_group",)

    def __init__(self, group: Any):
        self._group = group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, _SHARED) and not getattr(error, _MARK, False):
            settled(error)
            self._group.refuse(error)


def settled(error: Exception) -> Exception:
    """Mark ``error`` as no refusal: all ranks raise it, or it comes after they have met."""
    with contextlib.suppress(AttributeError):  # a class without a dictionary
        setattr(error, _MARK, True)
    return error


class Settled:
    """``with Settled():`` around what a call does after ranks have met, within ``Refusals``."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            settled(error)


def pack(rank: int, error: BaseException, site: str) -> bytes:
    """The words of a rank that refuses, cut to the bytes that there are for them."""
    sentence = errors.text_of(error)
    sentence = sentence if isinstance(error, errors.SymcommError) else f"{type(error).__name__}: {sentence}"
    while len(told := json.dumps([rank, sentence, site]).encode()) > native.REFUSAL_BYTES:
        longest = max(1, len(sentence) - max(4, (len(told) - native.REFUSAL_BYTES) // 6))
        sentence = f"{sentence[: longest - 3]}..." if len(sentence) > 60 else sentence
        site = site if len(sentence) > 60 else f"...{site[len(site) // 4 + 4 :]}"
    return told


def unpack(told: bytes) -> tuple[int, str, str]:
    """(rank, its sentence, where it made the call)"""
    rank, sentence, site = json.loads(told)
    return rank, sentence, site


def refused(what: str, told: bytes | None) -> errors.CallRefusedError:
    """The other ranks' exception. ``what``: the call, its number and its group. ``told``: the words of the first rank
    that was seen to refuse; None: they are not known any more."""
    if told is None:
        return errors.CallRefusedError(f"{what} did not take place: another rank refused it; the group can be used.")
    rank, sentence, site = unpack(told)
    return errors.CallRefusedError(
        f"{what} did not take place: rank {format_ranks([rank])} refused its call at {site}: {sentence.rstrip('.')}. "
        "The group can still be used.",
        [rank],
    )
