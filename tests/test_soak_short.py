"""Forty random faults; ``make soak`` runs a thousand."""

from __future__ import annotations

import pytest

from tests.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forty_random_faults():
    assert soak(40, seed=20_000) == {}
