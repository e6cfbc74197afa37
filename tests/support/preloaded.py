"""What the process has loaded that forks ranks (tests/support/ranks.py)."""

from __future__ import annotations

import contextlib
import gc
import importlib

import pytest
import torch._dynamo
import torch.distributed

import symcomm.windows.hosts

assert all((pytest, torch._dynamo, torch.distributed, symcomm.windows.hosts))
for name in ("typer", "pydantic.types"):  # for the command, a third of whose time it takes to load these
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
gc.freeze()  # ranks share it, and need not look at it when they collect
