"""A verdict in three replicas (`membership/replicated_round.py`): no member goes on in the new group while another one
that knows the verdict stays in the old.

Each member takes its verdict to the replicas in order, and takes along what it finds there. Replicas may die: that is
seen at once. Or a member may not hear from one, which has its verdict or not. Deaths alone divide nobody, and neither
do cuts. Both at once may: then the new group has a member that is dead."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.model.explorer import Model, Step, Strong, choose, compare_and_swap, load, store

Steps = Generator[Step, Any, Any]
GO, NO, UNKNOWN = "go", "no", "unknown"
REPLICAS = 3

MUTANTS = {
    "keeps its own": "decide: takes its own verdict to the next replica, and not the one that it found",
    "stops at the first": "decide: asks one replica, and believes it",
}
CUT_MUTANTS = {
    "thinks that it knows": "decide: believes the last replica also where it wanted to say no, and found go",
}


def member(mine: str, is_cut: bool, without: str) -> Steps:
    """Reconfiguration.decide(). ``mine``: what this member has to say."""
    verdict, said, heard_all = mine, "", True
    for replica in range(1 if without == "stops at the first" else REPLICAS):
        if (yield load(("dead", replica))):
            continue
        way = "answers"
        if is_cut:
            way = yield choose("answers", "hears", "lost")  # "hears": it takes the verdict, and its answer is lost
        found = ""
        if way != "lost":
            yield compare_and_swap(("verdict", replica), "", verdict)
            found = yield load(("verdict", replica))  # which nobody changes any more
        if way == "answers":
            said = found
            verdict = verdict if without == "keeps its own" else said
        else:
            heard_all = False
            verdict = NO
        found, way = None, None
    known = heard_all or said not in ("", GO) or without == "thinks that it knows"
    return verdict if known else UNKNOWN


def killer(deaths: int) -> Steps:
    """Kills some of the replicas, at any time. One lives."""
    for _turn in range(deaths):
        victim = yield choose(*range(REPLICAS))
        yield store(("dead", victim), 1)
        victim = None
    return "killed"


def admission(
    without: str = "", verdicts: tuple[str, ...] = (GO, GO, NO), deaths: int = 0, cut: tuple[int, ...] = ()
) -> Model:
    """``verdicts``: what each member has to say. ``cut``: members that may not hear from a replica."""
    processes: dict = {f"member {i}": lambda i=i, v=v: member(v, i in cut, without) for i, v in enumerate(verdicts)}
    if deaths:
        processes["killer"] = lambda: killer(deaths)

    def ends(results: dict) -> str:
        known = {v for name, v in results.items() if name != "killer" and v != UNKNOWN}
        return f"members differ: {results}" if len(known) > 1 else ""

    words = {(kind, r): value for r in range(REPLICAS) for kind, value in (("verdict", ""), ("dead", 0))}
    extras = [f"{deaths} deaths" if deaths else "", f"{len(cut)} cut off" if cut else "", without]
    name = ", ".join([f"verdict of {len(verdicts)} members", *filter(None, extras)])
    return Model(name, processes, Strong(words), ends)
