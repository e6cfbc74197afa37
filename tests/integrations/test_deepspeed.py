"""DeepSpeed's inference_all_reduce, with a stand-in for the class that has it: ``make programs`` runs the real one."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="DeepSpeed sums torch's tensors")
dist = importlib.import_module("torch.distributed")
from symcomm.torch_versions import release  # noqa: E402
from tests.support.children import children  # noqa: E402

pytestmark = pytest.mark.torch_versions

SUM, MAX = 0, 3  # DeepSpeed's own numbers
THEIRS = [-1.0] * 4


class TorchBackend:
    """As in deepspeed.comm.torch."""

    def _reduce_op(self, op: int):
        return {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}[op]

    def inference_all_reduce(self, tensor, op, group=None):
        tensor.fill_(-1)  # where it would take its own shared memory
        return tensor


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module, and makes it: what waits for its import is told, as of the real one."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "deepspeed.comm.torch" else None

    def exec_module(self, module):
        module.TorchBackend = TorchBackend


def sums(say, rank: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    importlib.import_module("symcomm.torch_backend")
    for package in ("deepspeed", "deepspeed.comm"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    sys.meta_path.append(StandIn())
    importlib.import_module("deepspeed.comm.torch")
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    alone = dist.new_group([0]), dist.new_group([1])
    comm = TorchBackend()

    def total(x: torch.Tensor) -> torch.Tensor:
        comm.inference_all_reduce(y := x * 2, SUM)
        return y + 1

    x = torch.arange(4.0) + 10 * rank
    whole = backend == "symcomm" and release(torch.__version__) >= (2, 12)  # which traces operations of c10d's
    compiled = torch.compile(total, backend="aot_eager", fullgraph=whole)
    found = {"eager": total(x)}
    with torch._dynamo.config.patch(optimize_ddp=False):  # of use to DDP only, of which earlier tests may leave traces
        found["compiled"] = compiled(x)
    found["alone"] = comm.inference_all_reduce(x.clone(), SUM, alone[rank])
    found["most"] = comm.inference_all_reduce(x.clone(), MAX)
    dist.barrier()
    dist.destroy_process_group()
    say({name: tensor.tolist() for name, tensor in found.items()})


def on_two_ranks(backend: str, folder: str) -> list[dict[str, list[float]]]:
    with children() as start:
        ranks = [start(sums, rank, folder, backend) for rank in range(2)]
        return [child.hear(90) for child in ranks]


def test_sums_are_made_by_the_group_if_it_is_ours(tmp_path):
    for rank, found in enumerate(on_two_ranks("symcomm", str(tmp_path))):
        total = [21.0, 25.0, 29.0, 33.0]
        alone = [value + 10 * rank for value in (0.0, 1.0, 2.0, 3.0)]
        assert found == {"eager": total, "compiled": total, "alone": alone, "most": THEIRS}


def test_other_groups_are_left_to_deepspeed(tmp_path):
    more = [each + 1 for each in THEIRS]
    expected = {"eager": more, "compiled": more, "alone": THEIRS, "most": THEIRS}
    assert on_two_ranks("gloo", str(tmp_path)) == [expected] * 2
