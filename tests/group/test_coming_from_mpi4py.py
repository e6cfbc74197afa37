"""Every row of the tables for users of mpi4py (docs/how-to/coming-from.md) runs, with mpi4py's results where it can.

``python -m tests.group.test_coming_from_mpi4py``, under mpiexec, prints what mpi4py finds.
"""

from __future__ import annotations

import array
import importlib.util
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import symcomm
from symcomm import Message

pytestmark = pytest.mark.without_torch

RANKS = 3
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
Row = Callable[..., Any]
ROWS: dict[str, tuple[Row | None, Row]] = {}  # by what a table's first cell begins with


def row(cell: str, mpi: Row | None = None) -> Callable[[Row], Row]:
    def add(ours: Row) -> Row:
        ROWS[cell] = (mpi, ours)
        return ours

    return add


def mine(comm: Any) -> np.ndarray:
    return np.arange(3.0) * 10 + comm.rank  # three numbers, different on each rank


def called(method: str, *fills: Any, **named: Any) -> Row:
    """A method of MPI's that writes into its second buffer, of so many zeros."""

    def run(comm: Any, MPI: Any) -> Any:
        y = np.zeros(*fills)
        getattr(comm, method)(mine(comm), y, **{k: getattr(MPI, v) if k == "op" else v for k, v in named.items()})
        return y.tolist()

    return run


# --- the same things -------------------------------------------------------------------------------------------------


@row("from mpi4py import MPI", lambda comm, MPI: comm.size)
def world(group):
    assert group is symcomm.default_group()
    return group.size


@row("comm.Get_rank()", lambda comm, MPI: [comm.Get_rank(), comm.Get_size()])
def rank_and_size(group):
    return [group.rank, group.size]


def in_place(comm: Any, MPI: Any) -> Any:
    x = mine(comm)
    comm.Allreduce(MPI.IN_PLACE, x)
    return x.tolist()


@row("comm.Allreduce(MPI.IN_PLACE, x)", in_place)
def all_reduce(group):
    x = mine(group)
    group.all_reduce(x)
    return x.tolist()


@row("comm.Allreduce(x, y, op=MPI.MAX)", called("Allreduce", 3, op="MAX"))
def all_reduce_max(group):
    x, y = mine(group), np.zeros(3)
    y[:] = x
    group.all_reduce(y, "max")
    return y.tolist()


def reduce_at_root(comm: Any, MPI: Any) -> Any:
    y = np.zeros(3)
    comm.Reduce(mine(comm), y, root=0)
    return y.tolist() if comm.rank == 0 else None


@row("comm.Reduce(x, y, root=0)", reduce_at_root)
def reduce(group):
    y = np.zeros(3)
    y[:] = mine(group)
    group.reduce(y, 0)
    return y.tolist() if group.rank == 0 else None


def bcast(comm: Any, MPI: Any) -> Any:
    x = mine(comm)
    comm.Bcast(x, root=0)
    return x.tolist()


@row("comm.Bcast(x, root=0)", bcast)
def broadcast(group):
    x = mine(group)
    group.broadcast(x, 0)
    return x.tolist()


@row(
    "comm.Allgather(x, y)",
    lambda comm, MPI: [called("Allgather", 3 * RANKS)(comm, MPI), called("Alltoall", 3)(comm, MPI)],
)
def all_gather_and_all_to_all(group):
    y, z = np.zeros(3 * group.size), np.zeros(3)
    group.all_gather_single(y, mine(group))
    group.all_to_all_single(z, mine(group))
    return [y.tolist(), z.tolist()]


def gather_scatter(comm: Any, MPI: Any) -> Any:
    y, x = np.zeros(3 * RANKS), np.zeros(3)
    comm.Gather(mine(comm), y, root=0)
    comm.Scatter(y, x, root=0)
    return x.tolist()


@row("comm.Gather(x, y, root=0)", gather_scatter)
def gather_and_scatter(group):
    y, x = np.zeros(3 * group.size) if group.rank == 0 else None, np.zeros(3)
    group.gather_single(y, mine(group), 0)
    group.scatter_single(x, y, 0)
    return x.tolist()


@row("comm.Reduce_scatter_block(x, y)", called("Reduce_scatter_block", 1))
def reduce_scatter(group):
    y = np.zeros(1)
    group.reduce_scatter_single(y, mine(group))
    return y.tolist()


@row("comm.bcast(obj)", lambda comm, MPI: [comm.bcast({"from": comm.rank}), comm.allgather([comm.rank])])
def objects(group):
    return [group.broadcast_object({"from": group.rank}, 0), group.all_gather_object([group.rank])]


@row("comm.gather(obj)", lambda comm, MPI: [comm.gather([comm.rank]), comm.scatter(["a", "b", "c"])])
def objects_at_a_root(group):
    objs = ["a", "b", "c"] if group.rank == 0 else None
    return [group.gather_object([group.rank], 0), group.scatter_object(objs, 0)]


def messages(comm: Any, MPI: Any) -> Any:
    x = mine(comm)
    if comm.rank == 0:
        comm.Send(x, dest=1, tag=7)
    elif comm.rank == 1:
        comm.Recv(x, source=MPI.ANY_SOURCE, tag=7)
    return x.tolist()


@row("comm.Send(x, dest=1, tag=7)", messages)
def send_and_receive(group):
    x = mine(group)
    if group.rank == 0:
        group.send(x, 1, tag=7)
    elif group.rank == 1:
        assert group.recv(x, symcomm.ANY_SOURCE, tag=7) == 0
    return x.tolist()


def ring(comm: Any, MPI: Any) -> Any:
    y = np.zeros(3)
    request = comm.Isend(mine(comm), dest=(comm.rank + 1) % comm.size)
    comm.Recv(y, source=(comm.rank - 1) % comm.size)
    request.Wait()
    return y.tolist()


@row("req = comm.Isend(...)", ring)
def isend(group):
    y = np.zeros(3)
    work = group.isend(mine(group), (group.rank + 1) % group.size)
    group.recv(y, (group.rank - 1) % group.size)
    work.wait()
    return y.tolist()


def iallreduce(comm: Any, MPI: Any) -> Any:
    y = np.zeros(3)
    comm.Iallreduce(mine(comm), y).Wait()
    return y.tolist()


@row("req = comm.Iallreduce(...)", iallreduce)
def asynchronous(group):
    x = mine(group)
    work = group.all_reduce(x, async_op=True)
    work.wait()
    return x.tolist()


def split_mpi(comm: Any, MPI: Any) -> Any:
    part = comm.Split(comm.rank % 2, -comm.rank)
    found = [part.rank, part.size]
    part.Free()
    return found


@row("comm.Split(color, key)", split_mpi)
def split(group):
    part = group.split(group.rank % 2, -group.rank)
    found = [part.rank, part.size]
    part.destroy()
    return found


def window_mpi(comm: Any, MPI: Any) -> Any:
    x, got = np.zeros(3), np.zeros(3)
    window = MPI.Win.Create(x, comm=comm)
    right = (comm.rank + 1) % comm.size
    window.Fence()
    window.Put(np.array([comm.rank + 0.5]), right, target=(8, 1, MPI.DOUBLE))
    window.Fence()
    window.Get(got, right)
    window.Fence()
    window.Free()
    return [x.tolist(), got.tolist()]


@row("MPI.Win.Create(x, comm=comm)", window_mpi)
def window(group):
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, dtype=torch.float64)
    ours, right = group.new_window(x), (group.rank + 1) % group.size
    ours.put(torch.tensor([group.rank + 0.5], dtype=torch.float64), right, 1)
    group.barrier()
    found = [x.tolist(), ours.map_remote_tensor(right).tolist()]
    group.barrier()
    ours.tensor_deregister()
    return found


@row("mpirun -n 4 python script.py")
def mpirun(group):
    """tests/launcher/test_launch_conventions.py starts ranks as mpirun does."""


@row("a rank that dies ends the job")
def a_death(group):
    part = group.split(0)
    if group.rank == 2:
        part.destroy()
        return
    with pytest.raises(symcomm.errors.RankFailedError):
        part.barrier()
    smaller = part.shrink()
    x = np.ones(1)
    smaller.all_reduce(x)
    assert (smaller.size, x.tolist()) == (2, [2.0])
    smaller.destroy()
    return


# --- what Symcomm has not ----------------------------------------------------------------------------------------


def send_object(comm: Any, MPI: Any) -> Any:
    if comm.rank == 0:
        comm.send({"a": [1, 2]}, dest=1)
    return comm.recv(source=0) if comm.rank == 1 else None


@row("comm.send(obj, dest=1)", send_object)
def an_object(group):
    if group.rank == 0:
        data = np.frombuffer(pickle.dumps({"a": [1, 2]}), "u1")
        group.send(np.array([data.size]), 1)
        group.send(data, 1)
    if group.rank == 1:
        size = np.zeros(1, int)
        group.recv(size, 0)
        data = np.zeros(size[0], "u1")
        group.recv(data, 0)
        return pickle.loads(data.tobytes())
    return None


COUNTS = [1, 2, 3]


def all_gather_v(comm: Any, MPI: Any) -> Any:
    y = np.zeros(6)
    comm.Allgatherv(mine(comm)[: COUNTS[comm.rank]], [y, COUNTS])
    return y.tolist()


@row("comm.Allgatherv(x, [y, counts])", all_gather_v)
def of_different_sizes(group):
    y = np.zeros(6)
    group.all_gather(np.split(y, np.cumsum(COUNTS)[:-1]), mine(group)[: COUNTS[group.rank]])
    return y.tolist()


def sendrecv(comm: Any, MPI: Any) -> Any:
    y = np.zeros(3)
    comm.Sendrecv(mine(comm), (comm.rank + 1) % comm.size, recvbuf=y, source=(comm.rank - 1) % comm.size)
    return y.tolist()


@row("comm.Sendrecv(x, right, recvbuf=y, source=left)", sendrecv)
def both_ways(group):
    y = np.zeros(3)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for work in group.batch([Message.send(mine(group), right), Message.receive(y, left)]):
        work.wait()
    return y.tolist()


@row(
    "comm.Scan(x, y)",
    lambda comm, MPI: [called("Scan", 3)(comm, MPI), called("Exscan", 3)(comm, MPI)],
)
def prefixes(group):
    every = np.zeros(3 * group.size)
    group.all_gather_single(every, mine(group))
    rows = every.reshape(group.size, -1)
    return [rows[: group.rank + 1].sum(0).tolist(), rows[: group.rank].sum(0).tolist()]


def maxloc(comm: Any, MPI: Any) -> Any:
    return comm.allreduce((float(-((comm.rank - 1) ** 2)), comm.rank), op=MPI.MAXLOC)


@row("op=MPI.MAXLOC", maxloc)
def where_the_largest_is(group):
    every = np.zeros(group.size)
    group.all_gather_single(every, np.array([float(-((group.rank - 1) ** 2))]))
    return [every.max(), int(every.argmax())]


def logical(comm: Any, MPI: Any) -> Any:
    flag, found = np.array([comm.rank > 0, True]), []
    for op in (MPI.LAND, MPI.LOR):
        y = np.zeros(2, bool)
        comm.Allreduce(flag, y, op=op)
        found.append(y.tolist())
    return found


@row("op=MPI.LAND", logical)
def logical_operations(group):
    found = []
    for op in ("min", "max"):
        flag = np.array([group.rank > 0, True])
        group.all_reduce(flag, op)
        found.append(flag.tolist())
    return found


def probe(comm: Any, MPI: Any) -> Any:
    if comm.rank:
        comm.Send(mine(comm)[: comm.rank], dest=0, tag=comm.rank)
        return None
    found, status = {}, MPI.Status()
    for _ in range(comm.size - 1):
        comm.Probe(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        x = np.zeros(status.Get_count(MPI.DOUBLE))
        comm.Recv(x, source=status.source, tag=status.tag)
        found[str(status.source)] = x.tolist()
    return found


@row("MPI.ANY_TAG", probe)
def what_comes_is_said_first(group):
    if group.rank:
        group.send(np.array([group.rank]), 0, tag=1)
        group.send(mine(group)[: group.rank], 0, tag=2)
        return None
    found, head, x = {}, np.zeros(1, int), np.zeros(3)
    for _ in range(group.size - 1):
        sender = group.recv(head, symcomm.ANY_SOURCE, tag=1)
        group.recv(x[: head[0]], sender, tag=2)
        found[str(sender)] = x[: head[0]].tolist()
    return found


def column(comm: Any, MPI: Any) -> Any:
    x = np.full((3, 4), float(comm.rank))
    kind = MPI.DOUBLE.Create_vector(3, 1, 4).Commit()
    comm.Bcast([x, 1, kind], root=1)
    kind.Free()
    return x.tolist()


@row("MPI.DOUBLE.Create_vector(...)", column)
def a_view(group):
    x = np.full((3, 4), float(group.rank))
    group.broadcast(x[:, 0], 1)
    return x.tolist()


def waitall(comm: Any, MPI: Any) -> Any:
    ys = [np.zeros(3) for _ in range(comm.size)]
    requests = [comm.Irecv(y, source=r) for r, y in enumerate(ys)]
    requests += [comm.Isend(mine(comm), dest=r) for r in range(comm.size)]
    MPI.Request.Waitall(requests)
    return [y.tolist() for y in ys]


@row("MPI.Request.Waitall(requests)", waitall)
def several_works(group):
    others = [r for r in range(group.size) if r != group.rank]
    ys = {r: np.zeros(3) for r in others}
    works = [group.irecv(y, r) for r, y in ys.items()] + [group.isend(mine(group), r) for r in others]
    for work in works:
        work.wait()
    return [(ys[r] if r in ys else mine(group)).tolist() for r in range(group.size)]


def persistent(comm: Any, MPI: Any) -> Any:
    x, found = mine(comm), []
    request = comm.Send_init(x, dest=1) if comm.rank == 0 else comm.Recv_init(x, source=0)
    for _ in range(2 * (comm.rank < 2)):
        request.Start()
        request.Wait()
        found.append(x.tolist())
        x += 1
    request.Free()
    return found


@row("comm.Send_init(...)", persistent)
def again(group):
    x, found = mine(group), []
    for _ in range(2 * (group.rank < 2)):
        group.send(x, 1) if group.rank == 0 else group.recv(x, 0)
        found.append(x.tolist())
        x += 1
    return found


def grid(comm: Any, MPI: Any) -> Any:
    cart = comm.Create_cart([1, RANKS])
    line = cart.Sub([False, True])
    return [*cart.Get_coords(cart.rank), line.rank, line.size]


@row("comm.Create_cart(dims)", grid)
def a_grid(group):
    row_of, column_of = np.unravel_index(group.rank, [1, RANKS])
    line = group.split(int(row_of), int(column_of))
    return [int(row_of), int(column_of), line.rank, line.size]


@row("comm.Split_type(MPI.COMM_TYPE_SHARED)", lambda comm, MPI: comm.Split_type(MPI.COMM_TYPE_SHARED).size)
def of_one_host(group):
    names = group.all_gather_object(socket.gethostname())
    return group.split(names.index(names[group.rank])).size


def buffers(comm: Any, MPI: Any) -> Any:
    x = array.array("d", [comm.rank, 1])
    comm.Allreduce(MPI.IN_PLACE, x)
    return list(x)


@row("array.array", buffers)
def other_buffers(group):
    x = array.array("d", [group.rank, 1])
    group.all_reduce(np.frombuffer(x, "d"))
    return list(x)


# --- tests -----------------------------------------------------------------------------------------------------------


def cells() -> list[str]:
    """The first cells of both tables."""
    section = PAGE.read_text().partition("## mpi4py\n")[2].partition("\n## ")[0]
    return [line.split(" | ")[0].strip("| ") for line in section.splitlines() if re.match(r"\| (?!---|mpi4py )", line)]


def test_every_row_has_its_example():
    told = [cell.replace("`", "") for cell in cells()]
    assert len(told) == len(ROWS) == 31
    assert [next((cell for cell in ROWS if text.startswith(cell)), text) for text in told] == list(ROWS)


@pytest.fixture(scope="module")
def by_mpi() -> list[dict[str, Any]]:
    """What mpi4py finds, by rank."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("neither mpi4py nor mpiexec")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    command = [launcher, "-n", str(RANKS), sys.executable, "-m", "tests.group.test_coming_from_mpi4py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("cell", [cell for cell, (mpi, _) in ROWS.items() if mpi is not None])
def test_a_row_gives_what_mpi4py_gives(cell: str, by_mpi: list[dict[str, Any]]):
    found = symcomm.spawn(ROWS[cell][1], RANKS, mode="threads", deadline=30.0)
    assert json.loads(json.dumps(found)) == [rank[cell] for rank in by_mpi]


@pytest.mark.parametrize("cell", [cell for cell, (mpi, _) in ROWS.items() if mpi is None])
def test_a_row_that_mpi4py_cannot_run_here(cell: str):
    symcomm.spawn(ROWS[cell][1], RANKS, mode="threads", deadline=30.0)


def main() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found = comm.gather({cell: mpi(comm, MPI) for cell, (mpi, _) in ROWS.items() if mpi is not None})
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
