"""Groups for code that makes its own, and torchft's class."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import symcomm
from symcomm.errors import DeadlineError, RankFailedError
from tests.support.ranks import returned, run_ranks

pytestmark = pytest.mark.torch_versions

SECONDS = timedelta(seconds=20)


def two_groups(rank: int, world: int, path: str) -> list[float]:
    """One after the other in one store, as Gloo's; init_process_group knows of neither."""
    store, sums = dist.FileStore(path, world), []
    for n in range(2):
        group = symcomm.torch_process_group(dist.PrefixStore(str(n), store), rank, world, SECONDS)
        x = torch.full((2,), rank + 1.0)
        group.allreduce([x]).wait()
        sums.append(x[0].item())
        group.shutdown()
    assert not dist.is_initialized() and isinstance(group, dist.ProcessGroup)
    return sums


def test_groups_that_a_wrapper_makes(tmp_path):
    assert run_ranks(two_groups, 2, str(tmp_path / "store")) == [[3.0, 3.0]] * 2


def one_leaves(rank: int, world: int, path: str) -> str:
    group = symcomm.torch_process_group(dist.FileStore(path, world), rank, world, SECONDS)
    if rank == 1:
        group.shutdown()
        return "left"
    with pytest.raises(RankFailedError, match="rank 1"):
        group.allreduce([torch.ones(2)]).wait()
    return "told"


def test_a_rank_that_leaves(tmp_path):
    outcomes = run_ranks(one_leaves, 2, str(tmp_path / "store"), outcomes=True)
    assert returned(outcomes) == ["told", "left"]


@pytest.fixture
def torchft_class(monkeypatch):
    """On a wrapper like torchft's, which need not be installed: `make programs` runs the real one."""

    class ProcessGroupWrapper:
        def __init__(self, timeout):
            self._timeout = timeout

        @contextmanager
        def _run_context(self):
            yield

    package, module = ModuleType("torchft"), ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = ProcessGroupWrapper
    monkeypatch.setitem(sys.modules, "torchft", package)
    monkeypatch.setitem(sys.modules, "torchft.process_group", module)
    monkeypatch.delitem(sys.modules, "symcomm.torchft", raising=False)
    from symcomm.torchft import ProcessGroupSymcomm

    yield ProcessGroupSymcomm
    sys.modules.pop("symcomm.torchft", None)


def test_a_class_for_torchft(torchft_class):
    wrapper = torchft_class(SECONDS)
    assert wrapper.getBackendName() == "torchft-symcomm"
    group = wrapper._create_pg(dist.HashStore(), 0, 1)
    x = torch.ones(2)
    with wrapper._run_context():
        work = wrapper._wrap_work(group.allreduce([x]), None)
    assert work.wait() and work.is_completed() and x.tolist() == [1.0, 1.0]
    group.shutdown()


def test_its_errors_have_gloos_words(torchft_class):
    wrapper = torchft_class(timedelta(milliseconds=10))
    with pytest.raises(DeadlineError, match=r"rank 1 did not come.* \(timeout after 10ms\)"):
        wrapper._create_pg(dist.HashStore(), 0, 2)
    with pytest.raises(RankFailedError, match=r"^gone \(Connection closed by peer\)$"), wrapper._run_context():
        raise RankFailedError("gone", [1])
