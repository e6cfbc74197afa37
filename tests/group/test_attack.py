"""Things that people do to a group and should not, or that come at the worst moment: forks, signals, tensors that hold
nothing. Each of these once crashed, hung or gave wrong values."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import symcomm
from symcomm import errors, symm_mem
from symcomm._core import native
from symcomm.ddp import DistributedDataParallel, hooks
from symcomm.group import leaving, local
from symcomm.memory.arena import current_arena
from symcomm.memory.flight import Flight, flight_bytes, read_flight

pytestmark = pytest.mark.usefixtures("forked_ranks")

# --- forks ----------------------------------------------------------------------------------------------------------


def _in_child(do: Any) -> int:
    """Run ``do`` in a forked child; its exit code, 99 when it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    for _ in range(1000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99


class _OfTheParent:
    def __init__(self):
        self.pid = os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            os._exit(7)


def _fails(group: Any, kept: list) -> None:
    def call(of_this_frame: Any) -> None:
        group.all_reduce(torch.ones(3 + group.rank))

    kept.append(group)
    with contextlib.suppress(errors.CollectiveMismatchError):
        call(_OfTheParent())


@pytest.mark.parametrize("hosts", [None, [1, 1]])
def test_fork_frees_nothing_that_a_failed_group_holds(hosts):
    kept: list = []
    symcomm.spawn(_fails, 2, (kept,), mode="threads", hosts=hosts, deadline=30)
    gc.collect()
    assert len(kept) == 2 and all(group.failure is not None for group in kept)
    assert _in_child(lambda: None) == 0


def _refused(call: Any) -> None:
    with pytest.raises(errors.GroupUnusableError, match="forked"):
        call()


def _fork_and_go_on(group: Any) -> list[float]:
    team = group.split(0)
    work = group.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    t = torch.ones(2)
    group.all_reduce(t)
    codes = []
    if group.rank == 0:

        def use() -> None:
            _refused(lambda: group.all_reduce(torch.ones(2)))
            _refused(lambda: group.all_reduce(torch.ones(3), async_op=True))
            _refused(lambda: group.send(torch.ones(2), 1))
            _refused(lambda: group.isend(torch.ones(2), 1))

        def forget() -> None:
            nonlocal team
            team = None
            gc.collect()

        codes = [_in_child(use), _in_child(group.destroy), _in_child(forget), _in_child(local._leave_all)]
    group.all_reduce(t)
    team.all_reduce(t)
    return [*t.tolist(), *codes]


def test_what_a_forked_child_does_with_a_group_does_not_reach_the_others() -> None:
    assert symcomm.spawn(_fork_and_go_on, 2, deadline=60) == [[8.0, 8.0, 0, 0, 0, 0], [8.0, 8.0]]


# --- signals --------------------------------------------------------------------------------------------------------


def _call_in_handler(group: Any) -> str:
    said = ""
    t = torch.ones(1)
    if group.rank == 0:

        def handler(*_: Any) -> None:
            nonlocal said
            try:
                group.barrier()
            except errors.CallerError as error:
                said = str(error)

        signal.signal(signal.SIGUSR1, handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    else:
        time.sleep(1)
    group.all_reduce(t)
    group.all_reduce(t)
    return f"{t.item()} {said}"


@pytest.mark.parametrize("hosts", [None, [1, 1]])
def test_a_signal_handler_that_calls_the_group_its_thread_waits_in_is_told_so(hosts: Any) -> None:
    first, second = symcomm.spawn(_call_in_handler, 2, hosts=hosts, deadline=60, timeout=20)
    assert first.startswith("4.0 barrier on group 'world': called by a signal handler") and second == "4.0 "


def test_ctrl_c_is_not_lost_while_a_waiting_call_looks_where_it_was_made() -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    def rank(group: Any) -> str:
        if group.rank == 1:
            time.sleep(0.5)
        try:
            group.all_reduce(torch.ones(1))
        except (KeyboardInterrupt, errors.GroupUnusableError) as error:
            return type(error).__name__
        return "nothing"

    native.use_call_site_callback(interrupt)
    try:
        assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == ["KeyboardInterrupt", "GroupUnusableError"]
    finally:
        native.use_call_site_callback(local._locate)


def test_a_group_is_collected_while_another_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run anywhere, also in the middle of giving memory back."""

    def rank(group: Any) -> tuple[bool, int]:
        before = current_arena().used_bytes
        one, other = group.new_group([0]), group.new_group([0])
        is_left_by_all, inner = native.Group.is_left_by_all, []

        def collecting(handle: Any) -> bool:
            if not inner:
                inner.append(True)
                other._retire()
            return is_left_by_all(handle)

        monkeypatch.setattr(native.Group, "is_left_by_all", collecting)
        one.destroy()
        monkeypatch.undo()
        leaving.free_retired()
        return other._retire.alive, current_arena().used_bytes - before

    assert symcomm.spawn(rank, 1, mode="threads", deadline=20) == [(False, 0)]


def test_a_batch_of_something_else() -> None:
    def rank(group: Any) -> bool:
        with pytest.raises(errors.BadArgumentError, match=r"batch: messages must be a list of Message, got None"):
            group.batch([None])
        return True

    assert symcomm.spawn(rank, 2, mode="threads", deadline=30) == [True, True]
    assert symcomm.spawn(rank, 2, mode="threads", hosts=[1, 1], deadline=30) == [True, True]


# --- tensors --------------------------------------------------------------------------------------------------------


def _freed(start: int = 2) -> torch.Tensor:
    tensor = torch.ones(start + 8)[start:]
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize("make", [_freed, lambda: _freed(1_000_000), _fake, lambda: torch._efficientzerotensor((3,))])
def test_tensors_without_memory_are_refused(make: Any) -> None:
    def rank(group: Any) -> float:
        for call in (group.all_reduce, lambda t: group.isend(t, 0), lambda t: group.recv(t, 0)):
            tensor = make()
            if call is not group.all_reduce and tensor._is_zerotensor():
                continue
            with pytest.raises(errors.BadArgumentError, match="without memory"):
                call(tensor)
        t = torch.ones(1)
        group.all_reduce(t)
        return t.item()

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [2.0, 2.0]


def test_promised_zeros_can_be_read() -> None:
    def rank(group: Any) -> list[float]:
        output = torch.ones(4)
        group.all_gather_single(output, torch._efficientzerotensor((2,)))
        return output.tolist()

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [[0.0] * 4] * 2


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_arrays_of_the_other_byte_order(dtype: str) -> None:
    def rank(group: Any) -> list:
        array = np.array([1, 2], dtype=dtype)
        group.all_reduce(array)
        return array.tolist()

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [[2, 4]] * 2


def test_an_output_on_its_input_does_not_overwrite_what_peers_still_read() -> None:
    """Symmetric tensors are read by peers where they lie; long ones are sent piece by piece."""

    def rank(group: Any, make: Any, n: int) -> bool:
        me, world = group.rank, group.size
        full = torch.arange(world * n, dtype=torch.float32)
        for _ in range(3):  # the first call takes the slow path, the others the fast one
            x = make(world * n)
            x.copy_(full + me)
            group.all_to_all_single(x, x)
            right = torch.equal(x, torch.cat([full[me * n : (me + 1) * n] + r for r in range(world)]))
            x.copy_(full + me)
            other = (me + 1) % world
            group.reduce_scatter_single(x[other * n : (other + 1) * n], x)
            right &= torch.equal(x[other * n : (other + 1) * n], (world * full + 3)[me * n : (me + 1) * n])
            x.copy_(full + me)
            group.all_gather(list(x.chunk(world)), x[other * n : (other + 1) * n])
            right &= torch.equal(x, (full.view(world, n).roll(-1, 0) + torch.arange(world)[:, None]).view(-1))
            x.copy_(full + me)
            group.gather(list(x.chunk(world)) if me == 0 else None, x[other * n : (other + 1) * n], 0)
            right &= me > 0 or torch.equal(x[:n], full[n : 2 * n])
            if not right:
                return False
        return right

    for make in (symm_mem.empty, torch.empty):
        for n in (3, 20_000, 500_000):
            assert symcomm.spawn(rank, 3, (make, n), mode="threads", deadline=60) == [True] * 3, (make, n)


def test_strided_tensors_take_part_in_the_order_of_calls() -> None:
    def rank(group: Any) -> list[float]:
        x, gathered = torch.ones(4)[::2], torch.empty(4)
        if group.rank == 1:
            time.sleep(0.2)
        works = [group.all_reduce(x, async_op=True) for _ in range(2)]
        group.all_gather_single(gathered, x)
        for work in works:
            work.wait()
        return [*x.tolist(), *gathered.tolist()]

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [[4.0] * 6] * 2


def test_callbacks_of_strided_tensors_may_wait_for_other_operations() -> None:
    def rank(group: Any) -> float:
        t, ended, works = torch.ones(1), threading.Event(), []

        def callback() -> None:
            works[0].wait()
            ended.set()

        if group.rank == 1:
            time.sleep(0.2)
        first = group.all_reduce(torch.ones(4)[::2], async_op=True)
        works.append(group.all_reduce(t, async_op=True))
        first.add_done_callback(callback)
        assert ended.wait(20)
        return t.item()

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [2.0, 2.0]


# --- the flight recorder --------------------------------------------------------------------------------------------


def test_flight_of_a_rank_that_is_writing() -> None:
    memory = np.zeros(flight_bytes(16) + 4096, dtype=np.uint8)
    flight = Flight(memory.ctypes.data, 16)
    names = ["\N{GRINNING FACE}" * 200, "plain"]
    for name in names:
        flight.add_group(name, 0, list(range(300)))
    place = 4096 + 16 * 64
    slots = [bytes(memory[place + i * 512 : place + (i + 1) * 512]) for i in range(2)]
    facts = [json.loads(s[8 : 8 + int.from_bytes(s[4:8], "little")]) for s in slots]
    assert facts[0]["name"] and names[0].startswith(facts[0]["name"]) and facts[1]["name"] == "plain"
    memory[place + 10] = 0xFF  # half written
    assert read_flight(flight.address) == []
    assert flight.site(("a\udcff.py", 3)) == 1


# --- data parallel --------------------------------------------------------------------------------------------------


def test_after_an_exception_in_a_hook_the_next_iteration_says_so() -> None:
    def rank(group: Any) -> str:
        model = torch.nn.Linear(2, 2)
        state = hooks.CastState(torch.bfloat16)
        wrapped = symcomm.DistributedDataParallel(model, process_group=state.process_group)

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            raise ValueError("once")

        wrapped.register_comm_hook(None, hook)
        with pytest.raises(ValueError, match="once"):
            wrapped(torch.ones(1, 2)).sum().backward()
        with pytest.raises(errors.CallerError) as caught:
            wrapped(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    for said in symcomm.spawn(rank, 2, mode="threads", deadline=60):
        assert "All gradients came" in said and "No gradient came" not in said


def test_data_parallel_of_a_group_that_is_not_torchs() -> None:
    def rank(group: Any) -> None:
        with pytest.raises(errors.BadArgumentError, match="process_group must be a group of torch.distributed"):
            DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)

    symcomm.spawn(rank, 1, mode="threads", deadline=20)


def test_sizes_of_symmetric_tensors_are_whole_numbers() -> None:
    for size in (2.5, "3", None):
        with pytest.raises(errors.BadArgumentError, match="size must be a sequence of ints"):
            symm_mem.empty(size)


def test_parameters_without_elements() -> None:
    """Such a parameter may be the only one of its dtype, and so have a bucket to itself."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.none = torch.nn.Parameter(torch.ones(0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum() + self.none.sum()

    def rank(group: Any) -> list[Any]:
        model = DistributedDataParallel(Model(), process_group=hooks.CastState(torch.bfloat16).process_group)
        model(torch.full((2,), group.rank + 1.0)).backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    assert symcomm.spawn(rank, 2, mode="threads", deadline=60) == [[[1.5, 1.5], []]] * 2


# --- launcher -------------------------------------------------------------------------------------------------------


def test_output_that_a_full_disk_refuses() -> None:
    command = [sys.executable, "-m", "symcomm", "run", "-n", "1", "--no-python", "echo", "hello"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 141 and "could not be written: No space left on device" in done.stderr
