"""Every function of torch.distributed, called on our backend and on Gloo: the same answers.

So are a group's methods for making groups, and calls that torch's private helpers make. What differs on purpose is in
``BETTER``, with the reason.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch_versions
dist = torch.distributed
WORLD = 2

CALLS: dict[str, Callable[[int], Any]] = {}


def call(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Its name is that of the function of torch's that it calls, and what follows ``__``, if it has several."""
    CALLS[function.__name__] = function
    return function


def mine(rank: int, n: int = 4) -> Any:
    return torch.arange(n) * (rank + 1.0)


def outs(n: int = 2) -> list[Any]:
    return [torch.full((n,), -1.0) for _ in range(WORLD)]


# --- collectives --------------------------------------------------------------------------------------------------


@call
def all_reduce(rank: int) -> Any:
    x = mine(rank)
    return dist.all_reduce(x), x, dist.all_reduce(x, dist.ReduceOp.MAX), x


@call
def all_reduce__async(rank: int) -> Any:
    x = mine(rank)
    work = dist.all_reduce(x, async_op=True)
    return work.wait(), work.is_completed(), work.is_success(), x, [t.tolist() for t in work.result()]


@call
def all_reduce_coalesced(rank: int) -> Any:
    x = [mine(rank), mine(rank, 3)]
    return dist.all_reduce_coalesced(x), x


@call
def all_gather(rank: int) -> Any:
    o = outs(4)
    return dist.all_gather(o, mine(rank)), o


@call
def all_gather_coalesced(rank: int) -> Any:
    o = [outs(4) for _ in range(WORLD)]
    return dist.all_gather_coalesced(o, [mine(rank), mine(rank) + 1]), o


@call
def all_gather_into_tensor(rank: int) -> Any:
    o = torch.empty(8)
    return dist.all_gather_into_tensor(o, mine(rank)), o


@call
def all_gather_single(rank: int) -> Any:
    o = torch.empty(WORLD * 4)
    return dist.all_gather_single(o, mine(rank)), o


@call
def all_gather_object(rank: int) -> Any:
    o: list[Any] = [None] * WORLD
    return dist.all_gather_object(o, {"rank": rank}), o


@call
def all_to_all(rank: int) -> Any:
    o = outs()
    return dist.all_to_all(o, [mine(rank, 2), mine(rank, 2) + 5]), o


@call
def all_to_all_single(rank: int) -> Any:
    o = torch.empty(4)
    return dist.all_to_all_single(o, mine(rank)), o


@call
def all_to_all_single__uneven(rank: int) -> Any:
    o = torch.empty(1 + 2 * rank + (1 - rank))
    gets, gives = ([1, 1], [1, 2]) if rank == 0 else ([2, 1], [1, 1])
    return dist.all_to_all_single(o, mine(rank, sum(gives)), gets, gives), o


@call
def barrier(rank: int) -> Any:
    work = dist.barrier(async_op=True)
    return dist.barrier(), work.wait()


@call
def broadcast(rank: int) -> Any:
    x = mine(rank)
    return dist.broadcast(x, 1), x


@call
def broadcast_object_list(rank: int) -> Any:
    o = ["a", rank]
    return dist.broadcast_object_list(o, 1), o


@call
def gather(rank: int) -> Any:
    o = outs(4) if rank == 1 else None
    return dist.gather(mine(rank), o, dst=1), o


@call
def gather_object(rank: int) -> Any:
    o: Any = [None] * WORLD if rank == 0 else None
    return dist.gather_object(("of", rank), o), o


@call
def monitored_barrier(rank: int) -> Any:
    return dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))


@call
def reduce(rank: int) -> Any:
    x = mine(rank)
    return dist.reduce(x, 1), x if rank == 1 else None


@call
def reduce_scatter(rank: int) -> Any:
    o = torch.empty(2)
    return dist.reduce_scatter(o, [mine(rank, 2), mine(rank, 2) + 5]), o


@call
def reduce_scatter_single(rank: int) -> Any:
    o = torch.empty(2)
    return dist.reduce_scatter_single(o, mine(rank)), o


@call
def reduce_scatter_tensor(rank: int) -> Any:
    o = torch.empty(2)
    return dist.reduce_scatter_tensor(o, mine(rank)), o


@call
def scatter(rank: int) -> Any:
    o = torch.empty(2)
    return dist.scatter(o, outs() if rank == 1 else None, src=1), o


@call
def scatter_object_list(rank: int) -> Any:
    o: list[Any] = [None]
    return dist.scatter_object_list(o, ["for 0", "for 1"] if rank == 0 else None), o


# --- messages -----------------------------------------------------------------------------------------------------


@call
def send(rank: int) -> Any:
    x = mine(rank)
    return (dist.send(x, 1, tag=3), x) if rank == 0 else (dist.recv(x, 0, tag=3), x)


@call
def recv(rank: int) -> Any:
    x = mine(rank)
    return dist.send(x, 1) if rank == 0 else (dist.recv(x), x)


@call
def isend(rank: int) -> Any:
    x = mine(rank)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    return work.wait(), work.is_completed(), x


@call
def irecv(rank: int) -> Any:
    x = mine(rank)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x)
    return work.wait(), None if rank == 0 else work._source_rank(), x


@call
def batch_isend_irecv(rank: int) -> Any:
    x, y = mine(rank), torch.empty(4)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
    return [work.wait() for work in works], y


@call
def send_object_list(rank: int) -> Any:
    o = [1, "two"] if rank == 0 else [None, None]
    return (dist.send_object_list(o, 1), o) if rank == 0 else (dist.recv_object_list(o, 0), o)


@call
def recv_object_list(rank: int) -> Any:
    o = [rank]
    return dist.send_object_list(o, 1) if rank == 0 else (dist.recv_object_list(o, 0), o)


@call
def gather_single(rank: int) -> Any:
    got = torch.zeros(2 * WORLD) if rank == 1 else None
    return dist.gather_single(mine(rank, 2), got, 1), got


@call
def gather_into_tensor(rank: int) -> Any:
    got = torch.zeros(WORLD, 2) if rank == 0 else None
    return dist.gather_into_tensor(mine(rank, 2), got, 0), got


# --- groups -------------------------------------------------------------------------------------------------------


@call
def new_group(rank: int) -> Any:
    group, alone = dist.new_group(), [dist.new_group([r]) for r in range(WORLD)][rank]
    x = mine(rank)
    dist.all_reduce(x, group=alone)
    return x, dist.get_process_group_ranks(alone), dist.get_world_size(alone), dist.get_rank(group)


@call
def new_subgroups(rank: int) -> Any:
    current, groups = dist.new_subgroups(1)
    return dist.get_process_group_ranks(current), len(groups)


@call
def new_subgroups_by_enumeration(rank: int) -> Any:
    current, groups = dist.new_subgroups_by_enumeration([[1], [0]])
    return dist.get_process_group_ranks(current), len(groups)


@call
def get_backend_impl(rank: int) -> Any:
    impl = dist.get_backend_impl()
    return impl.rank(), impl.size(), dist.get_backend_impl(device=torch.device("cpu")) is impl


@call
def set_timeout(rank: int) -> Any:
    x = mine(rank)
    return dist.set_timeout(datetime.timedelta(seconds=30)), dist.all_reduce(x), x


@call
def split_group(rank: int) -> Any:
    return dist.get_process_group_ranks(dist.split_group(split_ranks=[[0], [1]]))


@call
def shrink_group(rank: int) -> Any:
    return dist.shrink_group([0, 1])


@call
def init_device_mesh(rank: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("x",))
    return mesh.mesh, mesh.get_rank(), mesh.size(), mesh["x"].get_local_rank()


@call
def get_pg_count(rank: int) -> Any:
    before = dist.get_pg_count()
    dist.new_group()
    return dist.get_pg_count() - before


@call
def get_global_rank(rank: int) -> Any:
    group = dist.new_group([1])
    return dist.get_global_rank(group, 0) if rank == 1 else None


@call
def get_group_rank(rank: int) -> Any:
    group = dist.new_group([1])
    return dist.get_group_rank(group, 1) if rank == 1 else None


@call
def get_process_group_ranks(rank: int) -> Any:
    return dist.get_process_group_ranks(None), dist.get_process_group_ranks(dist.group.WORLD)


@call
def get_rank(rank: int) -> Any:
    return dist.get_rank(), dist.get_rank(dist.GroupMember.NON_GROUP_MEMBER)


@call
def get_world_size(rank: int) -> Any:
    return dist.get_world_size(), dist.get_world_size(dist.GroupMember.NON_GROUP_MEMBER)


@call
def get_node_local_rank(rank: int) -> Any:
    return dist.get_node_local_rank(7)


@call
def get_backend(rank: int) -> Any:
    return dist.get_backend() == dist.get_backend(dist.group.WORLD), type(dist.get_backend()).__name__


@call
def get_backend_config(rank: int) -> Any:
    return [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]


@call
def init_process_group(rank: int) -> Any:
    return dist.init_process_group("gloo")


@call
def destroy_process_group(rank: int) -> Any:
    group = dist.new_group()
    dist.barrier(group=group)
    before = dist.destroy_process_group(group)
    x = mine(rank)
    try:
        dist.all_reduce(x, group=group)
    except Exception:  # torch words it by what it finds first
        return before, "raised"
    return before, x


# --- a group's own methods, and torch's private helpers ---------------------------------------------------------------


@call
def private__coalescing_manager(rank: int) -> Any:
    x, y = mine(rank), mine(rank, 3)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x, y


@call
def private__coalescing_manager_async(rank: int) -> Any:
    x, y = torch.empty(8), torch.empty(6)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(x, mine(rank))
        dist.all_gather_into_tensor(y, mine(rank, 3))
    manager.wait()
    return x, y


@call
def private__split_group_method(rank: int) -> Any:
    """On Gloo the method splits the backend, too."""
    split = dist.group.WORLD.split_group([rank], None, None, None, f"half {rank}")
    x = mine(rank)
    split.allreduce([x]).wait()
    return split.size(), split.rank(), x


@call
def private__group_facts(rank: int) -> Any:
    group = dist.group.WORLD
    return (
        group.size(),
        group.rank(),
        group.group_desc,
        "cpu" in [d.type for d in group._device_types],
        group.bound_device_id,
    )


@call
def private__monitored(rank: int) -> Any:
    return dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=True)


# --- the process ---------------------------------------------------------------------------------------------------


@call
def get_debug_level(rank: int) -> Any:
    return dist.get_debug_level()


@call
def set_debug_level(rank: int) -> Any:
    known = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    found = dist.get_debug_level()
    return found, dist.set_debug_level(known)


@call
def set_debug_level_from_env(rank: int) -> Any:
    return dist.set_debug_level_from_env(), dist.get_debug_level()


@call
def get_default_backend_for_device(rank: int) -> Any:
    return dist.get_default_backend_for_device("cpu"), dist.get_default_backend_for_device(torch.device("cuda"))


@call
def record_comm(rank: int) -> Any:
    with dist.record_comm("name"):
        return None


@call
def supports_complex(rank: int) -> Any:
    return [dist.supports_complex(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)]


@call
def is_backend_available(rank: int) -> Any:
    return dist.is_backend_available("gloo"), dist.is_backend_available("no such")


for _name in ("is_available", "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
              "is_torchelastic_launched", "is_ucc_available", "is_xccl_available"):  # fmt: skip
    CALLS[_name] = lambda rank, name=_name: getattr(dist, name)()

# Gloo refuses to split, to shrink and to gather into one tensor, and a process that calls its group's own split_group
# dies. What was destroyed still works there.
BETTER: dict[str, Any] = {
    "gather_single": [[None, None], [None, ["torch.float32", [0.0, 1.0, 0.0, 2.0]]]],
    "gather_into_tensor": [[None, ["torch.float32", [[0.0, 1.0], [0.0, 2.0]]]], [None, None]],
    "destroy_process_group": [[None, "raised"]] * 2,
    "split_group": [[0], [1]],
    "shrink_group": [
        "BadArgumentError: shrink_group: ranks_to_exclude must be at least one rank of the group (0 to 1), not all of "
        "them, none twice, got [0, 1]."
    ] * 2,
    "private__split_group_method": [
        [1, 0, ["torch.float32", [0.0, 1.0, 2.0, 3.0]]], [1, 0, ["torch.float32", [0.0, 2.0, 4.0, 6.0]]],
    ],
}  # fmt: skip


def plain(value: Any) -> Any:
    """What can be compared and sent."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, str, bytes, type(None))) else repr(value)


def answers(rank: int, world: int, backend: str, store: str) -> dict[str, Any]:
    from symcomm.torch_backend.register import register

    register()
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    found = {}
    for name, make in CALLS.items():
        if name in BETTER and backend == "gloo":
            continue
        try:
            found[name] = plain(make(rank))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: Any) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("names")
    return {name: run_ranks(answers, WORLD, name, str(folder / name), deadline=120) for name in ("symcomm", "gloo")}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_on_gloo(name: str, both: dict[str, Any]):
    if name.split("__")[0] not in ("private", *dir(dist)):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    ours, gloos = ([of.get(name) for of in both[backend]] for backend in ("symcomm", "gloo"))
    if all(str(answer).endswith("does not support alltoall") for answer in gloos):
        pytest.skip(f"on torch {torch.__version__} Gloo does not")
    assert ours == BETTER.get(name, gloos)


def test_no_function_is_left_out():
    functions = {name for name in dist.distributed_c10d.__all__ if inspect.isroutine(vars(dist).get(name))}
    before_a_group = {"register_rendezvous_handler", "rendezvous"}
    assert functions - {name.split("__")[0] for name in CALLS} <= before_a_group
