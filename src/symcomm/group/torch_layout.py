"""Finds where torch's objects keep a few words that the core reads at every call.

Asking torch for them costs as much as a small operation: most of a microsecond for four questions. So this module finds
each place once per process. It asks torch about a few objects that differ, and looks where in their memory the answers
stand. A place that is in doubt is not used; the core then asks torch, or leaves the call to Python. The memory is read
through the kernel, so that a wrong guess is an error and not a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

WORD = 8
OBJECT_BYTES = 256  # of a C++ object to look at; torch's tensors have less than 200
MEMORY = "/proc/self/mem"
T = TypeVar("T")

# Places of the C++ object in the Python object, and of keys and storage offset in the C++ object. The keys of plain
# tensors. Places of the version counter and of the number in it, both -1 where they are not found.
TensorLayout = tuple[int, int, int, tuple[int, ...], int, int]


def read_memory(address: int, nbytes: int) -> bytes:
    """``nbytes`` of memory, or as many as are mapped. Raises OSError if none are, or the kernel does not show them."""
    with open(MEMORY, "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), nbytes, address)


def places_of(samples: Iterable[tuple[bytes, int]], width: int = WORD) -> list[int]:
    """The places at which each of these pieces of memory holds the number that belongs to it."""
    found: set[int] | None = None
    for memory, number in samples:
        at = {
            i
            for i in range(0, len(memory) - width + 1, width)
            if int.from_bytes(memory[i : i + width], "little") == number
        }
        found = at if found is None else found & at
    return sorted(found or ())


def pointed_to(thing: Any, at: int) -> bytes:
    """The first bytes behind the pointer that a Python object has at this place."""
    return read_memory(int.from_bytes(read_memory(id(thing) + at, WORD), "little"), OBJECT_BYTES)


def _samples(torch: Any) -> tuple[list[Any], list[Any]]:
    """(tensors whose memory holds their values, others)"""

    def empty(*shape: int, dtype: Any = torch.float32, device: str = "cpu") -> Any:
        return torch.empty(*shape, dtype=dtype, device=device)

    with torch.inference_mode(False):
        plain = [empty(3), empty(9, dtype=torch.int64)[5:], torch.nn.Parameter(empty(2, 2))]
        conjugate = empty(2, dtype=torch.complex64).conj()
        nowhere = empty(1 << 40, dtype=torch.uint8, device="meta")[0x5EED5EED:]  # far into memory that is not there
        others = [torch._neg_view(plain[0]), conjugate, conjugate.imag, nowhere]
        others += [torch._efficientzerotensor(3, device="cpu"), torch.eye(2, device="cpu").to_sparse()]
    with torch.inference_mode():
        plain.append(empty(4)[1:])
    return plain, others


def _without_modes(torch: Any) -> contextlib.ExitStack:
    """Suspends the modes of torch that the caller is in."""
    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    return stack


def gpu_keys(torch: Any, device: int) -> tuple[int, ...]:
    """The dispatch keys of GPU tensors whose memory holds their values: ordinary ones and inference mode's."""
    keys = []
    with _without_modes(torch):
        for inference in (False, True):
            with torch.inference_mode(inference):
                keys.append(torch._C._dispatch_keys(torch.empty(1, device=f"cuda:{device}")).raw_repr())
    return tuple(keys)


def reading_torch(torch: Any, find: Callable[[Any], T | None]) -> T | None:
    """``find(torch)``, or None if this torch does not have what it looks at, or the memory cannot be read."""
    try:
        with _without_modes(torch):
            return find(torch)
    except (OSError, ImportError, AttributeError, RuntimeError, TypeError, ValueError):
        return None


def tensor_layout(torch: Any) -> TensorLayout | None:
    """What ``native.use_tensors`` takes; None where this torch keeps these words in another way."""
    return reading_torch(torch, _find)


def _find(torch: Any) -> TensorLayout | None:
    plain, others = _samples(torch)
    keys: Callable[[Any], int] = lambda t: torch._C._dispatch_keys(t).raw_repr()  # noqa: E731
    head, size = object.__basicsize__, torch.Tensor.__basicsize__
    every: Sequence[Any] = [*plain, *others]
    in_python = [(read_memory(id(t) + head, size - head), t._cdata) for t in every]
    objects = [read_memory(t._cdata, OBJECT_BYTES) for t in every]
    strided = [(memory, t) for memory, t in zip(objects, every, strict=True) if t.layout is torch.strided]
    object_at = places_of(in_python)
    keys_at = places_of([(memory, keys(t)) for memory, t in zip(objects, every, strict=True)])
    start_at = places_of([(memory, t.storage_offset()) for memory, t in strided])
    known = {keys(t) for t in plain}  # two: of ordinary tensors and of inference mode's
    sound = len(known) == 2 and not known & {keys(t) for t in others}
    if not sound or not (len(object_at) == len(keys_at) == len(start_at) == 1):
        return None
    return head + object_at[0], keys_at[0], start_at[0], tuple(sorted(known)), *_find_version(torch)


# --- what autograd looks at -----------------------------------------------------------------------------------------

VERSIONS = (3, 211, 57, 402)  # given to tensors and then looked for: all different, and unlikely to be there by chance
COUNTER_BYTES = 64


def _words(memory: bytes) -> list[int]:
    return [int.from_bytes(memory[at : at + WORD], "little") for at in range(0, len(memory) - WORD + 1, WORD)]


def _behind_pointers(tensor: Any) -> dict[int, bytes]:
    """What lies behind each word of a tensor's C++ object that is the address of something."""
    found = {}
    for at, address in enumerate(_words(read_memory(tensor._cdata, OBJECT_BYTES))):
        with contextlib.suppress(OSError, OverflowError, ValueError):
            if address and len(memory := read_memory(address, COUNTER_BYTES)) == COUNTER_BYTES:
                found[WORD * at] = memory
    return found


def _find_version(torch: Any) -> tuple[int, int]:
    """(the place of the pointer to the counter, that of the number in the counter). Views share the counter; inference
    mode's tensors have none."""
    with torch.inference_mode(False), torch.no_grad():
        tensors = [torch.zeros(3, device="cpu") for _ in VERSIONS]
        for tensor, version in zip(tensors, VERSIONS, strict=True):
            for _ in range(version - tensor._version):
                tensor.zero_()
        tensors.append(tensors[0].view(-1)[1:])
    with torch.inference_mode():
        without = torch.zeros(3, device="cpu")
    behind = [(_behind_pointers(tensor), tensor._version) for tensor in tensors]
    common = set.intersection(*(set(found) for found, _ in behind))
    places = [
        (at, number_at) for at in sorted(common) for number_at in places_of([(f[at], v) for f, v in behind], width=4)
    ]
    if len(places) != 1 or _words(read_memory(without._cdata, OBJECT_BYTES))[places[0][0] // WORD]:
        return -1, -1
    return places[0]


def asks_requires_grad(torch: Any) -> int:
    """The address of the C++ function that says whether a C++ tensor requires grad; 0: not known. Asking through Python
    takes a tenth of a microsecond for each tensor."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        function = library["_ZNK3c1010TensorImpl13requires_gradEv"]
    except (OSError, AttributeError):
        return 0
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_bool
    with _without_modes(torch), torch.inference_mode(False), torch.enable_grad():
        leaf, plain = torch.zeros(3, device="cpu", requires_grad=True), torch.zeros(3, device="cpu")
        samples = (leaf, plain, leaf * 2, plain[1:], leaf[1:], leaf.detach())
        is_right = all(function(t._cdata) == t.requires_grad for t in samples)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if is_right else 0
