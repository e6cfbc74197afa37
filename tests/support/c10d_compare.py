"""Evaluate one expression on PyTorch's binding and on ours, and compare what comes out.

``same("m.OpType(3).name")`` evaluates with ``m`` as either module. Values are compared after both were brought to a
common form; exceptions by family: wrong type, or anything else that is a RuntimeError or ValueError. Ours is like the
newest binding; what an older one does not have yet is skipped, with its own words as the reason.
"""

from __future__ import annotations

import copy
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as theirs

import symcomm.c10d as ours
from symcomm.memory.arena import Arena, use_arena

__all__ = [
    "NEWEST",
    "OLDER",
    "family",
    "outcome",
    "ours",
    "same",
    "since_2_13",
    "since_2_15",
    "skip_what_is_newer",
    "theirs",
]

OLDER = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)
NEWEST = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)  # the version that ours follows
since_2_15 = pytest.mark.skipif(not NEWEST, reason=f"torch has it since 2.15; this is {torch.__version__}")
since_2_13 = pytest.mark.skipif(OLDER, reason=f"torch does so since 2.13; this is {torch.__version__}")


def plain(value: Any) -> Any:
    """A value in a form that both sides share: enum members, objects and types by name, tensors by content."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "__members__") and isinstance(value, type):
        return value.__name__
    if hasattr(type(value), "__members__"):
        return f"{type(value).__name__}.{value.name}={value.value}"
    if value is None or isinstance(value, (bool, int, float, str, bytes, timedelta, torch.device)):
        return value
    return value.__name__ if isinstance(value, type) else type(value).__name__


def family(error: BaseException) -> str:
    """TypeErrors stay apart."""
    if isinstance(error, TypeError):
        return "TypeError"
    return "refused" if isinstance(error, (RuntimeError, ValueError)) else type(error).__name__


def outcome(expression: str, module: Any, **names: Any) -> tuple[str, Any]:
    """("gave", value) or ("raised", exception). Statements may come before the last line's expression."""
    scope = {
        "m": module,
        "R": module.ReduceOp,
        "torch": torch,
        "td": timedelta,
        "copy": copy,
        "pickle": pickle,
        **names,
    }
    *before, last = expression.strip().split("\n")
    try:
        exec("\n".join(before), scope)
        return "gave", eval(last, scope)
    except Exception as error:
        return "raised", error


def skip_what_is_newer(kind: str, value: Any) -> None:
    """Skip the test if ``kind, value`` is how an older torch says that it has no such name, or that it does not
    work."""
    lacks = isinstance(value, AttributeError) or (
        OLDER
        and any(words in str(value) for words in ("object is not callable", "Unable to convert function return value"))
    )
    if kind == "raised" and lacks:
        pytest.skip(f"torch {torch.__version__}: {str(value).splitlines()[0]}")


def same(expression: str, **names: Any) -> None:
    """Fail unless both sides give the same value, or raise of the same family."""
    their_kind, theirs_was = outcome(expression, theirs, **names)
    our_kind, ours_was = outcome(expression, ours, **names)
    said = f"{expression!r}: theirs {their_kind} {theirs_was!r}, ours {our_kind} {ours_was!r}"
    if their_kind == "raised" and (our_kind == "gave" or family(theirs_was) != family(ours_was)):
        skip_what_is_newer(their_kind, theirs_was)
    assert their_kind == our_kind, said
    if their_kind == "gave":
        assert plain(theirs_was) == plain(ours_was), said
    else:
        assert family(theirs_was) == family(ours_was), said


def on_two_ranks(body, store=None) -> list:
    """``body(store, rank)`` on two threads that are ranks; their results."""
    store, results, failures = store or ours.HashStore(), [None, None], []

    def main(rank: int) -> None:
        use_arena(Arena())
        try:
            results[rank] = body(store, rank)
        except BaseException as error:
            failures.append(error)
        finally:
            use_arena(None)

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if failures:
        raise failures[0]
    return results
