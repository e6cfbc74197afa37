"""Every name of PyTorch's binding is in symcomm.c10d, or in the table of what a layer above brings."""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.c10d_compare import ours, theirs

DATA_PARALLEL = "comes with the data-parallel layer, which is above this one"
OBSERVE = "comes with the observing layer, which serves it"
LATER = {
    "BuiltinCommHookType": DATA_PARALLEL,
    "DDPLoggingData": DATA_PARALLEL,
    "GradBucket": DATA_PARALLEL,
    "Logger": DATA_PARALLEL,
    "Reducer": DATA_PARALLEL,
    "_broadcast_coalesced": DATA_PARALLEL,
    "_compute_bucket_assignment_by_size": DATA_PARALLEL,
    "_register_builtin_comm_hook": DATA_PARALLEL,
    "_register_comm_hook": DATA_PARALLEL,
    "_verify_params_across_processes": DATA_PARALLEL,
    "_dump_fr_trace": OBSERVE,
    "_dump_fr_trace_json": OBSERVE,
    "_dump_nccl_trace": OBSERVE,
    "_dump_nccl_trace_json": OBSERVE,
    "_reset_fr_recording_nccl": OBSERVE,
}


def names(module) -> list[str]:
    return [name for name in dir(module) if not name.startswith("__")]


@pytest.mark.parametrize("name", names(theirs))
def test_name_is_there(name: str):
    assert hasattr(ours, name) or name in LATER, f"symcomm.c10d lacks {name}"


@pytest.mark.parametrize("name", sorted(LATER))
def test_table_has_no_names_that_are_there(name: str):
    assert not hasattr(ours, name), f"{name} is in symcomm.c10d now: take it out of the table"


CLASSES = [name for name in names(theirs) if inspect.isclass(getattr(theirs, name)) and name not in LATER]


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_there(name: str):
    """Instances may have more than their class shows: what is annotated, and an enum member's name and value."""
    mine, wanted = getattr(ours, name), getattr(theirs, name)
    has = set(dir(mine)) | {n for kind in mine.__mro__ for n in getattr(kind, "__annotations__", {})}
    if issubclass(mine, enum.Enum):
        has |= {"name", "value"}
    members = [n for n in dir(wanted) if not n.startswith("__") and n != "_pybind11_conduit_v1_"]
    assert [n for n in members if n not in has] == []


def test_nothing_is_just_pytorchs_unless_it_is_said():
    """Classes of PyTorch's that we pass on are its engines; functions are those of the shared registries."""
    from symcomm.c10d.registry import OF_ENGINES, SHARED

    passed_on = {n for n in names(theirs) if hasattr(ours, n) and getattr(ours, n) is getattr(theirs, n)}
    engines = {n for n in passed_on if n.startswith("ProcessGroup") and n != "ProcessGroup"}
    said = {*SHARED, *OF_ENGINES} & set(names(theirs))
    assert passed_on - engines == said | {"_DEFAULT_FIRST_BUCKET_BYTES"} & passed_on


@pytest.mark.parametrize("name", ["_DEFAULT_FIRST_BUCKET_BYTES", "_DEFAULT_NO_TIMEOUT", "_DEFAULT_PG_TIMEOUT"])
def test_constants(name: str):
    assert getattr(ours, name) == getattr(theirs, name)


def test_everything_listed_exists():
    for name in ours.__all__:
        assert hasattr(ours, name)


def test_the_page_lists_every_name():
    page = (Path(__file__).parent.parent / "docs" / "c10d.md").read_text()
    assert [name for name in names(theirs) if f"`{name}`" not in page] == []
    rows = [line for line in page.splitlines() if "not here:" in line]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} >= set(LATER) & set(names(theirs))
