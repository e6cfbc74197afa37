"""Turns any tensor into a Buffer: an address, a number of elements and a dtype.

torch tensors and NumPy arrays are used as they are. Other objects that speak DLPack (JAX, CuPy on the host) are viewed
without a copy. A tensor that is not contiguous is copied once, and a result is copied back into it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from symcomm import errors
from symcomm._core import native
from symcomm.group.torch_layout import asks_requires_grad, tensor_layout
from symcomm.group.torch_values import value_layout
from symcomm.types import DType

_NUMPY = {
    "|u1": DType.UINT8, "|i1": DType.INT8, "<u2": DType.UINT16, "<i2": DType.INT16, "<u4": DType.UINT32,
    "<i4": DType.INT32, "<u8": DType.UINT64, "<i8": DType.INT64,
    "|b1": DType.BOOL, "<f2": DType.FLOAT16, "<f4": DType.FLOAT32,
    "<f8": DType.FLOAT64, "<c8": DType.COMPLEX64, "<c16": DType.COMPLEX128,
}  # fmt: skip
_torch_dtypes: dict[Any, DType] = {}
_DTYPES = tuple(DType)


def torch_dtypes() -> dict[Any, DType]:
    """torch's dtype objects -> ours; empty while torch is not loaded."""
    torch = sys.modules.get("torch")
    if not _torch_dtypes and torch is not None:
        if (api := getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) is not None:
            kinds = (torch.Tensor, torch.nn.Parameter)  # a subclass may hide anything
            autograd = torch.autograd.graph.increment_version, torch.is_grad_enabled
            native.use_autograd(*autograd, asks_requires_grad(torch))
            native.use_tensors(kinds, api, tensor_layout(torch))
            native.use_values(value_layout(torch))
        found = {getattr(torch, dtype.label): dtype for dtype in DType if hasattr(torch, dtype.label)}
        _torch_dtypes.update(found)  # last: another thread may be reading it
    return _torch_dtypes


class Buffer:
    """Contiguous bytes that the core can read or write. ``finish()`` copies a result back where that is needed."""

    __slots__ = ("address", "count", "dtype", "original", "owner", "target")

    def __init__(self, address: int, count: int, dtype: DType, owner: Any, target: Any = None, original: Any = None):
        self.address = address
        self.count = count
        self.dtype = dtype
        self.owner = owner  # keeps the bytes alive
        self.target = target  # the tensor that finish() copies the result to, where owner is a temporary copy
        self.original = original  # the tensor that owner is a copy of

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def written(self) -> Any:
        """Of an output: the caller's tensor, or one that shares its version counter."""
        return self.owner if self.target is None else self.target

    def extent(self) -> tuple[int, int]:
        """The first address of the caller's own tensor, and the one after its last."""
        tensor = self.original
        if isinstance(tensor, Buffer):
            return tensor.extent()
        if tensor is None:
            return self.address, self.address + self.nbytes
        if hasattr(tensor, "data_ptr"):
            start, steps = tensor.data_ptr(), [step * self.dtype.itemsize for step in tensor.stride()]
        else:
            start, steps = tensor.ctypes.data, list(tensor.strides)
        ends = [(n - 1) * step for n, step in zip(tensor.shape, steps, strict=True)]
        return start + sum(e for e in ends if e < 0), start + sum(e for e in ends if e > 0) + self.dtype.itemsize

    def touches(self, other: Buffer) -> bool:
        (a, b), (c, d) = self.extent(), other.extent()
        return a < d and c < b

    def copy(self) -> Buffer:
        memory = ctypes.create_string_buffer(self.nbytes)
        copy = Buffer(ctypes.addressof(memory), self.count, self.dtype, memory, original=self)
        copy.refresh()
        return copy

    def refresh(self) -> None:
        """Copy again, since the original has changed."""
        if isinstance(self.original, Buffer):
            ctypes.memmove(self.address, self.original.address, self.nbytes)
        elif self.original is not None:
            _assign(self.owner, self.original)

    def finish(self) -> None:
        if self.target is not None:
            _assign(self.target, self.owner)


View = TypeVar("View", bound=Buffer)


def _assign(target: Any, source: Any) -> None:
    if hasattr(target, "copy_"):
        torch = sys.modules["torch"]
        target, source = _fold(target, source)
        # Inference tensors can be written in inference mode only, and this thread may not be in it.
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(source)
    else:
        target[...] = source


# Calls that take outputs whose elements share memory (expanded tensors), as torch's own backends do.
TAKES_EXPANDED = ("all_reduce", "reduce", "broadcast", "scatter", "scatter_single", "all_to_all_single")


def _shared_dimensions(tensor: Any) -> list[int]:
    """The dimensions along which all elements share memory, as expand() makes them."""
    return [d for d, (step, n) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)) if step == 0 and n > 1]


def _fold(target: Any, result: Any) -> tuple[Any, Any]:
    """Drop the dimensions along which ``target`` shares memory from both; ``result`` must be constant along them."""
    for d in _shared_dimensions(target):
        first = result.narrow(d, 0, 1)
        if not sys.modules["torch"].equal(first.expand_as(result), result):
            raise errors.BadArgumentError(
                "the result differs between elements of an expanded output that share memory; pass a .clone()."
            )
        target, result = target.narrow(d, 0, 1), first
    return target, result


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


# What a caller can do with a tensor that is not on the CPU, by the type of its device.
_ELSEWHERE = {
    "cuda": "CUDA tensors go through symcomm.cuda.group.device_group(group, device), or torch.distributed on 'symcomm'",
    "meta": "it has no values; make one on the CPU",
}


def arrived(tensor: Any) -> Any:
    """``tensor``, or the one that a result of torch's functional collectives stands for, once it is there."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def _from_torch(call: str, name: str, tensor: Any, write: bool) -> Buffer:
    tensor = arrived(tensor)
    if not tensor.is_cpu:
        fix = _ELSEWHERE.get(tensor.device.type, "move it with .cpu()")
        raise errors.bad_argument(call, name, f"a tensor on {tensor.device}", "a CPU tensor", fix)
    if tensor.layout is not sys.modules["torch"].strided:
        raise errors.unsupported(
            call, name, f"a {tensor.layout} tensor", "dense", "use .to_dense(), or gloo for sparse sums"
        )
    return dense_view(Buffer, call, name, _with_memory(call, name, tensor.detach(), write), write)


def dense_view(kind: type[View], call: str, name: str, tensor: Any, write: bool) -> View:
    """A view of a dense torch tensor, or of a copy where the tensor is not contiguous."""
    dtype = torch_dtypes().get(tensor.dtype)
    if dtype is None:
        refuse = errors.unsupported if tensor.is_quantized else errors.bad_argument
        raise refuse(call, name, tensor.dtype, "a number, bool or complex dtype", "convert it first")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return kind(tensor.data_ptr(), tensor.numel(), dtype, tensor)
    tensor = tensor.detach()
    if write and call not in TAKES_EXPANDED and _shared_dimensions(tensor):
        raise errors.bad_argument(
            call, name, "an expanded tensor", "a tensor whose elements do not share memory", "pass a .clone()"
        )
    copy = tensor.resolve_conj().resolve_neg().contiguous()
    return kind(copy.data_ptr(), copy.numel(), dtype, copy, tensor if write else None, tensor)


def _with_memory(call: str, name: str, tensor: Any, write: bool) -> Any:
    """``tensor``, if it has memory of its own. A ZeroTensor, which has none, becomes real zeros if it is only read."""
    if not write and tensor._is_zerotensor():
        return tensor.clone()
    try:
        if tensor.numel() == 0 or tensor.untyped_storage().data_ptr():  # freed storage has address 0
            return tensor
    except RuntimeError:  # torch.func's wrappers: vmap, grad
        pass
    raise errors.bad_argument(
        call, name, f"a {type(tensor).__name__} without memory", "a tensor that holds its values",
        "fake, functional and freed tensors hold none",
    )  # fmt: skip


def _from_numpy(call: str, name: str, array: Any, write: bool) -> Buffer:
    import numpy as np

    native.use_arrays(np.ndarray)  # a subclass may hide anything
    kind = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    dtype = _NUMPY.get(kind.str)
    if dtype is None:
        dtype = getattr(DType, kind.name.upper(), None)  # ml_dtypes' bfloat16, float8_e4m3fn, ...
    if dtype is None:
        raise errors.bad_argument(
            call, name, f"dtype {array.dtype}", "a number, bool or complex dtype", "convert it first"
        )
    if write and not array.flags.writeable:
        raise errors.bad_argument(call, name, "a read-only array", "writable", "pass a copy")
    if array.flags.c_contiguous and array.dtype.isnative:
        return Buffer(array.ctypes.data, array.size, dtype, array)
    copy = np.ascontiguousarray(array, dtype=kind)
    return Buffer(copy.ctypes.data, copy.size, dtype, copy, array if write else None, array)


def _view(call: str, name: str, tensor: Any, write: bool) -> Buffer:
    seen = native.view_tensor(tensor)  # the usual case: a dense, contiguous CPU tensor or array
    if seen is not None:
        return Buffer(seen[0], seen[1], _DTYPES[seen[2]], tensor)
    if _is_torch(tensor):
        return _from_torch(call, name, tensor, write)
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "ctypes"):  # NumPy's scalars lack the latter
        return _from_numpy(call, name, tensor, write)
    if isinstance(getattr(tensor, "buffer", None), Buffer):
        return tensor.buffer
    if hasattr(tensor, "__dlpack__"):
        if "torch" in sys.modules:
            return _from_torch(call, name, sys.modules["torch"].from_dlpack(tensor), write)
        import numpy as np

        return _from_numpy(call, name, np.from_dlpack(tensor), write)
    raise errors.wrong_type(call, name, type(tensor).__name__, "a tensor, a NumPy array or an object with __dlpack__")


def overwrite(call: str, name: str, tensor: Any) -> errors.OutputRefusedError | None:
    """Tell autograd that a call is about to overwrite ``tensor``, as an in-place copy would.

    Autograd refuses leaves that require grad, and views of them: this returns that error. From then on what was
    computed before gets no gradient through the tensor. torch's Gloo does the same where it copies results out."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad or not torch.is_grad_enabled():
        return None
    try:
        tensor.copy_(tensor.detach())
    except RuntimeError as error:
        return errors.OutputRefusedError(
            f"{call}: {name}: {str(error).rstrip('.')}; call it under torch.no_grad(), or pass a .detach()."
        )
    return None


def overwrite_all(call: str, name: str, tensors: Sequence[Any]) -> errors.OutputRefusedError | None:
    """``overwrite`` each; returns the first refusal. ``name``: the argument, a list (``...s``) or a single tensor."""
    names = (f"{name}[{i}]" if name.endswith("s") else name for i in range(len(tensors)))
    return next(filter(None, map(partial(overwrite, call), names, tensors)), None)


def in_turn(calls: Iterable[Callable[[], Any]]) -> Any:
    """Make all of these calls, as the other ranks do; returns the last result. If autograd refused an output, that is
    raised only afterwards."""
    last = refusal = None
    for call in calls:
        try:
            last = call()
        except errors.OutputRefusedError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return last


def read_buffer(call: str, name: str, tensor: Any) -> Buffer:
    """A view of a tensor that is only read."""
    return _view(call, name, tensor, write=False)


def write_buffer(call: str, name: str, tensor: Any) -> Buffer:
    """A view of a tensor that is written; call ``finish()`` once the bytes are there."""
    return _view(call, name, tensor, write=True)


def as_list(call: str, name: str, tensors: Any, length: int) -> Sequence[Any]:
    if _is_torch(tensors) or not isinstance(tensors, (list, tuple)):
        raise errors.bad_argument(call, name, type(tensors).__name__, f"a list of {length} tensors, one per rank")
    if len(tensors) != length:
        raise errors.bad_argument(call, name, f"a list of {len(tensors)}", f"a list of {length} tensors, one per rank")
    return tensors


def read_list(call: str, name: str, tensors: Any, length: int) -> list[Buffer]:
    return [read_buffer(call, f"{name}[{i}]", t) for i, t in enumerate(as_list(call, name, tensors, length))]


def write_list(call: str, name: str, tensors: Any, length: int) -> list[Buffer]:
    return [write_buffer(call, f"{name}[{i}]", t) for i, t in enumerate(as_list(call, name, tensors, length))]
