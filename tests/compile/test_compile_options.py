"""What may be switched off, how the compiler learns of us, and what it must not cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from symcomm import errors
from symcomm.torch_versions import release
from tests.support import loaded
from tests.support.programs import environment

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]


def test_options(monkeypatch: pytest.MonkeyPatch):
    from symcomm.compile import options

    monkeypatch.setattr(options, "_current", [])
    monkeypatch.setenv("SYMCOMM_COMPILE", "no-bucket,overlap,no-zero-copy")
    chosen = options.current()
    assert (chosen.bucket, chosen.overlap, chosen.zero_copy, chosen.fuse) == (False, True, False, None)
    with options.configure(fuse=False, overlap=None) as inner:
        assert inner is options.current() and inner.fuse is False and inner.overlap is None
        assert inner.key() != chosen.key()
    assert options.current() is chosen


def test_code_that_other_sources_generated_is_other_code(tmp_path: Path):
    """Inductor keeps generated code on disk; an older lowering's must not run after it was mended."""
    from symcomm.compile import options

    for name, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lowering.py").write_text(text)
    a, b, c = (options.digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_bad_options(monkeypatch: pytest.MonkeyPatch):
    from symcomm.compile import options

    monkeypatch.setattr(options, "_current", [])
    monkeypatch.setenv("SYMCOMM_COMPILE", "no-buckets")
    with pytest.raises(errors.BadArgumentError, match=r"SYMCOMM_COMPILE must be .*no-bucket.* got 'no-buckets'"):
        options.current()
    monkeypatch.delenv("SYMCOMM_COMPILE")
    for wrong in ({"speed": True}, {"bucket": 3}, {"bucket": None}):
        with pytest.raises(errors.BadArgumentError, match="symcomm.compile.configure"), options.configure(**wrong):
            pass


ALONE = """
import json, sys
import torch, torch.distributed as dist
from symcomm.torch_backend.register import register
register()
register()
dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1)
before = sorted(sys.modules)
import torch.distributed._functional_collectives as functional
compiled = torch.compile(lambda x: functional.all_reduce(x @ x, "sum", "0"), fullgraph=True)
x = torch.randn(40, 40)
same = torch.equal(compiled(x), x @ x)
from symcomm import compile as symcompile
installed = symcompile.is_installed()
from torch._inductor.lowering import lowerings
ours = lowerings[torch.ops._c10d_functional.all_reduce_.default]
symcompile.uninstall()
theirs = lowerings[torch.ops._c10d_functional.all_reduce_.default]
symcompile.install()
print(json.dumps([before, same, installed, ours is not theirs, symcompile.is_installed()]))
dist.destroy_process_group()
"""


def test_the_compiler_is_told_when_it_loads(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False,
        env=environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path), SYMCOMM_DEBUG="compile"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    before, same, installed, replaced, again = json.loads(done.stdout.splitlines()[-1])  # Gloo may speak first
    assert not {"torch._inductor.compile_fx", "torch._dynamo", "symcomm.compile"} & set(before)
    assert same and installed and replaced and again
    assert "symcomm compile: all_reduce_ [40, 40] float32 (6400 bytes) on '0' (1 ranks)" in done.stderr


def test_install_by_hand_loads_the_compiler(tmp_path):
    code = ALONE.split("import torch.distributed._functional")[0] + (
        "from symcomm import compile as symcompile; symcompile.install(); print(symcompile.is_installed())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    assert done.stdout == "True\n", done.stderr[-3000:]


KEPT = """
import json
import torch, torch.distributed as dist
from symcomm.torch_backend.register import register
register()
dist.init_process_group("symcomm", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed._functional_collectives as functional
from torch._dynamo.utils import counters
from torch._inductor import config
from symcomm.compile import configure


def fused(a, w):
    return functional.all_gather_tensor(a, 0, "0") @ w


def selected(a, w):
    return functional.all_reduce(a @ w, "sum", "0") + 1


a, w, told = torch.randn(64, 32), torch.randn(32, 16), []
for function in (fused, selected):
    with configure(fuse=True), config.patch("_collective.auto_select", True):
        found = torch.compile(function, fullgraph=True)(a, w)
    torch.testing.assert_close(found, function(a, w), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    told.append([counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]])
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    release(metadata.version("torch")) < (2, 12), reason="torch 2.12 is the first to allocate comm buffers"
)
def test_graphs_with_symm_mem_operators_run_from_the_compilers_cache(tmp_path):
    """In a process that has compiled nothing, and so has never asked for these operators."""
    told = []
    for _ in range(2):
        env = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        done = loaded.run([sys.executable, "-c", KEPT], timeout=120, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told == [[[0, 1], [0, 2]], [[1, 0], [2, 0]]]
    kept = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert "symm_mem.fused_all_gather_matmul" in kept and "symm_mem.one_shot_all_reduce" in kept


def test_costs():
    import torch

    from symcomm.compile import cost

    graph = torch.fx.Graph()
    fake = {"a": torch.empty(64, 32, device="meta"), "b": torch.empty(32, 16, device="meta")}
    nodes = {name: graph.placeholder(name) for name in fake}
    for name, node in nodes.items():
        node.meta["val"] = fake[name]
    product = graph.call_function(torch.ops.aten.mm.default, (nodes["a"], nodes["b"]))
    product.meta["val"] = fake["a"] @ fake["b"]
    assert cost.kernel_us(product) == pytest.approx(2 * 64 * 32 * 16 / cost.FLOPS_PER_US)
    assert cost.kernel_us(nodes["a"]) == 0
    assert cost.collective_us(1 << 20, 2) > cost.collective_us(8, 2) > 0
    assert cost.has_idle_cores(len(os.sched_getaffinity(0)) * 2) is False


BLOCKING = """
import tempfile
from datetime import timedelta
import torch, torch.distributed as dist
from symcomm.torch_backend.register import register; register()
from symcomm import errors
from symcomm.compile import runtime
path = f"file://{tempfile.mkdtemp()}/meet"
dist.init_process_group("symcomm", init_method=path, rank=0, world_size=1, timeout=timedelta(seconds=60))
group, seen = dist.group.WORLD, []
theirs = type(group).allreduce
type(group).allreduce = lambda self, *args: seen.append("torch's way") or theirs(self, *args)
for op in ("sum", "avg", "product", "min", "max"):
    x = torch.full((3,), 2.0)
    runtime.all_reduce_(x, op, group.group_name)
    assert x.tolist() == [2.0] * 3 and not seen, (op, x, seen)
with torch.profiler.profile() as profile:
    runtime.all_reduce_(torch.ones(2), "sum", group.group_name)
assert seen and any("symcomm:all_reduce" in event.name for event in profile.events())

def too_late(tensor, op):
    raise errors.DeadlineError("nobody came", [1])

group.core.all_reduce = too_late
try:
    runtime.all_reduce_(torch.ones(2), "sum", group.group_name)
except errors.DeadlineError as error:
    print(error, error.missing)
"""


def test_all_reduce_of_a_graph_goes_straight_to_the_core():
    """Not by torch's options, unless somebody watches; late ones are told as everywhere."""
    done = loaded.run([sys.executable, "-c", BLOCKING], env=environment(), timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Timed out waiting 60000ms: nobody came [1]"
