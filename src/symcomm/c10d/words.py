"""Refusals of arguments of a wrong type. PyTorch's binding raises TypeError for them; so do we, with our words."""

from symcomm.backend.kinds import WrongTypeError, wrong_type

__all__ = ["WrongTypeError", "wrong_type"]
