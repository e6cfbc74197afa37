"""Finds where torch's tensors say where their values are, and how many of what type.

With these places, the core views a tensor in a few nanoseconds; asking torch through DLPack takes a hundred and more.
They are found as in torch_layout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symcomm.group.torch_layout import OBJECT_BYTES, places_of, read_memory, reading_torch
from symcomm.types import DType

STORAGE_BYTES = 128  # of a C++ storage to look at
MOST_CODES = 64  # torch's numbers of dtypes are below that
UNKNOWN = 255  # where another dtype than ours would stand
SHAPES = (3,), (2, 5), (0, 1)  # of samples of each dtype

# In the C++ tensor: places of the pointer to its storage, the number of elements, the number of its dtype, and the byte
# with a bit that says whether it is contiguous; that bit. In the storage: places of the address of its memory, and of
# the byte that says that torch has to be asked before the memory is used. Our numbers of torch's dtypes.
ValueLayout = tuple[int, int, int, int, int, int, int, bytes]


def value_layout(torch: Any) -> ValueLayout | None:
    """What ``native.use_values`` takes; None where this torch keeps these words in another way."""
    return reading_torch(torch, _find)


def _tensors(torch: Any) -> list[Any]:
    """Contiguous ones and others."""
    grid = torch.empty(7, 11, device="cpu")
    other = torch.empty(2, 3, 4, 5, device="cpu")
    return [
        grid, grid.t(), grid[:, ::2], grid[3:], grid[2], grid[:, 4:5], torch.empty(5, device="cpu").expand(3, 5),
        other.contiguous(memory_format=torch.channels_last), torch.empty(3, 1, 2, 2, device="cpu"), other,
        torch.empty(13, 1, device="cpu").t(), torch.empty(0, 19, device="cpu"), torch.empty((), device="cpu"),
        torch.frombuffer(bytearray(53), dtype=torch.uint8), torch.empty(1, 2, 1, 3, 1, 2, 29, device="cpu"),
    ]  # fmt: skip


def _find(torch: Any) -> ValueLayout | None:
    tensors = _tensors(torch)
    objects = [read_memory(t._cdata, OBJECT_BYTES) for t in tensors]
    storages = [t.untyped_storage() for t in tensors]
    storage_at = places_of([(o, s._cdata) for o, s in zip(objects, storages, strict=True)])
    data_at = places_of([(read_memory(s._cdata, STORAGE_BYTES), s.data_ptr()) for s in storages])
    count_at = places_of([(o, t.numel()) for o, t in zip(objects, tensors, strict=True)])
    dense = _bits_of([(o, t.is_contiguous()) for o, t in zip(objects, tensors, strict=True)])
    asks_at = _asks_at(torch)
    dtype_at, codes = _dtype_codes(torch)
    if not all(len(places) == 1 for places in (storage_at, data_at, count_at, dense, asks_at, dtype_at)):
        return None
    [(dense_at, bit)] = dense
    return storage_at[0], count_at[0], dtype_at[0], dense_at, bit, data_at[0], asks_at[0], codes


def _bits_of(samples: Sequence[tuple[bytes, bool]]) -> list[tuple[int, int]]:
    """The bits (place of the byte, value) that are set where the answer is true, and in none of the others."""
    found = []
    for at in range(min(len(memory) for memory, _ in samples)):
        bits = 255
        for memory, answer in samples:
            bits &= memory[at] if answer else ~memory[at]
        found += [(at, 1 << k) for k in range(8) if bits >> k & 1]
    return found


def _asks_at(torch: Any) -> list[int]:
    """The byte of a storage that is 1 if its memory may not be used as it is: of lazy clones that still share it."""

    def memory_of(tensor: Any) -> bytes:
        return read_memory(tensor.untyped_storage()._cdata, STORAGE_BYTES)

    plain = [memory_of(tensor) for tensor in _tensors(torch)]
    sources = [torch.zeros(n, device="cpu") for n in (3, 100, 5000)]
    clones = [torch._lazy_clone(source) for source in sources]
    lazy = [memory_of(tensor) for tensor in (*sources, *clones)]
    for tensor in (*sources, *clones):
        tensor.fill_(1)  # now each has memory of its own
    plain += [memory_of(tensor) for tensor in (*sources, *clones)]
    return [at for at in range(STORAGE_BYTES) if all(m[at] == 0 for m in plain) and all(m[at] == 1 for m in lazy)]


def _dtype_codes(torch: Any) -> tuple[list[int], bytes]:
    """(where the number of the dtype is, our number for each of torch's)"""
    names = {dtype: getattr(torch, dtype.label) for dtype in DType if hasattr(torch, dtype.label)}
    samples = {
        dtype: [read_memory(torch.empty(shape, dtype=name, device="cpu")._cdata, OBJECT_BYTES) for shape in SHAPES]
        for dtype, name in names.items()
    }
    found = []
    for at in range(0, OBJECT_BYTES - 1, 2):
        read = {dtype: {_short(memory, at) for memory in memories} for dtype, memories in samples.items()}
        codes = {min(numbers): dtype for dtype, numbers in read.items() if len(numbers) == 1}
        if len(codes) == len(names) and max(codes) < MOST_CODES:
            found.append((at, codes))
    known = found[0][1] if found else {}
    return [at for at, _ in found], bytes(known.get(code, UNKNOWN) for code in range(MOST_CODES))


def _short(memory: bytes, at: int) -> int:
    return int.from_bytes(memory[at : at + 2], "little")
