"""Arguments of a wrong type: refused with TypeError where PyTorch refuses them, and taken where it takes them."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.errors import WrongTypeError
from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import family, ours, outcome, plain, same, since_2_13, theirs

pytestmark = pytest.mark.torch_versions

X, LIST, LISTS = "torch.ones(2)", "[torch.ones(2)]", "[[torch.ones(2)]]"
NOT_OPTIONS = ["'sum'", "3", "3.5", "td(seconds=1)", "object()", "[3]", "R.SUM", "m.WorkResult.SUCCESS"]
OPTIONS = ["m.AllreduceOptions()", "m.BroadcastOptions()", "m.BarrierOptions()", "m.AllToAllOptions()"]
AFTER = ["opts=3", "op='sum'", "root='a'", "root=0", "timeout=3", "timeout='a'", "nonsense=3", "0, 'a'", "R.SUM, 3"]


def same_for(names: tuple[str, ...], forms: list[str]) -> dict[str, list[str]]:
    return {name: forms for name in names}


# A call's tensors in the forms that it takes and in some that it does not.
TENSORS = {
    "allreduce": [LIST, X, f"({X},)", "3", "'a'", "None", "[3]", "", f"tensor={X}", f"tensors={LIST}"],
    "broadcast": [LIST, X, "3", "[3]", "", f"tensor={X}"],
    "reduce": [LIST, X, "3", "[3]", "", f"tensor={X}"],
    "allreduce_coalesced": [LIST, "3", "[3]", "", f"tensor={X}"],
    "barrier": [""],
    "allgather": [f"{LISTS}, {LIST}", f"{LIST}, {X}", "3, 3", f"{LISTS}, 3", f"3, {LIST}", f"{LISTS}", "None, None"],
    "gather": [f"{LISTS}, {LIST}", f"{LIST}, {X}", "3, 3", f"{LISTS}, 3", f"3, {LIST}", f"{LISTS}", "None, None"],
    "scatter": [f"{LIST}, {LISTS}", f"{X}, {LIST}", "3, 3", f"{LIST}, 3", f"3, {LISTS}", f"{LIST}", "None, None"],
    "reduce_scatter": [f"{LIST}, {LISTS}", f"{X}, {LIST}", "3, 3", f"{LIST}, 3", f"3, {LISTS}", f"{LIST}"],
    **same_for(
        ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
        [f"{X}, {X}", f"{X}, 3", f"3, {X}", X, f"{LIST}, {LIST}"],
    ),
    **same_for(
        ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "alltoall"),
        [f"{LIST}, {LIST}", f"{LIST}, 3", f"3, {LIST}", f"{LIST}, [3]", f"{X}, {X}"],
    ),
    "allgather_coalesced": [f"{LISTS}, {LIST}", f"{LIST}, {LIST}", f"3, {LIST}"],
    **same_for(
        ("alltoall_base", "all_to_all_single"),
        [f"{X}, {X}, [], []", f"{X}, {X}, (2,), (2,)", f"{X}, {X}", f"{X}, {X}, 3, 3", f"{X}, {X}, None, None",
         f"{X}, {X}, ['a'], [2]", f"{X}, {X}, [2.0], [2]", f"{LIST}, {LIST}, [], []", f"{X}, 3, [], []"],
    ),
}  # fmt: skip
MESSAGES = {
    "send": ["{LIST}, 'a', 0", "{LIST}, 0, 'a'", "{X}, 0, 0", "3, 0, 0", "[3], 0, 0", "{LIST}", "{LIST}, 0",
             "{LIST}, 0, 0, 3", "{LIST}, 0.0, 0"],
    "recv_anysource": ["{LIST}, 'a'", "3, 0", "", "{LIST}"],
}  # fmt: skip
MESSAGES["recv"] = MESSAGES["send"]
OTHERS = [
    "set_timeout(3)", "set_timeout('a')", "set_timeout(None)", "set_timeout()", "_get_backend(3)",
    "_get_backend('cpu')", "_set_group_name(3)", "_set_group_desc(3)", "rank(3)", "abort(3)", "monitored_barrier('a')",
    "monitored_barrier(td(seconds=9), 'a')", "monitored_barrier(3)", "split_group(3)", "split_group(['a'])",
    "split_group([0], 3)", "split_group([0], None, 3)", "split_group([0], None, None, 3)",
    "split_group([0], None, None, 'a', 3)", "merge_remote_group(3, 1)", "merge_remote_group(m.HashStore(), 'a')",
    "merge_remote_group(m.HashStore(), 1, 3)", "_start_coalescing(3)", "_end_coalescing(3)",
    "_register_backend(3, 4, 5)",
]  # fmt: skip
ONLY_DISPATCHED = ["_register_backend(torch.device('cpu'), m.ProcessGroup.BackendType.GLOO, 3)", "_backend_id(3)"]


def calls_of(name: str) -> list[str]:
    """Every form of the tensors with each thing that may come after them."""
    seen = []
    for tensors in TENSORS[name]:
        more = [*NOT_OPTIONS, *OPTIONS, *AFTER] if "torch" in tensors or name == "barrier" else []
        seen += [f"{name}({tensors})", *[f"{name}({tensors}, {item})" for item in more if tensors]]
        seen += [f"{name}({item})" for item in more if not tensors]
    return seen


@pytest.fixture(scope="module")
def gloo():
    group = dist.ProcessGroup(0, 1)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


@pytest.fixture(scope="module")
def dispatching():
    group = ours.ProcessGroup(ours.HashStore(), 0, 1)
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def engine():
    group = TorchGroup(ours.HashStore(), 0, 1, timedelta(seconds=20), "wrong types")
    yield group
    group.shutdown()


def compared(calls: list[str], theirs_is, ours_is) -> list[str]:
    """What differs: whether a call was a TypeError, or what torch 2.14 raises instead of one here and there."""
    different = []
    for call in calls:
        if not hasattr(theirs_is, call.split("(")[0]):
            continue  # another version of torch
        was = [outcome(f"g.{call}", module, g=g) for module, g in ((theirs, theirs_is), (ours, ours_is))]
        refused = [
            kind == "raised" and (family(value) == "TypeError" or "Unable to cast Python" in str(value))
            for kind, value in was
        ]
        if refused[0] != refused[1] or (was[0][0] == "gave") != (was[1][0] == "gave"):
            different.append(f"{call}: theirs {was[0][0]} {plain(was[0][1])}, ours {was[1][0]} {was[1][1]!r}")
    return different


def is_lenient(call: str) -> bool:
    """Whether our engine and PyTorch differ on purpose. Ours takes a tensor outside a list together with options (after
    a similar call it no longer looks at lists), and plain arguments by the name ``opts``. PyTorch also takes tensors by
    their singular names; ours knows the names of one form only."""
    lone = "(torch.ones(2), m." in call or "[torch.ones(2)], torch.ones(2), m." in call
    return "opts=3" in call or "tensor=" in call or lone or "(torch.ones(2), [torch.ones(2)], m." in call


@since_2_13
@pytest.mark.parametrize("name", [*TENSORS, *MESSAGES])
@pytest.mark.parametrize("kind", ["dispatching", "engine"])
def test_calls_of_groups(name: str, kind: str, gloo, request):
    group = request.getfixturevalue(kind)
    if name in MESSAGES:
        calls = [f"{name}({text.format(X=X, LIST=LIST)})" for text in MESSAGES[name]]
    else:
        calls = calls_of(name)
    if kind == "engine":
        calls = [call for call in calls if not is_lenient(call)]
    assert not (different := compared(calls, gloo, group)), "\n".join(different)


@since_2_13
@pytest.mark.parametrize("kind", ["dispatching", "engine"])
def test_other_methods_of_groups(kind: str, gloo, request):
    group = request.getfixturevalue(kind)
    calls = OTHERS + (ONLY_DISPATCHED if kind == "dispatching" else [])
    if kind == "engine":
        calls = [call for call in calls if call != "_get_backend('cpu')"]  # a device's name will do
    assert not (different := compared(calls, gloo, group)), "\n".join(different)


@since_2_13
@pytest.mark.parametrize("name", [name for name in TENSORS if hasattr(theirs.Backend, name)])
def test_calls_of_fake_groups(name: str):
    fakes = [module.FakeProcessGroup._create_internal(0, 1) for module in (theirs, ours)]
    takes_timeout = "timeout" in (getattr(theirs.Backend, name).__doc__ or "")  # not since torch 2.14
    calls = [call for call in calls_of(name) if "None" not in call and "timeout=" not in call]
    if name == "barrier" or (name == "all_to_all_single" and not takes_timeout):  # ours do as groups' do
        calls = [call for call in calls if "td" not in call and "3.5" not in call]
    assert not (different := compared(calls, *fakes)), "\n".join(different)


def test_the_words_of_a_refusal(engine):
    for call, words in {
        "allreduce([torch.ones(2)], 'sum')": "allreduce: opts or op must be an AllreduceOptions or a ReduceOp, got 's",
        "broadcast(torch.ones(2))": "broadcast: root must be an int, got none",
        "barrier(3)": "barrier: opts or timeout must be a BarrierOptions or a timedelta, got 3",
        "allgather([[torch.ones(2)]], 3)": "allgather: input_tensors must be a list of tensors, got 3",
    }.items():
        kind, error = outcome(f"g.{call}", ours, g=engine)
        assert kind == "raised" and isinstance(error, WrongTypeError) and words in str(error), error


def test_a_refused_call_leaves_the_group_usable(engine):
    tensor, options = torch.full((2,), 3.0), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    before = engine._get_sequence_number_for_group()
    with pytest.raises(TypeError):
        engine.allreduce([tensor], "sum")
    assert engine._get_sequence_number_for_group() == before
    engine.allreduce([tensor], options).wait()
    assert tensor.tolist() == [3, 3]


REDUCE_OPS = [
    "R(3)", "R('SUM')", "R(None)", "R()", "R(R.SUM, 2)", "R(R.MAX).op", "R(R(R.MAX)).op", "R.RedOpType(3)",
    "R.RedOpType(3.0)", "R.RedOpType('SUM')", "R.RedOpType(None)", "o = R(R.SUM)\no.op = 3", "o = R(R.SUM)\ndel o.op",
    "o = R(R.SUM)\no.op = 'MAX'\no", "o = R(R.SUM)\no.op = R.MAX\no.op", "o = R(R.SUM)\no.op = 3\no",
    "o = R(R.SUM)\no.op = R(R.MAX)\no", "o = R(R.SUM)\ndel o.op\no", "o = R(R.SUM)\no.other = 3\no",
    "m._make_nccl_premul_sum('a')", "m._make_nccl_premul_sum(None)", "m._make_nccl_premul_sum([2.0])",
]  # fmt: skip


@pytest.mark.parametrize("expression", [text for text in REDUCE_OPS if "= 3" not in text or text.endswith("\no")])
def test_reduce_operations(expression: str):
    same(expression)


def test_reduce_operations_of_both():
    for op in (theirs.ReduceOp.MAX, ours.ReduceOp.MAX):
        assert ours.ReduceOp(op).op is ours.ReduceOp.MAX


# --- data-parallel ------------------------------------------------------------------------------------------------

REDUCER = "p = torch.ones(3, requires_grad=True)\nr = m.Reducer([p], [[0]], [100], g)\nl = m.Logger(r)\n"
REDUCERS = [
    "m.Reducer(3, [[0]], [100], g)",
    "m.Reducer([3], [[0]], [100], g)",
    "m.Reducer([p], 3, [100], g)",
    "m.Reducer([p], [0], [100], g)",
    "m.Reducer([p], [['a']], [100], g)",
    "m.Reducer([p], [[0]], 3, g)",
    "m.Reducer([p], [[0]], ['a'], g)",
    "m.Reducer([p], [[0]], [100], 3)",
    "m.Reducer([p], [[0]], [100])",
    "m.Reducer()",
    "m.Reducer([p], [[0]], [100], g, 3)",
    "m.Reducer([p], [[0]], [100], g, ['a'])",
    "m.Reducer([p], [[0]], [100], g, [False], 'a')",
    "m.Reducer([p], [[0]], [100], g, [False], 1.5)",
    "m.Reducer([p], [[0]], [100], g, [False], 9, 'a')",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, 'a')",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, 3)",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, False, 3)",
    "m.Reducer([p], [[0]], [100], g, nonsense=3)",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, False, {'a': 'b'})",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, False, {0: 3})",
    "m.Reducer([p], [[0]], [100], g, [False], 9, False, False, {0: 'a'}, 'a')",
    "m.Reducer((p,), ((0,),), (100,), g)",
    "r.prepare_for_backward(3)",
    "r.prepare_for_backward('a')",
    "r.prepare_for_backward([3])",
    "r.prepare_for_backward(None)",
    "r.prepare_for_backward()",
    "r.prepare_for_backward([p])",
    "r.prepare_for_backward(p)",
    "r.prepare_for_forward(3)",
    "r._rebuild_buckets(3)",
    "r.set_logger(3)",
    "r._set_static_graph(3)",
    "r._set_sparse_metadata(3)",
    "r._set_sparse_metadata({3: p})",
    "r._set_sparse_metadata({'a': 3})",
    "r._set_sparse_metadata({'a': p})",
    "r._set_forward_pass_work_handle(3, True)",
    "r._set_forward_pass_work_handle(m.FakeWork(), 'a')",
    "r._install_post_backward_futures(3)",
    "r._install_post_backward_futures([3])",
    "r._install_post_backward_futures([])",
    "r._set_ddp_runtime_logging_sample_rate('a')",
    "r._set_ddp_runtime_logging_sample_rate(1.5)",
    "r._set_ddp_runtime_logging_sample_rate(0)",
    "r._set_ddp_runtime_logging_sample_rate(9)",
    "r._update_process_group(3)",
    "r._run_comm_hook(3)",
    "r._run_allreduce_hook(3)",
    "r._push_all_rebuilt_params(3)",
    "r._remove_autograd_hooks(3)",
    "r._delay_all_reduce(3)",
    "m._register_comm_hook(3, None, print)",
    "m._register_comm_hook(r, None)",
    "m._register_builtin_comm_hook(r, 3)",
    "m._register_builtin_comm_hook(3, m.BuiltinCommHookType.ALLREDUCE)",
    "m._register_builtin_comm_hook(r, 'ALLREDUCE')",
    "m._broadcast_coalesced(3, [p], 9)",
    "m._broadcast_coalesced(g, 3, 9)",
    "m._broadcast_coalesced(g, [3], 9)",
    "m._broadcast_coalesced(g, [p], 'a')",
    "m._broadcast_coalesced(g, [p], 9, 'a')",
    "m._verify_params_across_processes(3, [p], None)",
    "m._verify_params_across_processes(g, 3, None)",
    "m._verify_params_across_processes(g, [3], None)",
    "m._verify_params_across_processes(g, [p], 3)",
    "m._compute_bucket_assignment_by_size(3, [1])",
    "m._compute_bucket_assignment_by_size([3], [1])",
    "m._compute_bucket_assignment_by_size([p], 3)",
    "m._compute_bucket_assignment_by_size([p], ['a'])",
    "m._compute_bucket_assignment_by_size([p], [1], 3)",
    "m._compute_bucket_assignment_by_size([p], [1], ['a'])",
    "m._compute_bucket_assignment_by_size([p], [1], [], 3)",
    "m._compute_bucket_assignment_by_size([p], [1], [], ['a'])",
    "m._compute_bucket_assignment_by_size([p], [-1])",
    "m._compute_bucket_assignment_by_size([p], [2, -1])",
    "m._compute_bucket_assignment_by_size([p, p], [2**64 - 1])",
    "m._compute_bucket_assignment_by_size([p], [2**64])",
    "m._compute_bucket_assignment_by_size([p], [True])",
    "m._compute_bucket_assignment_by_size([p], [1], logger=3)",
    "m._compute_bucket_assignment_by_size([p], '')",
    "m._compute_bucket_assignment_by_size([p], [1], logger=l)",
    "m._compute_bucket_assignment_by_size([p], {1: 2})",
    "m.Reducer([p], [[-1]], [100], g)",
    "m.Reducer([p], [[0]], [-1], g)",
    "m.Reducer([p], [[0]], [2**64], g)",
    "m.Reducer([p], [range(1)], range(9, 10), g)",
    "r._autograd_hook('a')",
    "r._autograd_hook(None)",
    "r._autograd_hook(1.0)",
    "r._autograd_hook(0)",
    "r.set_logger(None)",
    "r.set_logger('a')",
    "r.set_logger(l)",
    "r._set_forward_pass_work_handle(None, True)",
    "r._set_forward_pass_work_handle(None, 3)",
    "r._set_forward_pass_work_handle(None, 'a')",
    "m._broadcast_coalesced(g, [torch.ones(2)], 0)",
    "m._broadcast_coalesced(g, [torch.ones(2)], -1)",
    "m._broadcast_coalesced(g, [torch.ones(2)], 1.0)",
    "m._broadcast_coalesced(g, torch.ones(2), 9)",
    "m._broadcast_coalesced(g, {torch.ones(2): 3}, 9)",
    "m._broadcast_coalesced(g, '', 9)",
]
# Newer pybind11 takes more than lists for a vector.
ITERABLES = [
    "m._broadcast_coalesced(g, (t for t in [torch.ones(2)]), 9)", "m._broadcast_coalesced(g, {torch.ones(2)}, 9)",
    "m._broadcast_coalesced(g, {3: torch.ones(2)}.values(), 9)", "m._broadcast_coalesced(g, map(torch.ones, [2]), 9)",
    "m._broadcast_coalesced(g, (3 for _ in [0]), 9)", "m.Reducer((t for t in [p]), [{0}], {9}, g)",
    "r.prepare_for_backward(t for t in [p])", "m._verify_params_across_processes(g, {p})",
    "m._compute_bucket_assignment_by_size((t for t in [p, p]), {3})",
    "m._compute_bucket_assignment_by_size([p, p], (n for n in [3]), {False: 0, True: 0}.keys())",
]  # fmt: skip
LOGGERS = [
    "m.Logger(3)", "l.set_construction_data_and_log(3, [], -1, True, False, False)",
    "l.set_construction_data_and_log('a', 3, -1, True, False, False)",
    "l.set_construction_data_and_log('a', ['b'], -1, True, False, False)",
    "l.set_construction_data_and_log('a', [], 'b', True, False, False)",
    "l.set_construction_data_and_log('a', [], None, True, False, False)",
    "l.set_construction_data_and_log('a', [], -1, 'b', False, False)",
    "l.set_construction_data_and_log('a', [], -1, 3, False, False)",
    "l.set_construction_data_and_log('a', [], -1, True, 'b', False)",
    "l.set_construction_data_and_log('a', [], -1, True, False, 'b')", "l.set_construction_data_and_log('a')",
    "l.set_runtime_stats_and_log(3)", "l.set_error_and_log(3)", "l.set_error_and_log(None)", "l._set_comm_hook_name(3)",
    "l._set_static_graph(3)", "l._set_uneven_input_join(3)", "l._get_ddp_logging_data(3)",
    "d = m.DDPLoggingData()\nd.ints_map = 3\nd.ints_map", "d = m.DDPLoggingData()\nd.ints_map = {'a': 'b'}\nd.ints_map",
    "d = m.DDPLoggingData()\nd.ints_map = {3: 4}\nd.ints_map", "d = m.DDPLoggingData()\nd.strs_map = 3\nd.strs_map",
    "d = m.DDPLoggingData()\nd.strs_map = {'a': 3}\nd.strs_map", "d = m.DDPLoggingData()\nd.other = 3\nd",
    "m.DDPLoggingData(3)",
]  # fmt: skip
BUCKETS = [
    "m.GradBucket()", "m.GradBucket(3)", "b.index(3)", "b.buffer(3)", "b.set_buffer(3)", "b.set_buffer()",
    "b.set_buffer([p])", "b.set_buffer(p)", "b.gradients(3)", "b.parameters(3)", "b.is_last(3)", "b.other",
    "b.other = 3\nb", "b.set_buffer(torch.ones(3))\nb.buffer()",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["reducers", "loggers", "buckets", pytest.param("iterables", marks=since_2_13)])
def test_data_parallel(kind: str, gloo):
    before = REDUCER + ("b = r._get_zeros_like_grad_buckets()[0]\n" if kind == "buckets" else "")
    different = []
    cases = {"reducers": REDUCERS, "loggers": LOGGERS, "buckets": BUCKETS, "iterables": ITERABLES}
    for text in cases[kind]:
        was = [outcome(before + text, module, g=gloo) for module in (theirs, ours)]
        seen = [family(value) if how == "raised" else plain(value) for how, value in was]
        if seen[0] != seen[1]:
            different.append(f"{text}: theirs {seen[0]}, ours {was[1]}")
    assert not different, "\n".join(different)


# --- fields that only C++ may set ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["m.Backend.Options('x')", "m.FakeProcessGroup.Options()"])
@pytest.mark.parametrize("change", ["o.backend = 'y'", "del o.backend", "o.other = 3"])
def test_backend_options_keep_their_backend(make: str, change: str):
    for module in (theirs, ours):
        kind, error = outcome(f"o = {make}\n{change}\no.backend", module)
        assert kind == "raised" and isinstance(error, AttributeError), (module.__name__, error)


def test_what_was_detected_stays():
    """PyTorch detects for CUDA only; its class says which fields there are, and that none can be set."""
    assert {
        name for name, v in vars(theirs._DMAConnectivity).items() if isinstance(v, property) and v.fset is None
    } == {
        "device_type",
        "connection_type",
        "matrix",
    }
    found = ours._detect_dma_connectivity(torch._C._autograd.DeviceType.CPU, "numa")
    before = found.matrix
    for name in ("device_type", "connection_type", "matrix", "other"):
        with pytest.raises(AttributeError):
            setattr(found, name, [[1]])
    found.matrix[0][0] = 99  # a copy, as from C++
    assert found.matrix == before and found.connection_type == "numa"
