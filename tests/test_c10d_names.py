"""Every name of PyTorch's binding is in symcomm.c10d."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.c10d_compare import ours, theirs


def names(module) -> list[str]:
    return [name for name in dir(module) if not name.startswith("__")]


@pytest.mark.parametrize("name", names(theirs))
def test_name_is_there(name: str):
    assert hasattr(ours, name), f"symcomm.c10d lacks {name}"


CLASSES = [name for name in names(theirs) if inspect.isclass(getattr(theirs, name))]


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
    assert "not here" not in page
