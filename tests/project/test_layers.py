"""Imports point down only, and `import symcomm` stays light."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "symcomm"

# The one order of layers, lowest first: each may import those before it, and itself. The package's docstring and
# ARCHITECTURE.md show the same.
ORDER = """
errors arguments types undo ops torch_versions preflight _core store memory sharing collectives membership group
hierarchical cuda symm_mem windows simulate observe torch_backend ddp nn device comm compile elastic c10d ray torchft
integrations testing launcher llama bench demo cli __main__
""".split()
LAYERS = {name: level for level, name in enumerate(ORDER)}
# Packages below the line never import torch when they are loaded, only inside a function that was handed a tensor.
TORCH_FREE_AT_IMPORT = {
    "errors", "arguments", "types", "undo", "_core", "store", "memory", "sharing", "collectives", "membership", "group",
    "hierarchical", "observe", "cuda", "symm_mem", "cli", "simulate", "ray", "testing", "windows", "launcher",
    "preflight",
}  # fmt: skip


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(module, is it at the top level) for every import in a file."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "symcomm" else [node.module]
            found += [(name, id(node) in top) for name in names]
    return found


FILES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


def own_layer(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path):
    layer = own_layer(path)
    assert layer in LAYERS, f"{path.name} is in no known layer: add {layer!r} to LAYERS"
    for module, top in imports_of(path):
        if module.split(".")[0] == "torch":
            assert not (top and layer in TORCH_FREE_AT_IMPORT), f"{path} imports torch at its top level"
        if module.startswith("symcomm.") and layer_of(module) in LAYERS:
            assert LAYERS[layer_of(module)] <= LAYERS[layer], f"{path} ({layer}) imports {module}, which is above it"


# Layers above that a file loads by name, when somebody asks for them.
LOADED_BY_NAME = {
    ("group", "hierarchical"),  # a group whose ranks turn out to be on several hosts
    ("group", "observe"),  # the tracer, where the environment asks for it
    ("group", "windows"),  # group.new_window()
    ("symm_mem", "torch_backend"),  # torch.ops.symm_mem, once torch is loaded
    ("torch_backend", "compile"),  # our lowerings, once Inductor is imported
    ("torch_backend", "integrations"),  # DeepSpeed's sums, once that is imported
    ("observe", "cli"),  # `symcomm doctor` starts two ranks of a script
}


def test_layers_above_are_loaded_by_name_from_a_few_places_only():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("symcomm."):
                target = layer_of(node.value.partition(":")[0])
                if LAYERS.get(target, -1) > LAYERS[own_layer(path)] and is_module(node.value.partition(":")[0]):
                    found.add((own_layer(path), target))
    assert found <= LOADED_BY_NAME


def is_module(name: str) -> bool:
    path = SRC.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_fit_on_a_desk(path: Path):
    assert len(path.read_text().splitlines()) <= 600


def test_import_is_light():
    code = "import sys, json; import symcomm; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    loaded = set(json.loads(out.stdout))
    assert not loaded & {"torch", "numpy", "typer", "rich", "asyncio", "symcomm._core", "symcomm.observe"}


def test_names_that_need_torch_say_so():
    code = """
import sys
sys.modules["torch"] = None
import symcomm
for name in ("DistributedDataParallel", "comm"):
    try:
        getattr(symcomm, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    fix = "needs torch, which is not installed; run `pip install 'symcomm[torch]'`."
    assert out.stdout.splitlines() == [f"symcomm.DistributedDataParallel {fix}", f"symcomm.comm {fix}"]


def test_ranks_load_no_observer_unless_asked():
    """Neither groups nor the torch backend; a variable in the environment asks for one."""
    code = """
import json, os, sys, torch, torch.distributed as dist, symcomm
from symcomm.torch_backend.register import register
symcomm.spawn(lambda group: group.all_reduce(torch.ones(4)), 2, mode="threads", deadline=30)
register()
dist.init_process_group("symcomm", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(3))
print(json.dumps([name for name in sys.modules if name.startswith("symcomm.observe")]))
"""
    asking = ("SYMCOMM_SERVER", "SYMCOMM_TRACE_DIR", "TORCH_FR_", "TORCH_NCCL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(asking)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=env)
    assert json.loads(out.stdout) == []


def test_every_public_name_loads():
    import symcomm

    for name in symcomm.__all__:
        assert getattr(symcomm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = symcomm.nonsense
