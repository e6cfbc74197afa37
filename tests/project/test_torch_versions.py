"""What differs between versions of torch is asked in one place, and the versions that were tested are told alike."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from symcomm.torch_backend import versions  # noqa: E402
from symcomm.torch_versions import NEWEST, OLDEST, TESTED, release  # noqa: E402

pytestmark = pytest.mark.torch_versions

ROOT = Path(__file__).parents[2]


def test_releases():
    assert release("2.15.0+cu132") == (2, 15) and release("3.0.0a0+git1") == (3, 0)
    assert [release(version) for version in TESTED] == sorted({release(version) for version in TESTED})
    assert TESTED[0] == OLDEST and TESTED[-1] == NEWEST


def test_what_is_installed_with_us_is_what_was_tested():
    """No upper bound: a newer torch prints a warning, and works if it can."""
    wanted = re.search(r'^torch = \["torch([^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted is not None and wanted[1] == ">=" + ".".join(map(str, release(OLDEST)))


def test_the_page_lists_every_version_that_was_tested():
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    assert re.findall(r"^\| (2\.\d+\.\d+)", page, re.MULTILINE) == list(TESTED)


def test_facts_hold_for_the_torch_that_runs():
    """Each fact is known of these releases; the probes must find the same."""
    now = release(torch.__version__)
    if not release(OLDEST) <= now <= release(NEWEST):
        pytest.skip(f"nothing is known of torch {torch.__version__}")
    assert (now >= (2, 14)) == versions.HAS_PYTHON_BACKENDS
    assert bool(versions.dist2_factories()) == (now < (2, 14))
    assert versions.looked_up_by_cpp("all_gather_single", "_allgather_base").startswith("_") == (now < (2, 13))
    assert versions.all_gather_single.__name__ in ("all_gather_single", "all_gather_into_tensor")
    assert isinstance(versions.ACCEPTS_IN_FLIGHT_INPUTS(), bool)
    assert torch.backends.cuda.is_built() == versions.HAS_CUDA


def test_names_that_a_version_has():
    class Owner:
        here = 1

    assert versions.present(Owner, ["here", "gone"]) == {"here": 1}
    assert versions.functional_operators(["all_reduce", "no_such_operator"]) == ["all_reduce"]
    assert versions.op_type("ALLREDUCE", "UNKNOWN") != versions.op_type("NO_SUCH_TYPE", "UNKNOWN")
    assert versions.method_of_group(dist.ProcessGroup, "no_such_method", "rank") is dist.ProcessGroup.rank


def test_arguments_that_a_version_does_not_take():
    def older(module, timeout=None): ...

    assert versions.arguments_unknown_to(older, {"timeout": 3, "newer": 4}) == {"newer": 4}


TORCH = r"(torch_c10d|torch\.distributed|torch\.ops|torch\.library|dist|c10d)\b[\w.]*"
PROBES = re.compile(rf"hasattr\({TORCH}, |getattr\({TORCH}, [^,()]+, |release\(torch\.__version__")
ELSEWHERE = {
    "types.py": 1,  # lies below that file
}


def test_nothing_else_asks_for_a_version():
    source = Path(inspect.getfile(versions)).parent.parent
    for path in sorted(source.rglob("*.py")):
        found = [match[0] for match in PROBES.finditer(path.read_text())]
        name = path.relative_to(source).as_posix()
        if name != "torch_backend/versions.py":
            assert len(found) <= ELSEWHERE.get(name, 0), (
                f"{name} asks {found}: that belongs into torch_backend/versions.py"
            )
        else:
            assert len(found) >= 3, "the pattern finds what it is meant to find"
