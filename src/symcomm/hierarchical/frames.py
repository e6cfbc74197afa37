"""The control messages that ranks may send each other. Every field is checked before a handler sees it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from symcomm._core import native
from symcomm.hierarchical.session import ProtocolViolation
from symcomm.types import DType

EAGER_MAX_BLOCKING = 64 << 10  # bytes that travel with a blocking send's envelope; the sender then goes on, or leaves
LARGEST = 1 << 62  # of any number
SIGNATURE = 6  # numbers
DTYPES = frozenset(map(int, DType))
MOST_PACKED = 172  # characters, for 1,024 ranks
PACKED = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
FAULTS = ("gone", "late", "mismatch", "aborted")

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_any_int(value: Any) -> bool:
    return type(value) is int and -(1 << 64) <= value <= 1 << 64


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_ranks(value: Any) -> bool:
    return type(value) is list and all(map(is_number, value))


def _is_ended(value: Any) -> bool:
    """Rank (a string in JSON) -> how it ended."""
    return type(value) is dict and all(r.isascii() and r.isdigit() and len(r) < 10 for r in value) and all(
        map(_is_text, value.values())
    )  # fmt: skip


def _is_bytes(value: Any) -> bool:
    """Bytes, as text."""
    return type(value) is str and all(c <= "\xff" for c in value)


def _is_ballot(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_any_int, value))


def _is_set(value: Any) -> bool:
    """A set of ranks, as membership/succession.py packs them."""
    return type(value) is str and len(value) <= MOST_PACKED and PACKED.fullmatch(value) is not None


def _is_standing(value: Any) -> bool:
    """As membership/quorum_board.py packs it."""
    return (
        type(value) is list
        and len(value) == 5
        and all(map(is_number, (value[0], value[1], value[4])))
        and _is_set(value[2])
        and _is_bool(value[3])
    )


def _is_accepted(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _is_ballot(value[0]) and _is_standing(value[1])


def _is_signature(value: Any) -> bool:
    return type(value) is list and len(value) == SIGNATURE and all(map(_is_any_int, value))


def _is_told(value: Any) -> bool:
    """Why a rank refused a call, as group/refusal.py packs it."""
    if not isinstance(value, str) or not value.isascii() or len(value) > native.REFUSAL_BYTES:
        return False
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(told, list) and len(told) == 3 and is_number(told[0]) and all(map(_is_text, told[1:]))


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "hello": {},
    "bye": {},
    "envelope": {
        "number": is_number, "tag": _is_any_int, "dtype": DTYPES.__contains__, "nbytes": is_number, "inline": _is_bool,
    },
    "clear_to_send": {"number": is_number, "nbytes": is_number},
    "refused": {"number": is_number},
    "sending": {"number": is_number, "real": _is_bool},
    "cancelled": {"number": is_number},
    "ask": {"survey": is_number, "where": _is_bool},
    "answer": {
        "survey": is_number, "seq": _is_any_int, "call": _is_text, "site": _is_text, "awaits": _is_text,
        "ended": _is_ended, "place": _is_text,
    },
    "fail": {
        "fault": FAULTS.__contains__, "story": _is_text, "ranks": _is_ranks, "origin": is_number,
        "seconds": _is_seconds,
    },
    "refusal": {"seq": is_number, "told": _is_told},
    "exchange": {"topic": _is_text, "item": _is_bytes},
    "agree": {"step": lambda step: step in AGREEMENT_STEPS},
    "arrival": {"seq": is_number, "signature": _is_signature},
}  # fmt: skip


AGREEMENT_STEPS: Mapping[str, Mapping[str, Check]] = {  # by step, see membership/quorum_board.py
    "prepare": {"proposal": _is_ballot},
    "promise": {"proposal": _is_ballot, "accepted": _is_accepted},
    "accept": {"proposal": _is_ballot, "value": _is_standing},
    "accepted": {"proposal": _is_ballot},
    "refused": {"proposal": _is_ballot, "value": _is_standing},
    "learned": {"value": _is_standing},
    "record": {"vote": is_number, "done": is_number, "late": is_number, "value": _is_standing},
    "quit": {},
}

MESSAGES = FIELDS.keys() - {"arrival"}  # an arrival travels over leader links


def need(header: dict[str, Any], name: str, is_good: Check) -> Any:
    """A field of a message; a missing or invalid one ends the connection."""
    value = header.get(name)
    try:
        good = name in header and is_good(value)
    except TypeError:  # a value that has no hash
        good = False
    if not good:
        raise ProtocolViolation(f"sent a message whose {name!r} is missing or is not what it should be")
    return value


def check(kind: str, header: dict[str, Any], payload: bytes | bytearray, size: int) -> None:
    """Refuse a message that no rank of a group of ``size`` sends."""
    for name, is_good in FIELDS[kind].items():
        need(header, name, is_good)
    if kind == "envelope" and header["inline"]:
        if len(payload) != header["nbytes"] or len(payload) > EAGER_MAX_BLOCKING:
            raise ProtocolViolation(f"announced a message of {header['nbytes']} bytes and sent {len(payload)}")
    elif payload and kind != "arrival":
        raise ProtocolViolation(f"sent {len(payload)} bytes with a message that has none")
    if kind == "agree":
        for name, is_good in AGREEMENT_STEPS[header["step"]].items():
            need(header, name, is_good)
    elif kind == "fail":
        _check_ranks([*header["ranks"], header["origin"]], size)
    elif kind == "answer":
        _check_ranks([int(r) for r in header["ended"]], size)


def _check_ranks(ranks: Sequence[int], size: int) -> None:
    if any(r >= size for r in ranks):
        raise ProtocolViolation(f"spoke of a rank beyond the {size} of the group")
