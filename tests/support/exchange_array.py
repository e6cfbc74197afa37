"""An array with the DLPack exchange interface, as torch's tensors have it. It runs the fast paths of the C core where
torch is not at hand (under sanitizers)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU = 1
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


VIEW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        *[(name, ctypes.c_void_p) for name in ("previous", "allocate", "to_managed", "from_managed")],
        ("view", VIEW),
        ("stream", ctypes.c_void_p),
    ]


class ExchangeArray:
    """A NumPy array behind that interface."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape = values.shape
        self.shape_words = (ctypes.c_int64 * values.ndim)(*values.shape)
        self.stride_words = (ctypes.c_int64 * values.ndim)(*(s // values.itemsize for s in values.strides))

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def is_neg(self) -> bool:
        return False

    def storage_offset(self) -> int:
        return 0


def _view(array: ExchangeArray, out: Any) -> int:
    v, t = array.values, out.contents
    t.data, t.device_type, t.device_id, t.ndim = v.ctypes.data, CPU, 0, v.ndim
    t.code, t.bits, t.lanes = CODES[v.dtype.kind], v.itemsize * 8, 1
    t.shape, t.strides = ctypes.addressof(array.shape_words), ctypes.addressof(array.stride_words)
    t.byte_offset = 0
    return 0


_interface = Exchange(major=1, minor=3, view=VIEW(_view))


def install() -> bool:
    """Make the core view ExchangeArrays by itself from now on."""
    from symcomm._core import native

    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.addressof(_interface), b"dlpack_exchange_api", None)
    return native.use_tensors((ExchangeArray,), capsule, None)
