"""A minute of the soak; ``make soak`` runs hours of it and its siblings."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import soak
from tests.soak.churn import churn
from tests.soak.scenario import FAULTS, HARMLESS, Scenario

pytestmark = [pytest.mark.long, pytest.mark.unused_process]

FIRST, COUNT = 20_054, 30


def test_the_seeds_have_every_kind_of_scenario():
    plans = [Scenario(FIRST + i) for i in range(COUNT)]
    assert {p.fault for p in plans} == set(FAULTS)
    for fault in set(FAULTS) - set(HARMLESS):
        assert {p.goes_on for p in plans if p.fault == fault} == {True, False}, fault
    assert {p.newcomers for p in plans} == {0, 1, 2}
    assert {p.newcomer_killed for p in plans} == {p.over_tcp for p in plans} == {True, False}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_random_faults():
    assert soak(COUNT, FIRST) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_seconds_of_churn():
    job, wrong = churn(seed=3, seconds=5.0)
    assert wrong == [], "\n".join(wrong)
    assert job.steps > 100 and job.done, job.describe()
