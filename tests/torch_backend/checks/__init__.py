"""What users do with ``torch.distributed``, on our backend: each check runs on forked ranks with groups of its own.

``python -m tests.torch_backend.checks`` runs all of them (or those named) in one process tree and prints a JSON line
each; test_torch_backend.py makes tests of the lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
RANKS = 3  # processes; those that a check does not need have nothing to say about it
CHECKS: dict[str, tuple[Callable[[int, str], None], int]] = {}
KEPT: list[Any] = []


def check(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """A check gets its rank and the path of a file that does not exist yet, the same on all ranks."""
    CHECKS[function.__name__] = (function, WORLD)
    return function


def check3(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """The same on three ranks."""
    CHECKS[function.__name__] = (function, 3)
    return function


@contextlib.contextmanager
def joined(rank: int, path: str, backend: str = "symcomm", world: int = WORLD, **options: Any) -> Iterator[Any]:
    options.setdefault("init_method", f"file://{path}")
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=30), **options)
    try:
        yield dist.group.WORLD
    finally:
        leave()


def leave() -> None:
    """Ends all groups but keeps Gloo's objects: PyTorch's destructor joins Gloo's thread while it holds the interpreter
    lock, which that thread may be waiting for to let go of a tensor (seen with PyTorch 2.13 after ``join``)."""
    KEPT.extend(g for g, (name, _) in dist.distributed_c10d._world.pg_map.items() if "gloo" in name)
    dist.destroy_process_group()


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
    else:
        raise AssertionError("nothing was raised")


def equal(got: Any, expected: Any) -> None:
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected)), f"got {got}, expected {expected}"
