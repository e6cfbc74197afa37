"""The group of the ranks of one host, within a group across hosts."""

from __future__ import annotations

from collections.abc import Sequence

from symcomm.group.local import LocalGroup
from symcomm.hierarchical.standoff import Waits


class IntraHostGroup(LocalGroup):
    """The ranks of one host. They mostly wait for the network, which takes longer than spinning pays for."""

    _spin_ns = _yield_ns = 5_000
    waits: Waits
    here: Sequence[int]

    def on_standoff(self, is_send: bool, peer: int, tag: int) -> None:
        self.waits.on_standoff(is_send, self.here[peer], tag)
