"""Enumerations and the debug level: PyTorch's and ours side by side."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from tests.support.c10d_compare import NEWEST, ours, same, theirs

pytestmark = pytest.mark.torch_versions

ENUMS = ["DebugLevel", "ErrorType", "OpType", "WorkResult", "ProcessGroup.BackendType", *["HookOpName"] * NEWEST]
MEMBERS = [f"m.{e}.{n}" for e in ENUMS for n in eval(f"theirs.{e}.__members__")]


@pytest.mark.parametrize("member", MEMBERS)
def test_members(member: str):
    for form in ("{}", "repr({})", "str({})", "int({})", "hash({})", "{}.name", "{}.value", "{}.__index__()"):
        same(form.format(member))


@pytest.mark.parametrize("kind", ENUMS)
def test_behaviour(kind: str):
    members = list(eval(f"theirs.{kind}.__members__"))
    has = set(eval(f"ours.{kind}.__members__"))
    assert set(members) == has if NEWEST else set(members) <= has
    one = f"m.{kind}.{members[0]}"
    for expression in (
        f"{{name: m.{kind}.__members__[name] for name in {members}}}",
        f"{one} == {one}",
        f"{one} == 0",
        f"0 == {one}",
        f"{one} != 0",
        f"{one} == None",
        f"{one} == 'OFF'",
        f"{one} < {one}",
        f"{one} + 1",
        f"bool({one})",
        f"isinstance({one}, int)",
        f"[7, 8][{one}]",
        f"{one} in (0,)",
        f"{one} is {one}",
        f"{{{one}: 1}}[{one}]",
        f"pickle.loads(pickle.dumps({one}))",
        f"copy.copy({one})",
        f"copy.deepcopy({one}) == {one}",
        f"m.{kind}(0)",
        f"m.{kind}(value=1)",
        f"m.{kind}('OFF')",
        f"m.{kind}(None)",
        f"m.{kind}()",
        f"m.{kind}(True)",
    ):
        same(expression)


def test_kinds_do_not_mix():
    same("m.OpType.BROADCAST == m.DebugLevel.OFF")
    same("m.OpType.ALLREDUCE == m.ErrorType.TIMEOUT")
    same("m.ErrorType.TIMEOUT == m.WorkResult.TIMEOUT")


def test_ours_equals_pytorchs_of_the_same_name():
    assert ours.OpType.GATHER == theirs.OpType.GATHER
    assert ours.OpType.GATHER != theirs.OpType.SCATTER
    assert ours.ErrorType.TIMEOUT != theirs.WorkResult.TIMEOUT


def test_a_number_without_a_name_is_refused():
    """PyTorch makes a member called ``???`` of it."""
    with pytest.raises(ValueError, match="7 is not a valid DebugLevel"):
        ours.DebugLevel(7)


# --- the debug level ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def level_as_before():
    before = theirs.get_debug_level()
    yield
    theirs.set_debug_level(before)


@pytest.mark.parametrize("word", ["OFF", "INFO", "DETAIL", "info", "Detail", "", "1", "nonsense", " INFO", None])
def test_level_from_the_environment(word, monkeypatch):
    if word is None:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    else:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", word)
    same("m.set_debug_level(m.DebugLevel.DETAIL)\nm.set_debug_level_from_env()\nm.get_debug_level()")


def test_a_wrong_word_changes_nothing(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "loud")
    ours.set_debug_level(ours.DebugLevel.INFO)
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG must be one of OFF, INFO, DETAIL, got 'loud'"):
        ours.set_debug_level_from_env()
    assert ours.get_debug_level() is ours.DebugLevel.INFO


@pytest.mark.parametrize("value", ["m.DebugLevel.INFO", "1", "'INFO'", "None", ""])
def test_setting_the_level(value: str):
    same(f"m.set_debug_level({value})\nm.get_debug_level()")


def test_one_level_for_both():
    ours.set_debug_level(ours.DebugLevel.DETAIL)
    assert theirs.get_debug_level() == theirs.DebugLevel.DETAIL
    theirs.set_debug_level(theirs.DebugLevel.INFO)
    assert ours.get_debug_level() is ours.DebugLevel.INFO
    ours.set_debug_level(theirs.DebugLevel.OFF)
    assert ours.get_debug_level() is ours.DebugLevel.OFF


SMALL = """
R.SUM.__getstate__() | R(R.MAX).__getstate__() | m._make_nccl_premul_sum(2.0).__getstate__()
R(R.SUM).__setstate__((4, None)) | R(R.MAX).__copy__().op | R(R.MAX).__deepcopy__({}).op
R(R.MAX).__deepcopy__(3) | R(R.MAX).__deepcopy__(None)
copy.copy(m._make_nccl_premul_sum(2.0)).__getstate__()
copy.deepcopy(m._make_nccl_premul_sum(torch.ones(1))).__getstate__()
pickle.loads(pickle.dumps(R(R.MAX))).op | isinstance(R.SUM, R) | isinstance(R(R.SUM), R)
isinstance(3, R) | m._make_nccl_premul_sum(torch.empty(0)) | m.OpType(1.0) | m.OpType(-1) | m.OpType(1) | m.OpType('a')
m.OpType(True) | m.OpType(None) | m.OpType(10**30) | m.OpType([1]) | m.DebugLevel(1.0) | m.WorkResult(0.0)
isinstance(R.SUM, R.RedOpType)
"""


@pytest.mark.parametrize("expression", [item.strip() for item in SMALL.replace("\n", "|").split("|") if item.strip()])
def test_small_things(expression: str):
    same(expression)


@pytest.mark.parametrize("call", ["('a')", "(None, [])", "(onlyActive='x')"])
@pytest.mark.parametrize("name", ["_dump_fr_trace", "_dump_fr_trace_json"])
def test_flags_of_dumps(name: str, call: str):
    same(f"m.{name}{call}")
