"""Options objects and reduce operations: PyTorch's and ours side by side."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

pytest.importorskip("torch")
import torch

from symcomm.errors import BadArgumentError
from tests.support.c10d_compare import ours, outcome, plain, same, since_2_13, since_2_15, theirs

pytestmark = pytest.mark.torch_versions

CALLS = [
    "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BarrierOptions",
    "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions",
]  # fmt: skip
OF_WINDOWS = [name for name in ("PutOptions", "SignalOptions", "WaitSignalOptions") if hasattr(theirs, name)]
ALL = [*CALLS, *OF_WINDOWS, "_DistributedBackendOptions"]


def attributes(name: str) -> list[str]:
    return [a for a in dir(getattr(theirs, name)()) if not a.startswith("_")]


@pytest.mark.parametrize("name", ALL)
def test_defaults(name: str):
    def values(module):
        made = getattr(module, name)()
        return {a: plain(getattr(made, a)) for a in attributes(name)}

    assert values(ours) == values(theirs)


VALUES = [
    "True", "None", "1", "0", "-5", "2**33", "2**70", "1.5", "'cpu'", "'a'", "[1, 2]", "(1, 2)", "[1.5]", "[]",
    "td(seconds=3)", "td(seconds=1.23456)", "td(microseconds=-10)", "td(milliseconds=-1)", "td(days=2)", "R.MAX",
    "R(R.MIN)", "m._make_nccl_premul_sum(2.0)", "torch.device('cuda:1')", "torch.device('cpu')", "torch.tensor(1)",
    "object()", "{}", "{'a': 'b'}", "{'a': 1}",
]  # fmt: skip
# Newer pybind11 takes more than Python's own.
OF_OTHER_KINDS = [
    "b'ab'", "bytearray(b'ab')", "np.str_('a')", "{1, 2}", "frozenset([1])", "range(3)", "deque([1])",
    "(i for i in [1])", "{3: 4}.keys()", "{3: 4}.values()", "map(int, '12')", "np.array([1, 2])", "np.array([1.5])",
    "np.array([[1]])", "array('i', [1])", "memoryview(b'a')", "torch.tensor([1, 2])", "[np.int8(1)]", "[np.float32(1)]",
    "[True]", "['1']", "[None]", "[torch.tensor(1)]", "[2**63]", "np.int64(2)", "np.uint8(2)", "np.float32(2.5)",
    "np.float64(2)", "np.bool_(True)", "np.array(2)", "np.array([2])", "torch.tensor(2.5)", "torch.ones(2)",
    "Decimal(2)", "Fraction(5, 2)", "m.OpType(1)", "np.timedelta64(1, 's')",
]  # fmt: skip
NAMES = {"np": numpy, "deque": deque, "array": array, "Decimal": Decimal, "Fraction": Fraction}


@pytest.mark.parametrize("name", ALL)
def test_every_attribute_takes_and_refuses_the_same(name: str):
    for attribute in attributes(name):
        if attribute == "store":
            continue
        for value in VALUES:
            read = f"o.{attribute}.op" if attribute == "reduceOp" else f"o.{attribute}"
            same(f"o = m.{name}()\no.{attribute} = {value}\n{read}")


@since_2_13
@pytest.mark.parametrize("name", [*ALL, "Backend.Options('x')", "FakeProcessGroup.Options"])
def test_what_counts_as_a_number_text_or_a_list(name: str):
    made = f"m.{name}" if name.endswith(")") else f"m.{name}()"
    for attribute in dir(eval(made, {"m": theirs})):
        if attribute.startswith("__") or attribute in ("store", "backend"):
            continue
        for value in OF_OTHER_KINDS:
            read = f"o.{attribute}.op" if attribute == "reduceOp" else f"o.{attribute}"
            same(f"o = {made}\no.{attribute} = {value}\n{read}", **NAMES)


@since_2_13
def test_names_in_bytes():
    for name in ("b'x'", "bytearray(b'x')", "np.str_('x')", "3", "None"):
        same(f"m.Backend.Options({name}).backend", **NAMES)
        same(f"g = m.ProcessGroup(0, 1)\ng._set_group_desc({name})\ng.group_desc", **NAMES)
        same(f"d = m.DDPLoggingData()\nd.strs_map = {{'k': {name}}}\nd.strs_map", **NAMES)
    with pytest.raises(TypeError, match="must be a str"):  # PyTorch's takes what nobody can read then
        ours.Backend.Options(b"\xff")


@pytest.mark.parametrize("seconds", ["float('nan')", "float('inf')", "1e300", "-1e300"])
def test_a_time_that_nothing_can_hold_is_refused(seconds: str):
    """(PyTorch turns it into another time.)"""
    for change in ("o = m.BroadcastOptions()\no.timeout = X\n0", "m.Work().wait(X)", "m.FakeWork().wait(X)"):
        kind, error = outcome(change.replace("X", seconds), ours)
        assert kind == "raised" and isinstance(error, BadArgumentError) and "a time that a timedelta" in str(error)


@pytest.mark.parametrize("name", ALL)
def test_objects(name: str):
    for expression in (
        f"m.{name}(1)",
        f"m.{name}(timeout=td(1))",
        f"o = m.{name}()\no.nonsense = 3\n0",
        f"m.{name}() == m.{name}()",
        f"m.{name}().nonsense",
    ):
        same(expression)


def test_lists_are_copies():
    same("o = m.BarrierOptions()\no.device_ids = [1]\no.device_ids.append(2)\no.device_ids")


def test_a_store_goes_in_and_comes_out():
    same("s = m.HashStore()\no = m._DistributedBackendOptions()\no.store = s\no.store is s")
    same("o = m._DistributedBackendOptions()\no.store = 3\n0")


@pytest.mark.parametrize("name", CALLS)
def test_ours_as_pytorchs(name: str):
    mine = getattr(ours, name)()
    for attribute, value in {
        "timeout": ours._DEFAULT_PG_TIMEOUT,
        "asyncOp": False,
        "rootRank": 3,
        "rootTensor": 1,
        "reduceOp": ours.ReduceOp.MAX,
        "device_ids": [4],
    }.items():
        if hasattr(mine, attribute):
            setattr(mine, attribute, value)
    kind = getattr(theirs, name)
    assert isinstance(mine, kind)
    for attribute in attributes(name):
        in_cpp = getattr(kind, attribute).__get__(mine)  # what C++ will read
        if attribute == "reduceOp":
            assert in_cpp == theirs.ReduceOp.MAX
        else:
            assert in_cpp == getattr(mine, attribute)
    assert name in repr(mine) and "timeout" in repr(mine)


# --- reduce operations --------------------------------------------------------------------------------------------

SAME = """
R.SUM | repr(R.SUM) | str(R.SUM) | R.SUM.name | R.SUM.value | int(R.SUM) | R.SUM == R.SUM | R.SUM == 0 | 0 == R.SUM
R.SUM == R.MAX | R.SUM == R.RedOpType.SUM | R.SUM == None | R.SUM is R.SUM | bool(R.SUM) | R.SUM.__index__()
hash(R.MAX)
R(R.SUM) == R.SUM | R(R.SUM) != R.SUM | R(R.SUM) == R(R.SUM) | R(R.SUM) == R(R.MAX) | R(R.SUM) == 0 | R(R.SUM) == 'SUM'
R(R.SUM) == None | R(R.SUM) is R(R.SUM) | hash(R(R.MAX)) | hash(R(R.SUM)) == hash(R.SUM) | R.SUM in (R.SUM,)
isinstance(R.SUM, R) | isinstance(R(R.SUM), R) | isinstance(R.SUM, R.RedOpType) | isinstance(R(R.SUM), R.RedOpType)
isinstance(3, R) | isinstance(None, R) | type(R(R.SUM)).__name__ | type(R.SUM).__name__ | [1, 2, 3][R.AVG]
copy.copy(R.SUM) | copy.deepcopy(R.SUM) | copy.copy(R(R.MAX)).op | copy.deepcopy(R(R.MAX)).op == R.MAX
pickle.loads(pickle.dumps(R.SUM)) | pickle.loads(pickle.dumps(R(R.MAX))) == R.MAX | {R(R.SUM): 1}[R(R.SUM)]
dict(R.RedOpType.__members__) | R.RedOpType(3) | R.RedOpType('SUM') | R.RedOpType() | R('SUM') | R() | R(None)
R.SUM.op | R.SUM.factor | R(R.SUM).op | R(R.SUM).factor | R(R.SUM).name | R(R.PREMUL_SUM).factor
m._make_nccl_premul_sum(2.0).factor | m._make_nccl_premul_sum(factor=3.0).factor
m._make_nccl_premul_sum('a') | m._make_nccl_premul_sum(None) | m._make_nccl_premul_sum()
m._make_nccl_premul_sum(2.0).op | m._make_nccl_premul_sum(torch.tensor(2.0)).factor
 m._make_nccl_premul_sum(torch.tensor([2.0])).factor
m._make_nccl_premul_sum(2.0) == R.PREMUL_SUM | m._make_nccl_premul_sum(2.0) == m._make_nccl_premul_sum(2.0)
isinstance(m._make_nccl_premul_sum(2.0), R) | type(m._make_nccl_premul_sum(2.0)).__name__
copy.copy(m._make_nccl_premul_sum(2.0)).factor | copy.deepcopy(m._make_nccl_premul_sum(2.0)).factor
pickle.loads(pickle.dumps(m._make_nccl_premul_sum(2.0))).factor | R.PREMUL_SUM(2.0).factor
R.PREMUL_SUM(factor=3.0).factor
pickle.loads(pickle.dumps(m._make_nccl_premul_sum(torch.tensor(2.0)))).factor | R.PREMUL_SUM(torch.tensor(2.0)).factor
copy.deepcopy(m._make_nccl_premul_sum(torch.tensor(2.0))).factor | R.PREMUL_SUM(2.0).op | R.SUM(2.0) | R.PREMUL_SUM()
R(R.MAX).__getstate__() | m._make_nccl_premul_sum(2.0).__getstate__() | R.MAX.__getstate__() | R(R.MAX).__copy__().op
R(R.MAX).__deepcopy__({}).op | m._make_nccl_premul_sum(torch.empty(0)).op | R.PREMUL_SUM(torch.empty(0)).op
R.PREMUL_SUM('a') | R.UNUSED | R.sum | R['SUM'] | R.__name__ | R(R.SUM) < R(R.MAX)
"""


@pytest.mark.parametrize("expression", [e.strip() for e in SAME.replace("\n", "|").split("|") if e.strip()])
def test_reduce_op(expression: str):
    same(expression)


@since_2_13
@pytest.mark.parametrize(
    "state", ["R(R.MAX).__getstate__()", "m._make_nccl_premul_sum(2.0).__getstate__()", "()", "'a'", "3", "None"]
)
@pytest.mark.parametrize("made", ["R(R.SUM)", "R.__new__(R)"])
def test_the_state_of_a_reduce_op(made: str, state: str):
    """__setstate__ of an object that was already made."""
    same(f"o = {made}\no.__setstate__({state})\no.__getstate__()")


@pytest.mark.parametrize(
    "statement", ["R.SUM.name = 'x'", "o = R(R.SUM)\no.factor = 3", "o = R(R.SUM)\no.zzz = 3", "R.SUM.value = 2"]
)
def test_reduce_op_is_not_written_to(statement: str):
    same(f"{statement}\n0")


# Where ours differs, on purpose: (PyTorch's answer, ours, why).
DIFFERENT = {
    "R.SUM == R(R.SUM)": (False, True, "equality should not depend on the side"),
    "{R.SUM: 1}.get(R(R.SUM))": (None, 1, "follows from equality"),
    "R(R.SUM) in (R.MAX, R.SUM)": (False, True, "follows from equality"),
    "m._make_nccl_premul_sum(2.0) == m._make_nccl_premul_sum(3.0)": (True, False, "other factors give other sums"),
    "m._make_nccl_premul_sum(torch.tensor([2.0, 3.0])).op.name": (RuntimeError, "PREMUL_SUM", "any that broadcasts"),
    "R.RedOpType(99).value": (99, ValueError, "there is no such operation"),
    "R(R.PREMUL_SUM).op.name": (RuntimeError, "PREMUL_SUM", "refused when a collective asks for its factor"),
    "isinstance(R.SUM, int)": (False, True, "ours are numbers, as the C core wants them"),
    "repr(R(R.MAX))[0] == '<'": (True, False, "ours says what it is"),
}


@pytest.mark.parametrize("expression", DIFFERENT)
def test_reduce_op_differs_on_purpose(expression: str):
    for wanted, module in zip(DIFFERENT[expression][:2], (theirs, ours), strict=True):
        kind, value = outcome(expression, module)
        if isinstance(wanted, type):
            assert kind == "raised" and isinstance(value, wanted), (module, value)
        else:
            assert kind == "gave" and value == wanted, (module, value)


@since_2_15
@pytest.mark.parametrize(
    "expression",
    [
        "m._make_nccl_premul_sum(2).factor",  # refused before
        "m._make_nccl_premul_sum(True).factor",
        "R.unbox(R(R.MAX).boxed()).op",
        "R.unbox(R.PREMUL_SUM(2.0).boxed()).factor",
        "R.unbox(3)",
        "type(R(R.SUM).boxed()).__name__",
    ],
)
def test_reduce_op_of_newer_torch(expression: str):
    same(expression)


def test_boxes_are_shared_with_pytorch():
    if not hasattr(theirs.ReduceOp, "boxed"):
        with pytest.raises(RuntimeError, match="ReduceOp.boxed: PyTorch boxes reduce operations since 2.15"):
            ours.ReduceOp(ours.ReduceOp.MAX).boxed()
        return
    assert theirs.ReduceOp.unbox(ours.ReduceOp(ours.ReduceOp.MAX).boxed()) == theirs.ReduceOp.MAX
    assert ours.ReduceOp.unbox(theirs.ReduceOp(theirs.ReduceOp.MIN).boxed()) == ours.ReduceOp.MIN


def test_repr_says_what_it_is():
    assert repr(ours.ReduceOp(ours.ReduceOp.MAX)) == "ReduceOp.MAX"
    assert repr(ours._make_nccl_premul_sum(0.5)) == "ReduceOp.PREMUL_SUM(factor=0.5)"


def test_tensor_factors_compare_by_value():
    make = ours._make_nccl_premul_sum
    assert make(torch.tensor([1.0, 2.0])) == make(torch.tensor([1.0, 2.0]))
    assert make(torch.tensor([1.0, 2.0])) != make(torch.tensor([1.0, 3.0]))
    assert make(2.0) != ours.ReduceOp(ours.ReduceOp.PREMUL_SUM)


def test_refusals_are_one_sentence():
    with pytest.raises(BadArgumentError, match=r"AllreduceOptions.timeout: value must be a timedelta, got 5; write"):
        ours.AllreduceOptions().timeout = 5
    with pytest.raises(TypeError, match="_make_nccl_premul_sum: factor must be a number or a tensor, got 'x'"):
        ours._make_nccl_premul_sum("x")


def test_a_copy_of_options_is_a_copy():
    first = ours.BroadcastOptions()
    first.rootRank = 2
    second = copy.copy(first)
    second.rootRank = 3
    assert (first.rootRank, second.rootRank) == (2, 3)
