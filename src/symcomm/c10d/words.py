"""Refusals of arguments of a wrong type. PyTorch's binding raises TypeError for them; so do we, with our words."""

from __future__ import annotations

from symcomm import errors

__all__ = ["WrongTypeError", "wrong_type"]


class WrongTypeError(errors.BadArgumentError, TypeError):
    """An argument is of a type that the call does not take."""


def wrong_type(call: str, argument: str, got: object, allowed: str, fix: str = "") -> WrongTypeError:
    """One sentence: the call, the argument, what it was, what is allowed, what to do."""
    return WrongTypeError(str(errors.bad_argument(call, argument, got, allowed, fix)))
