"""The C core under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: ``make sanitize``.

Builds the extension with each of them in a temporary copy of the sources, then runs ``drive()`` there in a Python that
has the sanitizer's library preloaded. Ranks are threads: their shared memory is one address space then, so that
ThreadSanitizer sees the very synchronisation that processes rely on; a few run as processes too, which take other ways
through the core. Arrays are NumPy's, since torch is far too slow and noisy under a sanitizer; some are dressed up to
take torch's fast paths. Any report fails the run. ``python -m tests.tools.sanitize thread leaving`` runs one part.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
SECONDS = 600


# --- what is run under a sanitizer ---------------------------------------------------------------------------


if "SYMCOMM_SANITIZING" in os.environ:  # here and in ranks that are processes
    from symcomm.memory import arena

    arena.physical_bytes = lambda: 512 << 20  # ThreadSanitizer leaves too few addresses for the usual arenas


def drive(only: list[str]) -> None:
    import symcomm

    def chosen(*parts: Callable[..., None]) -> list[Callable[..., None]]:
        return [part for part in parts if part.__name__ in only or not only]

    for world in (1, 2, 3, 5):
        for part in chosen(collectives, messages, asynchronous, failures, fast_paths, one_sided, leaving):
            symcomm.spawn(part, world, mode="threads", timeout=60, deadline=SECONDS)
            print(f"  {part.__name__}, {world} ranks", flush=True)
    for part in chosen(collectives, messages, fast_paths, one_sided, leaving, interrupted):
        symcomm.spawn(part, 2, mode="processes", timeout=60, deadline=SECONDS)
        print(f"  {part.__name__}, 2 processes", flush=True)
    for part in chosen(lock_watch, held):
        symcomm.spawn(part, 2, mode="threads", deadline=SECONDS)
        print(f"  {part.__name__}, 2 ranks", flush=True)
    for part in chosen(reductions, many_tensors, store_server):
        part()
        print(f"  {part.__name__}", flush=True)


def symmetric(g, count, dtype="f4"):
    import numpy as np

    return np.frombuffer(g.arena.buffer(max(count, 1) * np.dtype(dtype).itemsize), dtype)[:count]


def collectives(g) -> None:
    import numpy as np

    from symcomm.collectives.select import Limits
    from symcomm.group.factory import make_group

    small = Limits(stage_bytes=8192, chunk_bytes=1024, one_shot_bytes=512, direct_bytes=2048,
                   attach_bytes=1024, attach_ranks=2)  # fmt: skip
    n, total = g.size, g.size * (g.size + 1) // 2
    for group in (g, make_group(g.rank, n, g.all_gather_bytes, "small", 60, small)):
        for count in (0, 1, 333, 20_001):
            for make in (lambda c: np.empty(c, "f4"), lambda c: symmetric(g, c)):
                t = make(count)
                t[:] = g.rank + 1
                group.all_reduce(t)
                assert (t == total).all()
                group.reduce(t, n - 1)
                group.broadcast(t, 0)
                out = make(count * n)
                group.all_gather_single(out, t)
                group.reduce_scatter_single(t, out)
                group.all_to_all_single(make(count * n), out)
                parts = [make(count) for _ in range(n)]
                group.gather(parts if g.rank == 0 else None, t, 0)
                group.scatter(t, parts if g.rank == 0 else None, 0)
                group.all_to_all([make(r + g.rank) for r in range(n)], [make(r + g.rank) for r in range(n)])
                group.barrier()


def messages(g) -> None:
    import numpy as np

    after, before = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    problems: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for count in (0, 5, 3000, 100_000, 300_000, 300_000):
                for make in (lambda c: np.empty(c, "f4"), lambda c: symmetric(g, c)):
                    sent, got = make(count), make(count)
                    sent[:] = tag
                    work = g.isend(sent, after, tag)
                    g.recv(got, before, tag)
                    while not work.is_completed():
                        pass
                    assert (got == tag).all()
        except BaseException as error:
            problems.append(error)

    team = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert not problems, problems
    g.monitored_barrier(timeout=30)
    try:
        g.recv(np.empty(3), before, tag=99, timeout=0.01)
    except TimeoutError:
        pass
    g.barrier()


def held(g) -> None:
    """Another thread holds receives, and resumes or fills them, while their messages come."""
    import numpy as np

    if g.rank:
        for i in range(100):
            g.send(np.full(64, i, "i4"), 0, 1)
        g.barrier()
        return
    works: list[Any] = []
    over = threading.Event()

    def meddle() -> None:
        turn = 0
        while not over.is_set():
            for work in works[-3:]:
                turn += 1
                if work.hold():
                    work.fill() if turn % 3 == 0 else work.resume()

    thread = threading.Thread(target=meddle)
    thread.start()
    found = 0
    while found < 100:
        array = np.full(64, -1, "i4")
        works.append(g.irecv(array, 1, 1))
        while not works[-1].is_completed():
            pass
        assert (array == (-1 if works[-1].was_withdrawn else found)).all()
        found += not works[-1].was_withdrawn
    over.set()
    thread.join()
    g.barrier()


def asynchronous(g) -> None:
    import numpy as np

    arrays = [np.full(100 + 500 * (i % 3), float(i)) for i in range(60)]
    works = [g.all_reduce(a, async_op=True) for a in arrays]
    g.barrier()
    for i, (a, work) in enumerate(zip(arrays, works, strict=True)):
        assert work.wait() and a[0] == i * g.size
    wide = np.ones((50, 2))
    g.all_reduce(wide[:, 0], async_op=True).get_future()
    g.all_reduce(np.ones(1000), async_op=True)
    g.destroy()


def fast_paths(g) -> None:
    """What blocking calls on torch's tensors do: the core looks at them and remembers the plan."""
    import numpy as np

    from symcomm import errors
    from symcomm._core import native
    from tests.support.exchange_array import ExchangeArray, install

    assert install() and native.view_tensor(ExchangeArray(np.empty(2, "f4"))) is not None
    total = g.size * (g.size + 1) // 2
    for turn in range(3):
        for count in (1, 2, 700, 20_001):
            t = ExchangeArray(np.full(count, g.rank + 1, "f4"))
            g.all_reduce(t)
            assert (t.values == total).all(), (turn, count)
            parts = [ExchangeArray(np.empty(count, "f4")) for _ in range(g.size)]
            g.all_gather(parts, t)
            g.gather(parts if g.rank == 0 else None, t, 0)
            g.scatter(t, parts if g.rank == 0 else None, 0)
            assert (t.values == total).all(), (turn, count)
            after, before = (g.rank + 1) % g.size, (g.rank - 1) % g.size
            if g.rank % 2 == 0 and g.size % 2 == 0:
                g.send(t, after)
                g.recv(t, before)
            elif g.size % 2 == 0:
                g.recv(t, before)
                g.send(t, after)
            g.barrier()
    for count in range(1, 4000):  # more kinds of calls than are remembered
        g.broadcast(ExchangeArray(np.empty(count, "u1")), 0)
    try:
        g.all_reduce(ExchangeArray(np.ones(3 + g.rank)))
    except errors.CollectiveMismatchError:
        assert g.size > 1


def failures(g) -> None:
    """Mismatch, abort and a rank that leaves: errors have paths of their own."""
    import numpy as np

    from symcomm import errors

    teams = [g.split(0, name=name) for name in ("mismatch", "abort", "leave")]
    steps = [
        lambda team: team.all_reduce(np.ones(3 + (g.rank == 0))),
        lambda team: team.abort() if g.rank == 0 else team.recv(np.ones(3), 0),
        lambda team: team.destroy() if g.rank == 0 else team.barrier(),
    ]
    for team, step in zip(teams, steps, strict=True):
        try:
            step(team)
        except errors.SymcommError:
            pass
        if g.size > 1 and team.name == "abort":
            survivors = team.shrink()
            survivors.barrier()
    g.barrier()


def leaving(g) -> None:
    """One thread leaves a group while others use it: a watchdog that fails it, observers, messages."""
    import numpy as np

    from symcomm import errors
    from symcomm._core import native

    team: Any = None
    done = threading.Event()
    problems: list[BaseException] = []
    calls: list[Callable[[], object]] = [
        lambda: team.handle.report(),
        lambda: team.handle.status(),
        lambda: [team.handle.records(kind) for kind in (native.RECORD_CALL, native.RECORD_VOTE)],
        lambda: team.handle.publish(native.RECORD_CALL, b"words"),
        lambda: team.handle.announce(3),
        lambda: team.isend(np.ones(3), (g.rank + 1) % g.size, done.is_set()),
        lambda: team.handle.fail(native.STATUS_TIMEOUT, 0),
    ]

    def use(call: Callable[[], object]) -> None:
        try:
            while not done.is_set():
                with contextlib.suppress(errors.SymcommError):
                    call()
        except BaseException as error:
            problems.append(error)

    for turn in range(3 * len(calls)):
        done.clear()
        team = g.split(0, name=f"leaving {turn}")
        # The last of them fails the group at once, and others' calls are short then.
        users = [threading.Thread(target=use, args=(call,)) for call in calls[: 2 + turn % (len(calls) - 1)]]
        for user in users:
            user.start()
        team.leave()
        done.set()
        for user in users:
            user.join()
    assert not problems, problems
    g.barrier()


def interrupted(g) -> None:
    """A signal ends a call that waits its turn, while another thread leaves the group."""
    import signal

    import numpy as np

    from symcomm import errors

    def leave(team: Any) -> None:
        while not team.handle.status():
            pass
        team.leave()

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    stopped = 0
    for turn in range(20):
        team = g.split(0, name=f"interrupted {turn}")
        if g.rank == 0:
            work = team.all_reduce(np.ones(3), async_op=True)
            leaver = threading.Thread(target=leave, args=(team,))
            leaver.start()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                team.barrier()
            except (KeyboardInterrupt, errors.SymcommError) as error:
                stopped += isinstance(error, KeyboardInterrupt)
            leaver.join()
            with contextlib.suppress(errors.SymcommError):
                work.wait()
    assert stopped or g.rank, "no call was interrupted"
    g.barrier()


def one_sided(g) -> None:
    """Puts and counted signals, with and without a look by Python."""
    import json

    import numpy as np

    from symcomm.group.failure import Status
    from symcomm.group.segments import Segment
    from symcomm.types import DType
    from tests.support.exchange_array import ExchangeArray, install

    assert install()
    n, mine = 64, symmetric(g, 64 * g.size, "i4")
    segment = Segment(g, mine.ctypes.data, mine.size, DType.INT32)
    segment.connect([json.loads(info) for info in g.all_gather_bytes(json.dumps(segment.info).encode())])
    put, signal, wait = segment.shortcuts()
    for turn in range(100):
        source = np.full(n, turn, "i4")
        for rank in range(g.size):
            if turn % 2:
                assert segment.write(rank, 4 * n * g.rank, source.ctypes.data, source.nbytes) == 0
                assert segment.signal(rank) == 0
            else:
                assert put(ExchangeArray(source), rank, n * g.rank) == 0 and signal(rank) == 0
        for rank in range(g.size):
            assert wait(rank) == 0 or segment.wait_signal(rank, 60 * 10**9) == 0
            assert (mine[n * rank : n * (rank + 1)] == turn).all()
        for rank in range(g.size):  # all have looked
            segment.signal(rank)
        for rank in range(g.size):
            segment.wait_signal(rank, 60 * 10**9)
    assert put(ExchangeArray(source), 0, n * g.size) is None and put(ExchangeArray(source), g.size, 0) is None
    assert segment.wait_signal(0, -1) == segment.wait_signal(0, 10**6) == wait(0) == Status.TIMEOUT
    g.barrier()


def lock_watch(g) -> None:
    import ctypes
    import time

    from symcomm.observe.recorder import gil

    with open(os.devnull, "w") as nowhere:
        stop = gil.watch(g, 0.2, nowhere.fileno())
        time.sleep(0.3)
        if g.rank == 0:
            ctypes.PyDLL(None).sleep(1)
        g.barrier()
        gil.stall_of(g.peers[0])
        stop()


def reductions() -> None:
    import numpy as np

    from symcomm._core import native
    from symcomm.types import DType, RedOpType

    rng = np.random.default_rng(1)
    for dtype in DType:
        for op in RedOpType:
            if not native.reduce_defined(dtype, op):
                continue
            for count in (1, 7, 1000):
                sources = [rng.integers(0, 256, count * dtype.itemsize, np.uint8) for _ in range(5)]
                out = np.empty_like(sources[0])
                native.reduce(dtype, op, out.ctypes.data, [s.ctypes.data for s in sources], count, 2.0)


def many_tensors() -> None:
    """Packed and added many at a time, with some that the core must leave alone."""
    import numpy as np

    from symcomm._core import native
    from tests.support.exchange_array import ExchangeArray, install

    assert install()
    counts = [0, 1, 2, 3, 700, 1025]
    lists = [[ExchangeArray(np.full(n, k + 1, "f4")) for n in counts] for k in range(3)]
    flat = np.zeros(sum(counts), "f4")
    assert native.pack(flat.ctypes.data, lists[1]) and (flat == 2).all()
    assert not native.pack(flat.ctypes.data, [*lists[0], ExchangeArray(np.zeros((4, 4), "f4").T), "text"])
    results = [ExchangeArray(np.zeros(n, "f4")) for n in counts]
    assert native.add_many(results, lists, 1000) == [5]
    assert all((r.values == 6).all() for r in results[:5]) and not results[5].values.any()
    assert native.add_many(results, [lists[0], [*lists[1][1:], lists[1][0]]], 1 << 40) == list(range(6))


def store_server() -> None:
    import symcomm.errors
    from symcomm.store import TCPStore

    master = TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    clients = [TCPStore("127.0.0.1", master.port, world_size=1, is_master=False) for _ in range(4)]

    def use(i: int) -> None:
        for k in range(50):
            clients[i].set(f"key{i}/{k}", b"x" * (k * 100))
            clients[i].add("count", 1)
            assert clients[i].get(f"key{i}/{k}") == b"x" * (k * 100)

    team = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert master.add("count", 0) == 200
    large = os.urandom((3 << 20) + 1)  # read in pieces, since so much might be a lie
    clients[0].set("large", large)
    assert clients[0].get("large") == large and clients[1].multi_get(["large", "large"]) == [large, large]
    for start, more in ((str(2**63 - 1), 1), (str(-(2**63)), -1), ("9" * 80, 0), (" " * 80 + "x", 1)):
        clients[0].set("number", start)
        try:
            raise AssertionError(clients[0].add("number", more))
        except symcomm.errors.BadArgumentError:
            continue
    key = struct.pack("=Q", 8) + b"/barrier"
    for count, world in (("-10", -100), (str(2**63 - 2), 1), (str(-(2**63)), 5), (str(2**63 - 1), 1)):
        clients[0].set("barrier", count)
        with socket.create_connection(("127.0.0.1", master.port)) as sock:
            sock.sendall(struct.pack("=BI", 0, 0x3C85F7CE) + b"\x12" + key + struct.pack("=q", world))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)


# --- building and running ------------------------------------------------------------------------------------


def library(name: str) -> str:
    path = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"sanitize: gcc does not know {name}; install gcc's sanitizer libraries.")
    return os.path.realpath(path)


def build(folder: Path, kind: str) -> None:
    """A copy of the sources with the extension built for one sanitizer; the one in the working tree stays as it is."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
        elif name == "README.md":
            (folder / name).write_text("")
    env = {**os.environ, "SYMCOMM_SANITIZE": kind}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(folder: Path, kind: str, only: list[str]) -> bool:
    suppressions = folder / "tsan.txt"
    # The interpreter closes sockets where it knows that nobody uses them; the loader frees the thread-local memory of
    # threads that have ended, which it knows from the kernel.
    suppressions.write_text("race:^sock_\nrace:_dl_deallocate_tls\n")
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'src'}:{folder}",
        "LD_PRELOAD": " ".join(library(name) for name in KINDS[kind]),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
        "TSAN_OPTIONS": f"exitcode=66:halt_on_error=0:suppressions={suppressions}:report_thread_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",
        "SYMCOMM_SANITIZING": "1",
    }
    command = [sys.executable, "-m", "tests.tools.sanitize", "--drive", *only]
    done = subprocess.run(command, cwd=folder, env=env, timeout=SECONDS)
    print(f"{kind}: {'clean' if done.returncode == 0 else f'FAILED with code {done.returncode}'}", flush=True)
    return done.returncode == 0


def main() -> int:
    if "--drive" in sys.argv:
        drive(sys.argv[2:])
        return 0
    kinds = [k for k in KINDS if k in sys.argv[1:]] or list(KINDS)
    only = [name for name in sys.argv[1:] if name not in KINDS]
    good = True
    for kind in kinds:
        print(f"{kind}: building", flush=True)
        with tempfile.TemporaryDirectory(prefix="symcomm-sanitize-") as folder:
            build(Path(folder), kind)
            good &= run(Path(folder), kind, only)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
