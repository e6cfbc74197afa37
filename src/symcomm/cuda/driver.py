"""The few functions of NVIDIA's driver that we call, found in its own library, so no package has to be installed.

We use torch for all that it offers (streams, events, tensors). It does not offer memory that other processes can open,
nor streams that write words in memory and wait for them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from symcomm import errors
from symcomm._core import native

HANDLE_BYTES = 64
MPS_ENABLED = 133  # numbers of device attributes, as in the driver's API
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
WAIT_AT_LEAST, WAIT_EQUAL = 0, 1  # flags of a stream's wait

_ADDRESS, _SIZE, _WORD, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint


class _Handle(ctypes.Structure):
    """64 bytes by which another process finds an allocation."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


# name -> argument types; a number behind a name is the version of the API that has 64-bit arguments
_FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [_FLAGS],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_ADDRESS), ctypes.c_int],
    "cuCtxSetCurrent": [_ADDRESS],
    "cuMemAlloc_v2": [ctypes.POINTER(_ADDRESS), _SIZE],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), _Handle, _FLAGS],
    "cuMemHostRegister_v2": [_ADDRESS, _SIZE, _FLAGS],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_ADDRESS), _ADDRESS, _FLAGS],
    "cuMemcpyAsync": [_ADDRESS, _ADDRESS, _SIZE, _ADDRESS],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int)],
    "cuMemsetD32Async": [_ADDRESS, _WORD, _SIZE, _ADDRESS],
    "cuStreamWriteValue32_v2": [_ADDRESS, _ADDRESS, _WORD, _FLAGS],
    "cuStreamWaitValue32_v2": [_ADDRESS, _ADDRESS, _WORD, _FLAGS],
    "cuLaunchHostFunc": [_ADDRESS, ctypes.c_void_p, ctypes.c_void_p],
    "cuModuleLoadData": [ctypes.POINTER(_ADDRESS), ctypes.c_char_p],
    "cuModuleGetFunction": [ctypes.POINTER(_ADDRESS), _ADDRESS, ctypes.c_char_p],
    "cuLaunchKernel": [_ADDRESS, *[_FLAGS] * 7, _ADDRESS, ctypes.c_void_p, ctypes.c_void_p],
}
OUT_OF_MEMORY, ALREADY_REGISTERED = 2, 712


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@functools.cache
def driver() -> Driver:
    """The driver of this process. Raises if there is none."""
    return Driver()


class Driver:
    """Checked calls: each raises our ResourceError with the driver's words."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise errors.ResourceError(
                "GPU memory: this machine has no NVIDIA driver (libcuda.so.1); install it, or use CPU tensors."
            ) from None
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise errors.ResourceError(f"GPU memory: the NVIDIA driver of this machine has no {name}; update it.")
            function.argtypes = arguments
            setattr(self, "_" + name.partition("_")[0], function)
        used = (self._cuMemcpyAsync, self._cuStreamWriteValue32, self._cuStreamWaitValue32, self._cuLaunchKernel)
        self._addresses = tuple(_address_of(f) for f in used)
        self.launch_address = self._addresses[3]
        self._host_function = _address_of(self._cuLaunchHostFunc)
        self._check("starting the driver", self._cuInit(0))

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions above
        raise AttributeError(name)

    def _check(self, what: str, result: int) -> None:
        if result:
            raise errors.ResourceError(f"GPU memory: {what} failed: {self.words_for(result)}.")

    def words_for(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._cuGetErrorString(result, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {result})"

    # --- devices ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _contexts(self) -> dict[int, int]:
        return {}

    def enter(self, device: int) -> None:
        """Make this thread's calls go to ``device``. Threads that torch never saw need it."""
        context = self._contexts.get(device)
        if context is None:
            number, found = ctypes.c_int(), _ADDRESS()
            self._check(f"finding GPU {device}", self._cuDeviceGet(ctypes.byref(number), device))
            self._check(f"using GPU {device}", self._cuDevicePrimaryCtxRetain(ctypes.byref(found), number))
            context = self._contexts[device] = found.value
        self._check(f"using GPU {device}", self._cuCtxSetCurrent(context))

    def allow_in_captures(self) -> None:
        """Keep this thread's calls of the driver from ending the capture of a CUDA graph in another thread."""
        mode = ctypes.c_int(RELAXED)
        self._check("leaving captures alone", self._cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))

    def has_mps(self, device: int) -> bool:
        """Whether processes share the GPU at the same time (MPS) and not in turns."""
        number, value = ctypes.c_int(), ctypes.c_int()
        self._check(f"finding GPU {device}", self._cuDeviceGet(ctypes.byref(number), device))
        return self._cuDeviceGetAttribute(ctypes.byref(value), MPS_ENABLED, number) == 0 and value.value == 1

    # --- memory -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        address = _ADDRESS()
        result = self._cuMemAlloc(ctypes.byref(address), nbytes)
        if result == OUT_OF_MEMORY:
            raise errors.ResourceError(
                f"GPU memory: {nbytes >> 20} MiB that peers can open were asked, but the GPU has not that much left; "
                "free tensors, call torch.cuda.empty_cache(), or use fewer ranks on this GPU."
            )
        self._check(f"allocating {nbytes} bytes", result)
        return address.value

    def handle_of(self, address: int) -> bytes:
        """The handle by which a peer opens the allocation at ``address``."""
        handle = _Handle()
        self._check(
            "sharing memory with other processes (CUDA IPC)", self._cuIpcGetMemHandle(ctypes.byref(handle), address)
        )
        return bytes(handle)

    def open(self, handle: bytes, owner: str) -> int:
        """Where a peer's allocation is in this process."""
        address = _ADDRESS()
        result = self._cuIpcOpenMemHandle(ctypes.byref(address), _Handle.from_buffer_copy(handle), 1)
        if result:
            raise errors.ResourceError(
                f"GPU memory: opening {owner}'s memory failed: {self.words_for(result)}; ranks of a group must be on "
                "one host, on the same GPU or on GPUs that can reach each other's memory, and see each other's GPUs "
                "(CUDA_VISIBLE_DEVICES). For others use backend nccl."
            )
        return address.value

    def register(self, address: int, nbytes: int) -> int:
        """Let GPUs read and write host memory; returns its address for them."""
        result = self._cuMemHostRegister(address, nbytes, 3)  # for all devices, mapped
        if result != ALREADY_REGISTERED:
            self._check("showing host memory to the GPU", result)
        found = _ADDRESS()
        self._check("showing host memory to the GPU", self._cuMemHostGetDevicePointer(ctypes.byref(found), address, 0))
        return found.value

    # --- in the order of a stream -----------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """From GPU or host memory to either; host memory that was not registered makes the caller wait."""
        self._check("copying", self._cuMemcpyAsync(target, source, nbytes, stream))

    def fill32(self, address: int, value: int, count: int, stream: int) -> None:
        self._check("filling", self._cuMemsetD32Async(address, value, count, stream))

    def write(self, stream: int, address: int, value: int) -> None:
        """Write ``value`` to the word at ``address`` once everything before it in the stream is done and visible."""
        self._check("writing a word", self._cuStreamWriteValue32(stream, address, value, 0))

    def wait(self, stream: int, address: int, value: int, flags: int = WAIT_AT_LEAST) -> None:
        """Let the rest of the stream wait until the word has that value (or more, counted cyclically)."""
        self._check("waiting for a word", self._cuStreamWaitValue32(stream, address, value, flags))

    def turn(
        self,
        stream: int,
        copy: tuple[int, ...],
        value: int,
        theirs: tuple[int, ...],
        mine: tuple[int, ...],
        kernel: tuple[int, ...] = (),
        places: tuple[int, ...] = (),
    ) -> None:
        """Copy (source, target, bytes), or nothing; write ``value`` to all of ``theirs`` and wait for it in all of
        ``mine``; then start a kernel (function, blocks, threads, count, packs) on ``places``, or nothing."""
        self.check_turn(
            native.enqueue_collective(self._addresses, stream, copy, value & 0xFFFFFFFF, theirs, mine, kernel, places)
        )

    def check_turn(self, result: int) -> None:
        if result:
            self._check("meeting the other ranks on the GPU", result)

    def combine_on_host(self, stream: int, dtype: int, op: int, sources: tuple[int, ...], out: int, count: int) -> None:
        """Have the CPU combine ``count`` elements of host memory into ``out`` when the stream gets there."""
        result = native.enqueue_host_reduce(self._host_function, stream, dtype, op, sources, out, count)
        if result:
            self._check("having the host combine what ranks have", result)

    # --- kernels ----------------------------------------------------------------------------------------------

    def load(self, image: bytes, name: str) -> int:
        """The kernel ``name`` of a compiled module, which stays loaded."""
        module, function = _ADDRESS(), _ADDRESS()
        self._check("loading a kernel", self._cuModuleLoadData(ctypes.byref(module), image))
        self._check("loading a kernel", self._cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return function.value
