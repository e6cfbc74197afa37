"""Groups that are made, destroyed and made again in one process: under every launcher, and with nothing left behind."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.programs import find_mpirun, run, run_loaded
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

PROGRAM = ["-m", "tests.support.life_program"]

LIVES = int(os.environ.get("SYMCOMM_LIVES", "15"))  # of a process; `make soak` wants 100


def launch(launcher: str, folder: Path, cycles: dict[str, int]) -> str:
    program = [*PROGRAM, str(folder), *[str(word) for pair in cycles.items() for word in pair]]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
        return run_loaded(*command, deadline=110)
    if launcher == "symcomm run":
        return run_loaded("-m", "symcomm", "run", "-n", "2", *program, deadline=110)
    if launcher == "spawn":
        return run_loaded(*program, "spawn", deadline=110)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if launcher == "mpirun":
        mpirun = find_mpirun()
        if mpirun is None:
            pytest.skip("no mpirun: install the dev extra")
        place["PMIX_MCA_gds"] = "hash"
        return run(mpirun, "-n", "2", sys.executable, *program, deadline=110, **place)
    place["WORLD_SIZE"] = "3"
    with ThreadPoolExecutor(3) as pool:
        return "".join(pool.map(lambda rank: run_loaded(*program, deadline=110, **place, RANK=rank), "012"))


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("launcher", "cycles"),
    [
        ("torchrun", {"torch": LIVES, "symcomm": 10}),
        ("symcomm run", {"symcomm": LIVES, "torch": 10}),
        ("mpirun", {"torch": 20, "symcomm": 10}),
        ("spawn", {"torch": LIVES}),
        ("by hand", {"symcomm": LIVES, "torch": 10}),
    ],
)
def test_init_and_destroy_again_and_again(launcher: str, cycles: dict[str, int], tmp_path: Path):
    said = launch(launcher, tmp_path, cycles)
    for rank in range(3 if launcher == "by hand" else 2):
        for api, count in cycles.items():
            assert f"rank {rank}: {count} cycles of {api}" in said, said


# --- what is left of one group ------------------------------------------------------------------------------------

ALONE = """
import gc, os, socket, sys
import torch, torch.distributed as dist
from symcomm.torch_backend.register import register
register()
gc.disable()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]
def listens():
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
"""


def _printed(rank: int, world: int, code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def printed_by(code: str) -> str:
    """What a program says that has a process to itself."""
    return run_ranks(_printed, 1, code)[0]


def test_the_port_is_free_while_the_old_group_is_still_held():
    out = printed_by(
        ALONE
        + """
dist.init_process_group("symcomm", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
held = [dist.group.WORLD, dist.new_group([0])]
x = torch.ones(3); dist.all_reduce(x)
before = listens()
dist.destroy_process_group()
print(before, listens(), len(held))
"""
    )
    assert out.split() == ["True", "False", "2"]


def test_our_own_store_ends_with_the_group():
    out = printed_by(
        ALONE
        + """
import symcomm
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
held = symcomm.init()
before = listens()
symcomm.destroy()
print(before, listens(), held.store)
"""
    )
    assert out.split() == ["True", "False", "None"]


def test_a_store_that_was_given_is_the_callers():
    out = printed_by(
        ALONE
        + """
import symcomm
from symcomm.store import TCPStore
store = TCPStore("127.0.0.1", port, 1, is_master=True)
group = symcomm.init(store=store, rank=0, world_size=1)
symcomm.destroy()
print(listens())
dist.init_process_group("symcomm", store=store, rank=0, world_size=1)
dist.destroy_process_group()
print(listens())
del store, group
print(listens())
"""
    )
    assert out.split() == ["True", "True", "False"]


def test_a_forked_child_can_collect_what_its_parent_had():
    """It must not run the destructor of a store whose threads it does not have."""
    out = printed_by(
        ALONE
        + """
dist.init_process_group("symcomm", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
held = dist.group.WORLD
dist.destroy_process_group()
pid = os.fork()
if pid == 0:
    del held
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert out.split() == ["7"]


def test_groups_of_the_newest_interface_go_when_they_are_dropped():
    """Nobody calls shutdown(); the next one meets in the same store."""
    out = printed_by(
        ALONE
        + """
import threading, weakref
from datetime import timedelta
from symcomm.torch_backend.torch_patches.dist2 import dist2_group as make
from symcomm.memory.arena import current_arena
store = dist.HashStore()
used = []
for number in range(5):
    group = make(store, 0, 1, timedelta(seconds=20), torch.device("cpu"))
    x = torch.ones(2); group.allreduce([x], dist.AllreduceOptions()).wait()
    gone = weakref.ref(group)
    del group
    assert gone() is None, number
    used.append(current_arena().used_bytes)
print(len(set(used)), store.num_keys())
"""
    )
    assert out.split() == ["1", "0"]


def test_a_newer_torch_than_any_tested_is_told_once():
    out = run_loaded(
        "-c",
        "import warnings, torch, torch.distributed as dist\n"
        "from symcomm.torch_backend.register import register; register()\n"
        "torch.__version__ = '9.1.0+cpu'\n"
        "with warnings.catch_warnings(record=True) as found:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        dist.init_process_group('symcomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "        x = torch.ones(2); dist.all_reduce(x); dist.destroy_process_group()\n"
        "print(*[w.message for w in found if 'symcomm' in str(w.message)], sep='\\n')\n",
    )
    from symcomm.torch_versions import NEWEST

    assert out.strip() == f"symcomm was tested with torch up to {NEWEST}; this is 9.1.0+cpu. `symcomm doctor` tries it."


def test_two_ranks_of_a_group_made_under_the_same_name_never_meet_the_old_one(tmp_path: Path):
    """new_group(use_local_synchronization=True) names a group by its members: each is the last one's namesake."""
    script = tmp_path / "namesakes.py"
    script.write_text(
        "import random, time, torch, torch.distributed as dist\n"
        "from symcomm.torch_backend.register import register; register()\n"
        "dist.init_process_group('symcomm')\n"
        "rank = dist.get_rank(); lag = random.Random(rank)\n"
        "for number in range(60):\n"
        "    group = dist.new_group([0, 1], use_local_synchronization=True)\n"
        "    x = torch.tensor([float(number)]); dist.all_reduce(x, group=group); assert x.item() == 2 * number\n"
        "    time.sleep(lag.choice((0, 0.002)))\n"
        "    dist.destroy_process_group(group)\n"
        "dist.destroy_process_group(); print('done', flush=True)\n"
    )
    out = run_loaded("-m", "symcomm", "run", "-n", "2", str(script), deadline=60)
    assert out.count("done") == 2, out
