"""Combines several ranks' data on a GPU: one kernel reads all sources and writes all targets.

The kernels are CUDA C, compiled on first use by NVRTC, which comes with torch's CUDA builds, and started by the driver.
On an H200 a launch through Triton took 12 to 18 us of the host's time; ours took 10 us together with the copy, the
write and the wait before it. torch's own operations handle what the kernels do not (complex numbers, 8-bit floats), and
builds without NVRTC. Both give the bits of the CPU's core: the tree over ranks, 16-bit floats in float32 and rounded
once, integers wrapped around, AVG divided at the end.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from symcomm import errors
from symcomm.collectives import tree
from symcomm.cuda.driver import driver
from symcomm.cuda.pool import RawMemory
from symcomm.cuda.single_kernel_source import SINGLE_KERNEL
from symcomm.types import ITEMSIZE, DType, RedOpType

THREADS = 256
SINGLE_KERNEL_THREADS = 512
OLDEST_FOR_SINGLE_KERNEL = 7  # compute capability, for acquire and release
MOST_BLOCKS = 1056  # eight for each of an H200's 132 multiprocessors; fewer on smaller data
PACK = 16  # bytes a thread loads at once
MOST_PLACES = 500  # a kernel takes 4 KiB of arguments

_C_TYPES = {
    DType.UINT8: "unsigned char", DType.INT8: "signed char", DType.UINT16: "unsigned short", DType.INT16: "short",
    DType.UINT32: "unsigned int", DType.INT32: "int", DType.UINT64: "unsigned long long", DType.INT64: "long long",
    DType.BOOL: "unsigned char", DType.FLOAT32: "float", DType.FLOAT64: "double", DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
}  # fmt: skip
_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_FLOATS = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}
_EITHER = "((a {0} b || a != a) ? a : (b {0} a || b != b) ? b : a)"  # NaN wins; of equal values the earlier

# Conversions without headers: NVRTC has none of its own.
_CONVERT = {
    DType.FLOAT16: """
__device__ float widen(unsigned short x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ unsigned short narrow(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
""",
    DType.BFLOAT16: """
__device__ float widen(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ unsigned short narrow(float x) {
    unsigned int y = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return (unsigned short)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}
""",
}

_TYPES = """
typedef {type} T;
typedef {wide} A;
{convert}
union Pack {{ uint4 whole; T item[{per_pack}]; }};
__device__ A widened(T x) {{ return {widen}; }}
__device__ A joined(A a, A b) {{ return {join}; }}
__device__ T finished(A a) {{ return {finish}; }}
template <class Term> __device__ A tree(const Term &term) {{ return {tree}; }} /* term(s): what source s brings */
"""

_KERNEL = """
struct Places {{ const T *src[{sources}]; T *dst[{targets}]; {stop} }};

extern "C" __global__ void combine(const Places p, const unsigned long long n, const unsigned long long packs) {{
    {look}
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = first; i < packs; i += stride) {{
        Pack in[{sources}], out;
#pragma unroll
        for (int s = 0; s < {sources}; s++) in[s].whole = ((const uint4 *)p.src[s])[i];
#pragma unroll
        for (int k = 0; k < {per_pack}; k++)
            out.item[k] = finished(tree([&](int s) {{ return widened(in[s].item[k]); }}));
#pragma unroll
        for (int d = 0; d < {targets}; d++) ((uint4 *)p.dst[d])[i] = out.whole;
    }}
    for (unsigned long long i = packs * {per_pack} + first; i < n; i += stride) {{
        const T result = finished(tree([&](int s) {{ return widened(p.src[s][i]); }}));
        for (int d = 0; d < {targets}; d++) p.dst[d][i] = result;
    }}
}}
"""


# A kernel with several targets writes to peers. Once the group has failed they may have that memory back, so the kernel
# must not begin then. Blocks that read the host's word take 2 us each, one after the other. So only the first block
# reads it, and tells the others by a word of the GPU's memory.
_STOP = "const unsigned *stop; unsigned long long *gate, turn;"
_LOOK = """
    __shared__ unsigned stopped;
    if (threadIdx.x == 0) {
        unsigned long long seen = p.turn << 1;
        if (blockIdx.x == 0) {
            seen |= *(const volatile unsigned *)p.stop != 0;
            asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(p.gate), "l"(seen) : "memory");
        } else {
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(p.gate) : "memory");
            while (seen >> 1 != p.turn);
        }
        stopped = seen & 1;
    }
    __syncthreads();
    if (stopped) return;
"""


def source_of(dtype: DType, redop: RedOpType, sources: int, targets: int) -> str | None:
    """The text of the kernel that combines, or None if torch has to do it."""
    stop, look = (_STOP, _LOOK) if targets > 1 else ("", "")
    return _filled(_TYPES + _KERNEL, dtype, redop, sources, targets=targets, stop=stop, look=look)


def single_kernel_source_of(dtype: DType, redop: RedOpType, world: int) -> str | None:
    """The text of the kernel that does a whole all_reduce, or None if there is none."""
    at_once = max(1, 8 // world)
    return _filled(_TYPES + SINGLE_KERNEL, dtype, redop, world, threads=SINGLE_KERNEL_THREADS, at_once=at_once)


def _filled(text: str, dtype: DType, redop: RedOpType, sources: int, **more: int | str) -> str | None:
    parts = _words(dtype, redop, sources) if dtype in _C_TYPES else None
    if parts is None:
        return None
    terms = tree.combine("joined({}, {})".format, [f"term({s})" for s in range(sources)])
    return text.format(sources=sources, per_pack=PACK // ITEMSIZE[dtype], tree=terms, **parts, **more)


def _words(dtype: DType, redop: RedOpType, sources: int) -> dict[str, str] | None:
    """The parts that differ between kernels: types, and how to widen, join and finish."""
    kind = _C_TYPES[dtype]
    same = {"type": kind, "wide": kind, "convert": "", "widen": "x", "finish": "a"}
    if dtype is DType.BOOL:
        some = redop in (RedOpType.SUM, RedOpType.MAX, RedOpType.BOR, RedOpType.AVG)
        join = "a | b" if some else "a ^ b" if redop is RedOpType.BXOR else "a & b"
        return {**same, "wide": "int", "widen": "x != 0", "join": join, "finish": "(T)a"}
    joins = {
        RedOpType.BAND: "a & b", RedOpType.BOR: "a | b", RedOpType.BXOR: "a ^ b",
        RedOpType.MIN: _EITHER.format("<") if dtype in _FLOATS else "b < a ? b : a",
        RedOpType.MAX: _EITHER.format(">") if dtype in _FLOATS else "b > a ? b : a",
        RedOpType.SUM: "a + b", RedOpType.AVG: "a + b", RedOpType.PRODUCT: "a * b",
    }  # fmt: skip
    if redop not in joins:
        return None
    join = joins[redop]
    if dtype in _FLOATS:
        if redop in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR):
            return None
        half = dtype in _CONVERT
        wide = "float" if half else kind
        total = f"(a / ({wide}){sources})" if redop is RedOpType.AVG else "a"
        if half:
            same |= {"wide": wide, "convert": _CONVERT[dtype], "widen": "widen(x)"}
        return {**same, "join": join, "finish": f"narrow({total})" if half else total}
    if redop in (RedOpType.MIN, RedOpType.MAX):
        return {**same, "join": join}
    # Overflow wraps around, which C defines for unsigned numbers only. AVG divides the wrapped sum toward zero.
    wide = _UNSIGNED[ITEMSIZE[dtype]]
    finish = f"(T)((T)a / (T){sources})" if redop is RedOpType.AVG else "(T)a"
    return {**same, "wide": wide, "widen": "(A)x", "join": f"(A)({join})", "finish": finish}


# --- compiling ------------------------------------------------------------------------------------------------


@functools.cache
def _compiler() -> Any:
    """NVRTC's library, or None."""
    import torch

    folders = [os.path.join(os.path.dirname(torch.__file__), "lib"), "/usr/local/cuda/lib64"]
    site = os.path.dirname(os.path.dirname(torch.__file__))
    folders += glob.glob(os.path.join(site, "nvidia", "*", "lib"))
    version = (torch.version.cuda or "").split(".")[0]
    names = [
        f"libnvrtc.so.{version}",
        *(p for f in folders for p in sorted(glob.glob(os.path.join(f, "libnvrtc.so*")))),
    ]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _compile(text: str, device: int) -> bytes | None:
    """Machine code for a GPU, or None where NVRTC is missing or cannot."""
    import torch

    compiler = _compiler()
    if compiler is None:
        return None
    program = ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false", b"--std=c++17"]
    if compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"symcomm.cu", 0, None, None):
        return None
    try:
        if compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            return None
        size = ctypes.c_size_t()
        if compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            return None
        image = ctypes.create_string_buffer(size.value)
        return None if compiler.nvrtcGetCUBIN(program, image) else image.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


class Combine:
    """A kernel, and how to start it for a number of elements."""

    def __init__(self, function: int, dtype: DType):
        self._function = function
        self._per_pack = PACK // ITEMSIZE[dtype]

    def launch(self, places: Sequence[int], count: int) -> tuple[int, ...]:
        """(function, blocks, threads, count, packs), as the driver's ``turn`` takes it."""
        aligned = not any(address % PACK for address in places)
        packs = count // self._per_pack if aligned else 0
        blocks = -(-max(packs, count - packs * self._per_pack) // THREADS)
        return self._function, min(max(blocks, 1), MOST_BLOCKS), THREADS, count, packs


_compiling = threading.Lock()  # ranks may be threads


@functools.cache
def _function(device: int, dtype: DType, redop: RedOpType, sources: int, targets: int) -> int | None:
    text = source_of(dtype, redop, sources, targets) if sources + targets < MOST_PLACES else None
    image = _compile(text, device) if text is not None else None
    if image is None:
        return None
    driver().enter(device)
    return driver().load(image, "combine")


class SingleKernels(NamedTuple):
    """Kernels that each are a whole all_reduce."""

    one_shot: int
    two_shot: int
    direct: int  # on symmetric tensors
    captured: int  # in a CUDA graph


@functools.cache
def _single_kernel_functions(device: int, dtype: DType, redop: RedOpType, world: int) -> SingleKernels | None:
    text = single_kernel_source_of(dtype, redop, world)
    if text is None:
        return None
    image = _compile(text, device)
    if image is None:  # the other ranks' kernels would wait for ours
        raise errors.ResourceError(
            f"all_reduce of {dtype.label} on cuda:{device}: NVRTC could not compile the kernel; "
            "reinstall torch's CUDA packages, or run without MPS."
        )
    driver().enter(device)
    return SingleKernels(*(driver().load(image, f"all_reduce_{name}") for name in SingleKernels._fields))


def supports_single_kernel(device: int) -> bool:
    """Whether this machine can make kernels that wait for each other."""
    import torch

    return _compiler() is not None and torch.cuda.get_device_capability(device)[0] >= OLDEST_FOR_SINGLE_KERNEL


def single_kernel(device: int, dtype: DType, redop: RedOpType, world: int) -> SingleKernels | None:
    """The kernels of a whole all_reduce, or None if no rank has one."""
    with _compiling:
        return _single_kernel_functions(device, dtype, redop, world)


def kernel(device: int, dtype: DType, redop: RedOpType, sources: int, targets: int) -> Combine | None:
    """The kernel, or None if torch has to do it."""
    with _compiling:
        function = _function(device, dtype, redop, sources, targets)
    return Combine(function, dtype) if function is not None else None


# --- through torch --------------------------------------------------------------------------------------------


def combine(
    device: int, dtype: DType, redop: RedOpType, sources: Sequence[int], targets: Sequence[int], count: int, stream: Any
) -> None:
    """Combine by torch's operations; ``stream`` is one of torch's."""
    import torch

    kind = getattr(torch, dtype.label)
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(kind, kind)

    def at(address: int) -> torch.Tensor:
        raw = RawMemory(address, count * kind.itemsize)
        return torch.as_tensor(raw, device=torch.device("cuda", device)).view(signed)

    with torch.cuda.stream(stream), torch.no_grad():
        total = _total(redop, [at(s) for s in sources], kind)
        for target in targets:
            at(target).copy_(total)


def _total(redop: RedOpType, parts: Sequence[Any], kind: Any) -> Any:
    import torch

    if kind is torch.bool:
        some = redop in (RedOpType.SUM, RedOpType.MAX, RedOpType.BOR, RedOpType.AVG)
        join: Any = torch.logical_or if some else torch.logical_xor if redop is RedOpType.BXOR else torch.logical_and
        return tree.combine(join, parts)
    joins = {
        RedOpType.SUM: torch.add, RedOpType.AVG: torch.add, RedOpType.PRODUCT: torch.mul,
        RedOpType.MIN: torch.minimum, RedOpType.MAX: torch.maximum, RedOpType.BAND: torch.bitwise_and,
        RedOpType.BOR: torch.bitwise_or, RedOpType.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    if redop not in joins:
        raise errors.InternalError(
            f"combine: no way to combine by {redop.name}. This is a bug of ours: please report it."
        )
    flip = 0
    if redop in (RedOpType.MIN, RedOpType.MAX) and kind is not parts[0].dtype:
        flip = -(1 << (8 * kind.itemsize - 1))  # unsigned numbers as signed ones: this bit flipped keeps their order
    wide = torch.float32 if kind.is_floating_point and kind.itemsize <= 2 else parts[0].dtype
    terms = [part.to(wide) ^ flip if flip else part.to(wide) for part in parts]
    total = tree.combine(joins[redop], terms)
    if redop is RedOpType.AVG:
        total = total / len(parts) if wide.is_floating_point or wide.is_complex else _divided(total, kind, len(parts))
    return (total ^ flip if flip else total).to(parts[0].dtype)


def _divided(total: Any, kind: Any, by: int) -> Any:
    """Divide toward zero; unsigned numbers come as signed ones of the same bits."""
    import torch

    if kind is total.dtype:
        return torch.div(total, by, rounding_mode="trunc")
    if kind.itemsize < 8:
        return torch.div(total.to(torch.int64) & ((1 << 8 * kind.itemsize) - 1), by, rounding_mode="trunc").to(
            total.dtype
        )
    half = torch.div((total >> 1) & 0x7FFFFFFFFFFFFFFF, by, rounding_mode="trunc")  # of the number without its last bit
    rest = total - 2 * half * by
    return 2 * half + torch.div(rest, by, rounding_mode="trunc")
