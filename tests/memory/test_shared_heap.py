"""The shared heap: ordinary tensors that peers can read, which are otherwise as malloc's."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import symcomm
from symcomm._core import native
from symcomm.memory import shared_heap
from symcomm.memory.arena import current_arena
from symcomm.memory.shared_heap import LEAST_BYTES, heap_stats
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

MIB = 1 << 20
FLOATS = LEAST_BYTES // 4


def with_heap() -> None:
    """What importing torch does where SYMCOMM_HEAP is set."""
    from symcomm.torch_backend import torch_patches

    torch.set_num_threads(1)
    os.environ["SYMCOMM_HEAP"] = "1"
    torch_patches.apply("cpu_allocator")
    assert heap_stats().why_not == ""


def in_heap(tensor: torch.Tensor) -> bool:
    return native.in_heap(tensor.data_ptr())


def resident() -> int:
    """Bytes of memory that this process has, shared pages included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def meet(rank: int, world: int, store: str, name: str = "world") -> symcomm.ProcessGroup:
    return symcomm.init(store=symcomm.FileStore(store, world), rank=rank, world_size=world, timeout=30, name=name)


def in_child(check) -> None:
    """Fork, check there, and hand on how that ended."""
    if (pid := os.fork()) == 0:
        try:
            check()
            os._exit(0)
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


# --- which tensors -------------------------------------------------------------------------------


def which_tensors(rank: int, world: int) -> None:
    before = torch.ones(FLOATS)
    with_heap()
    assert not in_heap(before)
    assert in_heap(torch.ones(FLOATS)) and not in_heap(torch.ones(FLOATS - 1))
    weight = torch.nn.Linear(256, 256).weight
    loss = (torch.ones(64, 256) @ weight).sum()
    loss.backward()
    assert weight.grad is not None and in_heap(weight) and in_heap(weight.grad)
    grown = torch.empty(0).resize_(FLOATS)
    assert in_heap(grown) and in_heap(grown.clone()) and not in_heap(torch.empty(0))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.ordinary_memory("begins without it, and with the size that users have")
def test_large_tensors_of_torch_lie_in_the_heap_and_no_others():
    run_ranks(which_tensors, 1)


def undone(rank: int, world: int) -> None:
    from symcomm.torch_backend import torch_patches

    with_heap()
    tensor = torch.arange(FLOATS)
    torch_patches.undo_all()
    assert not in_heap(torch.ones(FLOATS)) and in_heap(tensor)
    assert tensor[-1] == FLOATS - 1
    in_use = heap_stats().in_use
    del tensor
    assert heap_stats().in_use == in_use - 2 * LEAST_BYTES
    torch_patches.apply("cpu_allocator")
    assert in_heap(torch.ones(FLOATS))


def test_undone_new_tensors_are_torchs_and_old_ones_stay_where_they_are():
    run_ranks(undone, 1)


def profiled(rank: int, world: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with_heap()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        torch.ones(4 * MIB)
    rows = {row.key: row.cpu_memory_usage for row in found.key_averages()}
    assert rows["aten::empty"] == 16 * MIB and rows["[memory]"] == -16 * MIB


def test_torchs_profiler_sees_its_memory():
    run_ranks(profiled, 1)


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_off(value, monkeypatch):
    monkeypatch.setenv("SYMCOMM_HEAP", value)
    assert shared_heap.least_bytes() is None and shared_heap.room() == 0


@pytest.mark.parametrize(
    ("value", "least"), [("1", LEAST_BYTES), ("on", LEAST_BYTES), ("64K", 64 << 10), ("1MiB", MIB), ("20000", 20000)]
)
def test_sizes(value, least, monkeypatch):
    monkeypatch.setenv("SYMCOMM_HEAP", value)
    assert shared_heap.least_bytes() == least


def test_what_is_no_size_is_said_and_leaves_tensors_ordinary(monkeypatch):
    monkeypatch.setenv("SYMCOMM_HEAP", "lots")
    with pytest.warns(UserWarning, match="SYMCOMM_HEAP must be 1 or a size such as 64K, got 'lots'"):
        assert shared_heap.least_bytes() is None


PROGRAM = "import torch, symcomm; from symcomm.memory.shared_heap import heap_stats; print(heap_stats().why_not)"


@pytest.mark.parametrize(
    ("settings", "limit", "why"),
    [
        ({}, "", ""),
        ({"SYMCOMM_SHARE": "named"}, "", "arenas are files (SYMCOMM_SHARE=named)"),
        ({}, f"ulimit -v {40 << 20};", "raise the limit on address space"),
    ],
)
def test_where_it_cannot_be_had_tensors_are_ordinary_and_one_line_says_why(settings, limit, why):
    if limit and 1.5 * current_arena().own_bytes > 40 << 30:
        pytest.skip("this machine's memory is larger than the limit on addresses that the test sets")
    ended = subprocess.run(
        ["sh", "-c", f"{limit} exec '{sys.executable}' -c '{PROGRAM}'"],
        env={**os.environ, "SYMCOMM_HEAP": "1", **settings}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert why in ended.stdout and ended.stderr.count("SYMCOMM_HEAP: tensors are ordinary memory, since") == bool(why)


def test_a_torch_that_does_not_load_us_is_the_reason():
    """As where the package is only on the path: the arena has a heap, but torch does not allocate there."""
    program = (
        "import symcomm, torch; from symcomm.memory.arena import current_arena; current_arena(); "
        "print(symcomm.heap_stats().why_not); from symcomm.torch_backend import register; register.autoload(); "
        "print(repr(symcomm.heap_stats().why_not))"
    )
    settings = {"SYMCOMM_HEAP": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.splitlines() == [shared_heap.NOT_LOADED, "''"], ended


# --- as malloc -----------------------------------------------------------------------------------


def random_life(rank: int, world: int) -> None:
    """Every tensor keeps its values, whoever frees which around it, on which thread."""
    with_heap()
    chance, living, lock = random.Random(7), {}, threading.Lock()

    def work(seed: int) -> None:
        mine = random.Random(seed)
        for number in range(400):
            tensor = torch.full((mine.randrange(FLOATS, 40 * FLOATS),), float(seed * 1000 + number))
            with lock:
                living[seed * 1000 + number] = tensor
                if len(living) > 30:
                    key = chance.choice(list(living))
                    last = living.pop(key)
                    assert last.min() == last.max() == key

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, tensor in living.items():
        assert tensor.min() == tensor.max() == key
    assert len(living) == 30
    size = sum(-(-t.nbytes // 4096) * 4096 for t in living.values())
    assert heap_stats().in_use == size and heap_stats().refused == 0
    del tensor
    living.clear()
    assert heap_stats().in_use == 0


def test_tensors_keep_their_values_whatever_threads_allocate_and_free():
    run_ranks(random_life, 1)


def returned(rank: int, world: int) -> None:
    with_heap()
    before = resident()
    tensors = [torch.ones(MIB) for _ in range(64)]
    assert resident() - before > 200 * MIB
    del tensors
    assert heap_stats().idle > 200 * MIB
    deadline = time.monotonic() + 60
    while heap_stats().idle and time.monotonic() < deadline:
        torch.empty(1)  # any tensor looks whether idle pages have been kept for long enough
        time.sleep(0.05)
    assert heap_stats().idle == 0 and resident() - before < 40 * MIB


@pytest.mark.ordinary_memory("a small tensor must not come from the heap")
def test_freed_memory_goes_back_to_the_system_soon():
    run_ranks(returned, 1)


def never_more(rank: int, world: int) -> None:
    with_heap()
    for megabytes in (3, 5, 7, 11, 13, 17, 19, 23):
        tensor = torch.empty(megabytes * MIB, dtype=torch.uint8)
        del tensor
        stats = heap_stats()
        assert stats.in_use + stats.idle <= stats.most


def test_what_is_kept_is_never_more_than_the_program_itself_had():
    run_ranks(never_more, 1)


# --- fork ----------------------------------------------------------------------------------------


def forked(rank: int, world: int) -> None:
    with_heap()
    kept = torch.zeros(MIB)

    def child() -> None:
        assert kept.sum() == 0
        kept.fill_(7)
        mine = torch.ones(MIB)
        assert kept.min() == 7 and mine.min() == 1 and not in_heap(mine)
        assert "forked" in heap_stats().why_not

    in_child(child)
    assert kept.max() == 0


def test_a_forked_child_writes_its_own_memory():
    run_ranks(forked, 1)


def reused(rank: int, world: int) -> None:
    """The parent frees and fills its memory anew while the child reads what it was forked with."""
    with_heap()
    tensors = [torch.full((MIB,), 5.0)]
    freed = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(freed[1])
        os.read(freed[0], 1)
        os._exit(0 if tensors[0].min() == tensors[0].max() == 5 else 1)
    tensors.clear()
    assert heap_stats().held == 4 * MIB
    others = [torch.full((MIB,), 6.0) for _ in range(4)]
    os.write(freed[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0 and len(others) == 4
    for end in freed:
        os.close(end)
    deadline = time.monotonic() + 60
    while heap_stats().held and time.monotonic() < deadline:
        time.sleep(0.05)
        torch.empty(1)
    assert heap_stats().held == 0


def test_what_the_parent_frees_is_not_reused_while_a_child_lives():
    run_ranks(reused, 1)


def rank_that_was_forked(rank: int, world: int) -> None:
    """A child that makes an arena of its own has a heap of its own; what it inherited goes without harm."""
    with_heap()
    old = torch.full((MIB,), 3.0)

    def child() -> None:
        nonlocal old
        current_arena()
        new = torch.full((MIB,), 4.0)
        assert in_heap(new) and heap_stats().in_use == 4 * MIB and heap_stats().why_not == ""
        assert old.min() == 3
        old = None
        gc.collect()
        assert new.min() == 4
        in_child(lambda: new.fill_(8))
        assert new.max() == 4

    in_child(child)
    assert old.min() == old.max() == 3


def test_a_forked_child_may_have_a_heap_of_its_own():
    run_ranks(rank_that_was_forked, 1)


WORKERS = """
import os, torch
from symcomm._core import native
data = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
assert native.in_heap(data.data_ptr())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8, num_workers=2)
assert torch.equal(torch.cat([batch for (batch,) in loader]), data)
for strategy in torch.multiprocessing.get_all_sharing_strategies():
    torch.multiprocessing.set_sharing_strategy(strategy)
    shared = torch.ones(4096).share_memory_()
    child = torch.multiprocessing.get_context("fork").Process(target=shared.fill_, args=(2,))
    child.start(); child.join()
    assert shared.min() == 2, strategy
print("right")
"""


def test_data_loaders_and_torchs_own_shared_tensors_work():
    ended = subprocess.run(
        [sys.executable, "-c", WORKERS], env={**os.environ, "SYMCOMM_HEAP": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.stdout == "right\n", ended.stderr


# --- in collectives ------------------------------------------------------------------------------


def collectives(rank: int, world: int, store: str) -> None:
    with_heap()
    group = meet(rank, world, store)
    peers = world
    for count in (FLOATS, 16 * FLOATS + 3, MIB):
        tensor = torch.full((count,), float(rank + 1))
        assert in_heap(tensor)
        group.all_reduce(tensor)
        assert tensor.min() == tensor.max() == sum(range(1, peers + 1))
        parts = [torch.empty(count) for _ in range(peers)]
        group.all_gather(parts, torch.full((count,), float(rank)))
        assert [part.max().item() for part in parts] == list(range(peers))
        group.broadcast(tensor.fill_(float(rank)), 1)
        assert tensor.max() == 1
        if rank == 0:
            group.send(tensor.fill_(9.0), 1)
            del tensor
            tensor = torch.zeros(count)
        elif rank == 1:
            received = torch.empty(count)
            group.recv(received, 0)
            assert received.min() == received.max() == 9
    work = group.all_reduce(torch.ones(MIB), async_op=True)  # held by the work alone
    work.wait()
    symcomm.destroy()
    assert in_heap(torch.ones(FLOATS))
    again = meet(rank, world, store, "again")
    tensor = torch.full((MIB,), 1.0)
    again.all_reduce(tensor)
    assert tensor.max() == peers
    symcomm.destroy()


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_and_messages_on_tensors_of_the_heap(world, tmp_path):
    run_ranks(collectives, world, str(tmp_path / "store"))


def arrays(rank: int, world: int, store: str) -> None:
    with_heap()
    group = meet(rank, world, store)
    tensor = torch.ones(MIB)
    ways = {"direct": [tensor.numpy(), torch.tensor(np.ones(MIB, "f4"))]}
    ways["ordinary"] = [np.ones(MIB, "f4"), torch.from_numpy(np.ones(MIB, "f4"))]
    for way, given in ways.items():
        for array in given:
            before = group.copy_stats()["direct"]["calls"]
            group.all_reduce(array)
            assert array[0] == array[-1] == world
            assert group.copy_stats()["direct"]["calls"] - before == (way == "direct"), (way, type(array))
    assert tensor[0] == world
    symcomm.destroy()


def test_arrays_are_direct_where_torch_has_made_their_memory(tmp_path):
    run_ranks(arrays, 2, str(tmp_path / "store"))


def one_has_none(rank: int, world: int, store: str) -> None:
    if rank != 1:
        with_heap()
    group = meet(rank, world, store)
    tensor = torch.full((MIB,), float(rank))
    assert in_heap(tensor) == (rank != 1)
    group.all_reduce(tensor)
    assert tensor.min() == tensor.max() == 3
    symcomm.destroy()


@pytest.mark.ordinary_memory("one of the ranks has none")
def test_ranks_with_and_without_it_work_together(tmp_path):
    run_ranks(one_has_none, 3, str(tmp_path / "store"))


def dies(rank: int, world: int, store: str) -> None:
    with_heap()
    group = meet(rank, world, store)
    tensor = torch.ones(8 * MIB)
    group.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(symcomm.errors.RankFailedError):
        for _ in range(1000):
            group.all_reduce(tensor)
    tensor.fill_(5.0)
    del tensor
    assert torch.full((8 * MIB,), 6.0).min() == 6


def test_a_death_leaves_the_survivors_heap_as_it_was(tmp_path):
    survivor, dead = run_ranks(dies, 2, str(tmp_path / "store"), outcomes=True)
    assert survivor.kind == "returned", survivor
    assert dead.kind == "died" and dead.value == -signal.SIGKILL
