"""_SymmetricMemory: ours for the CPU and PyTorch's for other devices, by one name. Also how devices are connected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d

from symcomm import errors, symm_mem
from symcomm.c10d.stores import Store
from symcomm.errors import wrong_type
from symcomm.store import Store as OwnStore
from symcomm.symm_mem.handle import SymmetricMemory

_theirs: Any = torch_c10d._SymmetricMemory
_DeviceType: Any = torch._C._autograd.DeviceType
_NODES = Path("/sys/devices/system/node")


class _Settings(type):
    """``_SymmetricMemory.signal_pad_size`` reads and sets the size for what is made later; a handle has its own."""

    @property
    def signal_pad_size(cls) -> int:
        return symm_mem.get_signal_pad_size()

    @signal_pad_size.setter
    def signal_pad_size(cls, size: int) -> None:
        symm_mem.set_signal_pad_size(size)
        _theirs.signal_pad_size = size

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, (SymmetricMemory, _theirs))


class _SymmetricMemory(SymmetricMemory, metaclass=_Settings):
    """The same piece of memory on every rank of a group, made by ``_SymmetricMemory.rendezvous``.

    Raises: TypeError when it is constructed; its calls, what those of [symcomm.symm_mem](symm-mem.md) raise."""

    offset: int
    rank: int
    world_size: int

    def __init__(self, *_: Any):
        raise TypeError("_SymmetricMemory: no constructor; call _SymmetricMemory.rendezvous(tensor, group_name).")

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """A tensor in memory that peers can map. The same ``alloc_id`` gives the same memory again."""
        memory = _of_device("empty_strided_p2p", device)
        return memory.empty_strided_p2p(tuple(size), tuple(stride), dtype, device, group_name, alloc_id)

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> Any:
        """Every rank of the group calls it with its tensor. The group's name may be one of ours or of PyTorch's."""
        memory = _of_tensor("rendezvous", tensor)
        handle = memory.rendezvous(tensor, group_name)
        return handle.as_kind(_SymmetricMemory) if memory is symm_mem else handle

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        return _of_tensor("is_symm_mem_tensor", tensor).is_symm_mem_tensor(tensor)

    @staticmethod
    def memset32(input: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        return _of_tensor("memset32", input).memset32(input, offset, val, count)

    @staticmethod
    def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        return _of_tensor("stream_write_value32", input).stream_write_value32(input, offset, val)

    @staticmethod
    def set_group_info(group_name: str, rank: int, world_size: int, store: Any) -> None:
        """Say who takes part in the group of that name, and where they meet."""
        if not isinstance(store, Store):
            raise wrong_type("set_group_info", "store", store, "a Store")
        symm_mem.set_group_info(group_name, rank, world_size, store)
        if isinstance(store, torch_c10d.Store) and not isinstance(store, OwnStore):  # ranks of ours may be threads
            _theirs.set_group_info(group_name, rank, world_size, store)

    @staticmethod
    def set_backend(name: str) -> None:
        """``"symcomm"``, or one of PyTorch's for its devices."""
        if not isinstance(name, str):
            raise wrong_type("set_backend", "name", name, "a str")
        if name != symm_mem.get_backend("cpu"):
            _theirs.set_backend(name)

    @staticmethod
    def get_backend(device: torch.device) -> str | None:
        return _of_device("get_backend", device).get_backend(device)

    @staticmethod
    def get_mempool_allocator(device: torch.device) -> Any:
        return _of_device("get_mempool_allocator", device).get_mempool_allocator(device)

    @staticmethod
    def has_multicast_support(device_type: Any, device_idx: int) -> bool:  # type: ignore[override]
        if not isinstance(device_type, _DeviceType):
            raise wrong_type("has_multicast_support", "device_type", device_type, "a DeviceType")
        memory = symm_mem if device_type == _DeviceType.CPU else _theirs
        return memory.has_multicast_support(device_type, device_idx)


def _of_tensor(call: str, tensor: Any) -> Any:
    """Ours for the CPU, or PyTorch's."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong_type(call, "tensor", tensor, "a tensor")
    return symm_mem if tensor.is_cpu else _theirs


def _of_device(call: str, device: Any) -> Any:
    if not isinstance(device, torch.device):
        raise wrong_type(call, "device", device, "a torch.device", "write torch.device(...)")
    return symm_mem if device.type == "cpu" else _theirs


# --- how devices are connected ------------------------------------------------------------------------------------


class _DMAConnectivity:
    """``matrix[i][j]``: how devices i and j are connected, in units of ``connection_type``.

    Raises: TypeError when it is constructed; call ``_detect_dma_connectivity``."""

    __slots__ = ("_found",)
    _found: tuple[Any, str, list[list[int]]]

    def __init__(self, *_: Any):
        raise TypeError(
            "_DMAConnectivity: no constructor; call _detect_dma_connectivity(device_type, connection_type)."
        )

    @property
    def device_type(self) -> Any:
        return self._found[0]

    @property
    def connection_type(self) -> str:
        return self._found[1]

    @property
    def matrix(self) -> list[list[int]]:
        return [row.copy() for row in self._found[2]]


def _detect_dma_connectivity(device_type: Any, connection_type: str) -> Any:
    """For the CPU ``"numa"`` (distances of memory nodes, 10 is near); for others what PyTorch can tell, as nvlink.

    Raises: WrongTypeError, BadArgumentError for a connection type that the device has not."""
    if not isinstance(device_type, _DeviceType) or not isinstance(connection_type, str):
        got = (device_type, connection_type)
        raise wrong_type("_detect_dma_connectivity", "arguments", got, "a DeviceType and a str")
    if device_type != _DeviceType.CPU:
        theirs: Any = torch_c10d
        return theirs._detect_dma_connectivity(device_type, connection_type)
    if connection_type != "numa":
        raise errors.bad_argument("_detect_dma_connectivity", "connection_type", connection_type, "'numa' for the CPU")
    found = object.__new__(_DMAConnectivity)
    found._found = device_type, connection_type, _numa_distances()
    return found


def _numa_distances() -> list[list[int]]:
    files = sorted(_NODES.glob("node[0-9]*/distance"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return [[int(word) for word in path.read_text().split()] for path in files] or [[10]]
