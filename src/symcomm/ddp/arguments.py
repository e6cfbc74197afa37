"""Checks what callers pass to a Reducer, a Logger or a hook: the kinds of values that PyTorch's classes take."""

from __future__ import annotations

from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.bucket import GradBucket
from symcomm.torch_backend import values


def group_of(call: str, process_group: Any) -> Any:
    """``process_group``, which may also be a backend: both have these calls."""
    if not callable(getattr(process_group, "allreduce", None)):
        raise errors.wrong_type(call, "process_group", process_group, "a ProcessGroup")
    return process_group


def reducer_of(call: str, reducer: Any) -> Any:
    """``reducer``, if it is ours: PyTorch's has no such method. (Reducer's module imports this one.)"""
    if not callable(getattr(reducer, "set_hook", None)):
        raise errors.wrong_type(call, "reducer", reducer, "a Reducer")
    return reducer


def logger_of(call: str, logger: Any) -> Any:
    """``logger``, if it is ours or None. (Logger's module imports this one.)"""
    if logger is not None and not callable(getattr(logger, "set_error_and_log", None)):
        raise errors.wrong_type(call, "logger", logger, "a Logger or None")
    return logger


def bucket_of(call: str, bucket: Any) -> Any:
    if not isinstance(bucket, GradBucket):
        raise errors.wrong_type(call, "bucket", bucket, "a GradBucket")
    return bucket


def names_of(given: Any) -> dict[int, str]:
    """The names of parameters, by index."""
    call = "Reducer: param_to_name_mapping"
    return {} if given is None else values.mapping(call, given, values.integer, values.text, "int to str")


def outputs_of(outputs: Any) -> list[Any]:
    """Tensors of the forward pass, from a list or a single one."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return values.tensors("prepare_for_backward: outputs", outputs)


def buckets_of(bucket_indices: Any, params: list[Any], sparse: list[bool]) -> list[list[int]]:
    """The indices of the parameters in each bucket, which must exist and be able to share it."""
    buckets = values.lists_of_sizes("Reducer: bucket_indices", bucket_indices)
    if not params:
        raise errors.bad_argument(
            "Reducer", "params", params, "at least one parameter", "Expected at least one parameter"
        )
    if len(sparse) != len(params):
        allowed = f"{len(params)} bools, one for each parameter"
        raise errors.bad_argument("Reducer", "expect_sparse_gradients", sparse, allowed)
    for indices in buckets:
        bad = [index for index in indices if index >= len(params)]
        if bad or not indices:
            allowed = f"indices from 0 to {len(params) - 1}, at least one in each bucket"
            raise errors.bad_argument("Reducer", "bucket_indices", indices, allowed)
        if len(indices) > 1:
            _check_shared(indices, params, sparse)
    return buckets


def _check_shared(indices: list[int], params: list[Any], sparse: list[bool]) -> None:
    """Raise unless gradients of these parameters can lie in one flat buffer."""
    if any(sparse[i] for i in indices):
        raise errors.bad_argument("Reducer", "bucket_indices", indices, "one index alone where its gradient is sparse")
    for attribute, words in (("device", "be placed on the same device"), ("dtype", "have the same dtype")):
        kinds = [str(getattr(params[i], attribute)) for i in indices]
        if len(set(kinds)) > 1:
            raise errors.bad_argument(
                "Reducer", f"parameters of bucket {indices}", kinds, f"of one {attribute}",
                f"All parameters in a bucket must {words}",
            )  # fmt: skip


def check_leaves(params: list[Any]) -> None:
    """Raise unless autograd accumulates a gradient in each parameter."""
    for index, param in enumerate(params):
        if not param.is_leaf:
            raise errors.bad_argument(
                "Reducer", f"params[{index}]", f"the result of {param.grad_fn.name()}", "a leaf of the graph",
                "grad_accumulator() should be only called on leaf Variables",
            )  # fmt: skip
        if not param.requires_grad:
            got = f"a tensor of {param.dtype} that does not"
            raise errors.bad_argument("Reducer", f"params[{index}]", got, "a tensor that requires grad", "leave it out")
        if param.layout is not torch.strided:
            raise errors.bad_argument("Reducer", f"params[{index}]", param.layout, "a dense tensor")
