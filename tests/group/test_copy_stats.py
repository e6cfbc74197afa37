"""Groups count how the bytes of collectives went, and why some were copied; the recorder says the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

np = pytest.importorskip("numpy")  # its memory is ordinary, also with the shared heap
torch = pytest.importorskip("torch")

import symcomm  # noqa: E402
from symcomm import ProcessGroup, errors, symm_mem  # noqa: E402
from symcomm.observe.analysis.verdict import judge  # noqa: E402
from symcomm.observe.recorder.records import operations_of  # noqa: E402
from symcomm.observe.recorder.trace import RankTrace, Trace  # noqa: E402

pytestmark = pytest.mark.torch_versions

FLOATS = 1 << 18  # 1 MiB
KINDS = {"direct", "attached", "ordinary_here", "ordinary_there", "no_plan"}


def _counted(group: ProcessGroup, call: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """How many calls and bytes of each kind there were in ``call``."""
    before = group.copy_stats()
    assert set(before) == KINDS
    call()
    after = group.copy_stats()
    changes = {
        kind: (after[kind]["calls"] - before[kind]["calls"], after[kind]["bytes"] - before[kind]["bytes"])
        for kind in KINDS
    }
    return {kind: change for kind, change in changes.items() if change[0]}


def _all_ways(group: ProcessGroup) -> list[dict[str, tuple[int, int]]]:
    shared, other = symm_mem.empty(FLOATS).fill_(1), torch.from_numpy(np.ones(FLOATS, "f4"))
    mixed = shared if group.rank == 0 else other
    few, whole = torch.ones(2), symm_mem.empty(2 * FLOATS)
    found = [
        _counted(group, lambda: group.all_reduce(shared)),
        _counted(group, lambda: group.all_reduce(shared, async_op=True).wait()),
        _counted(group, lambda: group.all_reduce(mixed)),
        _counted(group, lambda: group.all_reduce(other)),
        _counted(group, lambda: group.all_reduce(few)),
        _counted(group, lambda: group.all_gather_single(whole, shared)),
        _counted(group, lambda: group.broadcast(mixed, 1)),
    ]
    own = [op for op in operations_of(group)[group.rank] if op.group == group.name and op.call != "barrier"]
    told = Counter[tuple[str, int]]()
    for op in own:
        told[op.copies, 0] += 1
        told[op.copies, 1] += op.nbytes
    found.append({kind: (told[kind, 0], told[kind, 1]) for kind in KINDS if told[kind, 0]})
    return found


def test_calls_and_bytes_are_counted_by_how_they_went():
    nbytes = 4 * FLOATS
    for rank, found in enumerate(symcomm.spawn(_all_ways, 2, mode="threads")):
        *each, told = found
        reason = ["ordinary_there", "ordinary_here"][rank]
        assert each[:6] == [
            {"direct": (1, nbytes)},
            {"direct": (1, nbytes)},
            {reason: (1, nbytes)},
            {"ordinary_here": (1, nbytes)},
            {"no_plan": (1, 8)},
            {"direct": (1, each[5]["direct"][1])},
        ]
        assert each[5]["direct"][1] in (nbytes, 2 * nbytes), "as the recorder counts them"
        ((kind, counted),) = each[6].items()
        assert counted == (1, nbytes) and kind == reason, "a broadcast needs its root's tensor"
        total = Counter[tuple[str, int]]()
        for counts in each:
            for kind, (calls, size) in counts.items():
                total[kind, 0] += calls
                total[kind, 1] += size
        assert told == {kind: (total[kind, 0], total[kind, 1]) for kind in KINDS if total[kind, 0]}


def _refuses(group: ProcessGroup) -> tuple[str, str]:
    parts = [torch.ones(3) for _ in range(group.size - (group.rank == 1))]
    with pytest.raises(errors.SymcommError):
        group.reduce_scatter(torch.empty(3), parts)
    group.barrier()
    members, ranks = [0, 1], {}
    for rank, operations in enumerate(operations_of(group)):
        kept = [op for op in operations if op.group == group.name and op.call != "barrier"]
        facts = [{"name": group.name, "rank": rank, "size": 2, "ranks": members}]
        ranks[rank] = RankTrace(rank, 1, boot="x", noted_ns=1 << 62, operations=kept, groups=facts)
    last = ranks[group.rank].operations[-1]
    group.barrier()
    return f"{last}: {last.state}", judge(Trace(ranks)).kind


def test_a_refused_call_is_in_the_recorder_and_nobodys_fault():
    zero, one = symcomm.spawn(_refuses, 2, mode="threads")
    assert one == ("a call that it refused: refused", "fine")
    assert zero == ("reduce_scatter(float32 x 6, SUM): refused", "fine")


def _fails(group: ProcessGroup) -> tuple[dict[str, tuple[int, int]], str]:
    said = ""

    def call() -> None:
        nonlocal said
        tensor = symm_mem.empty(FLOATS + group.rank)
        with pytest.raises(errors.CollectiveMismatchError) as caught:
            group.all_reduce(tensor)
        said = str(caught.value)

    return _counted(group, call), said


def test_a_call_that_did_not_take_place_is_not_counted():
    for counted, said in symcomm.spawn(_fails, 2, mode="threads"):
        assert counted == {} and "all_reduce" in said
