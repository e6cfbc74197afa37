"""Options: what a program may switch on or off, by code or by ``SYMCOMM_COMPILE=no-bucket,overlap``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from symcomm import errors


@dataclass(frozen=True)
class Options:
    """True: always. False: never. None: if the cost model says that it pays."""

    zero_copy: bool = True  # inputs of collectives are made in symmetric memory
    block: bool | None = None  # one call that ends with the collective, instead of a launch and a wait
    bucket: bool = True  # small collectives that follow one another are joined
    overlap: bool | None = None  # launches move up, waits move down
    fuse: bool | None = None  # all_gather + matmul, matmul + reduce_scatter in pieces

    def key(self) -> str:
        """For the compiler's caches: graphs compiled with other options are other graphs."""
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())


def _from_environment() -> Options:
    known = {field.name.replace("_", "-"): field.name for field in fields(Options)}
    chosen: dict[str, bool] = {}
    for word in filter(None, os.environ.get("SYMCOMM_COMPILE", "").lower().split(",")):
        name = known.get(word.removeprefix("no-"))
        if name is None:
            allowed = "a list of " + ", ".join(f"{w} or no-{w}" for w in known)
            raise errors.bad_argument("symcomm.compile", "SYMCOMM_COMPILE", word, allowed)
        chosen[name] = not word.startswith("no-")
    return Options(**chosen)


_current: list[Options] = []  # the last holds; the first is read from the environment, on first use


def current() -> Options:
    """The options in force: those of ``SYMCOMM_COMPILE``, and of ``configure`` around the caller.

    Raises: BadArgumentError for a bad ``SYMCOMM_COMPILE``."""
    if not _current:
        _current.append(_from_environment())
    return _current[-1]


@contextlib.contextmanager
def configure(**changes: bool | None) -> Iterator[Options]:
    """``with configure(bucket=False): ...`` sets options for all that is compiled within it. All ranks set the same.

    Raises: BadArgumentError."""
    known = [field.name for field in fields(Options)]
    for name, value in changes.items():
        if name not in known:
            raise errors.bad_argument("symcomm.compile.configure", "option", name, f"one of {', '.join(known)}")
        if value not in (True, False, None) or (value is None and name in ("zero_copy", "bucket")):
            raise errors.bad_argument("symcomm.compile.configure", name, value, "True or False")
    _current.append(replace(current(), **changes))  # type: ignore[arg-type]
    try:
        yield _current[-1]
    finally:
        _current.pop()


@functools.cache
def digest(folder: Path) -> str:
    """A digest of the sources in ``folder``, for the compiler's caches: other versions of them generate other code."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()
