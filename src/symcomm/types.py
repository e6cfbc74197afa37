"""The vocabulary every layer shares: element types and reduce operations.

The numbers are shared with the C core (``_core/reduce/types.h``); a test compares the two.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

from symcomm import errors
from symcomm.arguments import as_int


class DType(enum.IntEnum):
    """Element types. ``itemsize`` is in bytes."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    BOOL = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3FN = 15
    FLOAT8_E5M2 = 16
    FLOAT8_E4M3FNUZ = 17
    FLOAT8_E5M2FNUZ = 18

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name as torch spells it."""
        return self.name.lower()


ITEMSIZE: dict[int, int] = dict(zip(DType, (1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1), strict=True))


class _OfNumbers(enum.EnumMeta):
    """Members by their number, which a float is not even where it equals one."""

    def __call__(cls, value: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(value, cls):
            number = as_int(value)
            if number is None:
                raise errors.wrong_type(cls.__name__, "value", value, f"a number of {cls.__name__}")
            value = number
        return super().__call__(value, *args, **named)


class Numbered(enum.Enum, metaclass=_OfNumbers):
    """Enumerations that behave like those of PyTorch's binding. Members compare by kind and number, also with PyTorch's
    member of the same name (write ours on the left), and never with a plain number; they hash, convert to int and index
    lists like the numbers they stand for."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, int) or (cls._is_unsigned_byte() and not 0 <= value < 256):
            raise errors.wrong_type(cls.__name__, "value", value, f"a number of {cls.__name__}")
        return None

    @classmethod
    def _is_unsigned_byte(cls) -> bool:
        """Whether PyTorch's has its numbers in one."""
        return False

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self is other
        theirs = type(other)
        is_torchs = theirs.__name__ == type(self).__name__ and theirs.__module__.startswith("torch.")
        return is_torchs and self.value == getattr(other, "value", None)

    def __hash__(self) -> int:
        return self.value

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


class RedOpType(enum.IntEnum, metaclass=_OfNumbers):
    """Reduce operations, numbered as in PyTorch."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    def __bool__(self) -> bool:
        return True  # SUM is 0, but "op or default" must not replace it

    def __str__(self) -> str:
        return f"RedOpType.{self.name}"

    def __getstate__(self) -> int:
        return self.value

    def __call__(self, factor: Any) -> ReduceOp:
        """``ReduceOp.PREMUL_SUM(2.0)``: the operation with its factor."""
        if self is not RedOpType.PREMUL_SUM:
            raise errors.CallerError(f"ReduceOp.{self.name}: only PREMUL_SUM takes a factor.")
        if not _is_factor(factor):
            raise errors.bad_argument("ReduceOp.PREMUL_SUM", "factor", factor, _FACTOR)
        return ReduceOp(self, factor=factor)


_IN_FLOAT32 = {d for d in DType if "FLOAT" in d.name and d.itemsize <= 2}
_ROUNDING = {RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM, RedOpType.PRODUCT}


def kept_dtype(dtype: DType, op: RedOpType) -> DType:
    """The type in which values of ``dtype`` are combined, before they are rounded once."""
    return DType.FLOAT32 if dtype in _IN_FLOAT32 and op in _ROUNDING else dtype


_FACTOR = "a number or a tensor with at least one element"
_RedOpType = RedOpType  # ReduceOp has an attribute of that name


class _ReduceOpMeta(type):
    """Makes ``isinstance(ReduceOp.SUM, ReduceOp)`` true, as in PyTorch, where SUM is a plain enum value."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, RedOpType) or super().__instancecheck__(instance)


class ReduceOp(metaclass=_ReduceOpMeta):
    """A reduce operation, with the factor that PREMUL_SUM carries (a number or a tensor).

    Raises: WrongTypeError; CallerError for a factor of anything but PREMUL_SUM."""

    RedOpType = RedOpType
    SUM = RedOpType.SUM
    AVG = RedOpType.AVG
    PRODUCT = RedOpType.PRODUCT
    MIN = RedOpType.MIN
    MAX = RedOpType.MAX
    BAND = RedOpType.BAND
    BOR = RedOpType.BOR
    BXOR = RedOpType.BXOR
    PREMUL_SUM = RedOpType.PREMUL_SUM

    __slots__ = ("_factor", "_op")

    def __init__(self, op: Any, *, factor: Any = None):
        self._op: Any = _kind_of(op)
        self._factor: Any = factor

    @property
    def op(self) -> Any:
        """Which operation it is: one of RedOpType."""
        return self._op

    @op.setter
    def op(self, op: Any) -> None:
        if type(op) is ReduceOp or not isinstance(op, ReduceOp):
            raise errors.wrong_type("ReduceOp.op", "value", op, "a RedOpType, such as ReduceOp.SUM")
        self._op = op

    @property
    def factor(self) -> Any:
        """What PREMUL_SUM multiplies with."""
        if self._factor is None:
            raise errors.CallerError(f"ReduceOp.{self.op.name} has no factor; only PREMUL_SUM(factor) has one.")
        return self._factor

    def boxed(self) -> Any:
        """The form in which PyTorch's operators take it."""
        theirs = _torchs_reduce_op("boxed")
        if self._op is _RedOpType.PREMUL_SUM:
            return theirs.PREMUL_SUM(self.factor).boxed()
        return theirs(getattr(theirs, self.op.name)).boxed()

    @staticmethod
    def unbox(obj: Any) -> ReduceOp:
        """What ``boxed`` gave, as ours."""
        op, factor = _torchs_reduce_op("unbox").unbox(obj).__getstate__()
        return ReduceOp(_RedOpType(int(op)), factor=factor)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RedOpType):
            return self.op == other
        if type(other) is ReduceOp:
            return self.op == other.op and _same_factor(self._factor, other._factor)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.op)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._op, self._factor)

    def __getstate__(self) -> tuple[Any, Any]:
        return self._op, self._factor

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        if hasattr(self, "_op"):
            return  # as in PyTorch, what was made stays what it is
        if not isinstance(state, tuple) or len(state) != 2:
            refuse = errors.bad_argument if isinstance(state, tuple) else errors.wrong_type
            raise refuse("ReduceOp.__setstate__", "state", state, "a tuple of operation and factor")
        self._op, self._factor = _kind_of(state[0]), state[1]

    def __copy__(self) -> ReduceOp:
        return ReduceOp(self._op, factor=self._factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReduceOp:
        if not isinstance(memo, dict):
            raise errors.wrong_type("ReduceOp.__deepcopy__", "memo", memo, "a dict")
        return ReduceOp(self._op, factor=copy.deepcopy(self._factor, memo))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.op.name}" + (f"(factor={self._factor!r})" if self._factor is not None else "")


def _restored(op: RedOpType, factor: Any) -> ReduceOp:
    """From a pickle."""
    return ReduceOp(op, factor=factor)


def _kind_of(op: Any) -> RedOpType:
    """One of ours, or PyTorch's of the same name; torch need not be loaded."""
    if isinstance(op, RedOpType):
        return op
    if type(op).__name__ != "RedOpType":
        raise errors.wrong_type("ReduceOp", "op", op, "a RedOpType, such as ReduceOp.SUM")
    return RedOpType(int(op))


def _torchs_reduce_op(call: str) -> Any:
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d.ReduceOp, call):
        raise errors.CallerError(f"ReduceOp.{call}: PyTorch boxes reduce operations since 2.15; this one is older.")
    return c10d.ReduceOp


def _same_factor(one: Any, other: Any) -> bool:
    """Whether two factors (numbers, tensors, None) are the same."""
    if one is other or one is None or other is None:
        return one is other
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _is_factor(factor: Any) -> bool:
    """A number, or a tensor or array of any library that has elements."""
    return isinstance(factor, int | float) or 0 not in getattr(factor, "shape", (0,))


def make_premul_sum(factor: Any) -> ReduceOp:
    """SUM of the inputs, each multiplied by ``factor`` (a number, or a tensor that broadcasts) first.

    Raises: WrongTypeError."""
    if not _is_factor(factor):
        refuse = errors.bad_argument if hasattr(factor, "shape") else errors.wrong_type
        raise refuse("make_premul_sum", "factor", factor, _FACTOR)
    return ReduceOp(RedOpType.PREMUL_SUM, factor=factor)
