"""Checks the arguments of each operation and turns them into those of our group's method.

Each function takes our group, the call's other arguments, and its tensors. It returns the arguments for our group's
method or, if our groups have no such method, a function that makes the call. ``running.operation`` turns these
functions into TorchGroup's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from symcomm.torch_backend import checks, lists
from symcomm.torch_backend.arguments import Given, once_each, one_list
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.sparse import all_reduce_sparse
from symcomm.torch_backend.work import DoneWork

Arguments = tuple[Any, ...]


def as_given(core: Any, given: Given, *tensors: Any) -> Arguments:
    return tensors


def with_redop(core: Any, given: Given, *tensors: Any) -> Arguments:
    return *tensors, given.redop


# --- reductions -------------------------------------------------------------------------------------------------------


def all_reduce(core: Any, given: Given, tensors: Any) -> Arguments | Callable[[], Any]:
    redop = given.redop
    if isinstance(tensors, (list, tuple)) and len(tensors) != 1:
        return partial(lists.all_reduce, core, tensors, redop, given.seconds)
    tensor = single("all_reduce", tensors, "tensor list")
    if tensor.is_sparse and tensor.is_cpu:
        return partial(_all_reduce_sparse, core, tensor, redop, given.seconds)
    return tensor, redop


def _all_reduce_sparse(core: Any, tensor: Any, redop: Any, seconds: float | None) -> DoneWork:
    all_reduce_sparse(core, tensor, redop, seconds)
    return DoneWork([tensor])


def all_reduce_coalesced(core: Any, given: Given, tensors: Sequence[Any]) -> Arguments:
    checks.all_reduce_coalesced(tensors)
    return once_each(tensors), given.redop


def reduce(core: Any, given: Given, tensors: Any) -> Arguments:
    checks.root_rank("reduce", given.root, core.size)
    tensor = single("reduce", tensors, "tensor list")
    checks.root_tensor("reduce", given.options, 1)
    return tensor, given.root, given.redop


def reduce_scatter(core: Any, given: Given, output_tensors: Any, input_tensors: Any) -> Arguments:
    output = single("reduce_scatter", output_tensors, "output tensor list")
    return output, one_list("reduce_scatter", "inputs", input_tensors), given.redop


# --- copies -----------------------------------------------------------------------------------------------------------


def broadcast(core: Any, given: Given, tensors: Any) -> Arguments | Callable[[], Any]:
    count = len(tensors) if isinstance(tensors, (list, tuple)) else 1
    checks.root_rank("broadcast", given.root, core.size)
    checks.root_tensor("broadcast", given.options, count)
    if count != 1:
        return partial(lists.broadcast, core, tensors, given.root, given.options, given.seconds)
    return single("broadcast", tensors, "tensor list"), given.root


def all_gather(core: Any, given: Given, output_tensors: Any, input_tensors: Any) -> Arguments | Callable[[], Any]:
    inputs = input_tensors if isinstance(input_tensors, (list, tuple)) else [input_tensors]
    outputs = checks.all_gather_lists(output_tensors, inputs, core.size)
    if len(inputs) > 1:
        return partial(lists.all_gather, core, outputs, inputs, given.seconds)
    # dist.all_gather takes outputs of any size. A call of the group itself takes only what torch's own groups do.
    checks.alike("all_gather", outputs[0], inputs[0], sizes=given.options is None)
    return outputs[0], inputs[0]


def all_gather_lists(core: Any, given: Given, output_lists: Any, input_list: Any) -> Arguments:
    checks.all_gather_coalesced(output_lists, input_list, core.size)
    return output_lists, input_list


def gather(core: Any, given: Given, output_tensors: Any, input_tensors: Any) -> Arguments:
    outputs, tensor = checks.gather(output_tensors, input_tensors, given.root, core.rank, core.size)
    return outputs or None, tensor, given.root


def gather_single(core: Any, given: Given, output: Any, input: Any) -> Arguments:
    checks.root_rank("gather_single", given.root, core.size)
    return output if core.rank == given.root else None, input, given.root


def scatter(core: Any, given: Given, output_tensors: Any, input_tensors: Any) -> Arguments:
    tensor, pieces = checks.scatter(output_tensors, input_tensors, given.root, core.rank, core.size)
    return tensor, pieces or None, given.root


def all_to_all(core: Any, given: Given, output_tensors: Any, input_tensors: Any) -> Arguments:
    checks.all_to_all(output_tensors, input_tensors, core.size)
    return list(output_tensors), list(input_tensors)


def all_to_all_single(
    core: Any, given: Given, output: Any, input: Any, output_splits: Any, input_splits: Any
) -> Arguments:
    args = (output, input, list(output_splits), list(input_splits))
    checks.splits(*args, core.size)
    return args
