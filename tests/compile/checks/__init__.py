"""``torch.compile`` on our backend: each check runs on two forked ranks, or four, with groups of its own.

``python -m tests.compile.checks`` runs all of them (or those named); test_compile_checks.py makes tests of
that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch import config as functorch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from symcomm import compile as symcompile
from symcomm.compile import report
from tests.torch_backend.checks import joined

WORLD = 2
CHECKS: dict[str, tuple[Callable[[int, str], None], int]] = {}


def check(function: Callable[[int], None], world: int = WORLD) -> Callable[[int], None]:
    """A check gets its rank; the default group exists."""

    def run(rank: int, path: str) -> None:
        # Scalar code compiles in a third of the time, and what is tested is between the kernels.
        with joined(rank, path, world=world), config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
            torch._dynamo.reset()
            torch.manual_seed(rank)
            function(rank)

    CHECKS[function.__name__] = (run, world)
    return function


check_on_four = partial(check, world=4)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Our passes see every graph, though one like it was compiled before. Kernels of one text are compiled once."""
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


class Compiled:
    """A function compiled in one graph, called once: its result, its code, and what was done to its collectives."""

    def __init__(self, function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **chosen: bool | None):
        with (
            symcompile.configure(**chosen),
            report.listening() as self.records,
            uncached(),
        ):
            self.function = torch.compile(function, fullgraph=True, dynamic=dynamic)
            self.result, self.codes = run_and_get_code(self.function, *args)
        self.code = "\n".join(self.codes)


def alike(got: Any, expected: Any, exact: bool = True) -> None:
    """Both are tensors, or lists of them."""
    if isinstance(got, Sequence):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            alike(one, other, exact)
    elif exact:
        assert torch.equal(got, expected), f"got {got}, expected {expected}"
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def as_eager(function: Callable[..., Any], *args: Any, exact: bool = True, **chosen: bool | None) -> Compiled:
    """Compile, call, and compare with the function as it is."""
    compiled = Compiled(function, *args, **chosen)
    alike(compiled.result, function(*args), exact)
    return compiled


def gradients(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_() for a in args]
    out = function(*leaves)
    outs = out if isinstance(out, (list, tuple)) else [out]
    sum((o * torch.arange(1.0, o.numel() + 1).view(o.shape)).sum() for o in outs).backward()
    return [leaf.grad for leaf in leaves]  # type: ignore[misc]


@contextlib.contextmanager
def second_group(backend: str, ranks: Sequence[int] = (0, 1)) -> Iterator[Any]:
    group = dist.new_group(list(ranks), backend=backend)
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
