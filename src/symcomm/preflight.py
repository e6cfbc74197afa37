"""What a command needs before it starts a long piece of work: torch, and files it will be able to write."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from symcomm import errors

NO_HOME = Path("/dev/null")
INSTALL_TORCH = "pip install 'symcomm[torch]'"


def has_torch() -> bool:
    """Whether it is installed; it is not loaded."""
    return importlib.util.find_spec("torch") is not None


def need_torch(what: str) -> None:
    if not has_torch():
        raise errors.ResourceError(f"{what}: this needs torch, which is not installed; run `{INSTALL_TORCH}`.")


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/symcomm``, or ``~/.cache/symcomm``, where measurements of this machine are kept. A user without
    a home, as in some containers, is given one where nothing can be."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return Path(base, "symcomm")
    return NO_HOME / "symcomm"


def check_cache_directory(call: str) -> None:
    """Refuse before a measurement what could not be kept after it."""
    if cache_directory().is_relative_to(NO_HOME):
        raise errors.ResourceError(f"{call}: there is no home to keep it in; set XDG_CACHE_HOME to an absolute path.")
    check_output_folder(call, "XDG_CACHE_HOME", cache_directory())


def check_output_file(call: str, option: str, path: Path) -> None:
    """Refuse before the work a file that could not be written after it. Nothing is left behind or changed."""
    folder = path.absolute().parent
    if os.path.isdir(path):
        allowed, fix = "a file", "name a file in that folder"
    elif not os.path.isdir(folder):
        allowed, fix = "a file in a folder that exists", f"make {folder} first or choose another"
    elif os.path.exists(path):
        if os.access(path, os.W_OK):
            return
        allowed, fix = "a file that can be written", "choose another or change its permissions"
    else:
        if not (reason := _why_unwritable(folder)):
            return
        allowed, fix = "a file in a folder that can be written", f"choose another than {folder} ({reason})"
    raise errors.bad_argument(call, option, str(path), allowed, fix)


def check_output_folder(call: str, option: str, path: Path) -> None:
    """The same for a folder, which is made when something is written, with those above it."""
    nearest = path.absolute()
    while not os.path.exists(nearest):
        nearest = nearest.parent
    if reason := _why_unwritable(nearest):
        fix = f"choose another, as {nearest} cannot be written ({reason})"
        raise errors.bad_argument(call, option, str(path), "a folder that can be written or made", fix)


def _why_unwritable(folder: Path) -> str:
    """The system's words; empty where a file can be made. Tried, as permissions alone do not tell (root in /proc)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
