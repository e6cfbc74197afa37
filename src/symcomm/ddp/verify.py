"""Checks that all ranks hold the same model, once, before the first bucket would mix up gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from symcomm import errors
from symcomm.ddp.arguments import group_of, logger_of
from symcomm.torch_backend import values

_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def _gather(process_group: Any, row: list[int], device: torch.device) -> list[list[int]]:
    """All ranks' rows, which are of the same length."""
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(process_group.size())]
    process_group.allgather([everyone], [mine]).wait()
    return [row.tolist() for row in everyone]


def _describe(param: Any) -> list[int]:
    """(dtype, sizes, strides) of a parameter as numbers, with their count in front."""
    numbers = [_DTYPES.index(param.dtype), *param.shape, *param.stride()]
    return [len(numbers), *numbers]


def _read(row: list[int]) -> list[tuple[int, ...]]:
    """What ``_describe`` wrote for each parameter."""
    params, place = [], 0
    while place < len(row) and row[place] > 0:
        params.append(tuple(row[place + 1 : place + 1 + row[place]]))
        place += 1 + row[place]
    return params


def _words(numbers: tuple[int, ...]) -> str:
    half = (len(numbers) - 1) // 2
    dtype = str(_DTYPES[numbers[0]]).removeprefix("torch.")
    return f"sizes {list(numbers[1 : 1 + half])}, strides {list(numbers[1 + half :])} and dtype {dtype}"


def _refuse(logger: Any, text: str) -> errors.CollectiveMismatchError:
    if logger is not None:
        logger.set_error_and_log(text)
    return errors.CollectiveMismatchError(text)


def verify_params(process_group: Any, params: Sequence[Any], names: Mapping[int, str], logger: Any = None) -> None:
    """Raise on every rank, naming the first parameter that differs, unless all ranks' parameters agree."""
    me, device = process_group.rank(), params[0].device if params else torch.device("cpu")
    names = {index: name.lstrip(".") for index, name in names.items()}  # a bare layer's come as ".weight"
    described = [number for param in params for number in _describe(param)]
    sizes = _gather(process_group, [len(params), len(described)], device)
    for rank, (count, _) in enumerate(sizes):
        if count != len(params):
            last = names.get(min(count, len(params) - 1), "")
            raise _refuse(
                logger,
                f"DDP expects same model across all ranks, but Rank {me} has {len(params)} params, while rank {rank} "
                f"has inconsistent {count} params{f' (the lists part at {last!r} or after)' if last else ''}; "
                "build the same model on every rank.",
            )
    longest = max(length for _, length in sizes)
    everyone = [_read(row) for row in _gather(process_group, described + [0] * (longest - len(described)), device)]
    for index, mine in enumerate(everyone[me]):
        for rank, theirs in enumerate(everyone):
            if theirs[index] != everyone[0][index]:
                name = f" ({names[index]!r})" if index in names else ""
                reference = everyone[0][index]
                where, is_ = ("this process", mine) if mine != reference else (f"process {rank}", theirs[index])
                raise _refuse(
                    logger,
                    f"[{me}]: params[{index}] in {where} with {_words(is_)} appears not to match sizes of the same "
                    f"param in process 0{name}, which has {_words(reference)}; build the same model on every rank.",
                )


def verify_params_across_processes(process_group: Any, params: Sequence[Any], logger: Any = None) -> None:
    """``verify_params`` for callers who know no names.

    Raises: CollectiveMismatchError on every rank, naming the first parameter that differs; WrongTypeError."""
    call = "_verify_params_across_processes"
    group_of(call, process_group)
    verify_params(process_group, values.tensors(f"{call}: params", params), {}, logger_of(call, logger))
