"""What tests of the data-parallel layer share."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_a_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    yield
    torch.set_num_threads(before)
