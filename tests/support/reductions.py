"""The expected result of a reduction, for every element type and operation, by torch's own arithmetic."""

from __future__ import annotations

import functools
import itertools

import torch

from symcomm.types import DType, RedOpType
from tests.support.plan_cases import tree

INTEGERS = [d for d in DType if d <= DType.INT64]
SMALL_FLOATS = [d for d in DType if "FLOAT" in d.name and d.itemsize <= 2]
FLOATS = [DType.FLOAT32, DType.FLOAT64, *SMALL_FLOATS]
COMPLEX = [DType.COMPLEX64, DType.COMPLEX128]
BITWISE = {RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR}
DEFINED = [
    (d, op)
    for d, op in itertools.product(DType, RedOpType)
    if not (op in BITWISE and d in FLOATS + COMPLEX) and not (op in (RedOpType.MIN, RedOpType.MAX) and d in COMPLEX)
]


def torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.label)


def wrapped(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """int64 values cut to the type's bits."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return values.to(signed).view(torch_dtype(dtype))


def as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """Values as int64; those of uint64 wrap, which keeps sums, products and bitwise results right."""
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def divided(value: int, by: int) -> int:
    """Divide toward zero, and exactly, which torch's own division of 64-bit integers is not."""
    return abs(value) // by * (1 if value >= 0 else -1)


def expected_integers(dtype: DType, op: RedOpType, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    wide = [as_int64(s) for s in sources]
    if op in (RedOpType.MIN, RedOpType.MAX):
        flip = torch.iinfo(torch.int64).min if dtype == DType.UINT64 else 0  # orders unsigned numbers as signed ones
        pick = torch.minimum if op == RedOpType.MIN else torch.maximum
        return wrapped(functools.reduce(pick, [w ^ flip for w in wide]) ^ flip, dtype)
    if op == RedOpType.PREMUL_SUM:
        wide = [w * int(factor) for w in wide]
    if op == RedOpType.AVG:
        total = wrapped(functools.reduce(torch.add, wide), dtype)
        return torch.tensor([divided(t, len(wide)) for t in total.tolist()], dtype=torch_dtype(dtype))
    function = {
        RedOpType.SUM: torch.add,
        RedOpType.PREMUL_SUM: torch.add,
        RedOpType.PRODUCT: torch.mul,
        RedOpType.BAND: torch.bitwise_and,
        RedOpType.BOR: torch.bitwise_or,
        RedOpType.BXOR: torch.bitwise_xor,
    }[op]
    return wrapped(functools.reduce(function, wide), dtype)


def expected_bools(op: RedOpType, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    truths = [s.view(torch.uint8) != 0 for s in sources]
    if op in (RedOpType.PRODUCT, RedOpType.MIN, RedOpType.BAND):
        return functools.reduce(torch.logical_and, truths)
    if op == RedOpType.BXOR:
        return functools.reduce(torch.logical_xor, truths)
    any_true = functools.reduce(torch.logical_or, truths)
    return any_true & (factor != 0) if op == RedOpType.PREMUL_SUM else any_true


def expected_floats(dtype: DType, op: RedOpType, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    """Combined in float32 where the type is smaller, and rounded to the type once."""
    wide = [s.to(torch.float32) for s in sources] if dtype in SMALL_FLOATS else sources
    if op == RedOpType.PREMUL_SUM:
        wide = [w * torch.tensor(factor, dtype=w.dtype) for w in wide]
    function = {RedOpType.PRODUCT: torch.mul, RedOpType.MIN: torch.minimum, RedOpType.MAX: torch.maximum}
    total = tree(function.get(op, torch.add), wide)
    if op == RedOpType.AVG:
        total = total / len(wide)
    if dtype == DType.FLOAT8_E4M3FN:  # saturates: torch does since 2.13
        total = total.clamp(-448, 448)
    return total.to(torch_dtype(dtype))


def expected_complex(dtype: DType, op: RedOpType, sources: list[torch.Tensor], factor: float) -> torch.Tensor:
    """Componentwise: torch's own sum multiplies by a complex one first, which makes NaN of infinity."""
    if op == RedOpType.PRODUCT:
        return tree(torch.mul, sources)
    real = DType.FLOAT32 if dtype == DType.COMPLEX64 else DType.FLOAT64
    return torch.view_as_complex(expected_floats(real, op, [torch.view_as_real(s) for s in sources], factor))


def expected(dtype: DType, op: RedOpType, sources: list[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    if dtype == DType.BOOL:
        return expected_bools(op, sources, factor)
    if dtype in INTEGERS:
        return expected_integers(dtype, op, sources, factor)
    if dtype in COMPLEX:
        return expected_complex(dtype, op, sources, factor)
    return expected_floats(dtype, op, sources, factor)


def random_bits(dtype: DType, count: int, seed: int) -> torch.Tensor:
    """Every bit pattern is as likely as any other: huge, tiny, NaN, infinite, and negative zero."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(torch_dtype(dtype))


def moderate(dtype: DType, count: int, seed: int) -> torch.Tensor:
    """Values whose sums and products of a few stay finite."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in COMPLEX:
        return torch.randn(count, dtype=torch_dtype(dtype), generator=generator)
    if dtype in FLOATS:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(torch_dtype(dtype))
    return random_bits(dtype, count, seed)
