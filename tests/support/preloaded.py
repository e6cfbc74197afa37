"""Loads the modules of the process that forks ranks (tests/support/ranks.py)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

os.environ.pop("SYMCOMM_HEAP", None)  # a rank makes a heap of its own (ranks.py), and has no other, as a fresh process

import pytest
import torch._dynamo
import torch.distributed

import symcomm.windows.hosts

assert all((pytest, torch._dynamo, torch.distributed, symcomm.windows.hosts))
for name in ("typer", "pydantic.types"):  # loading these takes a third of the command's time
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
gc.freeze()  # ranks share it, and need not look at it when they collect
