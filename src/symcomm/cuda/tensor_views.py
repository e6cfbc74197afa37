"""A CUDA tensor as address, count and dtype. Tensors that are not contiguous are copied once."""

from __future__ import annotations

from typing import Any

from symcomm import errors
from symcomm.group.buffers import Buffer, arrived, as_list, dense_view


class TensorView(Buffer):
    """Contiguous elements in a GPU's memory. ``finish()`` copies a result back if that is needed."""

    __slots__ = ()

    def copy(self) -> TensorView:
        owner = self.owner.detach().clone()
        return TensorView(owner.data_ptr(), self.count, self.dtype, owner)


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
        allowed = f"on cuda:{device}, where this group works"
        raise errors.bad_argument(call, name, f"a tensor on {tensor.device}", allowed, "move it with .to()")
    if tensor.layout is not torch.strided:
        raise errors.bad_argument(call, name, f"a {tensor.layout} tensor", "dense", "use .to_dense()")
    return dense_view(TensorView, call, name, tensor, write)


def tensor_view_list(
    call: str, name: str, tensors: Any, length: int, device: int, write: bool = False
) -> list[TensorView]:
    listed = as_list(call, name, tensors, length)
    return [tensor_view(call, f"{name}[{i}]", t, device, write) for i, t in enumerate(listed)]
