"""What a Reducer and its kin are given: the same kinds of values as PyTorch's take."""

from __future__ import annotations

from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.bucket import GradBucket
from symcomm.torch_backend import values


def group_of(call: str, process_group: Any) -> Any:
    """A group, or a backend: both have these calls."""
    if not callable(getattr(process_group, "allreduce", None)):
        raise errors.wrong_type(call, "process_group", process_group, "a ProcessGroup")
    return process_group


def reducer_of(call: str, reducer: Any) -> Any:
    """One of ours: PyTorch's has no such method. (The module of Reducer is above this one.)"""
    if not callable(getattr(reducer, "set_hook", None)):
        raise errors.wrong_type(call, "reducer", reducer, "a Reducer")
    return reducer


def bucket_of(call: str, bucket: Any) -> Any:
    if not isinstance(bucket, GradBucket):
        raise errors.wrong_type(call, "bucket", bucket, "a GradBucket")
    return bucket


def names_of(given: Any) -> dict[int, str]:
    """Parameters' names by their index."""
    call = "Reducer: param_to_name_mapping"
    return {} if given is None else values.mapping(call, given, values.integer, values.text, "int to str")


def outputs_of(outputs: Any) -> list[Any]:
    """Tensors of the forward pass, from a list or a single one."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return values.tensors("prepare_for_backward: outputs", outputs)


def check_buckets(params: list[Any], bucket_indices: Any, limits: Any, sparse: list[bool]) -> None:
    """Raise unless every bucket is of parameters that there are."""
    if not isinstance(bucket_indices, (list, tuple)):
        raise errors.wrong_type("Reducer", "bucket_indices", bucket_indices, "a list of lists of int")
    values.ranks("Reducer: per_bucket_size_limits", limits)
    if not params:
        raise errors.bad_argument(
            "Reducer", "params", params, "at least one parameter", "Expected at least one parameter"
        )
    if len(sparse) != len(params):
        raise errors.bad_argument("Reducer", "expect_sparse_gradients", sparse, f"{len(params)} bools, one a parameter")
    for indices in [values.ranks("Reducer: bucket_indices", indices) for indices in bucket_indices]:
        bad = [index for index in indices if not 0 <= index < len(params)]
        if bad or not indices:
            raise errors.bad_argument(
                "Reducer", "bucket_indices", indices, f"indices of 0 to {len(params) - 1}, at least one a bucket"
            )
        if len(indices) > 1 and any(sparse[i] for i in indices):
            raise errors.bad_argument(
                "Reducer", "bucket_indices", indices, "one index alone where its gradient is sparse"
            )
