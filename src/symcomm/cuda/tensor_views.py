"""A CUDA tensor as address, count and dtype. What is not contiguous is copied once."""

from __future__ import annotations

from typing import Any

from symcomm import errors
from symcomm.group.buffers import arrived, torch_dtypes
from symcomm.types import DType

__all__ = ["TensorView", "tensor_view", "tensor_view_list", "torch_stream"]


class TensorView:
    """Contiguous elements in a GPU's memory. ``finish()`` copies a result back where that is needed."""

    __slots__ = ("address", "count", "dtype", "owner", "target")

    def __init__(self, address: int, count: int, dtype: DType, owner: Any, target: Any = None):
        self.address = address
        self.count = count
        self.dtype = dtype
        self.owner = owner  # keeps the bytes alive
        self.target = target  # where the result belongs, when owner is only a stand-in

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def copy(self) -> TensorView:
        owner = self.owner.detach().clone()
        return TensorView(owner.data_ptr(), self.count, self.dtype, owner)

    def finish(self) -> None:
        if self.target is not None:
            import torch

            with torch.no_grad():
                self.target.copy_(self.owner)


def torch_stream(handle: int, device: int) -> Any:
    """The stream with that number as torch's; 0 is the default stream, for which torch would make a new one."""
    import torch

    where = torch.device("cuda", device)
    return torch.cuda.ExternalStream(handle, where) if handle else torch.cuda.default_stream(where)


def tensor_view(call: str, name: str, tensor: Any, device: int, write: bool = False) -> TensorView:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise errors.bad_argument(call, name, type(tensor).__name__, f"a tensor on cuda:{device}")
    tensor = arrived(tensor)
    if not tensor.is_cuda or tensor.get_device() != device:
        raise errors.bad_argument(
            call,
            name,
            f"a tensor on {tensor.device}",
            f"on cuda:{device}, where this group works",
            "move it with .to()",
        )
    if tensor.layout is not torch.strided:
        raise errors.bad_argument(call, name, f"a {tensor.layout} tensor", "dense", "use .to_dense()")
    dtype = torch_dtypes().get(tensor.dtype)
    if dtype is None:
        raise errors.bad_argument(call, name, tensor.dtype, "a number, bool or complex dtype", "convert it first")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return TensorView(tensor.data_ptr(), tensor.numel(), dtype, tensor)
    tensor = tensor.detach()
    if write and any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise errors.bad_argument(
            call, name, "an expanded tensor", "a tensor whose elements do not share memory", "pass a .clone()"
        )
    copy = tensor.resolve_conj().resolve_neg().contiguous()
    return TensorView(copy.data_ptr(), copy.numel(), dtype, copy, tensor if write else None)


def tensor_view_list(
    call: str, name: str, tensors: Any, length: int, device: int, write: bool = False
) -> list[TensorView]:
    if not isinstance(tensors, (list, tuple)):
        raise errors.bad_argument(call, name, type(tensors).__name__, f"a list of {length} tensors, one per rank")
    if len(tensors) != length:
        raise errors.bad_argument(call, name, f"a list of {len(tensors)}", f"a list of {length} tensors, one per rank")
    return [tensor_view(call, f"{name}[{i}]", t, device, write) for i, t in enumerate(tensors)]
