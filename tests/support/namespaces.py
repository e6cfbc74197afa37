"""Tests on several hosts that are network namespaces: skipped, with the reason, where they cannot be made."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from symcomm.bench.namespaces import Network, why_no_namespaces

__all__ = ["network"]

_why_not = functools.cache(why_no_namespaces)


@contextmanager
def network(hosts: int, mbits: int = 0) -> Iterator[Network]:
    """The network; whatever happens, it is gone afterwards, and so is every process that was started on it."""
    if reason := _why_not():
        pytest.skip(f"several hosts: {reason}")
    with Network(hosts, mbits) as made:
        yield made
