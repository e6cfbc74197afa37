"""The ranks of one host, within a group across hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from symcomm.collectives.plan import Plan
from symcomm.group.local import LocalGroup
from symcomm.hierarchical.standoff import Waits


class IntraHostGroup(LocalGroup):
    """The group of one host's ranks. They mostly wait for the network, which takes longer than spinning pays for."""

    _spin_ns = _yield_ns = 5_000
    waits: Waits
    here: Sequence[int]

    def on_long_wait(self, site: Any, *facts: Any) -> float:
        """Reports nothing of one step: the group across hosts reports the whole operation (``hooks.watch``)."""
        return 0.0

    def gone(self) -> dict[int, int]:
        """Rank (in the whole group) -> DEAD or LEFT, for the ranks of this host that are gone."""
        return {self.here[seen["rank"]]: seen["gone"] for seen in self.handle.report()["ranks"] if seen["gone"]}

    def on_standoff(self, is_send: bool, peer: int, tag: int) -> None:
        self.waits.on_standoff(is_send, self.here[peer], tag)


class HostRanks:
    """The ranks of an operation's host: they compare signatures, and run plans together."""

    def __init__(self, group: IntraHostGroup):
        self._executor, self.state, self.gone = group.executor, group.state, group.gone

    def arrival(self, signature: Any, build: Callable[..., Plan] | None = None, args: tuple[Any, ...] = ()) -> Any:
        """The plan of an operation's first step: compare signatures, and maybe run a collective as well."""

        def make() -> Any:
            s, rank, world = signature, self.state.rank, self.state.size
            if build is None:
                plan = Plan(s.collective, rank, world, s.local_count(), s.dtype, s.redop, 0, "arrival")
            else:
                plan = build(rank, world, *args, limits=self._executor.limits)
                plan = replace(plan, collective=s.collective, count=s.local_count(is_whole=False))
            return self._executor.load_plan(plan)

        return self._executor.kept_plan((signature, build, args), make)

    def plan(self, build: Callable[..., Plan], *args: Any) -> Any:
        """The loaded plan of a collective."""
        return self._executor.cached_plan(build, *args)

    def run(self, plan: Any, ins: Sequence[int], outs: Sequence[int], timeout_ns: int, site: int) -> int:
        """Run a plan; returns the core's status."""
        return self.state.handle.run(plan, tuple(ins), tuple(outs), timeout_ns, site, ())

    def refusal(self, seq: int) -> bytes | None:
        """The words of the rank that refused the core's operation of that number."""
        told = self.state.handle.refusal(seq)
        return told[1] if told is not None else None
