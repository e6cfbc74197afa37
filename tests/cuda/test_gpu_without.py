"""What of the GPU parts can be checked where there is none: words, kernels' texts, meetings, --mps."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Collective, Plan
from symcomm.collectives.select import ON_DEVICE, elements_of, signature_count
from symcomm.cuda.flag_words import is_behind
from symcomm.cuda.kernels import single_kernel_source_of, source_of
from symcomm.cuda.single_kernel import MOST_BLOCKS, most_blocks
from symcomm.cuda.stream_collectives import StreamBarriers, StreamCollectives, shard_of
from symcomm.cuda.via_host import STAGE_BYTES, ViaHostCollectives
from symcomm.group.default import destroy, init
from symcomm.group.failure import describe_call
from symcomm.launcher.mps import multi_process_service
from symcomm.types import DType, RedOpType

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch_versions
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


class StandIn(SimpleNamespace):
    """For a group: a class of our own can be referred to weakly."""


def test_loading_needs_no_cuda():
    code = (
        "import sys; before = set(sys.modules);"  # some packages load themselves by a .pth file
        "import symcomm.cuda.group, symcomm.cuda.p2p, symcomm.symm_mem.on_gpu, symcomm.windows.cuda;"
        "assert not {'torch', 'triton', 'cuda'} & (set(sys.modules) - before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@without_cuda
def test_words_without_a_gpu():
    import symcomm
    from symcomm.cuda import devices

    for call in (lambda: symcomm.symm_mem.empty(4, device="cuda"), lambda: devices.need_cuda("here")):
        with pytest.raises(errors.ResourceError, match="has no CUDA; install one|finds no CUDA GPU"):
            call()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("meta", "must be a CPU or CUDA tensor, got 'a tensor on meta'; it has no values; make one on the CPU."),
        ("xpu:0", "got 'a tensor on xpu:0'; .*name an engine for its device: \"cpu:symcomm,xpu:xccl\"."),
        ("mps", "must be a CPU or CUDA tensor, got 'a tensor on mps'; move it with .cpu()."),
    ],
)
def test_devices_that_nobody_carries(device: str, words: str):
    from symcomm.torch_backend.engines import Engines

    nothing: Any = StandIn(backends_by_device=dict)
    with pytest.raises(errors.BadArgumentError, match=words):
        Engines(nothing).on("all_reduce", torch.device(device))


def test_calls_on_a_gpu_differ_from_calls_on_the_cpu():
    signature = Collective.ALL_REDUCE | DType.FLOAT32 << 8 | RedOpType.SUM << 16
    assert describe_call(signature, 12) == "all_reduce(float32 x 12, SUM)"
    assert describe_call(signature, 12 | ON_DEVICE) == "all_reduce(float32 x 12, SUM) on a GPU"
    uneven = signature_count([3, 4])
    assert elements_of(uneven) == elements_of(uneven | ON_DEVICE) == 7
    assert not uneven & ON_DEVICE or elements_of(uneven) == 7


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("redop", [op for op in RedOpType if op is not RedOpType.PREMUL_SUM])
def test_every_combination_has_a_kernel_or_is_left_to_torch(dtype: DType, redop: RedOpType):
    text, whole = source_of(dtype, redop, 3, 2), single_kernel_source_of(dtype, redop, 3)
    if not native.reduce_defined(dtype, redop):
        return
    exotic = dtype.label.startswith(("complex", "float8"))
    assert (text is None) == (whole is None) == exotic
    if text is not None and whole is not None:
        assert "src[3]" in text and "dst[2]" in text and "half[3]" in whole
        assert all("{" in t and t.count("{") == t.count("}") and t.count("(") == t.count(")") for t in (text, whole))


def test_blocks_that_wait_for_each_other_are_all_on_the_gpu():
    for multiprocessors, world in itertools.product((1, 14, 132), range(2, 65)):
        blocks = most_blocks(multiprocessors, world)
        assert 1 <= blocks <= MOST_BLOCKS and (blocks * world <= multiprocessors or blocks == 1)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 4, 7, 1000, 4096])
def test_shards_are_whole_packs_and_cover_everything(world: int, count: int):
    parts = [shard_of(r, world, count, 4) for r in range(world)]
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(first % 4 == 0 or first == count for first, _ in parts)


def test_words_count_on_beyond_32_bits():
    assert is_behind(4, 5) and not is_behind(5, 5) and not is_behind(6, 5)
    assert not is_behind(3, 0xFFFFFFFF) and is_behind(0xFFFFFFFF, 0x100000003)


# --- who carries messages ------------------------------------------------------------------------------------------


def test_messages_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    from symcomm.torch_backend import engines

    group = StandIn(core=SimpleNamespace(spans_hosts=False), backends_by_device=lambda: {"cuda": "symcomm"})
    monkeypatch.setattr("symcomm.cuda.p2p.cuda_messages", lambda core, index: f"mail {index}")
    monkeypatch.setattr(engines.Engines, "_make", lambda self, call, name, kind: f"{call} by {name}")
    device = torch.device("cuda", 1)
    for wish, mail in (("", "mail 1"), ("symcomm", "mail 1"), ("nccl", None)):
        monkeypatch.setenv("SYMCOMM_CUDA", wish)
        assert engines.Engines(group).messages(device) == mail
    first = engines.Engines(group)  # of all calls a message
    assert first.messages(device) is None and first.on("send", device) == "send by nccl"
    monkeypatch.setenv("SYMCOMM_CUDA", "gloo")
    with pytest.raises(errors.BadArgumentError, match="SYMCOMM_CUDA must be 'symcomm' or 'nccl'"):
        engines.Engines(group).messages(device)


# --- what other engines are asked -----------------------------------------------------------------------------------


# Our method and its arguments -> torch's, and the root and operation of its options.
def asked_of_others() -> list[tuple[Any, Any]]:
    t, two = torch.ones(4), [torch.ones(2), torch.ones(2)]
    most = RedOpType.MAX
    return [
        (("all_reduce", (t, most)), ("allreduce", ([t],), None, "MAX")),
        (("all_reduce_coalesced", (two, RedOpType.MIN)), ("allreduce_coalesced", (two,), None, "MIN")),
        (("reduce", (t, 1, RedOpType.SUM)), ("reduce", ([t],), 1, "SUM")),
        (("reduce_scatter", (t, two, most)), ("reduce_scatter", ([t], [two]), None, "MAX")),
        (("reduce_scatter_single", (t, t, most)), ("_reduce_scatter_base", (t, t), None, "MAX")),
        (("reduce_scatter_coalesced", (two, two, most)), ("reduce_scatter_tensor_coalesced", (two, two), None, "MAX")),
        (("broadcast", (t, 1)), ("broadcast", ([t],), 1, None)),
        (("all_gather", (two, t)), ("allgather", ([two], [t]), None, None)),
        (("all_gather_single", (t, t)), ("_allgather_base", (t, t), None, None)),
        (("all_gather_coalesced", (two, two)), ("allgather_into_tensor_coalesced", (two, two), None, None)),
        (("all_gather_lists", ([two, two], two)), ("allgather_coalesced", ([two, two], two), None, None)),
        (("gather", (two, t, 1)), ("gather", ([two], [t]), 1, None)),
        (("gather", (None, t, 0)), ("gather", ([], [t]), 0, None)),
        (("gather_single", (t, two[0], 1)), ("gather", ([two], [two[0]]), 1, None)),
        (("gather_single", (None, t, 0)), ("gather", ([], [t]), 0, None)),
        (("scatter", (t, two, 1)), ("scatter", ([t], [two]), 1, None)),
        (("scatter", (t, None, 0)), ("scatter", ([t], []), 0, None)),
        (("all_to_all", (two, two)), ("alltoall", (two, two), None, None)),
        (("all_to_all_single", (t, t, [1, 3], [2, 2])), ("alltoall_base", (t, t, [1, 3], [2, 2]), None, None)),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "torchs"), [pytest.param(*item, id=item[0][0]) for item in asked_of_others()])
def test_other_engines_are_asked_in_torchs_words(
    call: tuple[str, tuple], torchs: tuple, monkeypatch: pytest.MonkeyPatch
):
    from torch.distributed import ReduceOp

    from symcomm.torch_backend import engines

    asked: list[Any] = []
    engine = SimpleNamespace(size=lambda: 2, **{torchs[0]: lambda *args: asked.append(args)})
    monkeypatch.setattr(engines.Engines, "on", lambda self, name, device: engine)
    engines.Engines(StandIn()).forward(*call, None, 2.5, torch.device("cuda"))
    [(*tensors, options)] = asked
    _, wanted, root, op = torchs
    torch.testing.assert_close(tensors, list(wanted))
    assert getattr(options, "rootRank", None) == root and options.timeout.total_seconds() == 2.5
    assert op is None or options.reduceOp == getattr(ReduceOp, op)


# --- one call to the driver ---------------------------------------------------------------------------------------


LAUNCHING = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip


def test_a_turn_is_copy_write_wait_kernel():
    said: list[tuple[Any, ...]] = []
    word = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    copying = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def launch(kernel: int, gx: int, gy: int, gz: int, bx: int, *rest: Any) -> int:
        arguments = [ctypes.cast(rest[4][i], ctypes.POINTER(ctypes.c_uint64)) for i in range(3)]
        said.append(("launch", kernel, gx, bx, arguments[0][:3], arguments[1][0], arguments[2][0]))
        return 0

    functions = (
        copying(lambda target, source, n, stream: said.append(("copy", target, source, n, stream)) or 0),
        word(lambda stream, address, value, flags: said.append(("write", address, value)) or 0),
        word(lambda stream, address, value, flags: said.append(("wait", address, value)) or (7 if value == 9 else 0)),
        LAUNCHING(launch),
    )
    addresses = tuple(ctypes.cast(f, ctypes.c_void_p).value for f in functions)
    kernel = (77, 3, 256, 1000, 250)
    assert native.enqueue_collective(addresses, 5, (100, 200, 16), 1, (11, 12), (21, 22), kernel, (1, 2, 3)) == 0
    assert said == [
        ("copy", 200, 100, 16, 5), ("write", 11, 1), ("write", 12, 1), ("wait", 21, 1), ("wait", 22, 1),
        ("launch", 77, 3, 256, [1, 2, 3], 1000, 250),
    ]  # fmt: skip
    said.clear()
    assert (
        native.enqueue_collective(addresses, 5, (), 9, (11,), (21,), kernel, (1,)) == 7
    )  # what the driver refused ends it
    assert [item[0] for item in said] == ["write", "wait"]
    with pytest.raises(ValueError, match="numbers are missing"):
        native.enqueue_collective(addresses, 5, (), 9, (11,), (), (), ())


def test_a_prepared_kernel_starts_once_the_hosts_have_met(tmp_path: Path):
    said: list[Any] = []

    def launch(kernel: int, gx: int, gy: int, gz: int, bx: int, *rest: Any) -> int:
        places, count, packs = (ctypes.cast(rest[4][i], ctypes.POINTER(ctypes.c_uint64)) for i in range(3))
        said.append((kernel, gx, bx, rest[3], places[:4], count[0], packs[0]))
        return 0 if places[3] < 100 else 700

    function = LAUNCHING(launch)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    prepared = native.prepare_kernel(address, (77, 3, 256, 1000, 250), (0, 0, 31, 0), (0, 0, 32, 0))
    group = init(f"file://{tmp_path}/store", 0, 1)
    plan = group.executor.load_plan(Plan(Collective.ALL_REDUCE, 0, 1, 4 | ON_DEVICE, 0, 0, 0, "arrival"))
    before = group.call_stats()["collectives"]
    for half, value in ((1, 5), (0, 6)):
        assert native.run_prepared(group.handle, plan, 10**9, 0, prepared, half, 9, 4096, value) == 0
    assert said == [
        (77, 3, 256, 9, [4096, 4096, 32, 5], 1000, 250),
        (77, 3, 256, 9, [4096, 4096, 31, 6], 1000, 250),
    ]
    assert group.call_stats()["collectives"]["short"] == before["short"] + 2
    assert native.run_prepared(group.handle, plan, 10**9, 0, prepared, 0, 9, 4096, 100) == -700  # the driver's
    group.abort()
    assert native.run_prepared(group.handle, plan, 10**9, 0, prepared, 0, 9, 4096, 7) > 0
    assert len(said) == 3  # nothing is launched in a group that has failed
    destroy()
    for kernel, places in (((77, 3), (0, 0, 0)), ((1, 2, 3, 4, 5), (0, 0)), ((1, 2, 3, 4, 5), (0,) * 501)):
        with pytest.raises(ValueError, match="numbers are missing, or too many"):
            native.prepare_kernel(address, kernel, places, places)


def test_the_host_combines_in_the_order_of_a_stream():
    parts = [floats([1.0, 2.0, 3.0]), floats([10.0, 20.0, 30.0])]
    total = floats([0.0] * 3)
    where = tuple(ctypes.addressof(p) for p in parts)
    for stream, result, expected in ((99, 7, [0.0] * 3), (5, 0, [11.0, 22.0, 33.0])):
        given = (RUN_AT_ONCE, stream, DType.FLOAT32, RedOpType.SUM, where, ctypes.addressof(total), 3)
        assert native.enqueue_host_reduce(*given) == result and list(total) == expected
    for dtype, op, sources in ((DType.FLOAT32, RedOpType.BAND, where), (DType.FLOAT32, RedOpType.SUM, ())):
        with pytest.raises(ValueError, match="enqueue_host_reduce: dtype"):
            native.enqueue_host_reduce(RUN_AT_ONCE, 0, dtype, op, sources, ctypes.addressof(total), 3)


def test_words_are_written_on_the_tensors_own_gpu(monkeypatch: pytest.MonkeyPatch):
    """The number of a default stream is 0 on every GPU, so which one is meant has to be said."""
    from symcomm.symm_mem import on_gpu

    said: list[Any] = []

    class Driver:
        def enter(self, device: int) -> None:
            said.append(("enter", device))

        def write(self, stream: int, address: int, value: int) -> None:
            said.append(("write", stream, address, value))

        def fill32(self, address: int, value: int, count: int, stream: int) -> None:
            said.append(("fill", address, value, count, stream))

    @contextlib.contextmanager
    def using(device: Any):
        said.append(("device", device.index))
        yield
        said.append("before")

    monkeypatch.setattr(on_gpu, "driver", lambda: Driver())
    monkeypatch.setattr(torch.cuda, "device", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 1), data_ptr=lambda: 1000)
    on_gpu.OnGPU().write_words(tensor, 2, 7, None)
    assert said == [("device", 1), ("enter", 1), ("write", 0, 1008, 7), "before"]
    said.clear()
    on_gpu.OnGPU().write_words(tensor, 1, 5, 3)
    assert said == [("device", 1), ("enter", 1), ("fill", 1004, 5, 3, 0), "before"]


def test_a_tensor_inside_a_piece_is_symmetric(monkeypatch: pytest.MonkeyPatch):
    from symcomm.symm_mem import on_gpu

    piece: Any = SimpleNamespace(nbytes=100)
    monkeypatch.setattr(on_gpu, "_pieces", {1000: piece})
    monkeypatch.setattr(on_gpu, "find_block", lambda device, address: (None, 0) if address < 2000 else None)

    def tensor_at(address: int) -> Any:
        storage = SimpleNamespace(data_ptr=lambda: address)
        return SimpleNamespace(untyped_storage=lambda: storage, get_device=lambda: 0)

    assert [on_gpu.find_piece(tensor_at(a)) is piece for a in (1000, 1099, 1100, 5000)] == [True, True, False, False]


def test_ranks_that_are_threads_have_their_own_alloc_ids(monkeypatch: pytest.MonkeyPatch):
    from symcomm.symm_mem import on_gpu

    class Memory:
        pass

    facts: dict[Any, Any] = {}

    def allocate(device: int, nbytes: int) -> Any:
        piece = Memory()
        facts[piece] = SimpleNamespace(nbytes=nbytes)
        return piece

    for name, stand_in in (("_allocate", allocate), ("_kept", {}), ("_facts", facts)):
        monkeypatch.setattr(on_gpu, name, stand_in)
    mine, again, theirs = (on_gpu._persistent((rank, 0, 5), 8) for rank in (b"me", b"me", b"you"))
    assert mine is again is not theirs
    with pytest.raises(errors.BadArgumentError, match="with the same alloc_id 5 .8.; use another id"):
        on_gpu._persistent((b"me", 0, 5), 4)


# --- symcomm run --mps ----------------------------------------------------------------------------------------------


def test_mps_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(errors.CallerError, match="--mps needs nvidia-cuda-mps-control"), multi_process_service():
        pass


def fake_control(tmp_path: Path, script: str) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_mps_is_started_in_its_own_folders_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "log"
    fake_control(tmp_path, f'echo "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {log}; [ "$1" = -d ] || cat >> {log}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with multi_process_service() as found:
        pipe = found["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(pipe) and os.path.isdir(found["CUDA_MPS_LOG_DIRECTORY"])
    assert not os.path.exists(pipe)
    assert log.read_text().split("\n") == [f"-d {pipe}", f" {pipe}", "quit", ""]


def test_mps_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_control(tmp_path, "echo no way >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(errors.ResourceError, match=r"did not start \(no way\)"), multi_process_service():
        pass


def test_an_mps_that_runs_already_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with multi_process_service() as found:
        assert found == {}


# --- the moves, on ranks that are threads with host memory for a GPU --------------------------------------------------


class HostFlagWords:
    """Flag words in host memory; a "stream" runs what it is given at once, so a wait really waits."""

    def __init__(self, rank: int, world: int, words: Any):
        peers = [r for r in range(world) if r != rank]
        base = ctypes.addressof(words)
        self.theirs = tuple(base + 4 * (r * world + rank) for r in peers)
        self.mine = tuple(base + 4 * (rank * world + r) for r in peers)
        self.stop = 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def run_at_once(stream: int, function: int, argument: int) -> int:
    """As cuLaunchHostFunc does, later, in a thread of the driver; refuses stream 99."""
    if stream == 99:
        return 7
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
    return 0


RUN_AT_ONCE = ctypes.cast(run_at_once, ctypes.c_void_p).value


class HostDriver:
    def combine_on_host(self, stream: int, dtype: int, op: int, sources: Any, out: int, count: int) -> None:
        assert native.enqueue_host_reduce(RUN_AT_ONCE, stream, dtype, op, sources, out, count) == 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def turn(
        self, stream: int, copy: Any, value: int, theirs: Any, mine: Any, kernel: Any = (), places: Any = ()
    ) -> None:
        if copy and copy[2]:
            ctypes.memmove(copy[1], copy[0], copy[2])
        for address in theirs:
            ctypes.c_uint32.from_address(address).value = value
        deadline = time.monotonic() + 20
        for address in mine:
            while is_behind(ctypes.c_uint32.from_address(address).value, value):
                assert time.monotonic() < deadline, "a wait without an end"
                time.sleep(0)
        time.sleep(random.random() * 0.002)  # let the others get ahead
        if kernel:
            count, used = kernel
            gate = 3 if used > len(set(places[:used])) else 0
            assert len(places) == used + gate, "several targets: the stop word, and what blocks tell each other by"
            add_floats(places[:used], count)


def add_floats(places: Any, count: int) -> None:
    """The last ``places[-k:]`` get the sum of the others; for one target, or as many targets as sources."""
    targets = 1 if len(set(places)) == len(places) else len(places) // 2
    sources = places[: len(places) - targets]
    parts = [(ctypes.c_float * count).from_address(a) for a in sources]
    total = [sum(items) for items in zip(*parts, strict=True)]
    for address in places[len(places) - targets :]:
        (ctypes.c_float * count).from_address(address)[:] = total


class HostKernel:
    def launch(self, places: Any, count: int) -> tuple[int, ...]:
        return (count, len(places))


class Rig:
    """All ranks' movers over host memory."""

    HALF = 256

    def __init__(self, world: int, via_host: bool = False):
        self.world = world
        self._words = (ctypes.c_uint32 * (world * world))()
        size = STAGE_BYTES if via_host else 2 * self.HALF
        self._stages = [ctypes.create_string_buffer(size) for _ in range(world)]
        stages = [ctypes.addressof(s) for s in self._stages]
        self.all_collectives: list[Any] = []
        for rank in range(world):
            barriers = StreamBarriers(HostFlagWords(rank, world, self._words), HostDriver())
            if via_host:
                self.all_collectives.append(ViaHostCollectives(rank, world, 0, barriers, stages))
                continue
            collectives: Any = StreamCollectives(rank, world, 0, barriers)
            collectives.kernel = lambda *_: HostKernel()
            collectives._next_gate = lambda *_: (0, 0, 0)  # for kernels on a GPU
            collectives.use_stage(stages, self.HALF)
            self.all_collectives.append(collectives)

    def run(self, rank_main: Any) -> list[Any]:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(rank_main, self.all_collectives))


def floats(values: Any) -> Any:
    values = list(values)
    return (ctypes.c_float * max(len(values), 1))(*values)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["one_shot", "two_shot", "in_place", "one_shot through the host"])
def test_reductions_move_by_move(world: int, kind: str):
    rig, n = Rig(world, "host" in kind), 150  # three turns of a staging area
    kind = kind.partition(" ")[0]
    tensors = [floats(range(n)) for _ in range(world)]

    def rank_main(collectives: Any) -> list[float]:
        mine = tensors[collectives.rank]
        address = ctypes.addressof(mine)
        for turn in range(4):
            mine[:] = [float(i * (collectives.rank + 1) + turn) for i in range(n)]
            if kind == "in_place":
                everyone = [ctypes.addressof(t) for t in tensors]
                collectives.reduce_in_place(DType.FLOAT32, RedOpType.SUM, everyone, n, 0)
            else:
                getattr(collectives, f"reduce_{kind}")(DType.FLOAT32, RedOpType.SUM, address, address, n, 0)
            expected = [i * world * (world + 1) / 2 + turn * world for i in range(n)]
            assert mine[:] == expected, f"rank {collectives.rank}, turn {turn}"
        return mine[:]

    results = rig.run(rank_main)
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("via_host", [False, True], ids=["", "through the host"])
def test_copies_move_by_move(world: int, via_host: bool):
    rig = Rig(world, via_host)
    counts = [70 + 13 * r for r in range(world)]

    def rank_main(collectives: Any) -> None:
        me = collectives.rank
        mine = floats(me * 1000 + i for i in range(counts[me]))
        outs = [floats([0] * c) for c in counts]
        for _ in range(3):
            collectives.all_gather(
                ctypes.addressof(mine), [4 * c for c in counts], [ctypes.addressof(o) for o in outs], 0
            )
            assert [o[-1] for o in outs] == [r * 1000 + c - 1 for r, c in enumerate(counts)]
        matrix = [[4 * (30 * i + 7 * j + 1) for j in range(world)] for i in range(world)]
        pieces = [floats([me * 10 + j] * (matrix[me][j] // 4)) for j in range(world)]
        got = [floats([-1] * (matrix[i][me] // 4)) for i in range(world)]
        where = [[ctypes.addressof(x) for x in some] for some in (pieces, got)]
        for _ in range(3):
            collectives.all_to_all(where[0], matrix, where[1], 0)
            assert [g[:] for g in got] == [[i * 10 + me] * (matrix[i][me] // 4) for i in range(world)]
        output = floats([0] * counts[me])
        parts = [floats([me + q] * counts[q]) for q in range(world)]
        sources = [ctypes.addressof(p) for p in parts]
        collectives.reduce_scatter(DType.FLOAT32, RedOpType.SUM, sources, counts, ctypes.addressof(output), 0)
        assert output[:] == [sum(r + me for r in range(world))] * counts[me]

    rig.run(rank_main)


def test_sizes_of_pieces_do_not_look_like_a_gpus():
    """A hash of uneven sizes once reached into the bit that tells calls on a GPU from those on the host."""
    for first in range(1, 200):
        assert not signature_count([first, 1000 - first]) & ON_DEVICE
        assert elements_of(signature_count([first, 1000 - first])) == 1000
