"""``@symcomm.testing.ranks(...)``: a test of pytest whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import pdb
import sys
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm.testing import plugin
from symcomm.testing.faults import Faults
from symcomm.testing.running import DEADLINE, Skip, run
from symcomm.testing.schedule import Schedule

DEBUGGING = 86400.0  # seconds that a test has while a debugger may be open
_screen: Any = multiprocessing.get_context("fork").Lock()  # one debugger at a time


def ranks(
    n: int | Sequence[int],
    *,
    mode: str = "threads",
    backend: str = "symcomm",
    deadline: float = DEADLINE,
    timeout: float | None = None,
    kill: str | Sequence[str] = (),
    stop: str | Sequence[str] = (),
    delay: str | Sequence[str] = (),
    schedule: Schedule | None = None,
    **more: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on ``n`` ranks, or once for each of several numbers. Its first argument is the rank's group; the
    others are pytest's fixtures and parameters, which all ranks share as they were before the ranks started.

    ``mode="processes"``: ranks are forks, and ``torch.distributed`` is initialised with ``backend``. ``deadline`` ends
    a test that takes longer, ``timeout`` is the group's. ``kill``, ``stop``, ``delay`` and ``raise`` (given as
    ``**{"raise": ...}``, or ``raise_=``) are faults: see faults.py for their sentences.

    Raises, when the test runs: RanksFailed, with every rank's own traceback."""
    scripts = {"kill": kill, "stop": stop, "delay": delay}
    scripts["raise"] = more.pop("raise", more.pop("raise_", ()))
    if more:
        raise errors.bad_argument("symcomm.testing.ranks", "arguments", sorted(more), "those of its documentation")
    faults = Faults.of(scripts)
    counts = [n] if isinstance(n, int) else list(n)
    for count in counts:
        faults.check(count, mode)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        first, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def on_ranks(*args: Any, **given: Any) -> None:
            __tracebackhide__ = True
            count = given.pop(COUNT, counts[0])
            body = functools.partial(_with_self, test, args) if args else test
            debugs = plugin.pdb_rank is not None
            try:
                run(
                    body, count, given, mode=mode, backend=backend, deadline=DEBUGGING if debugs else deadline,
                    timeout=DEBUGGING if debugs else timeout, faults=faults, schedule=schedule,
                    on_error=debug if debugs else None,
                )  # fmt: skip
            except Skip as skip:
                import pytest

                pytest.skip(str(skip))

        del on_ranks.__wrapped__  # whose signature pytest would take
        kept = [first, *others[1:]] if first.name == "self" else others
        if len(counts) == 1:
            on_ranks.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
            return on_ranks
        import pytest

        parameter = inspect.Parameter(COUNT, inspect.Parameter.KEYWORD_ONLY)
        on_ranks.__signature__ = inspect.Signature([*kept, parameter])  # type: ignore[attr-defined]
        return pytest.mark.parametrize(COUNT, counts)(on_ranks)

    return decorate


COUNT = "ranks"  # the parameter that says how many


def _with_self(test: Callable[..., None], args: tuple[Any, ...], group: Any, **given: Any) -> None:
    test(*args, group, **given)


def debug(rank: int, error: BaseException) -> None:
    """The debugger, at what a rank raised, on the terminal."""
    if plugin.pdb_rank not in (rank, plugin.ANY) or not _screen.acquire(block=plugin.pdb_rank != plugin.ANY):
        return
    try:
        with open("/dev/tty") as keys, open("/dev/tty", "w") as screen:
            print(f"rank {rank}: {type(error).__name__}: {error}", file=screen)
            debugger = pdb.Pdb(stdin=keys, stdout=screen)
            debugger.reset()
            debugger.interaction(None, error.__traceback__ or sys.exc_info()[2])
    except OSError:  # no terminal
        pass
    finally:
        _screen.release()
