"""What of torch symm_mem.install(), compile.install() and torch_patches change is as it was after that is undone."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import symcomm
from symcomm.undo import Switch, all_of, replace, replace_item
from tests.support.programs import environment

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch_versions, pytest.mark.long]

# A process of its own: nothing of ours may have touched its torch before the first look.
INSTALLS = """
import json, sys
from tests.support.torch_state import changed, look
before = look()
from symcomm import symm_mem
import symcomm.compile as symcompile
assert changed(before, look()) == [], changed(before, look())
for install, uninstall in ((symm_mem, symcompile), (symcompile, symm_mem), (symm_mem, symm_mem)):
    symm_mem.install(), symcompile.install()
    both = changed(before, look())
    install.uninstall(), uninstall.uninstall()
    symm_mem.uninstall(), symcompile.uninstall()
    assert changed(before, look()) == [], changed(before, look())
there = [each for each in json.loads(sys.argv[1]) if any(each in str(key) for key in before)]
print(json.dumps([there, [each for each in there if not any(each in key for key in both)]]))
"""
CHANGES = [  # older versions lack some
    "_codegen_comm_buffer", "'rendezvous'", "'nccl_wait_signal'", "_c10d_functional.all_reduce_.default",
    "fx_codegen_and_compile", "'symm_mem::one_shot_all_reduce'", "('rules', 'symm_mem::two_shot_all_reduce_')",
    "FxGraphHashDetails", "is_symm_mem_enabled_for_group",
]  # fmt: skip


def test_torch_is_as_it_was_after_everything_is_undone():
    done = subprocess.run(
        [sys.executable, "-c", INSTALLS, json.dumps(CHANGES)], capture_output=True, text=True, timeout=200, check=False,
        env=environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    there, unchanged = json.loads(done.stdout)
    assert len(there) >= len(CHANGES) - 2 and unchanged == [], "or the comparison says nothing"


PATCHES = """
import importlib, json, sys
from pathlib import Path
from tests.support.torch_state import changed, look
import torch, torch.distributed as dist
from symcomm import errors

before = look()
bases = errors.StoreDeadlineError.__bases__
from symcomm.torch_backend import torch_patches
from symcomm.torch_backend import register
from symcomm.torch_backend import versions
from torch.fx.experimental.proxy_tensor import make_fx

factories = dict(versions.dist2_factories())
files = {path.stem for path in Path(torch_patches.__file__).parent.glob("*.py")}
tools = {"__init__", "patch", "method_swap", "operators", "make_fx", "comm_debug_mode", "dynamo_rules", "fsdp_buffers"}
names = [*torch_patches.AT_IMPORT, *torch_patches.AT_FIRST_GROUP, "replace_gloo"]
names_here = {*names, "cpu_allocator"}  # whose undo tests/memory/test_shared_heap.py tries
assert files - tools == names_here, files ^ {*names_here, *tools}
for path in files - {"__init__", "patch", "method_swap", "operators"}:
    words = importlib.import_module(f"{torch_patches.__name__}.{path}").__doc__
    assert all(f"{word}: " in words for word in ("What", "Why", "Versions", "Undo")), path

known = changed(before, look())
silent = []
for name in names:
    torch_patches.apply(name)
    now = changed(before, look())
    facts = (now, errors.StoreDeadlineError.__bases__ != bases, len(versions.dist2_factories()))
    silent += [name] if "facts_before" in globals() and facts == facts_before else []
    facts_before = facts
assert torch_patches.applied() == names

dist.Backend.register_backend("symcomm", register.create, extended_api=True, devices=["cpu", "cuda"])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert getattr(dist.group.WORLD, "is_symcomm", False), "Gloo is replaced"
traced = make_fx(lambda x: dist.all_reduce(x) or x + 1)(torch.ones(2))
assert "allreduce_" in traced.code, traced.code
with_kernels = changed(before, look())
dist.destroy_process_group()
torch_patches.undo_all()
assert errors.StoreDeadlineError.__bases__ == bases and versions.dist2_factories() == factories
print(json.dumps([silent, with_kernels, changed(before, look()), torch_patches.applied()]))
"""


# Patches of what only some versions have
VERSIONS = {"split_group", "shrink_group", "flight_recorder_hook", "dist2", "health_check_hook", "cpp_hooks"}


@pytest.mark.timeout(300)  # it loads torch's compiler, which busy neighbours make slow
def test_torch_is_as_it_was_after_its_patches_are_undone():
    done = subprocess.run(
        [sys.executable, "-c", PATCHES], capture_output=True, text=True, timeout=200, check=False,
        env=environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0", SYMCOMM_REPLACE=""),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    silent, inside, after, applied = json.loads(done.stdout)
    assert after == [] and applied == []
    assert any("c10d::allreduce_" in key for key in inside), "or the comparison says nothing"
    assert set(silent) <= VERSIONS, "others change every torch"


@pytest.mark.parametrize("name", ["symcomm.symm_mem.install", "symcomm.compile.install"])
def test_who_changes_torch_says_what_why_for_which_versions_and_how_to_undo_it(name):
    words = importlib.import_module(name).__doc__
    assert all(f"{word}: " in words for word in ("What", "Why", "Versions", "Undo"))


def test_nothing_is_mocked_in_production():
    for path in Path(symcomm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "unittest" for name in names), path


def test_undoing_restores_what_was_there_and_keeps_what_others_have_set_since():
    class Base:
        inherited = 1

    class Owner(Base):
        own = 2

    table = {"key": 3}
    undo = all_of(replace(Owner, "inherited", -1), replace(Owner, "own", -2), replace_item(table, "key", -3))
    assert (Owner.inherited, Owner.own, table) == (-1, -2, {"key": -3}) and Base.inherited == 1
    undo()
    assert (Owner.inherited, Owner.own, table) == (1, 2, {"key": 3}) and "inherited" not in vars(Owner)

    owner = SimpleNamespace(name=1)
    first, second = replace(owner, "name", 2), replace_item(table, "key", -3)
    owner.name = table["key"] = 4
    first(), second()
    assert owner.name == table["key"] == 4


def test_a_switch_changes_once_for_all_of_its_holders():
    owner, made = SimpleNamespace(name=1), []

    def change():
        made.append(1)
        if len(made) == 1:
            raise RuntimeError("not yet")
        return replace(owner, "name", 2)

    switch = Switch(change)
    with pytest.raises(RuntimeError, match="not yet"):
        switch.on()
    assert not switch and owner.name == 1
    switch.on("a"), switch.on("b"), switch.on("a")
    assert switch and owner.name == 2 and len(made) == 2
    switch.off("a")
    assert switch and owner.name == 2
    switch.off("b"), switch.off("b")
    assert not switch and owner.name == 1
