"""reconfigure of ``torch.distributed`` groups, beside Gloo's where this torch has it (2.15)."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm import c10d
from symcomm.torch_backend.register import register
from tests.support.ranks import die, run_ranks

pytestmark = pytest.mark.torch_versions

HAS_RECONFIGURE = hasattr(dist, "_reconfigure")
BACKENDS = ["symcomm", *(["gloo"] if HAS_RECONFIGURE else [])]
LIMIT = timedelta(seconds=20)


def start(backend: str, rank: int, world: int, folder: str, timeout: timedelta = LIMIT) -> None:
    """A default group without members."""
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads
    register()
    store = dist.FileStore(os.path.join(folder, "store"), world)
    more: dict[str, Any] = {"enable_reconfigure": True}
    if not HAS_RECONFIGURE:  # what older versions pass on as it is
        options = c10d.Backend.Options("symcomm", timeout)
        options.enable_reconfigure = True
        more = {"pg_options": options}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, **more)


class Board:
    """Where processes find each other's handles; Gloo's change with each reconfigure."""

    def __init__(self, folder: str, me: int):
        self._store, self._me = dist.FileStore(os.path.join(folder, "board"), -1), me
        self._store.set_timeout(LIMIT)

    def handles(self, step: int, who: list[int]) -> list[str]:
        group: Any = dist.group.WORLD
        self._store.set(f"{step}/{self._me}", group.get_reconfigure_handle())
        return [self._store.get(f"{step}/{i}").decode() for i in who]

    def all_came(self, name: str, count: int) -> None:
        self._store.set(f"{name}/{self._me}", "x")
        self._store.wait([f"{name}/{i}" for i in range(count)], LIMIT)


def reconfigure(uuid: int, handles: Any, timeout: timedelta | None = None) -> Any:
    """As dist._reconfigure of torch 2.15."""
    if HAS_RECONFIGURE:
        return dist._reconfigure(uuid, handles, timeout=timeout)
    options, group = c10d.ReconfigureOptions(), dist.group.WORLD
    options.uuid, options.handles, options.timeout = uuid, handles, timeout
    return group.reconfigure(options)  # type: ignore[union-attr]


def facts(me: int) -> tuple:
    """What torch and the group say of this rank, and the sum of everybody's number plus one."""
    group: Any = dist.group.WORLD
    total = torch.tensor([me + 1.0])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), group.rank(), group.size(), total.item()


def expected(me: int, who: list[int]) -> tuple:
    return (who.index(me), len(who)) * 2 + (float(sum(i + 1 for i in who)),)


def refusal(call: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


# --- the same on both ------------------------------------------------------------------------------------------------

SCRIPT = [[0, 1, 2], [2, 1, 0], [0, 2], [1, 0, 2], [1], [1, 2, 0]]


def follow(rank: int, world: int, backend: str, folder: str) -> list:
    start(backend, rank, world, folder)
    board, group = Board(folder, rank), dist.group.WORLD
    seen: list[Any] = [group.supports_reconfigure, (dist.get_rank(), dist.get_world_size())]  # type: ignore[union-attr]
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(),
        lambda: dist.broadcast(torch.ones(1), 0),
    ):
        said = refusal(call)
        seen.append([words in said for words in ("has not been initialized", "Call reconfigure() before issuing coll")])
    for step, who in enumerate(SCRIPT):
        if rank in who:
            work = reconfigure(step + 100, board.handles(step, who))
            seen.append((work.wait(), work.is_completed(), *facts(rank)))
    board.all_came("end", world)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_come_and_go(backend, tmp_path):
    for rank, seen in enumerate(run_ranks(follow, 3, backend, str(tmp_path), start="fork")):
        assert seen[:2] == [True, (rank, 3)] and seen[2:5] == [[True, True]] * 3
        assert seen[5:] == [(True, True, *expected(rank, who)) for who in SCRIPT if rank in who]


def refused(rank: int, world: int, backend: str, folder: str) -> list:
    start(backend, rank, world, folder)
    board = Board(folder, rank)
    reconfigure(1, board.handles(0, [0, 1]))
    handles = board.handles(1, [0, 1])
    mine, other = handles[rank], handles[1 - rank]
    told = [
        refusal(lambda: reconfigure(2, [mine, mine])),
        refusal(lambda: reconfigure(2, [other])),
        refusal(lambda: reconfigure(2, [mine, "nonsense"])),
        refusal(lambda: reconfigure(2, [])),
        refusal(lambda: reconfigure(1, [mine])),
    ]
    kept = facts(rank)  # the group is what it was
    pending = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    reconfigure(3, board.handles(2, [1, 0]))
    told.append("" if pending is None else refusal(pending.wait))
    seen = [told, kept, facts(rank)]
    board.all_came("end", world)
    return seen


WORDS = {
    "gloo": ["must be unique", "not part of", "Invalid Gloo reconfigure handle", "at least one handle", "already used"],
    "symcomm": ["must be unique", "own", "from get_reconfigure_handle()", "at least one handle", "already used"],
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_calls_are_refused(backend, tmp_path):
    """Before anything happens; and what is pending when members change fails."""
    for rank, (told, kept, after) in enumerate(run_ranks(refused, 2, backend, str(tmp_path), start="fork")):
        for said, words in zip(told, WORDS[backend], strict=False):
            assert words in said
        assert kept == expected(rank, [0, 1]) and after == expected(rank, [1, 0])
        if backend == "symcomm" and rank == 0:
            assert "was left when its members were reconfigured (uuid 3)" in told[5]


def test_there_is_a_real_thing_to_compare_with():
    if not HAS_RECONFIGURE:
        pytest.skip(f"torch {torch.__version__} has no reconfigure; Gloo's came with 2.15")
    assert BACKENDS == ["symcomm", "gloo"]


# --- ours ------------------------------------------------------------------------------------------------------------


def train(rank: int, world: int, folder: str) -> list:
    start("symcomm", rank, world, folder)
    board = Board(folder, rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    seen = []
    for step, who in enumerate([[0, 1], [2, 0, 1], [1, 2]]):
        if rank in who:
            reconfigure(step, set(board.handles(step, who)) if step == 1 else board.handles(step, who))
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            data = torch.full((3, 4), float(rank + 1))
            parallel(data).sum().backward()
            mean = 3.0 * sum(i + 1 for i in who) / len(who)
            seen.append(bool((model.weight.grad == mean).all()))
            model.zero_grad()
            del parallel
    board.all_came("end", world)
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_data_parallel_made_anew(level, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert run_ranks(train, 3, str(tmp_path)) == [[True] * 2, [True] * 3, [True] * 2]


def more_calls(rank: int, world: int, folder: str) -> list:
    """What torch itself derives from a group's members."""
    start("symcomm", rank, world, folder)
    board = Board(folder, rank)
    group: Any = dist.group.WORLD
    seen: list[Any] = []
    for step, who in enumerate([[1, 0], [2, 0, 1]]):
        if rank not in who:
            continue
        reconfigure(step, board.handles(step, who))
        last = len(who) - 1
        root = torch.tensor([float(rank)])
        dist.broadcast(root, last)
        objects: list[Any] = [None] * len(who)
        dist.all_gather_object(objects, {"me": rank})
        if dist.get_rank() == last:
            dist.send(torch.tensor([7.0]), 0)
        got = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.recv(got, last)
        half = group.split_group([0, last])
        ones = torch.ones(1)
        if half is not None:
            half.allreduce([ones]).wait()
        seen.append((
            int(root), [o["me"] for o in objects], got.item(), dist.get_process_group_ranks(group), ones.item(),
            group._get_sequence_number_for_group() > 0, dist.get_backend(),
        ))  # fmt: skip
    board.all_came("end", world)
    return seen


def test_everything_else_knows_the_new_members(tmp_path):
    def wanted(me: int, who: list[int]) -> tuple:
        first, last = who[0], who[-1]
        return (last, who, 7.0 * (me == first), list(range(len(who))), 1.0 + (me in (first, last)), True, "symcomm")

    for rank, seen in enumerate(run_ranks(more_calls, 3, str(tmp_path), start="fork")):
        assert seen == [wanted(rank, who) for who in ([1, 0], [2, 0, 1]) if rank in who]


def never_configured(rank: int, world: int, folder: str) -> list:
    start("symcomm", rank, world, folder)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=3))
    group.abort()
    seen = [group.group_name, group._get_sequence_number_for_group(), group.get_reconfigure_handle()[:8]]
    dist.destroy_process_group()
    return [*seen, dist.is_initialized()]


def test_a_group_may_end_without_members(tmp_path):
    assert run_ranks(never_configured, 2, str(tmp_path), start="fork") == [["0", 0, "symcomm-", False]] * 2


def with_members(rank: int, world: int, folder: str) -> list:
    """A group that was made the usual way."""
    torch.set_num_threads(1)
    register()
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("symcomm", store=store, rank=rank, world_size=world, timeout=LIMIT)
    board = Board(folder, rank)
    seen = [facts(rank)]
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=17))
    if rank == 2:
        board.handles(0, [])
        die()
    with pytest.raises(RuntimeError, match=r"rank 0 \(pid \d+ on .*\) is gone; the group is what it was"):
        reconfigure(5, board.handles(0, [2, 0, 1]))
    with pytest.raises(RuntimeError, match="rank 2 .* died"):
        facts(rank)
    reconfigure(6, board.handles(1, [1, 0]))
    assert group.core.timeout == 17.0
    seen.append(facts(rank))
    board.all_came("end", 2)
    return seen


def test_a_group_made_with_members_goes_on_without_one_that_died(tmp_path):
    outcomes = run_ranks(with_members, 3, str(tmp_path), outcomes=True, start="fork")
    assert outcomes[2].kind == "died"
    for rank in range(2):
        assert outcomes[rank].value == [expected(rank, [0, 1, 2]), expected(rank, [1, 0])], str(outcomes[rank])


def strangers(rank: int, world: int, folder: str) -> tuple:
    """Processes that share nothing but the handles: each is a group of one at first."""
    torch.set_num_threads(1)
    register()
    dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    alone = facts(rank)
    board = Board(folder, rank)
    reconfigure(1, board.handles(0, [2, 1, 0]))
    together = facts(rank)
    board.all_came("end", world)
    dist.destroy_process_group()
    return alone, together


def test_processes_that_share_no_store(tmp_path):
    for rank, (alone, together) in enumerate(run_ranks(strangers, 3, str(tmp_path), start="fork")):
        assert alone == (0, 1, 0, 1, rank + 1.0) and together == expected(rank, [2, 1, 0])


def test_options_hold_what_torchs_do(tmp_path: Path):
    options = c10d.ReconfigureOptions()
    assert (options.uuid, options.handles, options.timeout, options.hints) == (0, set(), None, {})
    options.handles = ("b", "a")
    assert options.handles == ["b", "a"]
    options.handles = {"a"}
    options.handles.add("b")  # a copy, as torch's
    assert options.handles == {"a"}
    options.timeout, options.hints = timedelta(seconds=2), {"k": "v"}
    for name, value in (
        ("uuid", "x"),
        ("uuid", 1 << 63),
        ("handles", "a"),
        ("handles", [1]),
        ("timeout", "x"),
        ("hints", 3),
    ):
        with pytest.raises(TypeError):
            setattr(options, name, value)
    if HAS_RECONFIGURE:
        theirs: Any = torch_c10d.ReconfigureOptions  # ours are of that class, too: what C++ reads
        told = tuple(getattr(theirs, name).__get__(options) for name in ("uuid", "handles", "timeout", "hints"))
        assert told == (0, {"a"}, timedelta(seconds=2), {"k": "v"})


def hooked(rank: int, world: int, folder: str) -> list[str]:
    start("symcomm", rank, world, folder)
    board, group, seen = Board(folder, rank), dist.group.WORLD, []
    group.register_pre_hook(3, lambda call: seen.append(call.name.name))
    for uuid in (1, 2):
        reconfigure(uuid, board.handles(uuid, [0, 1])).wait()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == 3.0
    group.unregister_pre_hook(3)
    dist.barrier()
    board.all_came("end", 2)
    dist.destroy_process_group()
    return seen


def test_hooks_of_torch_groups_go_on_watching(tmp_path: Path):
    assert run_ranks(hooked, 2, str(tmp_path), deadline=60) == [["ALLREDUCE", "ALLREDUCE"]] * 2
