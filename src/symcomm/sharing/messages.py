"""Messages: an object as a pickle, with its large buffers behind the pickle, each as it lies in memory.

CPU tensors and NumPy arrays are such buffers. A reader's tensors are views of the part that it was lent. Memory that
occurs twice (tied weights) is written once, and shared on the other side, too. A part begins with a table::

    8 bytes   the number of buffers
    8 bytes   the length of the pickle
    16 bytes  for each buffer: its place and its length
    ...       the pickle, and the buffers
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import sys
from typing import Any

from symcomm._core import native

INLINE = native.QUEUE_INLINE_BYTES - 1  # bytes of a message that needs no part; its kind comes before them
LARGE = 512  # bytes; smaller buffers stay in the pickle
ALIGN = 64
BYTES, PICKLE, BYTES_IN_PART, PICKLE_IN_PART = b"b", b"p", b"B", b"P"


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, out: list[pickle.PickleBuffer]):
        def keep(buffer: pickle.PickleBuffer) -> bool:
            if (raw := buffer.raw()).nbytes < LARGE:
                return True  # goes into the pickle
            out.append(raw)  # type: ignore[arg-type]  # typeshed's PickleBuffer.raw() is a memoryview
            return False

        super().__init__(file, 5, buffer_callback=keep)

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(torch, obj):
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        dtype = str(obj.dtype).removeprefix("torch.")
        if flat.numel() == 0:
            return _empty, (dtype, tuple(obj.shape))
        return _rebuild, (pickle.PickleBuffer(flat.view(torch.uint8).numpy()), dtype, tuple(obj.shape))


def _is_plain(torch: Any, tensor: Any) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _empty(dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype))


def _rebuild(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


class Message:
    """An object, ready to be written."""

    def __init__(self, obj: Any, in_part: bool = False):
        self._outside: list[Any] = []  # memoryviews, which keep their memory alive
        if type(obj) is bytes:
            self._pickle, kinds = obj, (BYTES, BYTES_IN_PART)
        else:
            file = io.BytesIO()
            _Pickler(file, self._outside).dump(obj)
            self._pickle, kinds = file.getvalue(), (PICKLE, PICKLE_IN_PART)
        self.is_inline = not in_part and not self._outside and len(self._pickle) <= INLINE
        self.kind = kinds[not self.is_inline]
        self.nbytes = 0
        if not self.is_inline:
            self._lay_out()

    @property
    def inline(self) -> bytes:
        """The bytes that go into the slot."""
        return self.kind + self._pickle if self.is_inline else self.kind

    def _lay_out(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._first: dict[tuple[int, int], int] = {}
        self._addresses: list[int] = []
        end = 16 * (1 + len(self._outside)) + len(self._pickle)
        for buffer in self._outside:
            address = _address_of(buffer)
            key = address or id(buffer), buffer.nbytes
            if key not in self._first:
                self._first[key] = start = end + -end % ALIGN
                end = start + buffer.nbytes
            self._addresses.append(address)
            self._places.append((self._first[key], buffer.nbytes))
        self.nbytes = end

    def write(self, at: int) -> None:
        """Write the message to the part at this address."""
        flat = [number for place in self._places for number in place]
        head = struct.pack(f"<{2 + len(flat)}Q", len(self._places), len(self._pickle), *flat)
        native.poke(at, head)
        native.copy_in(at + len(head), _address_of_bytes(self._pickle), len(self._pickle))
        written = set()
        for (start, nbytes), address, buffer in zip(self._places, self._addresses, self._outside, strict=True):
            if start in written:
                continue
            written.add(start)
            if address:
                native.copy_in(at + start, address, nbytes)
            else:
                native.copy_in(at + start, _address_of_bytes(buffer.tobytes()), nbytes)


def _address_of_bytes(value: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0


def _address_of(buffer: memoryview) -> int:
    """0 for read-only memory, whose address Python does not tell."""
    return 0 if buffer.readonly else ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def from_slot(inline: bytes) -> Any:
    return inline[1:] if inline[:1] == BYTES else pickle.loads(inline[1:])


def from_part(kind: bytes, view: memoryview) -> Any:
    count, length = struct.unpack_from("<2Q", view)
    places = struct.unpack_from(f"<{2 * count}Q", view, 16)
    start = 16 * (1 + count)
    whole = view[start : start + length]
    if kind == BYTES_IN_PART:
        return bytes(whole)
    views = [view[places[i] : places[i] + places[i + 1]] for i in range(0, 2 * count, 2)]
    return pickle.loads(whole, buffers=views)
