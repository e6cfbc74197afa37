"""Several hosts as network namespaces; tests are skipped, with the reason, if they cannot be made."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from symcomm.bench.namespaces import Network, why_no_namespaces
from tests.support.loaded import Loaded, parse

__all__ = ["FaultyNetwork", "network"]

_why_not = functools.cache(why_no_namespaces)


class FaultyNetwork(Network):
    def set_link(self, host: int, up: bool) -> None:
        """Pull a host's cable, or put it back."""
        self._at_switch("ip", "link", "set", f"port{host}", "up" if up else "down")

    def deafen(self, host: int) -> None:
        """Let nothing reach a host from now on; what it sends still arrives."""
        limit = ("tbf", "rate", "8bit", "burst", "1", "limit", "1")
        self._at_switch("tc", "qdisc", "replace", "dev", f"port{host}", "root", *limit)

    def start(self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> Any:
        """Python in a process that has torch already."""
        if parse(words) is None:
            return super().start(host, words, env, **more)
        self._started.append(Loaded(words, env=env, network=self._names[host], **more))
        return self._started[-1]

    def _at_switch(self, tool: str, *words: str) -> None:
        subprocess.run([tool, "-n", self._switch, *words], check=True, capture_output=True, timeout=20)


@contextmanager
def network(hosts: int, mbits: int = 0) -> Iterator[FaultyNetwork]:
    """The network; whatever happens, it is gone afterwards, and so is every process that was started on it."""
    if reason := _why_not():
        pytest.skip(f"several hosts: {reason}")
    with FaultyNetwork(hosts, mbits) as made:
        yield made
