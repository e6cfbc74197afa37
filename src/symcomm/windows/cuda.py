"""Windows into CUDA tensors of ranks that share a host: puts and signals in the order of the current stream.

Signals are counts in GPU memory. Only one rank increments a word, so it knows the next value, and its stream writes it.
The waiting rank's stream waits until the word has reached that value. Nothing on the host waits for the GPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.cuda.departure import Departure
from symcomm.cuda.driver import driver
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.group import CudaGroup, device_group
from symcomm.cuda.pool import RawMemory, hold, opened_pieces, pool_of, storage_over
from symcomm.cuda.work import CudaWork
from symcomm.group.buffers import torch_dtypes
from symcomm.group.segments import Segment, TensorRef
from symcomm.symm_mem.on_gpu import find_piece, using
from symcomm.types import DType
from symcomm.windows.memory import AnyMemory

if TYPE_CHECKING:
    import torch

WORD = 4  # bytes


class _Source:
    """The tensor of a put, made contiguous."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.contiguous()
        self.count = tensor.numel()
        self.dtype = torch_dtypes()[tensor.dtype]


def _part(departure: Departure, pieces: Any) -> None:
    """Called when a window goes away without deregistration."""
    departure.windows -= 1
    hold(pieces, departure.is_left_alone)


class CudaMemory(AnyMemory):
    """One window's memory on the GPUs of all ranks of a ProcessGroup."""

    def __init__(self, group: Any, tensor: torch.Tensor):
        import torch

        if group.spans_hosts:
            raise errors.ResourceError(
                f"tensor_register: the ranks of group {group.name!r} are on several hosts, and windows into CUDA "
                "tensors do not reach beyond one host; use a group of one host's ranks."
            )
        piece = find_piece(tensor)
        if piece is None and tensor.numel():
            what = f"a tensor in ordinary memory of {tensor.device}"
            fix = "allocate it with symcomm.symm_mem.empty(..., device='cuda')"
            raise errors.bad_argument("tensor_register", "tensor", what, "in symmetric memory", fix)
        self.group = group
        self.device = tensor.device
        self._piece = piece or pool_of(tensor.get_device()).allocate(1)
        self.words = pool_of(tensor.get_device()).allocate(WORD * group.size)
        torch.as_tensor(self.words, device=tensor.device).zero_()
        torch.cuda.current_stream(tensor.device).synchronize()  # no rank may signal before the words are cleared
        self._host = Segment(group, 0, 0, DType.UINT8)  # says whether a rank is still there
        self.info = {
            "device": "cuda", "shape": list(tensor.shape), "count": tensor.numel(),
            "dtype": torch_dtypes()[tensor.dtype], "handle": self._piece.block.handle.hex(),
            "offset": tensor.data_ptr() - self._piece.block.address if piece else self._piece.offset,
            "words_handle": self.words.block.handle.hex(), "words": self.words.offset, "host": self._host.info,
        }  # fmt: skip
        self._sent: Counter[int] = Counter()  # signals, by target
        self._awaited: Counter[int] = Counter()  # waits for signals, by sender
        self._signalled: dict[int, tuple[Any, Any]] = {}  # by target: the last signal's stream, and its event
        self._puts: dict[int, Any] = {}  # by stream: the event of its last put
        self._sides: dict[int, Any] = {}  # by sender: the stream of asynchronous waits

    def connect(self, infos: Sequence[dict[str, Any]], tensor: TensorRef) -> None:
        self.infos, self.tensor = infos, tensor
        self._host.connect([info["host"] for info in infos])
        self._gpu: CudaGroup = device_group(self.group, self.device.index)
        self._departure = self._gpu.failures.departure
        self._departure.windows += 1
        self._gpu.failures.watchdog.wake()
        self._part = weakref.finalize(self, _part, self._departure, (self._piece, self.words))
        self._part.atexit = False
        with using(self.device):
            self._addresses = opened_pieces(infos)
            self._word_addresses = opened_pieces(infos, "words_handle", "words")

    def check_usable(self, call: str) -> None:
        """Raise if the group failed. The first call also raises failures that were found while the GPU waited."""
        self.failures.check_usable(call)

    def close(self) -> None:
        for event in self._puts.values():
            event.synchronize()
        self.group.barrier()
        self._part.detach()
        self._departure.windows -= 1

    def end(self) -> None:
        """Unless ``close`` succeeded, peers may have puts in their streams: keep the memory until they have left."""
        self._part()

    @property
    def failures(self) -> CudaFailures:
        return self._gpu.failures

    # --- puts -------------------------------------------------------------------------------------------------

    def source(self, tensor: Any) -> _Source:
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device != self.device or tensor.layout is not torch.strided:
            what = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise errors.bad_argument("put", "tensor", what, f"a dense tensor on {self.device}, as the window's own")
        if tensor.dtype not in torch_dtypes():
            raise errors.bad_argument("put", "tensor", f"a tensor of {tensor.dtype}", "of a dtype of numbers")
        return _Source(tensor)

    @explain_cuda_errors
    def put(self, source: _Source, rank: int, offset: int, seconds: float) -> int:
        """Copy in the order of the current stream."""
        import torch

        if status := self._host.write(rank, 0, 0, 0):
            return status
        stream = torch.cuda.current_stream(self.device)
        size = source.dtype.itemsize
        with using(self.device):
            if source.count:
                target = self._addresses[rank] + offset * size
                driver().copy(target, source.tensor.data_ptr(), source.count * size, stream.cuda_stream)
            ended = self._puts.setdefault(stream.cuda_stream, torch.cuda.Event())
            ended.record(stream)
        self._departure.touch(ended)
        if rank == self.group.rank:
            self.changed()
        return 0

    def _storage_of(self, rank: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
        return storage_over(RawMemory(self._addresses[rank], nbytes, (self, keeps)), self.device.index)

    # --- signals ----------------------------------------------------------------------------------------------

    @explain_cuda_errors
    def signal(self, rank: int, seconds: float) -> int:
        """Signal in the order of the current stream, and after all earlier signals to that rank."""
        import torch

        if status := self._host.write(rank, 0, 0, 0):
            return status
        stream = torch.cuda.current_stream(self.device)
        self._sent[rank] += 1
        with using(self.device):
            before, sent = self._signalled.get(rank, (stream, None))
            if before != stream:  # counts must not go back
                stream.wait_event(sent)
            address = self._word_addresses[rank] + WORD * self.group.rank
            driver().write(stream.cuda_stream, address, self._sent[rank] & 0xFFFFFFFF)
            event = torch.cuda.Event()
            event.record(stream)
        self._signalled[rank] = (stream, event)
        self._departure.touch(event)
        return 0

    @explain_cuda_errors
    def wait_signal(self, what: str, rank: int, async_op: bool, seconds: float) -> CudaWork | None:
        """The current stream waits. With ``async_op`` another stream does, and the work's ``wait()`` joins it."""
        import torch

        stream = self._side(rank) if async_op else torch.cuda.current_stream(self.device)
        self._awaited[rank] += 1
        address, count = self._word_addresses[self.group.rank] + WORD * rank, self._awaited[rank] & 0xFFFFFFFF
        with using(self.device):
            driver().wait(stream.cuda_stream, address, count)
            passed = torch.cuda.Event()
            passed.record(stream)
        self.changed()
        self._gpu.watch_wait(what, passed, [rank], [(address, count)], seconds)
        if not async_op:
            return None
        work = CudaWork(self._gpu, what, [], self)
        self._gpu.failures.add(work)
        work.settle(None, passed, stream)
        return work

    def _side(self, rank: int) -> Any:
        import torch

        if rank not in self._sides:
            self._sides[rank] = torch.cuda.Stream(self.device)
        return self._sides[rank]
