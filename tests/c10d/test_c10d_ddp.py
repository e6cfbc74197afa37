"""The data-parallel names of symcomm.c10d against PyTorch's, on one rank; tests/ddp/checks.py compares on two."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from symcomm.errors import BadArgumentError
from tests.support.c10d_compare import OLDER, ours, same, since_2_15, theirs
from tests.torch_backend.checks import leave

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize(
    "expression",
    [
        "m.BuiltinCommHookType.ALLREDUCE",
        "m.BuiltinCommHookType.FP16_COMPRESS.name",
        "m.BuiltinCommHookType(2)",
        "m.BuiltinCommHookType('ALLREDUCE')",
        "m.BuiltinCommHookType.ALLREDUCE == 1",
        "int(m.BuiltinCommHookType.ALLREDUCE)",
        "sorted(m.BuiltinCommHookType.__members__)",
        "m.DDPLoggingData().strs_map",
        "m.DDPLoggingData().ints_map",
        "d = m.DDPLoggingData()\nd.ints_map = {'a': 1}\nd.ints_map",
        "m._compute_bucket_assignment_by_size([], [1])",
        "m._compute_bucket_assignment_by_size([torch.ones(2)], [1], [True, False])",
        "m._compute_bucket_assignment_by_size([torch.ones(2)], [1], [True])",
        "m._compute_bucket_assignment_by_size([torch.ones(2).to_sparse()], [1])",
        "m._compute_bucket_assignment_by_size(tensors=[torch.ones(2)], bucket_size=[1], tensor_indices=[7])",
        "m._DEFAULT_FIRST_BUCKET_BYTES",
    ],
)
def test_same(expression: str):
    same(expression)


def test_members_compare_with_pytorchs():
    assert ours.BuiltinCommHookType.FP16_COMPRESS == theirs.BuiltinCommHookType.FP16_COMPRESS
    assert ours.BuiltinCommHookType.FP16_COMPRESS != theirs.BuiltinCommHookType.ALLREDUCE


@st.composite
def assignments(draw):
    count = draw(st.integers(1, 20))
    dtypes = draw(st.lists(st.sampled_from([torch.float32, torch.float64]), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    limits = draw(st.lists(st.integers(0, 400), min_size=1, max_size=4))
    sparse = draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=count, max_size=count)))
    order = draw(st.one_of(st.just([]), st.permutations(range(count))))
    return [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)], limits, sparse, list(order)


@given(assignments())
@settings(max_examples=200, deadline=None)
def test_buckets_are_pytorchs(case):
    tensors, limits, sparse, order = case
    mine = ours._compute_bucket_assignment_by_size(tensors, limits, sparse, order)
    wanted = theirs._compute_bucket_assignment_by_size(tensors, limits, sparse, order)
    assert mine == tuple(wanted)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    leave()


def test_reducer_takes_pytorchs_arguments(group):
    signature = inspect.signature(ours.Reducer)
    assert list(signature.parameters) == [
        "params", "bucket_indices", "per_bucket_size_limits", "process_group", "expect_sparse_gradients",
        "bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "param_to_name_mapping",
        "first_bucket_bytes_cap", "skip_all_reduce_unused_params", "use_python_reducer", "bucket_bytes_cap_list",
        "batched_grad_copy",
    ]  # fmt: skip
    param = torch.nn.Parameter(torch.ones(3))
    bad = [
        ([], [[0]], [0], group),
        ([param], [[1]], [0], group),
        ([param], [[0]], [0], group, [True, False]),
    ]
    for arguments in bad:
        for module in (ours, theirs):
            with pytest.raises(RuntimeError):
                module.Reducer(*arguments)


SHARING = {
    "must have the same dtype": lambda: [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "must be placed on the same device": lambda: [torch.ones(2), torch.ones(2, device="meta")],
}


@pytest.mark.parametrize("words", SHARING)
@pytest.mark.parametrize("views", [True, False])
def test_parameters_of_a_bucket_are_of_one_kind(group, words: str, views: bool):
    for module in (theirs, ours):
        params = [torch.nn.Parameter(tensor) for tensor in SHARING[words]()]
        with pytest.raises(RuntimeError, match=f"All parameters in a bucket {words}"):
            module.Reducer(params, [[0, 1]], [100], group, gradient_as_bucket_view=views)
        module.Reducer(params, [[0], [1]], [100, 100], group, gradient_as_bucket_view=views)


@pytest.mark.parametrize("sparse", [True, False])
def test_parameters_are_leaves(group, sparse: bool):
    leaf = torch.ones(2, requires_grad=True)
    for module in (theirs, ours):
        for other in (leaf * 2, leaf.view(2), leaf.clone()):
            with pytest.raises(RuntimeError, match="should be only called on leaf Variables"):
                module.Reducer([leaf, other], [[0], [1]], [100, 100], group, [False, sparse])
    for other, words in (
        (
            torch.ones(2),
            r"params\[1\] must be a tensor that requires grad, got 'a tensor of torch.float32 that does not'",
        ),
        (torch.ones(2, dtype=torch.int64), r"params\[1\] must be a tensor that requires grad"),
        (torch.ones(2).to_sparse().requires_grad_(), r"params\[1\] must be a dense tensor, got torch.sparse_coo"),
    ):  # PyTorch's constructor kills the process, or makes one whose backward pass raises
        with pytest.raises(BadArgumentError, match=words):
            ours.Reducer([leaf, other], [[0], [1]], [100, 100], group, [False, sparse])


def reduced_by(module, group, **options) -> tuple:
    """A model trained by a reducer alone: gradients, statistics, what the logger says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params = list(model.parameters())
    indices, limits = module._compute_bucket_assignment_by_size(params, [40, 100])
    reducer = module.Reducer(params, indices[::-1], limits[::-1], group, **options)
    logger = module.Logger(reducer)
    reducer.set_logger(logger)
    logger.set_construction_data_and_log("Sequential", [], -1, True, False, False)
    seen = []
    for _ in range(3):
        logger.set_runtime_stats_and_log()
        reducer.prepare_for_forward()
        seen.append(reducer._rebuild_buckets())
        loss = model(torch.ones(2, 3)).sum()
        reducer.prepare_for_backward([])
        loss.backward()
        reducer._check_reducer_finalized()
    zeros = [(b.index(), b.is_last(), b.buffer().tolist()) for b in reducer._get_zeros_like_grad_buckets()]
    data = logger._get_ddp_logging_data()
    told = {k: v for k, v in {**data.strs_map, **data.ints_map}.items() if "time" not in k}
    logger.set_error_and_log("a fault")
    after = logger._get_ddp_logging_data()
    return (
        [p.grad.tolist() for p in params],
        seen,
        zeros,
        told,
        (after.ints_map["has_error"], "a fault" in after.strs_map["error"]),
        len(reducer.get_backward_stats()),
        reducer._ddp_graph_static(),
    )


@pytest.mark.parametrize("views", [True, False])
def test_reducers_do_the_same(group, views):
    options = {"gradient_as_bucket_view": views, "bucket_bytes_cap": 50, "first_bucket_bytes_cap": 20}
    mine, wanted = reduced_by(ours, group, **options), reduced_by(theirs, group, **options)
    if OLDER:
        mine[3].clear(), wanted[3].clear()  # keys have come since
    assert mine == wanted


def test_reducers_do_the_same_where_graphs_would_reduce(group):
    """``use_python_reducer`` matters to compiled autograd only."""
    assert reduced_by(ours, group, use_python_reducer=True) == reduced_by(theirs, group, use_python_reducer=True)


@pytest.mark.parametrize("in_graph", [True, False])
def test_compiled_autograd(group, in_graph: bool):
    """It passes over the hooks of a reducer that was made for it, and refuses others."""
    from torch._dynamo import compiled_autograd

    for module in (theirs, ours):
        param = torch.nn.Parameter(torch.ones(3))
        reducer = module.Reducer([param], [[0]], [100], group, use_python_reducer=in_graph)
        reducer.prepare_for_backward([])
        with compiled_autograd._enable(lambda graph: graph):
            if in_graph:
                param.sum().backward()
                assert reducer.get_backward_stats() == [0] and param.grad.tolist() == [1, 1, 1]
            else:
                with pytest.raises(RuntimeError, match="Compiled autograd is not compatible with C\\+\\+ DDP Reducer"):
                    param.sum().backward()
        reducer.prepare_for_backward([])
        param.sum().backward()
        assert reducer.get_backward_stats()[0] > 0


def finalized_by_hand(module, group) -> list:
    """Each step of a reducer whose caller finalizes; of errors, their kind."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params = list(model.parameters())
    reducer = module.Reducer(params, [[3, 2], [1, 0]], [100, 100], group)
    said: list = []

    def attempt(call, *args) -> None:
        try:
            said.append(call(*args))
        except RuntimeError:
            said.append("refused")

    attempt(reducer._finalize_backward_manual)  # nobody asked for it
    attempt(reducer._should_finalize_after_backward)
    reducer._set_manual_finalization_required(True)
    attempt(reducer._finalize_backward_manual)  # nothing is under way
    for _ in range(3):
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        loss = model(torch.ones(2, 3)).sum()
        reducer.prepare_for_backward([])
        attempt(reducer._should_finalize_after_backward)
        attempt(reducer._set_manual_finalization_required, False)  # too late for this pass
        attempt(reducer._finalize_backward_manual)  # too early
        loss.backward()
        attempt(reducer._finalize_backward_manual)
        attempt(reducer._finalize_backward_manual)  # once only
        reducer._check_reducer_finalized()
    reducer._set_manual_finalization_required(False)
    attempt(reducer._finalize_backward_manual)
    return [said, [p.grad.tolist() for p in params]]


BY_HAND = ["refused", True, "refused", *[True, "refused", "refused", None, "refused"],
           *[False, "refused", "refused", None, "refused"] * 2, "refused"]  # fmt: skip


def test_the_caller_may_finalize(group):
    said, grads = finalized_by_hand(ours, group)
    assert said == BY_HAND
    assert grads == reduced_by(ours, group)[0]


@since_2_15
def test_the_caller_may_finalize_as_in_pytorch(group):
    if not hasattr(theirs.Reducer, "_finalize_backward_manual"):
        pytest.skip(f"torch {torch.__version__} has no _finalize_backward_manual")
    assert finalized_by_hand(ours, group) == finalized_by_hand(theirs, group)


def test_hooks_go_with_the_reducer(group):
    param = torch.nn.Parameter(torch.ones(3))
    reducer = ours.Reducer([param], [[0]], [100], group)
    reducer.prepare_for_backward([])
    param.sum().backward()
    assert reducer.get_backward_stats()[0] > 0
    reducer._remove_autograd_hooks()
    reducer.prepare_for_backward([])
    param.sum().backward()
    reducer._check_reducer_finalized()
    del reducer
    param.sum().backward()
    assert param.grad.tolist() == [3, 3, 3]


def test_parameters_of_a_bare_layer_have_no_leading_dot(group, monkeypatch):
    """torch's DistributedDataParallel calls it ".weight"; our messages say "weight"."""
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.INFO)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    names = {0: ".weight", 1: ".bias"}
    reducer = ours.Reducer(params, [[0, 1]], [100], group, param_to_name_mapping=names)
    reducer.prepare_for_backward([])
    params[0].sum().backward()
    with pytest.raises(RuntimeError) as twice:
        params[0].sum().backward()
    with pytest.raises(RuntimeError) as unused:
        reducer._check_reducer_finalized()
    assert "Parameter at index 0 with name weight has been marked" in str(twice.value)
    assert "No gradient came for bias (parameter 1) on rank 0" in str(unused.value)
    assert "Parameters which did not receive grad for rank 0: bias\n" in str(unused.value)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_logger_and_used_map_as_pytorchs(find_unused: bool, static: bool, group):
    told = []
    for module in (theirs, ours):
        params = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
        reducer = module.Reducer(
            params, [[0, 1]], [1 << 20], group, [False, False], 1 << 20, find_unused, False, {0: "a", 1: "b"}, 1 << 20
        )
        logger = module.Logger(reducer)
        logger.set_construction_data_and_log("Module", [], -1, False, False, False)
        logger._set_static_graph()
        if static:
            reducer._set_static_graph()
            logger._set_static_graph()
        reducer.set_logger(logger)
        is_mapped = reducer._get_local_used_map() is not None
        for _ in range(2):
            logger.set_runtime_stats_and_log()
            reducer.prepare_for_forward()
            total = params[0].sum() + params[1].sum()
            reducer.prepare_for_backward([total] if find_unused and not static else [])
            total.backward()
            reducer._rebuild_buckets()
        logger.set_runtime_stats_and_log()
        data = logger._get_ddp_logging_data()
        kept = {**data.ints_map, **data.strs_map}
        told.append((is_mapped, {k: v for k, v in kept.items() if "rebuilt" in k or "static" in k}))
    assert told[0] == told[1]


def test_a_logger_is_one_of_a_reducer():
    same("m.Logger(3)")
    same("m.Logger()")
