"""Parameters without a gradient: finds them before backward, and words the errors when nobody looked for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from symcomm import errors

REPORT_SECONDS = 1.0  # how long an error waits to hear of the other ranks'


def search_unused(outputs: Iterable[Any], accumulators: Sequence[Any]) -> list[int]:
    """Indices of the accumulators that no output's graph leads to."""
    with torch.autograd.profiler.record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
        return _unreached(outputs, accumulators)


def _unreached(outputs: Iterable[Any], accumulators: Sequence[Any]) -> list[int]:
    seen: set[Any] = set()  # the nodes themselves: torch keeps a node's Python object only while it is held
    queue = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    seen.update(queue)
    while queue:
        for node, _ in queue.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                queue.append(node)
    return [index for index, accumulator in enumerate(accumulators) if accumulator not in seen]


def _store_of(process_group: Any) -> Any:
    try:
        return process_group.get_group_store()
    except (AttributeError, RuntimeError):
        return None


def _ask_around(process_group: Any, topic: str, mine: list[int]) -> dict[int, list[int]]:
    """The lists of all ranks that run into the same error within a moment."""
    told = {process_group.rank(): mine}
    store = _store_of(process_group)
    if store is None:
        return told
    keys = {rank: f"symcomm-ddp/{topic}/{rank}" for rank in range(process_group.size())}
    try:
        store.set(keys[process_group.rank()], json.dumps(mine))
        end = time.monotonic() + REPORT_SECONDS
        while len(told) < len(keys):
            for rank in keys.keys() - told.keys():
                if store.check([keys[rank]]):
                    told[rank] = json.loads(store.get(keys[rank]))
            if time.monotonic() > end:
                break
            time.sleep(0.01)
    except RuntimeError:
        pass  # the store is gone: our own list must do
    return told


def _by_rank(told: Mapping[int, list[int]], size: int, names: Mapping[int, str]) -> str:
    """``net2.weight (parameter 1, module net2) on ranks 0, 1; ...``"""
    ranks_of: dict[int, list[int]] = {}
    for rank, indices in sorted(told.items()):
        for index in indices:
            ranks_of.setdefault(index, []).append(rank)
    parts = []
    for index, ranks in sorted(ranks_of.items()):
        name = names.get(index, f"parameter {index}")
        module = name.rpartition(".")[0]
        where = f" of module {module}" if module else ""
        parts.append(f"{name} (parameter {index}{where}) on rank{'s' * (len(ranks) > 1)} {errors.format_ranks(ranks)}")
    text = "; ".join(parts)
    silent = [rank for rank in range(size) if rank not in told]
    return text + (f" (not heard from: {errors.format_ranks(silent)})" if silent else "")


def unfinished(
    process_group: Any,
    iteration: int,
    missing: list[int],
    names: Mapping[int, str],
    *,
    find_unused: bool,
    static_graph: bool,
    quiet: bool,
) -> errors.CallerError:
    """The error of a backward pass that left parameters without gradients."""
    told = _ask_around(process_group, f"unused/{iteration}", missing)
    whose = _by_rank(told, process_group.size(), names)
    me = process_group.rank()
    lists = f"\nParameter indices which did not receive grad for rank {me}: {' '.join(map(str, missing))}"
    if quiet:
        lists += (
            "\nYou can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to log names too."
        )
    else:
        lists = (
            f"\nParameters which did not receive grad for rank {me}: {', '.join(names.get(i, str(i)) for i in missing)}"
            + lists
        )
    text = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if not any(told.values()):
        text += (
            "All gradients came, but the backward pass did not end: an exception stopped it, in a communication hook "
            "perhaps. Look for that one; to go on after it, wrap the model anew on every rank."
        )
    elif static_graph:
        text += (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
            "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
            f"set to True.{lists}\nNo gradient came for {whose}; leave static_graph out and pass "
            "find_unused_parameters=True."
        )
    elif find_unused:
        text += (
            f"No gradient came for {whose}. Since `find_unused_parameters=True` is enabled, this likely means that not "
            "all outputs were used: fix it by making sure all `forward` function outputs participate in calculating "
            f"loss, and that `forward` returns them in tuples, lists, dicts or dataclasses.{lists}"
        )
    else:
        text += (
            f"No gradient came for {whose}. Look for unused parameters by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel (or static_graph=True, if it is the same ones in "
            "every iteration), or use them all by making sure all `forward` function outputs participate in "
            f"calculating loss.{lists}"
        )
    return errors.CallerError(text)


def marked_twice(index: int, names: Mapping[int, str], looked_for_unused: bool) -> errors.CallerError:
    """The error of a parameter whose gradient came a second time."""
    name = f" with name {names[index]}" if index in names else ""
    text = (
        f"Expected to mark a variable ready only once. Parameter at index {index}{name} has been marked as ready "
        "twice: its gradient came a second time in one backward pass (or a second one ran without a forward pass "
        "before it). Either a parameter is used outside `forward`, or several reentrant checkpoints share it; "
        "_set_static_graph() (static_graph=True) allows both, if the graph is the same in every iteration."
    )
    if looked_for_unused:
        text += (
            " Or Incorrect unused parameter detection: it was not reached from the outputs of `forward`, and was used "
            "later all the same; if nothing goes unused, pass find_unused_parameters=False."
        )
    return errors.CallerError(text)
