"""Every exception Symcomm raises, and the one place that words them.

The tree says whose fault it is::

    SymcommError (RuntimeError)
      CallerError                 fix the call
        BadArgumentError            an argument is wrong (also a ValueError)
          WrongTypeError              it is of a type that the call does not take (also a TypeError)
          OutputRefusedError          autograd does not let an output be written
          UnsupportedTensorError      a tensor of a kind that no collective takes (also a NotImplementedError)
          OutOfRangeError             a number does not fit in 64 bits (also an IndexError)
        CollectiveMismatchError     ranks made different calls
        CallRefusedError            another rank refused its part of a call
        GroupUnusableError          the group was destroyed, aborted, or failed before
        RendezvousError             the environment does not say who we are
        QueueEmptyError             a queue of a store had nothing to take
      PeerError                   someone else went away
        ProcessDiedError            the writer or a reader of a queue or board died
        QueueClosedError            it was closed: nothing follows (also an EOFError)
        RankFailedError             a rank died or left
          NoQuorumError               too few ranks can be reached: others may go on without us
        StoreConnectionError        the store cannot be reached (also a ConnectionError)
          StoreUnreachableError       not even in the time there was (also a DeadlineError)
        StoreAuthError              the store and we do not hold the same job token
      DeadlineError               the clock ran out (also a TimeoutError)
        StoreDeadlineError          while waiting for something in a store
      ResourceError               this machine has too little of something
      InternalError               a bug of ours: please report it

All of them are RuntimeErrors, since that is what ``torch.distributed`` raises and what scripts catch. Those of stores
are also what PyTorch's stores raise (DistStoreError and its kin) as soon as torch knows us: see
torch_backend/torch_patches/store_errors.py.
"""

from __future__ import annotations

import os
import reprlib
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "BadArgumentError", "CallRefusedError", "CallerError", "CollectiveMismatchError", "DeadlineError",
    "GroupUnusableError", "InternalError", "NoQuorumError", "OutOfRangeError", "OutputRefusedError", "PeerError",
    "ProcessDiedError", "QueueClosedError", "QueueEmptyError",
    "RankFailedError", "RendezvousError", "ResourceError", "StoreAuthError", "StoreConnectionError",
    "StoreDeadlineError", "StoreUnreachableError", "SymcommError", "UnsupportedTensorError", "WrongTypeError",
]  # fmt: skip


class SymcommError(RuntimeError):
    """Base of all our exceptions."""


class CallerError(SymcommError):
    """The call itself has to change."""


class BadArgumentError(CallerError, ValueError):
    """An argument is wrong: which, what it was, what is allowed, what to do."""


class WrongTypeError(BadArgumentError, TypeError):
    """An argument is of a type that the call does not take."""


class UnsupportedTensorError(BadArgumentError, NotImplementedError):
    """A tensor is quantized, sparse or laid out in a way that the call does not take."""


class OutputRefusedError(BadArgumentError):
    """Autograd does not let an output of this rank be written, which stays as it is. The rank took part all the same:
    the others have what they asked for, and the group can be used."""


class OutOfRangeError(BadArgumentError, IndexError):
    """A number does not fit in 64 bits, and is not stored as another one."""


class CollectiveMismatchError(CallerError):
    """The ranks of a group did not make the same call."""


class CallRefusedError(CallerError):
    """Another rank refused its part of a call, which did not take place. ``ranks`` lists it (ranks of the group).

    The group can still be used."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


class GroupUnusableError(CallerError):
    """The group was destroyed or aborted, or an earlier operation on it failed."""


class RendezvousError(CallerError):
    """Rank, world size or meeting place could not be found."""


class QueueEmptyError(CallerError):
    """``queue_pop(key, block=False)`` of a store found nothing."""


class PeerError(SymcommError):
    """A process that we depend on went away."""


class RankFailedError(PeerError):
    """One or more ranks died or left. ``ranks`` lists them (ranks of the group)."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


class ProcessDiedError(PeerError):
    """The other side of a queue or board ended without closing its end. ``pids`` lists the processes."""

    def __init__(self, message: str, pids: Sequence[int] = ()):
        super().__init__(message)
        self.pids = list(pids)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.pids)


class QueueClosedError(PeerError, EOFError):
    """A queue or board was closed, and everything that was sent has been read."""


class NoQuorumError(RankFailedError):
    """So few of a group's ranks can be reached that the others may go on without us. ``ranks``: those others."""


class StoreConnectionError(PeerError, ConnectionError):
    """The store's server cannot be reached, or went away."""


class StoreAuthError(PeerError, ConnectionError):
    """The other side of a store connection did not prove that it knows the job token."""


class DeadlineError(SymcommError, TimeoutError):
    """A deadline passed. ``missing`` lists the ranks that did not come, where that is known."""

    is_own = True  # False: another rank's deadline ended what they did together

    def __init__(self, message: str, missing: Sequence[int] = ()):
        super().__init__(message)
        self.missing = list(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.missing)


class StoreDeadlineError(DeadlineError):
    """What a call of a store waited for did not come in time."""


class StoreUnreachableError(StoreConnectionError, DeadlineError):
    """No server of a store answered in time."""


class ResourceError(SymcommError):
    """This machine does not have enough memory, descriptors or permissions."""


class InternalError(SymcommError):
    """A state that should be impossible. Please report it."""


# --- words ---------------------------------------------------------------------------------------


def notebook_cells() -> dict[str, str]:
    """The names under which a notebook compiled its cells, and how to show them: ``In [3]``. A spawned rank's are its
    parent's, which hands them over in ``inherited_cells``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"In [{number}]" for file, number in numbers.items()} or inherited_cells


inherited_cells: dict[str, str] = {}


def format_ranks(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``; runs of three or more are folded."""
    parts: list[str] = []
    run: list[int] = []

    def close() -> None:
        if len(run) >= 3:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts.extend(map(str, run))
        run.clear()

    for rank in sorted(set(ranks)):
        if run and rank != run[-1] + 1:
            close()
        run.append(rank)
    close()
    return ", ".join(parts) or "none"


def format_seconds(seconds: float) -> str:
    """A duration as a person would write it: ``12 us``, ``3.4 ms``, ``1.5 s``, ``30 min``."""
    if seconds >= 120:
        return f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds / 60:.1f} min"
    if seconds >= 10:
        return f"{seconds:.0f} s" if float(seconds).is_integer() else f"{seconds:.1f} s"
    rounded = float(f"{seconds:.2g}")  # two digits are enough, and what was meant to take 0.3 s takes 301 ms
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if 0 < rounded * factor < 999.5:
            return f"{rounded * factor:.3g} {unit}"
    return f"{rounded:g} s"


def format_exit(returncode: int) -> str:
    """How a process ended, from a ``subprocess`` style return code."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"died with {signal.Signals(-returncode).name}"
    except ValueError:
        return f"died with signal {-returncode}"


_failures_of_the_parent: list[BaseException | None] = []


def forked(failure: BaseException | None) -> GroupUnusableError:
    """In a forked child: why its copy of a group, which may have failed before, cannot be used.

    That failure is kept: its traceback holds what threads of the parent work with, which must not be freed here."""
    _failures_of_the_parent.append(failure)
    return GroupUnusableError(
        f"it belongs to the process that this one was forked from ({os.getppid()}); make groups of its own here."
    )


class _Shown(reprlib.Repr):
    """The repr of an argument, as far as it fits into a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 12
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_instance(self, x: Any, level: int) -> str:
        if not hasattr(type(x), "untyped_storage"):
            words = repr(x)
            return words if len(words) <= self.maxother else f"{words[: self.maxother]}..."
        # torch reads the values, which crashes where a tensor's memory was given away
        return f"{type(x).__name__}({', '.join(map(str, x.shape))}) of {x.dtype}"


_shown = _Shown()


def shown(value: object) -> str:
    """What an error says that an argument was, whatever it is."""
    try:
        return _shown.repr(value)
    except Exception:  # a number of thousands of digits, a repr that raises
        return f"an object of {type(value).__name__}"


def text_of(error: BaseException) -> str:
    """What ``error`` says, also if that cannot be told."""
    try:
        return str(error)
    except Exception:
        return "no words"


def bad_argument(call: str, argument: str, got: object, allowed: str, fix: str = "") -> BadArgumentError:
    """One sentence: the call, the argument, what it was, what is allowed, what to do."""
    text = f"{call}: {argument} must be {allowed}, got {shown(got)}"
    end = "" if fix.endswith("?") else "."
    return BadArgumentError(f"{text}; {fix}{end}" if fix else f"{text}.")


def wrong_type(call: str, argument: str, got: object, allowed: str, fix: str = "") -> WrongTypeError:
    """The same of an argument that is of another type altogether."""
    return WrongTypeError(str(bad_argument(call, argument, got, allowed, fix)))


def unsupported(call: str, argument: str, got: object, allowed: str, fix: str = "") -> UnsupportedTensorError:
    """The same of a tensor of a kind that nobody has made the call for."""
    return UnsupportedTensorError(str(bad_argument(call, argument, got, allowed, fix)))


def nan_found(call: str, number: int, tensor: str, rank: int, group: str) -> CallerError:
    """PyTorch's words first, which scripts look for."""
    return CallerError(
        f"NaN found in input tensor {number} ({tensor}) of {call.lower()} on rank {rank} of group {group!r}; "
        "nothing was sent."
    )


def bad_choice(call: str, argument: str, got: str, allowed: Sequence[str], how_many: str = "one") -> BadArgumentError:
    """The same for a name that is not among those ``allowed``; if it is nearly one of them, that is the way out."""
    import difflib

    near = difflib.get_close_matches(got.lower(), allowed, n=1)
    fix = f"did you mean {near[0]}?" if near else ""
    return bad_argument(call, argument, got, f"{how_many} of {', '.join(allowed)}", fix)


def deadline(
    what: str,
    seconds: float,
    *,
    missing: Sequence[int] = (),
    arrived: Sequence[int] = (),
    fix: str = "",
    kind: type[DeadlineError] = DeadlineError,
) -> DeadlineError:
    """``what`` did not finish in ``seconds``; who was missing and who was there, where known."""
    text = f"{what} timed out after {format_seconds(seconds)}"
    if missing:
        noun = "rank" if len(set(missing)) == 1 else "ranks"
        text += f": {noun} {format_ranks(missing)} did not come"
        if arrived:
            text += f" (there: {format_ranks(arrived)})"
    return kind(f"{text}. {fix}" if fix else f"{text}.", missing)


def no_thread(what: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"no thread could be started for {what} ({error}); raise the limit on threads "
        "(ulimit -u, or the container's limit on processes)."
    )


def nested(call: str, name: str) -> CallerError:
    return CallerError(
        f"{call} on group {name!r}: called by a signal handler (or a finalizer) while its thread waits in another "
        "operation of this group. Set a flag there and make the call later, or use another group."
    )
