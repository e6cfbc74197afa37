"""What the process has loaded that forks ranks (tests/support/ranks.py)."""

from __future__ import annotations

import gc

import pytest
import torch._dynamo
import torch.distributed

import symcomm.windows.hosts

assert all((pytest, torch._dynamo, torch.distributed, symcomm.windows.hosts))
gc.freeze()  # ranks share it, and need not look at it when they collect
