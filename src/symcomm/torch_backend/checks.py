"""Checks of arguments passed directly to a group.

Every message begins with the words that PyTorch's own backends use for the same mistake ("invalid root rank"), since
scripts look for them; then it says what is allowed and what it got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.torch_backend import values


def _refuse(call: str, words: str, argument: str, got: object, allowed: str) -> errors.BadArgumentError:
    return errors.bad_argument(f"{call}: {words}", argument, got, allowed)


def root_rank(call: str, root: Any, size: int) -> None:
    if not isinstance(root, int) or not 0 <= root < size:
        raise _refuse(call, "invalid root rank", "root", root, f"a rank of this group, 0 to {size - 1}")


def root_tensor(call: str, options: Any, count: int) -> int:
    """The number, among the root's ``count`` tensors, of the one that the caller means."""
    number = getattr(options, "rootTensor", 0)
    if not 0 <= number < count:
        allowed = f"0 to {count - 1}" if count else "the number of a tensor, and there are none"
        raise _refuse(call, "invalid root tensor", "rootTensor", number, allowed)
    return number


def tag(call: str, number: Any) -> None:
    """Check a message's tag: ours may be negative, torch's may not."""
    if number < 0:
        raise _refuse(call, "Tag must be nonnegative", "tag", number, "0 or more")


def dense(call: str, name: str, tensor: Any) -> None:
    if tensor.layout is not torch.strided:
        raise errors.unsupported(call, name, f"a {tensor.layout} tensor", "dense", "use .to_dense()")


def non_empty(call: str, tensors: Any, what: str = "tensor list") -> None:
    if isinstance(tensors, (list, tuple)) and not tensors:
        raise _refuse(call, f"requires non-empty {what}", "tensors", "an empty list", "at least one tensor")


def single(call: str, tensors: Any, what: str) -> Any:
    """The only tensor of a list (or the tensor itself)."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise _refuse(
            call, f"requires a single-element {what}", "tensors", f"a list of {len(tensors)}", "a list of one"
        )
    return tensors[0]


def alike(call: str, tensors: Sequence[Any], like: Any = None, sizes: bool = True, other_type: str = "") -> None:
    """Refuse tensors whose layout, dtype or (with ``sizes``) shape is not that of ``like``, or of the first.
    ``other_type``: the words for another dtype."""
    first = tensors[0] if like is None else like
    for k, tensor in enumerate(tensors):
        if tensor.layout != first.layout:
            dense(call, f"tensors[{k}]", first)
            raise _refuse(
                call, f"invalid tensor layout at index {k}", f"tensors[{k}]", tensor.layout, f"{first.layout}"
            )
        if tensor.dtype != first.dtype:
            words = other_type or f"invalid tensor type at index {k}"
            raise _refuse(call, words, f"tensors[{k}]", tensor.dtype, f"{first.dtype}")
        if sizes and tensor.shape != first.shape:
            raise _refuse(
                call, f"invalid tensor size at index {k}", f"tensors[{k}]", list(tensor.shape), f"{list(first.shape)}"
            )


def all_reduce_coalesced(tensors: Sequence[Any]) -> None:
    call = "all_reduce_coalesced"
    non_empty(call, tensors)
    alike(call, tensors, sizes=False, other_type="tensors must all have the same type")
    dense(f"{call}: unsupported layout", "tensors", tensors[0])


def _one_per_rank(call: str, side: str, lists: Any, like: Any, size: int) -> list[Any]:
    """The list of tensors that a root gives, one per rank; torch wraps it in a list of one."""
    nested = lists and isinstance(lists[0], (list, tuple))
    if not lists or (nested and len(lists) != 1):
        got = f"{len(lists)} lists" if nested else "none"
        raise _refuse(call, f"requires a single-element {side} list", f"{side}s", got, "one list of tensors")
    tensors = list(lists[0]) if nested else list(lists)
    if len(tensors) != size:
        words = f"Incorrect {side} list size {len(tensors)}. {side.capitalize()} list size should be {size}"
        raise _refuse(call, words, f"{side}s", f"a list of {len(tensors)}", f"{size} tensors, one per rank")
    for k, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise _refuse(call, f"invalid tensor type at index {k}", f"{side}s[{k}]", tensor.dtype, f"{like.dtype}")
        if tensor.numel() != like.numel():
            words = f"invalid tensor size at index {k}"
            raise _refuse(call, words, f"{side}s[{k}]", list(tensor.shape), f"{list(like.shape)}")
    return tensors


def _from_root(call: str, side: str, lists: Any, like: Any, root: Any, rank: int, size: int) -> list[Any]:
    if rank == root:
        return _one_per_rank(call, side, lists, like, size)
    if lists:
        words = f"requires empty {side} on non-root"
        raise _refuse(call, words, f"{side}s", f"a list on rank {rank}", f"given on rank {root} only")
    return []


def scatter(outputs: Any, inputs: Any, root: Any, rank: int, size: int) -> tuple[Any, list[Any]]:
    """(this rank's output, the root's inputs)."""
    root_rank("scatter", root, size)
    tensor = single("scatter", outputs, "output tensor list")
    return tensor, _from_root("scatter", "input", inputs, tensor, root, rank, size)


def gather(outputs: Any, inputs: Any, root: Any, rank: int, size: int) -> tuple[list[Any], Any]:
    """(the root's outputs, this rank's input)."""
    root_rank("gather", root, size)
    tensor = single("gather", inputs, "input tensor list")
    return _from_root("gather", "output", outputs, tensor, root, rank, size), tensor


def all_to_all(outputs: Sequence[Any], inputs: Sequence[Any], size: int) -> None:
    for side, tensors in (("input", inputs), ("output", outputs)):
        if len(tensors) != size:
            words = f"{side} tensor list size {len(tensors)} does not match world size {size}"
            raise _refuse("all_to_all", words, f"{side}s", f"a list of {len(tensors)}", f"{size} tensors, one per rank")


def all_gather_lists(outputs: Any, inputs: Sequence[Any], size: int) -> list[list[Any]]:
    """One list of outputs for each of this rank's tensors, each as long as all ranks' inputs together."""
    call = "all_gather"
    non_empty(call, inputs, "input tensor list")
    lists = [list(x) for x in outputs] if outputs and isinstance(outputs[0], (list, tuple)) else [list(outputs)]
    if not outputs or len(lists) != len(inputs):
        words = "requires input/output tensor lists to have the same length"
        raise _refuse(call, words, "outputs", f"{len(lists) if outputs else 0} lists", f"{len(inputs)} lists")
    for k, places in enumerate(lists):
        if len(places) != len(inputs) * size:
            words = f"invalid output tensor list at index {k}"
            raise _refuse(call, words, f"outputs[{k}]", f"{len(places)} tensors", f"{len(inputs) * size} tensors")
    return lists


def all_gather_coalesced(outputs: Sequence[Any], inputs: Sequence[Any], size: int) -> None:
    """``outputs[r]`` has an output for each of rank r's inputs."""
    call = "all_gather_coalesced"
    non_empty(call, inputs, "input tensor list")
    if len(outputs) != size:
        words = "output lists should be equal to world size"
        raise _refuse(call, words, "outputs", f"{len(outputs)} lists", f"{size} lists")
    for r, places in enumerate(outputs):
        if len(places) != len(inputs):
            words = f"invalid output size: expected length {len(inputs)}, got {len(places)}"
            raise _refuse(call, words, f"outputs[{r}]", f"{len(places)} tensors", f"{len(inputs)} tensors")
        for k, (place, given) in enumerate(zip(places, inputs, strict=True)):
            if place.shape != given.shape:
                words = f"invalid size of output tensor at index {k}"
                raise _refuse(call, words, f"outputs[{r}][{k}]", list(place.shape), f"{list(given.shape)}")
            if place.dtype != given.dtype:
                words = f"invalid tensor type at index {k}"
                raise _refuse(call, words, f"outputs[{r}][{k}]", place.dtype, f"{given.dtype}")


def splits(output: Any, input: Any, output_splits: Sequence[int], input_splits: Sequence[int], size: int) -> None:
    """The splits of all_to_all_single: rows for each rank; empty: equal parts."""
    call = "all_to_all_single"
    dense(call, "input", input)
    dense(call, "output", output)
    if not input.is_contiguous():
        raise _refuse(call, "Tensors must be contiguous", "input", "one that is not", "contiguous")
    for name, tensor, rows in (("output", output, output_splits), ("input", input, input_splits)):
        count = tensor.shape[0] if tensor.dim() else 1
        if not rows:
            if count % size:
                words = "Tensor's dim 0 does not divide equally across group size"
                raise _refuse(call, words, name, f"{count} rows", f"a multiple of {size} rows, or given with splits")
        elif len(rows) != size:
            words = "Number of tensor splits not equal to group size"
            raise _refuse(call, words, f"{name}_split_sizes", list(rows), f"{size} numbers")
        elif sum(rows) != count or min(rows) < 0:
            words = "Split sizes doesn't match total dim 0 size"
            raise _refuse(call, words, f"{name}_split_sizes", list(rows), f"numbers that add up to {count}")


def _names(call: str, timeout: Any, group_name: Any, group_desc: Any) -> None:
    values.optional(values.duration, f"{call}: timeout", timeout)
    values.optional(values.text, f"{call}: group_name", group_name)
    values.optional(values.text, f"{call}: group_desc", group_desc)


def split_group(ranks: Any, timeout: Any, opts: Any, group_name: Any, group_desc: Any) -> None:
    """Raise if torch's split_group would refuse the type of an argument."""
    call = "split_group"
    values.ranks(f"{call}: ranks", ranks)
    if opts is not None and not hasattr(opts, "_timeout"):
        raise errors.wrong_type(call, "opts", opts, "a Backend.Options or None")
    _names(call, timeout, group_name, group_desc)


def merge_group(store: Any, size: Any, at_least: int, timeout: Any, group_name: Any, group_desc: Any) -> None:
    """The same for merge_remote_group, which never makes a group smaller."""
    call = "merge_remote_group"
    if not callable(getattr(store, "add", None)) or not callable(getattr(store, "wait", None)):
        raise errors.wrong_type(call, "store", store, "a Store")
    _names(call, timeout, group_name, group_desc)
    if values.short(f"{call}: size", size) < at_least:
        raise errors.bad_argument(call, "size", size, f"at least this group's {at_least}")
