"""symcomm.c10d has every name of PyTorch's binding, of the installed version and of the newest.

c10d_names.json lists what ``dir()`` gives in torch 2.15.0 (built for CUDA): its names and the members of its classes,
without those of vendors' backends, one name a line.
"""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.support.c10d_compare import ours, theirs

pytestmark = pytest.mark.torch_versions


def names(module) -> list[str]:
    return [name for name in dir(module) if not name.startswith("__")]


NEWEST: dict[str, list[str]] = json.loads((Path(__file__).parent / "c10d_names.json").read_text())
EVERY = sorted({*names(theirs), *NEWEST})


@pytest.mark.parametrize("name", EVERY)
def test_name_is_there(name: str):
    assert hasattr(ours, name), f"symcomm.c10d lacks {name}"


@pytest.mark.parametrize("name", [name for name in EVERY if NEWEST.get(name)])
def test_members_of_the_newest_are_there(name: str):
    wanted = {*NEWEST[name]}
    assert wanted - members_of(getattr(ours, name)) == set()


def members_of(kind: type) -> set[str]:
    has = set(dir(kind)) | {n for base in kind.__mro__ for n in getattr(base, "__annotations__", {})}
    return has | {"name", "value"} if issubclass(kind, enum.Enum) else has


CLASSES = [name for name in EVERY if hasattr(theirs, name) and inspect.isclass(getattr(theirs, name))]


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_there(name: str):
    """Instances may have more than their class shows: what is annotated, and an enum member's name and value."""
    mine, wanted = getattr(ours, name), getattr(theirs, name)
    members = [n for n in dir(wanted) if not n.startswith("__") and n != "_pybind11_conduit_v1_"]
    assert [n for n in members if n not in members_of(mine)] == []


def test_nothing_is_just_pytorchs_unless_it_is_said():
    """We pass on PyTorch's classes of engines and its functions of the shared registries."""
    from symcomm.c10d.registry import SHARED
    from symcomm.c10d.vendors import FUNCTIONS, GROUPS

    passed_on = {n for n in names(theirs) if hasattr(ours, n) and getattr(ours, n) is getattr(theirs, n)}
    engines = {n for n in passed_on if n.startswith("ProcessGroup") and n != "ProcessGroup"}
    numbers = {"_DEFAULT_FIRST_BUCKET_BYTES", "_DEFAULT_PG_NCCL_TIMEOUT", "_is_nvshmem_available"} & passed_on
    said = {*SHARED, *FUNCTIONS, *GROUPS} & set(names(theirs))
    assert passed_on | said == engines | said | numbers and said <= passed_on


ABSENT = [
    name for name in ("ProcessGroupNCCL2", "ProcessGroupXCCL", "NCCLXStub", "_hash_tensors") if name not in dir(theirs)
]


@pytest.mark.parametrize("name", ABSENT)
def test_vendors_names_say_whose_they_are(name: str):
    with pytest.raises(RuntimeError, match=f"^{name} belongs to .*, which this build of PyTorch .* does not have; "):
        getattr(ours, name)(1, 2)


@pytest.mark.skipif("_is_process_group_registered" in dir(theirs), reason="PyTorch has it; ours is that one")
def test_groups_are_looked_up_by_name():
    assert ours._is_process_group_registered("nobody") is False


@pytest.mark.parametrize("name", ["_DEFAULT_FIRST_BUCKET_BYTES", "_DEFAULT_NO_TIMEOUT", "_DEFAULT_PG_TIMEOUT"])
def test_constants(name: str):
    assert getattr(ours, name) == getattr(theirs, name)


def test_everything_listed_exists():
    for name in ours.__all__:
        assert hasattr(ours, name)


def test_the_page_lists_every_name():
    page = (Path(__file__).parents[2] / "docs/reference/c10d.md").read_text()
    assert [name for name in EVERY if f"`{name}`" not in page] == []
    assert "not here" not in page
