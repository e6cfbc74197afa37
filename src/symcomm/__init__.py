"""Symcomm: PyTorch's communication layer on symmetric memory.

Where things are (imports point down only)::

    cli/          the `symcomm` command: run, bench, demo
    group/        ProcessGroup, Work, spawn, the default group
    collectives/  plans: one file per family of collectives, and the choice between them
    memory/       arenas and symmetric tensors
    store/        key-value stores and rendezvous
    _core/        C: reductions, the plan executor, waits, mailboxes, the store's server
    errors.py     every exception, and the words of every error
    types.py      dtypes and reduce operations

Names below are loaded on first use, so that ``import symcomm`` stays instant and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from symcomm import errors

__version__ = "0.1.0"

# public name -> the module that defines it
_LAZY = {
    "Store": "symcomm.store",
    "HashStore": "symcomm.store",
    "FileStore": "symcomm.store",
    "TCPStore": "symcomm.store",
    "PrefixStore": "symcomm.store",
    "ReduceOp": "symcomm.types",
}

__all__ = ["__version__", "errors", *_LAZY]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'symcomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
