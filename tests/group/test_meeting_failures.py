"""One rank cannot take part in making a group, at each point of the meeting: the others are told its words at once, the
same ranks meet under the same name afterwards, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

from symcomm import errors
from symcomm._core import native
from symcomm.group import grow, hooks
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.group.grow import join_through
from symcomm.group.local import LocalGroup
from symcomm.group.reconfigure import ReconfigurableGroup
from symcomm.hierarchical import control_channel
from symcomm.hierarchical.engines import torch_engine
from symcomm.hierarchical.group import HierarchicalGroup
from symcomm.launcher.job import reserve_port
from symcomm.memory import arena, share
from symcomm.store import FileStore, PrefixStore
from symcomm.store.handshake import _Attempt
from tests.support.faults import leftovers
from tests.support.ranks import run_ranks, until

pytestmark = pytest.mark.torch_versions

WORDS = "there is no room here"
SOON = 10.0  # seconds: a wide bound of "at once"
LONG = 100.0  # what a rank would wait for another that does not come


def failing(*_: Any, **__: Any) -> None:
    raise errors.ResourceError(WORDS)


def failing_late(*_: Any, **__: Any) -> None:
    """When the others have come: a store that this rank serves ends soon after it failed."""
    time.sleep(1.5)
    failing()


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt(WORDS)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError(WORDS)


@contextlib.contextmanager
def at_exchange(turn: int, after: bool) -> Iterator[None]:
    """Fail before or after the exchange of that number."""
    exchange, count = _Attempt._exchange, 0

    def counting(self: Any, item: bytes) -> list[bytes]:
        nonlocal count
        count += 1
        if count == turn and not after:
            failing()
        items = exchange(self, item)
        if count == turn and after:
            failing()
        return items

    with mock.patch.object(_Attempt, "_exchange", counting):
        yield


@contextlib.contextmanager
def without_descriptors(spare: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(used - len(os.listdir("/proc/self/fd")) + 2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used, *fillers) + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def patch(owner: Any, name: str, instead: Callable = failing) -> Fault:
    return lambda: mock.patch.object(owner, name, instead)


ON_ONE_HOST: dict[str, Fault] = {
    "its part of the arena": patch(arena.Arena, "allocate_sparse"),
    "before the exchange": partial(at_exchange, 1, False),
    "after the exchange": partial(at_exchange, 1, True),
    "what the others said": patch(share, "check_versions"),
    "passing descriptors": patch(share, "_pass_descriptors"),
    "interrupted while passing descriptors": patch(share, "_pass_descriptors", interrupted),
    "mapping arenas": patch(share, "_prove"),
    "no memory for the core": patch(native, "Group", out_of_memory),
    "what is made": patch(hooks, "made"),
    "interrupted before the first operation": patch(LocalGroup, "meet", interrupted),
    "interrupted in the first operation": patch(LocalGroup, "barrier", interrupted),
}
ACROSS_HOSTS: dict[str, Fault] = {
    **{f"before exchange {turn}": partial(at_exchange, turn, False) for turn in range(1, 5)},
    **{f"after exchange {turn}": partial(at_exchange, turn, True) for turn in range(1, 4)},
    "a port": patch(control_channel.ControlChannel, "open_endpoint"),
    "its host's arenas": patch(share, "_prove"),
    "its host's group": patch(LocalGroup, "_build"),
    "an engine": patch(torch_engine.GlooEngine, "__init__"),
    "connecting the engine": patch(torch_engine.GlooEngine, "connect"),
    "interrupted in the first operation": patch(HierarchicalGroup, "barrier", interrupted),
}


def meet(call: Callable[[], Any]) -> tuple[str, str, float]:
    """What the call raised, and after how many seconds."""
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


def attempts(rank: int, world: int, path: str, hosts: list[str], victims: list[int]) -> Any:
    """For each fault and each victim: what the first attempt raised. The second must work."""
    faults = ACROSS_HOSTS if hosts else ON_ONE_HOST
    if hosts:
        os.environ.update(SYMCOMM_HOST_ID=hosts[rank], SYMCOMM_ENGINE="gloo")
    store, found, descriptors = FileStore(path), {}, []
    for number, (name, fault) in enumerate(faults.items()):
        for victim in victims:
            part = PrefixStore(f"{number}/{victim}", store)
            make = partial(make_group, timeout=LONG)
            join = partial(join_ranks, part, rank, world, LONG, make)
            with fault() if rank == victim else contextlib.nullcontext():
                found[name, victim] = meet(join)
            part.add("told", 1)
            assert until(lambda: part.add("told", 0) == world, LONG)  # noqa: B023
            group = join()
            assert b"".join(group.all_gather_bytes(bytes([rank]))) == bytes(range(world))
            group.destroy()
            del group
            gc.collect()
            descriptors.append(len(os.listdir("/proc/self/fd")))
    return found, descriptors


def judge(told: list[Any]) -> None:
    wrong = []
    for rank, (found, descriptors) in enumerate(told):
        for (name, victim), (kind, words, seconds) in found.items():
            where = f"{name}, victim {victim}, rank {rank}: {kind} {words!r} after {seconds:.1f} s"
            own = rank == victim
            if WORDS not in words or seconds > SOON or (not own and f"rank {victim}" not in words):
                wrong.append(where)
        # Now and then a connection of the last group is still being closed, so one count may be too high.
        if min(descriptors[-len(descriptors) // 3 :]) > min(descriptors) + 2:
            wrong.append(f"rank {rank} has more and more descriptors: {descriptors}")
    assert not wrong, "\n".join(wrong)
    assert leftovers() == []


@pytest.mark.timeout(300)
def test_on_one_host(tmp_path):
    judge(run_ranks(attempts, 3, str(tmp_path / "store"), [], [0, 1], deadline=200.0))


@pytest.mark.timeout(300)
def test_across_hosts(tmp_path):
    judge(run_ranks(attempts, 3, str(tmp_path / "store"), ["a", "a", "b"], [0, 2], deadline=250.0))


# --- other ways to meet ----------------------------------------------------------------------------


def init_where_rank_0_serves(rank: int, world: int, port: int, victim: int) -> Any:
    """The store ends with rank 0, and yet the others hear why it failed."""
    import symcomm

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with patch(arena.Arena, "allocate_sparse", failing_late)() if rank == victim else contextlib.nullcontext():
        told = meet(symcomm.init)
    time.sleep(1.5)  # all have been told
    group = symcomm.init()
    group.barrier()
    group.destroy()
    return {("init", victim): told}, [0]


@pytest.mark.parametrize("victim", [0, 1])
def test_in_init(victim):
    with reserve_port() as holder:
        judge(run_ranks(init_where_rank_0_serves, 3, holder.getsockname()[1], victim))


def torch_groups(rank: int, world: int, port: int, victim: int) -> Any:
    import torch
    import torch.distributed as dist

    import symcomm.torch_backend  # noqa: F401

    where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world}
    found = {}
    fault = patch(arena.Arena, "allocate_sparse", failing_late)
    with fault() if rank == victim else contextlib.nullcontext():
        found["init_process_group", victim] = meet(partial(dist.init_process_group, "symcomm", **where))
    time.sleep(1.5)
    dist.init_process_group("symcomm", **where)
    with fault() if rank == victim else contextlib.nullcontext():
        found["new_group", victim] = meet(partial(dist.new_group, range(world)))
    again = dist.new_group(range(world))
    dist.all_reduce(ones := torch.ones(3), group=again)
    dist.all_reduce(ones)
    assert ones.tolist() == [world**2] * 3
    dist.destroy_process_group()
    return found, [0]


@pytest.mark.parametrize("victim", [0, 1])
def test_torch_groups(victim):
    with reserve_port() as holder:
        judge(run_ranks(torch_groups, 2, holder.getsockname()[1], victim))


def groups_of_groups(rank: int, world: int, path: str, hosts: list[str]) -> Any:
    """The group that they come from lives on."""
    if hosts:
        os.environ.update(SYMCOMM_HOST_ID=hosts[rank], SYMCOMM_ENGINE="gloo")
    found = {}
    group = join_ranks(FileStore(path), rank, world, LONG, partial(make_group, timeout=LONG))
    for victim in range(world):
        for name, call in (("new_group", lambda: group.new_group([0, 1, 2])), ("split", lambda: group.split(0))):
            with ON_ONE_HOST["its part of the arena"]() if rank == victim else contextlib.nullcontext():
                found[name, victim] = meet(call)
            group.barrier()
            part = call()
            part.barrier()
            part.destroy()
    return found, [0]


@pytest.mark.parametrize("hosts", [[], ["a", "a", "b"]], ids=["one host", "two hosts"])
def test_groups_of_groups(tmp_path, hosts):
    judge(run_ranks(groups_of_groups, 3, str(tmp_path / "store"), hosts))


def without_any_descriptors(rank: int, world: int, path: str, spare: int) -> Any:
    store = FileStore(path)
    join = partial(join_ranks, store, rank, world, LONG, partial(make_group, timeout=LONG))
    with without_descriptors(spare) if rank == 1 else contextlib.nullcontext():
        told = meet(join)
    store.add("told", 1)
    assert until(lambda: store.add("told", 0) == world, LONG)
    join().barrier()
    return told


@pytest.mark.parametrize("spare", range(1, 6))
def test_without_descriptors(tmp_path, spare):
    """Wherever they run out: in the arena, in the socket, in what is received."""
    told = run_ranks(without_any_descriptors, 3, str(tmp_path / "store"), spare)
    if not told[1][0]:
        assert [kind for kind, _, _ in told] == ["", "", ""]  # there were enough
        return
    for rank, (kind, words, seconds) in enumerate(told):
        assert kind and seconds < SOON and "open files" in words, told
        assert rank == 1 or "rank 1" in words, told


def without_memory(rank: int, world: int, path: str) -> Any:
    store = FileStore(path)
    join = partial(join_ranks, store, rank, world, LONG, partial(make_group, timeout=LONG))
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    told = meet(join)
    resource.setrlimit(resource.RLIMIT_AS, before)
    store.add("told", 1)
    assert until(lambda: store.add("told", 0) == world, LONG)
    join().barrier()
    return told


def test_without_address_space(tmp_path):
    told = run_ranks(without_memory, 3, str(tmp_path / "store"))
    own = told[1][1]
    assert told[1][0] == "ResourceError" and "memory" in own.lower(), told
    for kind, words, seconds in (told[0], told[2]):
        assert kind and seconds < SOON and f"rank 1 gave up: {own}" in words, told


# --- ranks that come later -------------------------------------------------------------------------


def growing(rank: int, world: int, path: str) -> Any:
    """Two members and a newcomer, which fails at first: what each raised or logged."""
    store, logged = FileStore(path), []
    call: Callable[[], Any] = partial(join_through, store, "world", LONG)
    if rank < 2:
        group = join_ranks(store, rank, 2, LONG, partial(make_group, timeout=LONG))
        call = partial(group.grow, wait=30.0, size=3)
    fault = patch(LocalGroup, "_build")() if rank == 2 else contextlib.nullcontext()
    with mock.patch.object(grow.log, "warning", lambda text, *words: logged.append(text % words)), fault:
        kind, words, seconds = meet(call)
    bigger = call()
    bigger.barrier()
    return bigger.size, kind, " ".join([words, *logged]), seconds


def test_a_newcomer_that_cannot_join(tmp_path):
    """It raises its own words at once; the members stay as they are, and log them."""
    told = run_ranks(growing, 3, str(tmp_path / "store"))
    assert [(size, kind) for size, kind, *_ in told] == [(3, ""), (3, ""), (3, "ResourceError")]
    assert all(WORDS in words and seconds < SOON for _, _, words, seconds in told), told
    assert all("rank 2 of the new group" in words for _, _, words, _ in told[:2]), told


def reconfigured(rank: int, world: int, path: str) -> Any:
    store = FileStore(path)
    group = ReconfigurableGroup(timeout=LONG)
    store.set(f"handle/{rank}", group.get_reconfigure_handle())
    handles = [store.get(f"handle/{r}").decode() for r in range(world)]
    found = {}
    for victim in range(world):
        with patch(LocalGroup, "_build")() if rank == victim else contextlib.nullcontext():
            found["reconfigure", victim] = meet(partial(group.reconfigure, 2 * victim, handles))
        group.reconfigure(2 * victim + 1, handles).barrier()
    group.destroy()
    return found, [0]


def test_reconfigure(tmp_path):
    judge(run_ranks(reconfigured, 3, str(tmp_path / "store")))
