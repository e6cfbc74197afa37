"""vLLM's communicator of CPU ranks, whose collectives are Symcomm's: eager by our own calls, compiled by operators."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

import symcomm
from symcomm import errors
from symcomm.integrations import operators
from symcomm.integrations.vllm import experts, last_words

HEAD_TAG, TENSOR_TAG = 1, 2

log = logging.getLogger("vllm.symcomm")  # vLLM shows what its own loggers say
_said = False


class Communicator(CpuCommunicator):
    """Takes the place of vLLM's shared memory, and of Gloo, in groups of any size on one host and on several."""

    def __init__(
        self,
        cpu_group: Any,
        device: Any = None,
        device_group: Any = None,
        unique_name: str = "",
        *more: Any,
        **named: Any,
    ):
        is_shared = unique_name.startswith(("tp", "pp"))  # by their names vLLM knows groups that get its shared memory
        super().__init__(cpu_group, device, device_group, "" if is_shared else unique_name, *more, **named)
        self.unique_name = unique_name
        self._ours = symcomm.of(self.device_group)
        self._name = self.unique_name or self._ours.name
        self._eager = _Speaking(self._ours)
        operators.announce(self._name, self._eager)
        self.supports_tensor_dict = True
        if unique_name.startswith("ep"):
            experts.mend()
        _say_so()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            torch.ops.symcomm.all_reduce_(input_, self._name)
        else:
            self._eager.all_reduce(input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        dim, shape = dim % input_.dim(), input_.shape
        gathered = torch.ops.symcomm.all_gather(input_, self.world_size, self._name)
        if dim == 0:
            return gathered
        return (
            gathered.reshape((self.world_size, *shape))
            .movedim(0, dim)
            .reshape((*shape[:dim], self.world_size * shape[dim], *shape[dim + 1 :]))
        )

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        dim = dim % input_.dim()
        piece = torch.ops.symcomm.reduce_scatter(input_.movedim(0, dim).contiguous(), self.world_size, self._name)
        return piece.movedim(0, dim).contiguous()

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Pieces of any lengths along the first dimension; of several tensors, one after the other."""
        if dim != 0:
            raise NotImplementedError("only dim 0 all-gatherv is supported")
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        if sizes is None or len(set(sizes)) == 1:
            return self.all_gather(input_, 0)
        pieces = [input_.new_empty((size, *input_.shape[1:])) for size in sizes]
        self._eager.all_gather(pieces, input_.contiguous())
        return torch.cat(pieces)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return self.reduce_scatter(input_, dim)
        whole = input_.movedim(0, dim % input_.dim()).contiguous()
        pieces = list(whole.split(sizes))
        out = torch.empty_like(pieces[self.rank_in_group])
        self._eager.reduce_scatter(out, pieces)
        return out.movedim(0, dim % input_.dim()).contiguous()

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """``dst`` is a rank of this group."""
        is_root = self.rank_in_group == dst
        pieces = [torch.empty_like(input_) for _ in range(self.world_size)] if is_root else None
        self._eager.gather(pieces, input_.contiguous(), dst)
        return torch.cat(pieces, dim=dim) if pieces is not None else None

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """Tensors as they lie in memory, behind a pickle of everything else."""
        tensors = {key: value.contiguous() for key, value in tensor_dict.items() if isinstance(value, torch.Tensor)}
        facts = {key: (value.shape, value.dtype) for key, value in tensors.items()}
        others = {key: value for key, value in tensor_dict.items() if key not in tensors}
        head = torch.frombuffer(bytearray(pickle.dumps((list(tensor_dict), facts, others))), dtype=torch.uint8)
        self._eager.send(torch.tensor([head.numel()]), dst, HEAD_TAG)
        self._eager.send(head, dst, HEAD_TAG)
        for tensor in tensors.values():
            if tensor.numel():
                self._eager.send(tensor, dst, TENSOR_TAG)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64)
        self._eager.recv(length, src, HEAD_TAG)
        head = torch.empty(int(length), dtype=torch.uint8)
        self._eager.recv(head, src, HEAD_TAG)
        keys, facts, others = pickle.loads(head.numpy().tobytes())
        for key, (shape, dtype) in facts.items():
            others[key] = torch.empty(shape, dtype=dtype)
            if others[key].numel():
                self._eager.recv(others[key], src, TENSOR_TAG)
        return {key: others[key] for key in keys}

    def destroy(self) -> None:
        operators.withdraw(self._name)
        super().destroy()


def _say_so() -> None:
    """Once in a job."""
    global _said
    if not _said and torch.distributed.get_rank() == 0:
        log.info("symcomm: groups of CPU ranks are Symcomm's; SYMCOMM_VLLM=0 leaves them as they were.")
    _said = True


class _Speaking:
    """A group whose calls leave last words when they fail."""

    def __init__(self, group: Any):
        self._group = group

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._group, name)

        def run(*args: Any) -> Any:
            try:
                return call(*args)
            except errors.SymcommError as error:
                last_words.leave(error)
                raise

        setattr(self, name, run)  # for the next time
        return run
