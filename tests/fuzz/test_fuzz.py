"""Ten thousand inputs that are almost right, for the store's server and for the control channel between hosts. `make
soak` tries a million of each."""

from __future__ import annotations

import logging

import pytest

from symcomm.hierarchical import frames, group
from tests.fuzz import control as fuzz_control
from tests.fuzz import store as fuzz_store

INPUTS = 10_000


@pytest.fixture(autouse=True)
def logs():
    """The fuzzers are quiet, the tests after them are not."""
    loggers = [logging.getLogger(name) for name in ("symcomm.hosts", "symcomm.store")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_the_stores_server() -> None:
    fuzz_store.fuzz(INPUTS, seed=20_001)


def test_the_control_channel() -> None:
    fuzz_control.fuzz(INPUTS, seed=20_002)


def test_the_fuzzer_notices_a_length_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: the payload of a message may be longer than the message."""

    def check(kind: str, header: dict, payload: bytes, size: int) -> None:
        nbytes = header.get("nbytes")
        is_eager = kind == "envelope" and header.get("inline") is True and type(nbytes) is int and nbytes >= 0
        fits_guard = len(payload) <= fuzz_control.ROOM + fuzz_control.GUARD  # beyond that lies the heap
        frames.check(kind, header, payload[:nbytes] if is_eager and fits_guard else payload, size)

    monkeypatch.setattr(group, "check", check)
    with pytest.raises(AssertionError, match="memory beside a receive was written"):
        for seed in range(20_006, 20_026):  # one in three finds it
            fuzz_control.fuzz(6000, seed)
