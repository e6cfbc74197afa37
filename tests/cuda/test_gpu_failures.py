"""A rank of a GPU that fails: nobody takes what it overwrites for a result, and its memory is its own again."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SECOND = 1_900_000_000  # cycles of an H200, about
N = 4 << 20  # elements of tensors that peers use in place
DIRECT = 1 << 20  # bytes from which on they do


def join(rank: int, world: int, folder: str) -> Any:
    """A group on the GPU that nobody else holds, and that uses symmetric tensors of a few MiB in place."""
    from symcomm.cuda.group import CudaGroup, CudaLimits
    from tests.support.faults import join_group

    torch.cuda.set_device(0)
    core = join_group(rank, world, folder, 30.0)
    limits = CudaLimits(one_shot_bytes=DIRECT, direct_bytes=DIRECT)
    gpu = core.attached["CudaGroup", 0] = CudaGroup(core, 0, limits)
    gpu.all_reduce(torch.ones(4, device="cuda"))
    gpu.synchronize()
    core.barrier()
    return gpu


def symmetric(value: float, n: int = N) -> Any:
    import symcomm

    tensor = symcomm.symm_mem.empty(n, device="cuda").fill_(value)
    torch.cuda.synchronize()
    return tensor


def warm_up(gpu: Any) -> None:
    """Loading a kernel waits for all streams: it must not be first needed behind one that sleeps."""
    gpu.all_reduce(symmetric(1.0))
    gpu.synchronize()
    gpu.core.barrier()


def tell(folder: str, word: str) -> None:
    Path(folder, word).touch()


def hear(folder: str, *words: str) -> None:
    end = time.monotonic() + 40
    while not all(Path(folder, word).exists() for word in words):
        assert time.monotonic() < end, f"nobody said {words}"
        time.sleep(0.005)


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- reads --------------------------------------------------------------------------------------------------------


def root_overwrites(rank: int, world: int, folder: str, dies: bool, asks: str) -> tuple[str, bool]:
    """Rank 0 fails in an operation in which rank 1 reads its tensor later, and overwrites that."""
    gpu = join(rank, world, folder)
    mine, out = symmetric(rank + 1.0), torch.zeros(world * N, device="cuda")
    if rank:
        torch.cuda._sleep((4 if rank == 1 else 30 if dies else 4) * SECOND)
    work = gpu.all_gather_single(out, mine, async_op=True, timeout=1.0 if rank == 0 and not dies else 30.0)
    work.await_queued(20.0)
    tell(folder, f"queued {rank}")
    if rank == 2 and dies:
        hear(folder, "queued 0", "queued 1")
        os.kill(os.getpid(), signal.SIGKILL)
    ask = {"work": work.synchronize, "group": gpu.synchronize, "timeout": lambda: work.wait(20.0)}[asks]
    said = outcome_of(ask)
    if rank == 0:
        mine.fill_(-1.0)
        torch.cuda.synchronize()
    later = [outcome_of(gpu.synchronize), outcome_of(lambda: gpu.barrier()), "nothing" if work.is_success() else ""]
    torch.cuda.synchronize()
    expected = torch.arange(1.0, world + 1, device="cuda").repeat_interleave(N)
    right = torch.equal(out, expected)
    return said, right or "nothing" not in (said, *later)


@pytest.mark.parametrize("asks", ["work", "group", "timeout"])
@pytest.mark.parametrize("dies", [False, True], ids=["a deadline", "a death"])
def test_what_a_failed_rank_overwrites_is_no_result(tmp_path: Path, dies: bool, asks: str):
    outcomes = run_ranks(root_overwrites, 3, str(tmp_path), dies, asks, outcomes=True)
    kinds = ["returned", "returned", "died" if dies else "returned"]
    assert [o.kind for o in outcomes] == kinds, "\n".join(map(str, outcomes))
    for outcome in outcomes[: 2 if dies else 3]:
        said, sound = outcome.value
        assert sound, f"rank {outcome.rank} took wrong values for a result: {said}"
        assert said.startswith("RankFailedError" if dies else "DeadlineError"), said
        assert not dies or "rank 2 (pid " in said


# --- writes -------------------------------------------------------------------------------------------------------


def owner_goes_on(rank: int, world: int, folder: str) -> tuple[str, float, list[float]]:
    """Rank 0's all_reduce on symmetric tensors fails; rank 1 would write its part much later."""
    gpu = join(rank, world, folder)
    warm_up(gpu)
    mine = symmetric(rank + 1.0)
    gpu.core.barrier()
    if rank == 1:
        torch.cuda._sleep(6 * SECOND)
    begun = time.monotonic()
    gpu.all_reduce(mine, timeout=0.5 if rank == 0 else 30.0)
    said = outcome_of(gpu.synchronize)
    took = time.monotonic() - begun
    if rank == 0:
        mine.fill_(5.0)
        torch.cuda.synchronize()
    else:
        torch.cuda.synchronize()
        tell(folder, "done")
    hear(folder, "done")
    return said, took, torch.unique(mine).tolist()


def test_a_tensor_is_its_owners_again_after_an_error(tmp_path: Path):
    (said, took, values), (later, _, _) = run_ranks(owner_goes_on, 2, str(tmp_path))
    assert said.startswith("DeadlineError") and took < 5, (said, took)
    assert later.startswith("DeadlineError: work on cuda:0") and "rank 0's deadline" in later, later
    assert values == [5.0]


def wait_gives_up(rank: int, world: int, folder: str, call: str, late: str, in_place: bool) -> tuple[str, list[float]]:
    """Rank 0 waits no longer for rank 1, whose host comes afterwards, or whose GPU is busy for long."""
    gpu = join(rank, world, folder)
    warm_up(gpu)
    mine = symmetric(rank + 1.0) if in_place else torch.full((N,), rank + 1.0, device="cuda")
    out = torch.zeros(world * N, device="cuda")
    gpu.core.barrier()
    if rank == 1 and late == "host":
        hear(folder, "given up")
    elif rank == 1:
        torch.cuda._sleep(4 * SECOND)

    def act() -> None:
        both = (out, mine) if call == "all_gather_single" else (mine,)
        getattr(gpu, call)(*both, async_op=True).wait(0.3 if rank == 0 else 20.0)

    said = outcome_of(act)
    if rank == 0:
        for tensor in (mine, out):
            tensor.fill_(-7.0)
        torch.cuda.synchronize()
        tell(folder, "given up")
    torch.cuda.synchronize()
    again = outcome_of(gpu.barrier)
    tell(folder, f"done {rank}")
    hear(folder, "done 0", "done 1")
    torch.cuda.synchronize()
    return said if again != "nothing" else f"{said}, and the group goes on", torch.cat([mine, out]).unique().tolist()


@pytest.mark.parametrize("in_place", [False, True], ids=["ordinary", "symmetric"])
@pytest.mark.parametrize("late", ["host", "gpu"])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather_single"])
def test_a_work_that_was_given_up(tmp_path: Path, call: str, late: str, in_place: bool):
    (said, values), (theirs, _) = run_ranks(wait_gives_up, 2, str(tmp_path), call, late, in_place)
    assert said.startswith("DeadlineError") and "rank" in said and "goes on" not in said, said
    assert theirs.startswith("DeadlineError") and "goes on" not in theirs, theirs
    assert values == [-7.0]


def error_waits_for_peers(rank: int, world: int, folder: str) -> tuple[str, float]:
    """Rank 1 is in the middle of it, and leaves within a second: rank 0 is told then, not before."""
    gpu = join(rank, world, folder)
    warm_up(gpu)
    mine = symmetric(rank + 1.0)
    gpu.core.barrier()
    if rank == 1:
        torch.cuda._sleep(int(1.5 * SECOND))
    gpu.all_reduce(mine, timeout=0.5 if rank == 0 else 30.0)
    said = outcome_of(gpu.synchronize)
    torch.cuda.synchronize()
    left = gpu.flag_words.has_left(1 - rank)
    return said, left


def test_callers_are_told_when_peers_have_left_their_tensors(tmp_path: Path):
    for said, left in run_ranks(error_waits_for_peers, 2, str(tmp_path)):
        assert said.startswith("DeadlineError") and left, (said, left)


# --- memory that was given back -----------------------------------------------------------------------------------


def overwrite_what_was_freed(n: int) -> list[Any]:
    gc.collect()
    fresh = [symmetric(9.0, n) for _ in range(4)]
    return [*fresh, symmetric(9.0, 16 * n)]


def sender_goes(rank: int, world: int, folder: str) -> tuple[str, bool]:
    """Rank 1 has heard of a message; before it takes it, rank 0's group fails and goes, and its memory is used anew."""
    gpu = join(rank, world, folder)
    core, n = gpu.core, 1 << 18
    if rank == 0:
        gpu.isend(torch.ones(n, device="cuda"), 1)
        torch.cuda.synchronize()
        hear(folder, "heard")
        said = outcome_of(partial(core.barrier, timeout=0.3))
        del core, gpu
        kept = overwrite_what_was_freed(n)
        tell(folder, "overwritten")
        hear(folder, "taken")
        return said, all(bool((t == 9.0).all()) for t in kept)
    got = torch.zeros(n, device="cuda")
    work = gpu.irecv(got, 0)
    while not work._message.is_completed():
        time.sleep(0.001)
    tell(folder, "heard")
    hear(folder, "overwritten")
    said = outcome_of(work.wait)
    torch.cuda.synchronize()
    success = work.is_success()
    right = bool((got == 1.0).all())
    tell(folder, "taken")
    return said, right or (said != "nothing" and not success)


def test_a_message_whose_sender_failed(tmp_path: Path):
    (said, kept), (received, sound) = run_ranks(sender_goes, 2, str(tmp_path))
    assert said.startswith("DeadlineError") and kept
    assert sound, f"wrong values were taken for a message: {received}"


def window_goes(rank: int, world: int, folder: str) -> list[bool]:
    """Rank 1's put waits in its stream while rank 0's group fails and goes, and its memory is used anew."""
    gpu = join(rank, world, folder)
    core = gpu.core
    mine = symmetric(0.0)
    window = core.new_window(mine)
    core.barrier()
    if rank == 1:
        source = torch.ones(N, device="cuda")
        torch.cuda._sleep(6 * SECOND)
        window.put(source, 0)
        tell(folder, "put")
        torch.cuda.synchronize()
        tell(folder, "done")
        return []
    hear(folder, "put")
    assert outcome_of(partial(core.barrier, timeout=0.3)).startswith("DeadlineError")
    assert outcome_of(window.tensor_deregister) != "nothing"
    del mine, window, core, gpu
    fresh = overwrite_what_was_freed(N)
    assert not Path(folder, "done").exists(), "the put was over before anything was given back"
    hear(folder, "done")
    return [bool((t == 9.0).all()) for t in fresh]


def test_a_put_into_a_window_that_is_gone(tmp_path: Path):
    kept, _ = run_ranks(window_goes, 2, str(tmp_path))
    assert all(kept), kept


def leaves_while_others_read(rank: int, world: int, folder: str) -> bool:
    """Rank 0 has its result and leaves; rank 1 is yet to read rank 0's staging area."""
    from symcomm.cuda import kernels

    gpu = join(rank, world, folder)
    tensor = torch.full((1 << 18,), complex(rank + 1.0), dtype=torch.complex64, device="cuda")  # left to torch
    combine = kernels.combine

    def later(*args: Any) -> None:
        with torch.cuda.stream(args[-1]):
            torch.cuda._sleep(4 * SECOND)
        combine(*args)

    if rank == 1:
        kernels.combine = later
    gpu.all_reduce(tensor)
    if rank == 0:
        gpu.synchronize()
        gpu.core.destroy()
        del gpu
        kept = overwrite_what_was_freed(1 << 19)
        tell(folder, "overwritten")
        hear(folder, "read")
        return all(bool((t == 9.0).all()) for t in kept)
    hear(folder, "overwritten")
    gpu.synchronize()
    tell(folder, "read")
    return bool((tensor == complex(3.0)).all())


def test_a_rank_that_leaves_while_others_read_its_staging_area(tmp_path: Path):
    assert run_ranks(leaves_while_others_read, 2, str(tmp_path)) == [True, True]


def test_freed_memory_cools_on_the_stream_that_used_it():
    import symcomm

    user, other = torch.cuda.Stream(), torch.cuda.Stream()
    n = 1 << 20
    warm = [symmetric(1.0, n) for _ in range(5)]  # new blocks, and kernels that are new, wait for all streams
    torch.cuda._sleep(1)
    del warm
    torch.cuda.synchronize()
    with torch.cuda.stream(user):
        tensor = symcomm.symm_mem.empty(n, device="cuda")
        torch.cuda._sleep(3 * SECOND)
        tensor.fill_(1.0)
        address = tensor.data_ptr()
        del tensor
    with torch.cuda.stream(other):
        early = [symcomm.symm_mem.empty(n, device="cuda") for _ in range(3)]
        assert not user.query(), "too slow to see anything"
        assert address not in [t.data_ptr() for t in early]
        user.synchronize()
        late = [symcomm.symm_mem.empty(n, device="cuda") for _ in range(5)]
        assert address in [t.data_ptr() for t in late]


# --- pinned memory ------------------------------------------------------------------------------------------------


def pinned(rank: int, world: int, folder: str) -> list[int]:
    from symcomm.cuda import flag_words
    from symcomm.cuda.group import device_group
    from tests.support.faults import join_group

    torch.cuda.set_device(0)
    gpu = device_group(join_group(rank, world, folder, 30.0), 0)
    found = []
    for n in (1 << 20, 4):
        gpu.all_reduce(torch.ones(n, device="cuda"))
        gpu.synchronize()
        found.append(sum(nbytes for _, nbytes in flag_words._registered))
    return found


def test_host_memory_is_pinned_when_it_is_used(tmp_path: Path):
    for first, second in run_ranks(pinned, 2, str(tmp_path)):
        assert first <= 64 << 10 and second >= 2 * (768 << 10), (first, second)
