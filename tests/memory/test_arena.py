"""The arena: its bookkeeping, what it takes from the system and gives back, and how ranks come to share it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.memory import arena as arena_module
from symcomm.memory import hosts, limits, share
from symcomm.memory.arena import Arena, use_arena
from symcomm.memory.heap import PAGE, Heap
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch

MIB = 1 << 20


@pytest.fixture
def arena():
    return Arena()


# --- the heap, against a model ---------------------------------------------------------------------

START, END = PAGE, 64 * PAGE
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 9 * PAGE), st.sampled_from([PAGE, 4 * PAGE])),
        st.tuples(st.just("give"), st.integers(0, 1 << 16), st.just(0)),
    ),
    max_size=60,
)


def gaps(taken: dict[int, int]) -> list[tuple[int, int]]:
    """What a heap with these ranges in use must report as free."""
    found, at = [], START
    for offset in sorted(taken):
        if offset > at:
            found.append((at, offset - at))
        at = offset + taken[offset]
    return [*found, (at, END - at)] if at < END else found


@settings(max_examples=200, deadline=None)
@given(steps)
def test_heap_against_a_model(actions):
    heap, taken, peak = Heap(START, END), {}, 0
    for action, number, align in actions:
        if action == "take":
            need = max(number, 1) + -max(number, 1) % align
            offset = heap.allocate(number, align)
            if offset is None:
                assert all(start + -start % align + need > start + length for start, length in gaps(taken))
                continue
            assert offset % align == 0 and offset >= START and offset + need <= END
            assert all(offset >= o + n or offset + need <= o for o, n in taken.items()), "ranges overlap"
            taken[offset] = need
            assert heap.length_of(offset) == need
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            assert heap.free(offset) == (offset, taken.pop(offset))
        peak = max(peak, sum(taken.values()))
        assert heap.used_bytes == sum(taken.values())
        assert heap.free_ranges == gaps(taken), "neighbours must merge"
    assert heap.peak_bytes == peak
    for offset in list(taken):
        heap.free(offset)
    assert heap.free_ranges == [(START, END - START)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "keep", "merge"]), st.integers(0, 9 * PAGE)), max_size=60))
def test_kept_ranges_against_a_model(actions):
    heap, taken, kept = Heap(START, END), {}, {}
    for action, number in actions:
        need = max(number, 1) + -max(number, 1) % PAGE
        if action == "take":
            fits = [offset for offset, length in kept.items() if length == need]
            offset = heap.take_kept(number)
            assert (offset in fits) if fits else offset is None, "only a range of the same length"
            if fits:
                taken[offset] = kept.pop(offset)
            elif (offset := heap.allocate(number)) is not None:
                assert all(offset >= o + n or offset + need <= o for o, n in (taken | kept).items())
                taken[offset] = need
        elif action == "keep" and taken:
            offset = sorted(taken)[number % len(taken)]
            heap.keep(offset)
            kept[offset] = taken.pop(offset)
        elif action == "merge":
            heap.merge_kept()
            kept.clear()
        assert heap.used_bytes == sum(taken.values())
        assert heap.free_ranges == gaps(taken | kept)


def test_freeing_twice_is_an_error():
    heap = Heap(START, END)
    offset = heap.allocate(1)
    heap.free(offset)
    with pytest.raises(KeyError):
        heap.free(offset)


# --- memory comes and goes ---------------------------------------------------------------------------


def shared_resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024


def test_memory_grows_and_is_returned(arena):
    before_resident, before = shared_resident(), arena.reserved_bytes
    view = arena.buffer(200 * MIB)
    ctypes.memset(view, 7, len(view))
    assert arena.reserved_bytes - before == 200 * MIB
    assert shared_resident() - before_resident >= 199 * MIB
    del view
    assert arena.used_bytes == 0 and arena.peak_bytes == 200 * MIB
    assert arena.idle_bytes == 200 * MIB, "kept for the next allocation"
    assert arena.trim() == 200 * MIB
    assert arena.reserved_bytes == before and arena.idle_bytes == 0
    assert shared_resident() - before_resident < 20 * MIB
    assert arena.trim() == 0


def test_idle_pages_are_reused_and_bounded(arena, monkeypatch):
    monkeypatch.setattr(arena_module, "KEEP_BYTES", 4 * MIB)
    for _ in range(20):  # far more than KEEP_BYTES in sum: the same pages every time
        arena.free(arena.allocate(2 * MIB))
    assert arena.idle_bytes == 2 * MIB
    first, second = arena.allocate(3 * MIB), arena.allocate(3 * MIB)
    arena.free(first)
    arena.free(second)
    assert arena.idle_bytes <= 4 * MIB
    assert arena.reserved_bytes <= 5 * MIB


def test_a_range_of_a_length_seen_before_costs_no_system_call(arena, monkeypatch):
    arena.free(arena.allocate(2 * MIB))
    with monkeypatch.context() as patch:
        patch.setattr(arena_module.native, "set_pages", None)
        patch.setattr(arena_module, "check_room", None)
        offset = arena.allocate(2 * MIB)
        arena.free(offset)
        assert arena.allocate(2 * MIB) == offset
    arena.free(offset)
    longer = arena.allocate(3 * MIB)
    assert longer == offset and arena.reserved_bytes < 4 * MIB, "other lengths use the same pages"
    arena.free(longer)


def test_fresh_pages_are_zero_after_trim(arena):
    offset = arena.allocate(PAGE)
    native.poke(arena.base + offset, b"x" * PAGE)
    arena.free(offset)
    arena.trim()
    assert arena.allocate(PAGE) == offset
    assert native.peek(arena.base + offset, PAGE) == bytes(PAGE)


def test_a_finalizer_may_run_while_the_lock_is_held(arena):
    """The garbage collector runs where it likes, also in the middle of allocate()."""
    view = arena.buffer(PAGE)
    with arena._lock, arena._alone():
        del view
        gc.collect()
        assert arena.used_bytes == PAGE, "cannot be taken back yet"
    other = arena.allocate(PAGE)
    assert arena.used_bytes == PAGE
    arena.free(other)


def test_many_threads(arena):
    failures = []

    def work(seed: int) -> None:
        for i in range(200):
            view = arena.buffer(PAGE * (1 + (seed + i) % 5))
            ctypes.memset(view, seed, len(view))
            if view.raw != bytes([seed]) * len(view):
                failures.append(seed)
            del view

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert arena.used_bytes == 0


def test_huge_page_advice_does_no_harm(arena):
    assert arena.huge_pages in (True, False)
    view = arena.buffer(8 * MIB)
    ctypes.memset(view, 1, len(view))
    assert view[8 * MIB - 1] == b"\1"


def _fork_and_drop(rank: int, world: int) -> tuple[bytes, int, int, int]:
    arena = arena_module.current_arena()
    view = arena.buffer(MIB)
    view[:4] = b"mine"
    child = os.fork()
    if child == 0:
        try:
            del view
            gc.collect()
            own = arena_module.current_arena()
            kept = own.buffer(PAGE)
            kept[:4] = b"hers"
            os._exit(0 if own is not arena and arena.used_bytes == MIB else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    arena.trim()
    return view[:4], os.waitstatus_to_exitcode(status), arena.used_bytes, world


def test_a_forked_child_does_not_free_our_memory():
    assert run_ranks(_fork_and_drop, 1) == [(b"mine", 0, MIB, 1)]


# --- too little memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "room", "says"),
    [
        ("system_room", (MIB, "MemAvailable in /proc/meminfo"), r"MemAvailable.*free memory"),
        ("cgroup_room", (MIB, "/sys/fs/cgroup/job/memory.max = 2 MiB"), r"memory\.max = 2 MiB.*docker run --memory"),
    ],
)
def test_too_little_memory_names_limit_and_fix(arena, monkeypatch, where, room, says):
    monkeypatch.setattr(limits, where, lambda *_: room)
    with pytest.raises(errors.ResourceError, match=rf"16 MiB asked, 1 MiB left.*{says}"):
        arena.allocate(16 * MIB)
    assert arena.used_bytes == 0
    arena.allocate(MIB // 2)


def test_a_small_mount_is_named(tmp_path, monkeypatch):
    arena = Arena(str(tmp_path))
    arena.unlink()

    class Small:
        f_bavail, f_frsize = 256, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(errors.ResourceError, match=r"1 MiB left \(free space in .*--shm-size"):
        arena.allocate(2 * MIB)


def test_a_small_mount_for_real(tmp_path, monkeypatch):
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    try:
        arena = Arena(str(tmp_path))
        arena.unlink()
        arena.allocate(2 * MIB)
        with pytest.raises(errors.ResourceError, match=r"8 MiB asked, .* left \(free space in"):
            arena.allocate(8 * MIB)
        monkeypatch.setattr(limits, "_mount_room", lambda directory: (1 << 62, "a dream"))
        with pytest.raises(errors.ResourceError, match="the kernel refused 8 MiB"):
            arena.allocate(8 * MIB)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_what_the_kernel_refuses_is_an_error_and_not_a_signal(arena, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "native", types.SimpleNamespace(set_pages=refuse, is_isolated=native.is_isolated))
        with pytest.raises(errors.ResourceError, match=r"the kernel refused 4 MiB \(No space left on device\)"):
            arena.allocate(4 * MIB)
    assert arena.used_bytes == 0


def test_more_than_the_arena(arena, monkeypatch):
    monkeypatch.setattr(limits, "system_room", lambda: (1 << 62, "a dream"))
    monkeypatch.setattr(limits, "cgroup_room", lambda *_: None)
    with pytest.raises(errors.ResourceError, match="of this rank's .* are in use; free some tensors"):
        arena.allocate(2 * arena.nbytes)


# --- who may map it --------------------------------------------------------------------------------------


class FakeSocket:
    def __init__(self, uid: int):
        self.uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.pack("3i", 4711, self.uid, 0)


def test_another_user_is_refused():
    share._check_user(FakeSocket(os.getuid()))  # type: ignore[arg-type]
    with pytest.raises(errors.ResourceError, match=rf"process 4711 of user id {os.getuid() + 1} answers for rank 0"):
        share._check_user(FakeSocket(os.getuid() + 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"boot": "other"}, {"net": "other"}, {"host_id": "other"}], ids=str)
def test_ranks_that_cannot_share_are_on_different_hosts(change):
    info = {"boot": "b", "uid": 1, "net": "n", "path": None}
    assert hosts.hosts_of([info, info]) == [[0, 1]]
    assert hosts.hosts_of([info, info | change, info]) == [[0, 2], [1]]


def test_ranks_whose_arenas_lost_their_names_share_what_they_have_mapped():
    """Two containers with a /dev/shm of their own, two ranks in each, once they have been in a group."""
    nonces = [secrets.token_bytes(16) for _ in range(4)]
    infos = [
        {
            "boot": "b", "uid": 1, "net": f"n{r // 2}", "named": True, "path": None, "nonce": nonces[r].hex(),
            "mapped": hosts.short(nonces[r // 2 * 2 : r // 2 * 2 + 2]),
        }
        for r in range(4)
    ]  # fmt: skip
    assert hosts.hosts_of(infos) == [[0, 1], [2, 3]]
    assert hosts.hosts_of([info | {"mapped": hosts.short(nonces)} for info in infos]) == [[0, 1, 2, 3]]
    assert hosts.hosts_of([info | {"path": "/dev/shm/x"} for info in infos]) == [[0, 1, 2, 3]]


def test_ranks_of_different_users_are_refused():
    info = {"boot": "b", "uid": 1, "net": "n", "path": None}
    with pytest.raises(errors.ResourceError, match=r"rank 1 as 7; start all ranks as one user"):
        hosts.hosts_of([info, info | {"uid": 7}])


def test_ranks_on_different_versions_are_refused():
    def other(rank: int, item: bytes) -> bytes:
        return json.dumps(json.loads(item) | ({"version": "9.8.7"} if rank == 1 else {})).encode()

    def older(rank: int, item: bytes) -> bytes:
        return json.dumps({k: v for k, v in json.loads(item).items() if rank or k != "version"}).encode()

    for forge, words in (
        (other, f"rank 0 runs Symcomm {symcomm.__version__} and rank 1 9.8.7; install one version for all ranks."),
        (older, f"rank 0 runs Symcomm an older version and rank 1 {symcomm.__version__}; install one version"),
    ):
        for error in _meet(3, forge):
            assert type(error) is errors.ResourceError and words in str(error)


def _meet(world: int, forge) -> list:
    """connect() on threads; ``forge(rank, info)`` may change what a rank publishes."""
    barrier = threading.Barrier(world, timeout=20)
    items: list[bytes] = [b""] * world
    results: list = [None] * world

    def exchange_of(rank: int):
        def exchange(item: bytes) -> list[bytes]:
            items[rank] = forge(rank, item)
            barrier.wait()
            everyone = list(items)
            barrier.wait()
            return everyone

        return exchange

    def run(rank: int) -> None:
        use_arena(Arena())
        try:
            results[rank] = share.connect(rank, world, exchange_of(rank), {"rank": rank}, 10.0)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_connect_maps_everybody():
    results = _meet(3, lambda rank, item: item)
    for found in results:
        assert [p.base for p in found.peers] == [p.base for p in results[0].peers]
        assert found.hosts == [[0, 1, 2]] and found.extras == [{"rank": r} for r in range(3)]


def test_a_wrong_nonce_is_refused():
    def forge(rank: int, item: bytes) -> bytes:
        if rank != 1 or not item.startswith(b"{"):
            return item
        return json.dumps(json.loads(item) | {"nonce": "ab" * 16}).encode()

    for result in _meet(2, forge):
        assert isinstance(result, errors.SymcommError)
        assert "rank 1's memory was mapped but holds another nonce" in str(result)


def test_what_is_not_an_arena_is_refused(tmp_path):
    with open(tmp_path / "junk", "w+b") as file:
        file.truncate(PAGE)
        with pytest.raises(errors.ResourceError, match="not an arena"):
            arena_module.Peer.map(file.fileno(), PAGE)


# --- nothing is left behind ------------------------------------------------------------------------------


def _fill_and_say(rank: int, world: int, path: str, nbytes: int) -> None:
    from symcomm.group.default import join_ranks
    from symcomm.group.factory import make_group
    from symcomm.store import FileStore

    group = join_ranks(FileStore(path, world), rank, world, 30.0, make_group)
    view = group.arena.buffer(nbytes)
    ctypes.memset(view, 1, nbytes)
    assert native.peek(group.peers[1 - rank].base, 8), "the peer's memory is mapped"
    group.barrier()
    Path(f"{path}.ready{rank}").touch()
    time.sleep(60)


ARENA = re.compile(r"memfd:symcomm|/symcomm-[0-9a-f]{32}")


def arenas_held_by(pid: int) -> set[int]:
    """Inodes of arenas that a process has open or mapped: the memory of one is gone when it is in nobody's set."""
    held = set()
    with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if ARENA.search(os.readlink(fd)):
                    held.add(os.stat(fd).st_ino)
        held |= {
            int(line.split()[4]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if ARENA.search(line)
        }
    return held


def named_files(directory: str) -> set[str]:
    return {name for name in os.listdir(directory) if name.startswith("symcomm-")}


@pytest.mark.parametrize("way", ["fd", "named"])
def test_nothing_is_left_after_sigkill(tmp_path, monkeypatch, way):
    directory = os.environ["SYMCOMM_SHM_DIR"]
    if way == "named":
        directory = str(tmp_path / "shm")
        os.mkdir(directory)
        monkeypatch.setenv("SYMCOMM_SHARE", "named")
        monkeypatch.setenv("SYMCOMM_SHM_DIR", directory)
    before = named_files(directory)
    arenas: set[int] = set()

    def kill_all(processes) -> None:
        deadline = time.monotonic() + 40
        ready = [tmp_path / f"store.ready{r}" for r in range(2)]
        while not all(p.exists() for p in ready) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(p.exists() for p in ready)
        assert named_files(directory) == before, "names go as soon as everybody has mapped the memory"
        arenas.update(*(arenas_held_by(process.pid) for process in processes))
        links = [os.readlink(fd) for fd in Path(f"/proc/{processes[0].pid}/fd").iterdir()]
        assert sum("symcomm" in link for link in links) == 1, "a rank holds its own memory open, and nobody else's"
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)

    outcomes = run_ranks(_fill_and_say, 2, str(tmp_path / "store"), MIB, deadline=60, outcomes=True, during=kill_all)
    assert [o.text for o in outcomes] == ["SIGKILL", "SIGKILL"]
    assert named_files(directory) == before
    assert len(arenas) == 2, "each had one"
    holders = {pid: arenas_held_by(int(pid)) & arenas for pid in os.listdir("/proc") if pid.isdigit()}
    assert not any(holders.values()), "what nobody holds is gone"


def test_sharing_by_name_is_used_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMCOMM_SHARE", "named")
    monkeypatch.setenv("SYMCOMM_SHM_DIR", str(tmp_path))
    (paths,) = run_ranks(_path_of_arena, 1)
    assert paths[0].startswith(str(tmp_path)) and paths[1] == 0o600


def _path_of_arena(rank: int, world: int) -> tuple[str, int]:
    arena = arena_module.current_arena()
    path = arena.path
    assert path is not None
    mode = os.stat(path).st_mode & 0o777
    arena.unlink()
    assert not os.path.exists(path)
    return path, mode


def test_named_arenas_of_the_dead_are_swept(tmp_path):
    dead, young, other = (tmp_path / name for name in ("symcomm-dead", "symcomm-young", "else"))
    for path in (dead, young, other):
        path.touch()
    live = Arena(str(tmp_path))
    assert live.path is not None
    for path in (dead, other, Path(live.path)):
        os.utime(path, (1, 1))
    second = Arena(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {
        "symcomm-young",
        "else",
        os.path.basename(live.path),
        os.path.basename(second.path or ""),
    }
    live.unlink()
    second.unlink()
    assert live.path is None and {p.name for p in tmp_path.iterdir()} == {"symcomm-young", "else"}


def test_too_few_addresses_are_an_error_of_ours(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(native, "map_shared", refuse)
    with pytest.raises(errors.ResourceError, match=r"mapping .* of addresses failed .*ulimit -v unlimited"):
        Arena(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_small_allocations_do_not_ask_every_time(arena, monkeypatch):
    asked = []
    monkeypatch.setattr(arena_module, "check_room", lambda nbytes, directory: asked.append(nbytes))
    for _ in range(100):
        arena.free(arena.allocate(PAGE))
    assert asked == [PAGE]
    arena.free(arena.allocate(MIB))
    assert asked == [PAGE, MIB]


def arenas_mapped() -> tuple[int, int]:
    """(descriptors, mappings) of arenas in this process."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:symcomm" in link for link in links), sum("memfd:symcomm" in line for line in maps)


def _use_it(group):
    view = group.arena.buffer(PAGE)
    view[:4] = b"%04d" % group.rank
    group.split(group.rank % 2).barrier()
    group.barrier()
    return view


def test_arenas_of_threads_go_with_what_uses_them():
    gc.collect()
    before = arenas_mapped()
    kept = []
    for _ in range(5):
        kept = symcomm.spawn(_use_it, 3, mode="threads", timeout=20, deadline=40)
    gc.collect()
    assert arenas_mapped() == (before[0] + 3, before[1] + 3), "tensors that were returned stay valid"
    assert [view[:4] for view in kept] == [b"0000", b"0001", b"0002"]
    kept.clear()
    gc.collect()
    assert arenas_mapped() == before
