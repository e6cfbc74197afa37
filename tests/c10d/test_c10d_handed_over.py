"""Our objects in PyTorch's hands, and PyTorch's in ours: stores, reduce operations, options, hooks."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import symcomm
from symcomm.ddp import hooks
from symcomm.ddp.comm_hook import AllReduceHook, Fp16CompressHook
from symcomm.torch_backend import stores
from symcomm.torch_backend.register import register
from tests.support.c10d_compare import on_two_ranks, ours, theirs

pytestmark = pytest.mark.torch_versions

SOON = timedelta(seconds=20)

# --- stores -------------------------------------------------------------------------------------------------------


class Dict(ours.Store):
    """A store that a user wrote in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}

    def set(self, key, value):
        self.data[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.data[key]

    def add(self, key, amount):
        self.data[key] = b"%d" % (int(self.data.get(key, 0)) + amount)
        return int(self.data[key])

    def compare_set(self, key, expected, desired):
        if self.data.get(key, b"") == expected:
            self.data[key] = desired
        return self.data.get(key, expected)

    def check(self, keys):
        return all(key in self.data for key in keys)


KINDS = {
    "hash": lambda tmp: ours.HashStore(),
    "file": lambda tmp: ours.FileStore(str(tmp / "store"), 1),
    "tcp": lambda tmp: ours.TCPStore("localhost", 0, 1, True, SOON),
    "prefix": lambda tmp: ours.PrefixStore("p", ours.HashStore()),
    "prefix of theirs": lambda tmp: ours.PrefixStore("p", theirs.HashStore()),
    "python": lambda tmp: Dict(),
    "made without torch": lambda tmp: ours.as_torch_store(symcomm.HashStore()),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda: KINDS[request.param](tmp_path)


def test_cpp_takes_our_stores(make):
    store = make()
    assert isinstance(store, dist.Store)
    part = theirs.PrefixStore("a", store)
    part.set("x", "1")
    assert part.append("x", "2") is None and part.get("x") == b"12" and part.add("n", 3) == 3
    assert store.get("a/x") == b"12" and part.underlying_store is store
    theirs._test_python_store(make())
    if hasattr(theirs, "_StoreCollectives"):
        assert theirs._StoreCollectives(store, 0, 1).all_sum("sum", 7, SOON) == 7


def test_what_cpp_holds_answers_for_as_long_as_that(make):
    store = make()
    outside = theirs.PrefixStore("a", store)
    gone = weakref.ref(store)
    outside.set("x", "1")
    del store
    gc.collect()
    stores.take_back()
    assert outside.get("x") == b"1" and gone() is not None
    clone = outside.clone()  # of which C++ is the only owner from the start
    gc.collect()
    clone.set("y", "2")
    assert outside.get("y") == b"2" or clone.get("y") == b"2"
    del outside, clone
    stores.take_back()
    assert gone() is None


def test_what_nobody_holds_goes_at_once(make):
    gone = weakref.ref(make())
    assert gone() is None


def test_a_store_in_a_cycle_answers_too():
    store = Dict()
    store.myself = store
    outside = theirs.PrefixStore("a", store)
    gone = weakref.WeakSet([store])
    del store
    gc.collect()
    outside.set("x", "1")
    assert outside.get("x") == b"1"
    del outside
    gone.clear()


def test_a_server_ends_when_cpp_lets_go():
    outside = theirs.PrefixStore("a", ours.TCPStore("localhost", 0, 1, True, SOON))
    port = outside.underlying_store.port
    client = theirs.TCPStore("localhost", port, timeout=SOON)
    outside.set("x", "1")
    assert client.get("a/x") == b"1"
    del outside
    stores.take_back()
    with pytest.raises(dist.DistError):
        ours.TCPStore("localhost", port, timeout=timedelta(milliseconds=200))


def test_a_group_keeps_the_store_that_was_given_to_it():
    register()
    for backend in ("gloo", "symcomm"):
        store = ours.HashStore()
        gone = weakref.ref(store)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        del store
        gc.collect()
        try:
            part = dist.new_group([0])
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=part)
            assert tensor.tolist() == [1, 1] and gone() is not None
            del part
        finally:
            dist.destroy_process_group()
        gc.collect()
        stores.take_back()
        assert gone() is None, backend


RPC = """
import torch, symcomm
from symcomm import c10d
import torch.distributed.rpc as rpc

kinds = [c10d.HashStore, lambda: c10d.PrefixStore("p", c10d.TCPStore("localhost", 0, 1, True)), symcomm.HashStore]
torch.distributed.rendezvous.__globals__["register_rendezvous_handler"](
    "ours", lambda url, **_: iter([(kinds.pop()(), 0, 1)])
)
options = rpc.TensorPipeRpcBackendOptions(init_method="ours://")
while kinds:
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("worker", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()
held = torch.distributed.PrefixStore("a", c10d.HashStore())  # until the process ends
print("done")
"""


@pytest.mark.skipif(not dist.rpc.is_available(), reason="this build of torch has no RPC")
def test_rpc_on_our_stores():
    ran = subprocess.run([sys.executable, "-c", RPC], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout.endswith("done\n") and "Exception ignored" not in ran.stderr, ran.stderr


def test_where_the_count_is_not_found_stores_are_kept(monkeypatch):
    assert stores._COUNT_AT is not None, "not found in this torch: every store would be kept for ever"
    monkeypatch.setattr(stores, "_COUNT_AT", None)
    outside = theirs.PrefixStore("a", ours.HashStore())
    gc.collect()
    outside.set("x", "1")
    stores.take_back()
    assert outside.get("x") == b"1"
    monkeypatch.undo()
    del outside
    stores.take_back()


def test_stores_are_what_they_were():
    """Those of symcomm.c10d are those that need no torch, and more."""
    for name in ("Store", "HashStore", "FileStore", "TCPStore", "PrefixStore"):
        assert issubclass(getattr(ours, name), getattr(symcomm, name))
        assert issubclass(getattr(ours, name), dist.Store)
    assert isinstance(symcomm.HashStore(), ours.Store) and isinstance(theirs.HashStore(), ours.Store)
    assert not isinstance(3, ours.Store) and not isinstance(theirs.HashStore(), ours.HashStore)
    register()
    part = theirs.PrefixStore("a", symcomm.HashStore())  # a prefix is the way in for those, too
    part.set("x", "1")
    assert theirs.PrefixStore(prefix="b", store=part).check(["x"]) is False and part.get("x") == b"1"


reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # since torch 2.13

# --- reduce operations and options --------------------------------------------------------------------------------


@pytest.fixture(params=["gloo", "symcomm"])
def world(request):
    register()
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"])
def test_torchs_functions_take_our_operations(op: str, world):
    """The result, or the refusal, is the same as with PyTorch's own."""

    def attempt(given) -> list:
        seen = []
        for call in (dist.all_reduce, lambda t, op: dist.reduce(t, 0, op=op)):
            tensor = torch.tensor([3, 5], dtype=torch.int32)
            try:
                call(tensor, op=given)
                seen.append(tensor.tolist())
            except (RuntimeError, ValueError):
                seen.append("refused")
        output = torch.zeros(2)
        try:
            reduce_scatter(output, torch.tensor([3.0, 5.0]), op=given)
            seen.append(output.tolist())
        except (RuntimeError, ValueError):
            seen.append("refused")
        return seen

    wanted = attempt(getattr(dist.ReduceOp, op))
    for ours_is in (getattr(symcomm.ReduceOp, op), symcomm.ReduceOp(getattr(symcomm.ReduceOp, op))):
        assert attempt(ours_is) == wanted
    assert [3, 5] in wanted or op in ("AVG",)


def test_torchs_functions_take_our_premultiplied_sum():
    register()
    dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for op in (ours._make_nccl_premul_sum(3.0), ours._make_nccl_premul_sum(torch.tensor([3.0])),
                   ours.ReduceOp.PREMUL_SUM(3), theirs._make_nccl_premul_sum(3.0)):  # fmt: skip
            tensor = torch.tensor([1.0, 2.0])
            dist.all_reduce(tensor, op=op)
            assert tensor.tolist() == [3, 6]
    finally:
        dist.destroy_process_group()


def test_what_is_no_operation_is_refused_as_before():
    register()
    options = dist.AllreduceOptions()
    for wrong in (3, "SUM", None, object(), symcomm.ReduceOp):
        with pytest.raises(TypeError):
            options.reduceOp = wrong
    options.reduceOp = symcomm.ReduceOp.MAX
    assert options.reduceOp == dist.ReduceOp.MAX
    options.reduceOp = dist.ReduceOp.SUM
    assert options.reduceOp == dist.ReduceOp.SUM


def every_option(group, module) -> list:
    """Calls whose outcome depends on what their options say."""
    rank = group.rank()

    def of(name: str, **values):
        options = getattr(module, name)()
        for attribute, value in values.items():
            setattr(options, attribute, value)
        return options

    def fresh() -> torch.Tensor:
        return torch.tensor([rank + 1.0, 10.0 - rank])

    a, b, c, d, e = fresh(), fresh(), fresh(), fresh(), torch.zeros(2)
    group.allreduce([a], of("AllreduceOptions", reduceOp=module.ReduceOp.MAX)).wait()
    group.broadcast([b], of("BroadcastOptions", rootRank=1)).wait()
    group.reduce([c], of("ReduceOptions", rootRank=1, reduceOp=module.ReduceOp.PRODUCT)).wait()
    gathered = [torch.zeros(2), torch.zeros(2)]
    group.gather([gathered] if rank == 1 else [], [d], of("GatherOptions", rootRank=1, timeout=SOON)).wait()
    group.scatter([e], [[fresh(), fresh() * 2]] if rank == 1 else [], of("ScatterOptions", rootRank=1)).wait()
    group.barrier(of("BarrierOptions", device_ids=[0])).wait()
    seen = [a, b, *([c] if rank == 1 else []), *gathered, e]
    try:
        group.broadcast([a], of("BroadcastOptions", rootTensor=7))
    except (RuntimeError, ValueError):
        seen.append(torch.tensor(7.0))
    return [t.tolist() for t in seen]


def test_gloo_takes_our_options():
    def with_options_of(module):
        def body(store, rank):
            return every_option(
                dist.ProcessGroupGloo(theirs.PrefixStore(module.__name__, store), rank, 2, SOON), module
            )

        return on_two_ranks(body)

    wanted = with_options_of(theirs)
    assert with_options_of(ours) == wanted and wanted[0][0] == [2, 10] and wanted[0][-1] == 7


def test_our_backend_options_are_pytorchs():
    options = ours.Backend.Options("x", timedelta(seconds=3))
    options.group_name = "a name"
    group = dist.ProcessGroup(0, 1)
    assert isinstance(options, theirs.Backend.Options) and isinstance(group, dist.ProcessGroup)
    in_cpp = {name: getattr(theirs.Backend.Options, name).__get__(options) for name in ("_timeout", "backend")}
    assert in_cpp == {"_timeout": timedelta(seconds=3), "backend": "x"}
    fake = theirs.FakeProcessGroup._create_internal(0, 1, ours.FakeProcessGroup.Options())
    refusing = ours.FakeProcessGroup.Options()
    refusing.error_on_collective = True
    fake.allreduce([torch.ones(1)]).wait()
    with pytest.raises(RuntimeError):
        theirs.FakeProcessGroup._create_internal(0, 1, refusing).allreduce([torch.ones(1)])


# --- hooks --------------------------------------------------------------------------------------------------------


def trained_by(module, group, state, hook) -> list:
    """Gradients of a reducer of ``module`` that one hook reduces."""
    torch.manual_seed(0)
    params = [torch.rand(3, requires_grad=True), torch.rand(2, requires_grad=True)]
    reducer = module.Reducer(params, [[0, 1]], [1 << 20], group)
    if hook is not None:
        module._register_comm_hook(reducer, state, hook)
    reducer.prepare_for_backward([])
    (params[0].square().sum() + params[1].sum()).backward()
    return [p.grad.tolist() for p in params]


def test_our_hooks_on_pytorchs_reducer(world):
    group = dist.group.WORLD
    plain = trained_by(theirs, group, None, None)
    for hook in (AllReduceHook(group), Fp16CompressHook(group)):
        mine = trained_by(theirs, group, None, hook)
        assert mine == trained_by(ours, group, None, hook)
        assert all(
            torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-2) for a, b in zip(mine, plain, strict=True)
        )
    for make, hook in ((hooks.CastState, hooks.cast_hook), (hooks.BlockwiseState, hooks.blockwise_hook)):
        wanted = trained_by(ours, group, make(), hook)
        assert trained_by(theirs, group, make(), hook) == wanted


def test_pytorchs_hooks_on_our_reducer(world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = dist.group.WORLD
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        assert trained_by(ours, group, None, hook) == trained_by(theirs, group, None, hook)


# --- what is said not to work -------------------------------------------------------------------------------------

REFUSED = {
    "an operation in a call of a group of C++": "gloo.allreduce(torch.ones(1), symcomm.ReduceOp.SUM)",
    "a member of an enumeration": "theirs.set_debug_level(ours.DebugLevel.OFF)",
    "a kind of hook": "theirs._register_builtin_comm_hook(reducers[0], ours.BuiltinCommHookType.ALLREDUCE)",
    "a logger of theirs": "theirs.Logger(reducers[1])",
    "a logger of ours": "ours.Logger(reducers[0])",
    "a hook of ours on their reducer": "ours._register_comm_hook(reducers[0], None, print)",
    "a store made without torch": "dist.ProcessGroupGloo(symcomm.HashStore(), 0, 1)",
    "a backend": "dist.ProcessGroup(0, 1)._register_backend(torch.device('cpu'), KIND, ours.Backend(0, 1))",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_said_to_be_refused_is(what: str):
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, SOON)
    group = dist.ProcessGroup(0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, gloo)
    reducers = [module.Reducer([torch.ones(1, requires_grad=True)], [[0]], [9], group) for module in (theirs, ours)]
    with pytest.raises((TypeError, RuntimeError), match="incompatible|Unable to cast|must be"):
        eval(REFUSED[what], {**globals(), "gloo": gloo, "reducers": reducers, "KIND": kind})


def test_everything_here_takes_pytorchs():
    options = ours.AllreduceOptions()
    options.reduceOp = theirs.ReduceOp.MAX
    assert options.reduceOp == ours.ReduceOp.MAX
    ours.PrefixStore("p", theirs.HashStore()).set("a", "1")
    ours.set_debug_level(theirs.get_debug_level())
    group = ours.ProcessGroup(theirs.HashStore(), 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor], theirs.AllreduceOptions()).wait()
    group.allreduce(tensor, theirs._make_nccl_premul_sum(2.0)).wait()
    assert tensor.tolist() == [2, 2] and isinstance(theirs.FakeWork(), ours.Work)
    group.shutdown()
