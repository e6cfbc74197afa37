"""The reduction kernels of the C core, against torch: every element type, every operation."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symcomm._core import native
from symcomm.types import DType, RedOpType
from tests.support.plan_cases import tree
from tests.support.reductions import (
    BITWISE,
    COMPLEX,
    DEFINED,
    FLOATS,
    INTEGERS,
    SMALL_FLOATS,
    divided,
    expected,
    moderate,
    random_bits,
    torch_dtype,
)

pytestmark = pytest.mark.long

UNDEFINED = [pair for pair in itertools.product(DType, RedOpType) if pair not in DEFINED]
COUNTS = (0, 1, 3, 7, 31, 64, 1000, 4097)
N_SOURCES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 33)


def label(value: object) -> str:
    return value.name.lower() if isinstance(value, DType | RedOpType) else str(value)


# --- what we compare with --------------------------------------------------------------------------------------


# --- helpers ---------------------------------------------------------------------------------------------------


def reduce(dtype, op, sources, factor=1.0, out=None):
    count = sources[0].numel()
    out = torch.empty(count, dtype=torch_dtype(dtype)) if out is None else out
    factor = factor if op == RedOpType.PREMUL_SUM else 1.0
    native.reduce(dtype, op, out.data_ptr(), [s.data_ptr() for s in sources], count, factor)
    return out


def codes_of(tensor: torch.Tensor, zeros_alike: bool) -> torch.Tensor:
    """The bits as integers. All NaNs are made one, as a NaN's payload is not specified; and both zeros, if asked."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    codes = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    values = tensor.to(torch.float64)
    codes = codes.masked_fill(values.isnan(), 99)
    return codes.masked_fill(values == 0, 0) if zeros_alike else codes


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, zeros_alike: bool = False):
    assert got.dtype == want.dtype
    assert torch.equal(codes_of(got, zeros_alike), codes_of(want, zeros_alike)), f"got {got}, want {want}"


def assert_matches_torch(dtype: DType, op: RedOpType, got: torch.Tensor, want: torch.Tensor):
    if dtype in COMPLEX and op == RedOpType.PRODUCT:  # torch may fuse its multiplications
        torch.testing.assert_close(got, want, equal_nan=True)
    else:  # torch's choice between 0.0 and -0.0 depends on the CPU; ours is tested below
        assert_same_bits(got, want, zeros_alike=op in (RedOpType.MIN, RedOpType.MAX))


# --- the tables ------------------------------------------------------------------------------------------------


def test_c_and_python_agree_on_numbers():
    dtypes, ops = native.reduce_tables()
    assert list(dtypes) == [(d.label, d.itemsize) for d in sorted(DType)]
    assert list(ops) == [op.name for op in sorted(RedOpType)]
    for dtype in DType:
        assert torch_dtype(dtype).itemsize == dtype.itemsize


def test_which_pairs_are_defined():
    assert [pair for pair in itertools.product(DType, RedOpType) if native.reduce_defined(*pair)] == DEFINED
    assert not native.reduce_defined(-1, 0)
    assert not native.reduce_defined(0, 99)


@pytest.mark.parametrize(("dtype", "op"), UNDEFINED, ids=label)
def test_undefined_pairs_are_named(dtype, op):
    with pytest.raises(ValueError, match=f"{op.name} is not defined for {dtype.label};"):
        reduce(dtype, op, [torch.zeros(4, dtype=torch.complex128)])


def test_bad_arguments_are_named():
    x = torch.zeros(4)
    call = functools.partial(native.reduce, DType.FLOAT32, RedOpType.SUM, x.data_ptr())
    with pytest.raises(ValueError, match="sources must be 1 to 1024 addresses, got 0"):
        call([], 4)
    with pytest.raises(ValueError, match="got 1025"):
        call([x.data_ptr()] * 1025, 4)
    with pytest.raises(ValueError, match="count must be 0 or more, got -1"):
        call([x.data_ptr()], -1)
    with pytest.raises(TypeError):
        call(["here"], 4)
    with pytest.raises(ValueError, match="dtype must be a number of DType, 0 to 18, got 19"):
        native.reduce(19, 0, x.data_ptr(), [x.data_ptr()], 4)
    with pytest.raises(ValueError, match="op must be a number of RedOpType, 0 to 8, got 9"):
        native.reduce(0, 9, x.data_ptr(), [x.data_ptr()], 4)


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [moderate, random_bits], ids=["moderate", "any_bits"])
@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=label)
def test_matches_torch(dtype, op, make):
    if dtype in COMPLEX and op == RedOpType.PRODUCT:
        make = moderate  # only finite products of complex numbers are specified
    factor = 3.0 if dtype in INTEGERS else 0.37
    for count, n in itertools.product(COUNTS, N_SOURCES):
        sources = [make(dtype, count, seed=17 * n + s) for s in range(n)]
        assert_matches_torch(dtype, op, reduce(dtype, op, sources, factor), expected(dtype, op, sources, factor))


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=label)
def test_in_place_on_each_source(dtype, op):
    for n, count in itertools.product((1, 2, 3, 5, 13), (7, 5000)):
        sources = [moderate(dtype, count, seed=s) for s in range(n)]
        want = reduce(dtype, op, sources, 3.0)
        for s in range(n):
            here = [t.clone() for t in sources]
            assert_same_bits(reduce(dtype, op, here, 3.0, out=here[s]), want)
            assert all(
                torch.equal(codes_of(a, False), codes_of(b, False))
                for i, (a, b) in enumerate(zip(here, sources, strict=True))
                if i != s
            )


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=label)
def test_any_address_and_any_cut_give_the_same_bits(dtype, op):
    """At odd addresses, whole and in two pieces, without a byte written outside."""
    size, count, factor = dtype.itemsize, 4097, 3.0 if op == RedOpType.PREMUL_SUM else 1.0
    for n in (2, 5):
        sources = [moderate(dtype, count, seed=s) for s in range(n)]
        want = reduce(dtype, op, sources, factor).view(torch.uint8)
        shifted = []
        for s, source in enumerate(sources):
            buffer = torch.zeros(count * size + 64, dtype=torch.uint8)
            buffer[s + 1 : s + 1 + count * size] = source.view(torch.uint8)
            shifted.append((buffer, s + 1))
        for cut in (count, 1, 5, 1024, 2048, 4096):
            out = torch.full((count * size + 64,), 0xA5, dtype=torch.uint8)
            for start, stop in ((0, cut), (cut, count)):
                addresses = [b.data_ptr() + shift + start * size for b, shift in shifted]
                native.reduce(dtype, op, out.data_ptr() + 3 + start * size, addresses, stop - start, factor)
            assert torch.equal(out[3 : 3 + count * size], want)
            assert (out[:3] == 0xA5).all()
            assert (out[3 + count * size :] == 0xA5).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=label)
def test_nan_infinity_and_zeros(dtype):
    kind = torch_dtype(dtype)
    nan, low, high = (torch.tensor([v], dtype=torch.float32).to(kind) for v in (float("nan"), -2.0, 3.0))
    for op in (RedOpType.MIN, RedOpType.MAX, RedOpType.SUM, RedOpType.PRODUCT):
        for sources in itertools.permutations([nan, low, high]):
            assert reduce(dtype, op, list(sources)).to(torch.float32).isnan().all()
    if not dtype.label.endswith("fnuz"):
        zero, minus_zero = (torch.tensor([v], dtype=torch.float32).to(kind) for v in (0.0, -0.0))
        for op, (first, second) in itertools.product(
            (RedOpType.MIN, RedOpType.MAX), ((zero, minus_zero), (minus_zero, zero))
        ):
            assert_same_bits(reduce(dtype, op, [first, second]), first)  # the earlier source wins


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=label)
def test_sixteen_bit_sums_round_once(dtype):
    """1 + 16 * (eps / 8) is lost when every step is rounded to the type."""
    eps = torch.finfo(torch_dtype(dtype)).eps
    sources = [torch.full((9,), v, dtype=torch_dtype(dtype)) for v in [1.0] + [eps / 8] * 16]
    assert (reduce(dtype, RedOpType.SUM, sources) == 1 + 2 * eps).all()


def test_products_and_sums_are_not_fused():
    """With a fused multiply-add, x * factor + y would keep what rounding x * factor drops."""
    x = torch.full((64,), 1 + 2.0**-12)
    for n in (2, 3):
        sources = [-(x * x), *[torch.zeros(64)] * (n - 2), x]
        got = reduce(DType.FLOAT32, RedOpType.PREMUL_SUM, sources, float(x[0]))
        assert_same_bits(got, expected(DType.FLOAT32, RedOpType.PREMUL_SUM, sources, float(x[0])))
    a = torch.full((64,), complex(1 + 2.0**-12, 1 + 2.0**-12), dtype=torch.complex64)
    assert (reduce(DType.COMPLEX64, RedOpType.PRODUCT, [a, a]).real == 0).all()


@pytest.mark.parametrize("n", [3, 7, 8, 1000, 1024])
def test_average_of_many_is_a_true_division(n):
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.COMPLEX64, DType.INT16, DType.INT64, DType.UINT8):
        sources = [moderate(dtype, 33, seed=s) for s in range(n)]
        assert_same_bits(reduce(dtype, RedOpType.AVG, sources), expected(dtype, RedOpType.AVG, sources))


@pytest.mark.parametrize("dtype", INTEGERS, ids=label)
def test_integer_average_is_exact_for_every_extreme(dtype):
    info = torch.iinfo(torch_dtype(dtype))
    values = [info.min, info.min + 1, 0, 1, 99, info.max // 2, info.max - 1, info.max]
    for n in (2, 3, 5, 7, 641, 1023):
        first = torch.tensor(values, dtype=torch_dtype(dtype))
        sources = [first, *[torch.zeros_like(first)] * (n - 1)]
        assert reduce(dtype, RedOpType.AVG, sources).tolist() == [divided(v, n) for v in values]


@pytest.mark.parametrize(
    ("factor", "int8", "uint64"),
    [
        (2.9, 2, 2),
        (-2.9, -2, 2**64 - 2),
        (300.0, 44, 300),
        (float("nan"), 0, 0),
        (2.0**63, 0, 2**63),
        (1e30, -1, 2**64 - 1),
    ],
)
def test_integer_factors(factor, int8, uint64):
    for dtype, want in ((DType.INT8, int8), (DType.UINT64, uint64)):
        one = torch.ones(3, dtype=torch_dtype(dtype))
        assert reduce(dtype, RedOpType.PREMUL_SUM, [one], factor).tolist() == [want] * 3


@pytest.mark.parametrize("dtype", [d for d in DType if (d, RedOpType.AVG) in DEFINED and d != DType.BOOL], ids=label)
@pytest.mark.parametrize("by", [2.0, 3.0, 6.0, 8.0])
def test_averages_of_sums(dtype, by):
    """Sources that are sums of others say by how many in all to divide."""
    sources = [torch.tensor([0, 6, 24]).to(torch_dtype(dtype)) for _ in range(2)]
    out = torch.empty_like(sources[0])
    native.reduce(dtype, RedOpType.AVG, out.data_ptr(), [s.data_ptr() for s in sources], 3, by)
    exact = torch.tensor([0, 12, 48], dtype=torch.float64) / by
    want = exact.trunc() if dtype in INTEGERS else exact
    assert torch.equal(out, want.to(out.dtype))


@pytest.mark.parametrize("by", [1.0, 0.5, -3.0, float("nan"), float("inf"), 1e300])
def test_what_is_no_number_of_sources_is_not_divided_by(by):
    ones = [torch.full((3,), 5.0) for _ in range(5)]
    out = torch.empty(3)
    native.reduce(DType.FLOAT32, RedOpType.AVG, out.data_ptr(), [s.data_ptr() for s in ones], 3, by)
    assert out.tolist() == [5.0] * 3


# --- sets of kernels -------------------------------------------------------------------------------------------

SETS, CHOSEN = native.reduce_sets()
MOST = 70  # elements: several vectors of every set, and every remainder


@pytest.fixture(params=SETS)
def kernels(request):
    native.use_reduce_set(request.param)
    yield request.param
    native.use_reduce_set(CHOSEN)


def misplaced(tensor: torch.Tensor, shift: int) -> tuple[torch.Tensor, int]:
    """A copy at an odd address: the memory, and the address."""
    memory = torch.zeros(tensor.nbytes + 64, dtype=torch.uint8)
    memory[shift : shift + tensor.nbytes] = tensor.view(torch.uint8)
    return memory, memory.data_ptr() + shift


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=label)
def test_every_length_at_every_place(kernels, dtype, op):
    """Each element is on its own: a shorter reduction is the beginning of a longer one, and writes no more."""
    factor, size = (3.0 if dtype in INTEGERS else 0.37) if op == RedOpType.PREMUL_SUM else 1.0, dtype.itemsize
    make = moderate if dtype in COMPLEX and op == RedOpType.PRODUCT else random_bits
    for n, shift in ((1, 0), (2, 1), (2, 16), (3, 7), (4, 3), (5, 0), (8, 5)):
        sources = [make(dtype, MOST, seed=31 * n + s) for s in range(n)]
        want = expected(dtype, op, sources, factor)
        placed = [misplaced(source, shift * (s + 1) % 33) for s, source in enumerate(sources)]
        out = torch.full((MOST + 1, MOST * size + 64), 0xA5, dtype=torch.uint8)
        for count in range(MOST + 1):
            place = out[count].data_ptr() + shift
            native.reduce(dtype, op, place, [address for _, address in placed], count, factor)
        got = torch.cat([row[shift : shift + count * size] for count, row in enumerate(out)]).view(torch_dtype(dtype))
        assert_matches_torch(dtype, op, got, torch.cat([want[:count] for count in range(MOST + 1)]))
        for count, row in enumerate(out):
            row[shift : shift + count * size] = 0xA5
        assert (out == 0xA5).all(), "nothing else was written"


@pytest.mark.parametrize("dtype", COMPLEX, ids=label)
@pytest.mark.parametrize("n", [2, 4, 5, 8, 13])
def test_products_of_complex_numbers_are_not_fused(kernels, dtype, n):
    """Each multiplication and addition is rounded, as NumPy's of real numbers are."""
    real = {DType.COMPLEX64: np.float32, DType.COMPLEX128: np.float64}[dtype]
    sources = [moderate(dtype, MOST, seed=s) for s in range(n)]

    def times(a: list[np.ndarray], b: list[np.ndarray]) -> list[np.ndarray]:
        return [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]

    parts = [[np.ascontiguousarray(part, real) for part in (s.numpy().real, s.numpy().imag)] for s in sources]
    re, im = tree(times, parts)
    got = reduce(dtype, RedOpType.PRODUCT, sources).numpy()
    assert got.real.tobytes() == re.tobytes() and got.imag.tobytes() == im.tobytes()


@pytest.mark.parametrize("n", [17, 64, 65, 100, 1000, 1023, 1024])
def test_a_tree_of_many_sources(kernels, n):
    """Of short lengths and long ones, which take other ways."""
    for dtype, count in itertools.product((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E5M2), (3, 333)):
        sources = [moderate(dtype, count, seed=s) for s in range(n)]
        assert_same_bits(reduce(dtype, RedOpType.SUM, sources), expected(dtype, RedOpType.SUM, sources))


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=label)
def test_all_sets_give_the_same_bits(dtype, op):
    """Whatever cannot be compared with torch bit for bit, products of complex numbers and signs of zeros, included."""
    lengths = [(1, 333), (2, 5001), (3, 1025), (4, 2049), (8, 3000), (9, 1300), (10, 4099)]
    if dtype.itemsize == 2:  # from 8 KiB on, some sets have others for these
        lengths += [(1, 4433), (2, 4095), (2, 4096), (3, 4097), (4, 8193), (5, 4128), (8, 4161), (17, 4111)]
    for n, count in lengths:
        sources = [random_bits(dtype, count, seed=13 * n + s) for s in range(n)]
        found = []
        for name in SETS:
            native.use_reduce_set(name)
            fresh = reduce(dtype, op, sources, 0.37)
            own = [source.clone() for source in sources]
            found += [fresh, reduce(dtype, op, own, 0.37, out=own[n // 2])]
        native.use_reduce_set(CHOSEN)
        for other in found[1:]:
            assert_same_bits(other, found[0])


def test_two_float16_of_any_kind(kernels):
    """Sums that overflow, and means of what is subnormal, are those of float32: every code beside many others."""
    codes = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    partners = [
        0,
        1,
        2,
        3,
        0x200,
        0x3FF,
        0x400,
        0x401,
        0x3C00,
        0x3C01,
        0x4BFF,
        0x4C00,
        0x4C01,
        0x7BFE,
        0x7BFF,
        0x7C00,
        0x7E00,
    ]
    for code in [sign | p for p in (*partners, *range(7, 0x7C00, 4001)) for sign in (0, 0x8000)]:
        sources = [codes, torch.full((1 << 16,), code, dtype=torch.uint16).view(torch.float16)]
        for op in (RedOpType.SUM, RedOpType.AVG, RedOpType.PRODUCT):
            assert_same_bits(reduce(DType.FLOAT16, op, sources), expected(DType.FLOAT16, op, sources))


def test_no_nan_is_rounded_to_a_number(kernels):
    """Adding to the last place of one with all bits set would carry into its sign."""
    codes = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    ones = torch.ones(1 << 16, dtype=torch.bfloat16)
    nan = codes.isnan()
    for n in (1, 2, 3, 4):
        assert torch.equal(reduce(DType.BFLOAT16, RedOpType.SUM, [codes, *[ones] * (n - 1)]).isnan(), nan)
    full = struct.unpack("<d", struct.pack("<Q", 0x7FFFFFFFFFFFFFFF))[0]
    for dtype in FLOATS:
        out = reduce(dtype, RedOpType.PREMUL_SUM, [torch.ones(99).to(torch_dtype(dtype))], full)
        assert out.to(torch.float32).isnan().all()


def test_the_environment_names_a_set():
    ask = "from symcomm._core import native; print(*native.reduce_sets()[0], native.reduce_sets()[1])"

    def run(wanted: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "SYMCOMM_KERNELS": wanted}
        return subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=60)

    for name in SETS:
        assert run(name).stdout.split() == [*SETS, name]
    assert run("").stdout.split() == [*SETS, SETS[-1]]  # the best one
    refused = run("mmx").stderr
    assert f"SYMCOMM_KERNELS: the reduction kernels of this CPU are {', '.join(SETS)}, got 'mmx'." in refused
    with pytest.raises(ValueError, match="got 'mmx'"):
        native.use_reduce_set("mmx")


def test_the_baseline_is_always_there():
    assert SETS[0] == {"aarch64": "neon"}.get(platform.machine(), "baseline")
    assert len(set(SETS)) == len(SETS) and CHOSEN in SETS


# --- small formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=label)
def test_every_code_comes_back(dtype):
    """x * 1 decodes and encodes every code there is."""
    codes = torch.arange(256**dtype.itemsize).to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize])
    values = codes.view(torch_dtype(dtype))
    assert_same_bits(reduce(dtype, RedOpType.PREMUL_SUM, [values], 1.0), values)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=label)
def test_every_rounding_is_torchs(dtype):
    """code * factor lands on, between and beyond the values of the format; torch rounds the same float32 to it."""
    codes = torch.arange(256**dtype.itemsize).to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize])
    values = codes.view(torch_dtype(dtype))
    generator = torch.Generator().manual_seed(1)
    factors = (
        torch.randn(400, generator=generator) * 2 ** torch.randint(-12, 12, (400,), generator=generator)
    ).tolist()
    halfway = [2.0**-k for k in range(1, 24)] + [1 + 2.0**-k for k in range(1, 12)] + [2.0**k for k in range(1, 24)]
    for factor in factors + halfway:
        want = expected(dtype, RedOpType.PREMUL_SUM, [values], factor)
        assert_same_bits(reduce(dtype, RedOpType.PREMUL_SUM, [values], factor), want)


# --- random bits -----------------------------------------------------------------------------------------------


def bit_patterns(bits: int):
    edges = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits - 2), 3 * 2 ** (bits - 2)]
    return st.lists(
        st.lists(st.one_of(st.sampled_from(edges), st.integers(0, 2**bits - 1)), min_size=3, max_size=3),
        min_size=1,
        max_size=40,
    )


def check_patterns(dtype: DType, rows: list[list[int]], factor: float):
    raw_type = {2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    sources = [torch.tensor(column, dtype=raw_type).view(torch_dtype(dtype)) for column in zip(*rows, strict=True)]
    for op in set(RedOpType) - BITWISE:
        got = reduce(dtype, op, sources, factor)
        assert_matches_torch(dtype, op, got, expected(dtype, op, sources, factor))


@settings(max_examples=150, deadline=None)
@given(rows=bit_patterns(16), factor=st.floats(width=32))
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=label)
def test_any_bits_of_16(dtype, rows, factor):
    check_patterns(dtype, rows, factor)


@settings(max_examples=150, deadline=None)
@given(rows=bit_patterns(32), factor=st.floats(width=32))
def test_any_bits_of_float32(rows, factor):
    check_patterns(DType.FLOAT32, rows, factor)
