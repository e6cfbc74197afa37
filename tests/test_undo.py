"""What symm_mem.install() and compile.install() change of torch is as it was after their uninstall()."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.test_compile_checks import environment

pytest.importorskip("torch")

# A process of its own: nothing of ours may have touched its torch before the first look.
LOOK = """
import json, sys, types
import torch, torch.distributed as dist, torch.distributed._symmetric_memory as functions
import torch._inductor.compile_fx, torch._dynamo, torch.fx.experimental.proxy_tensor
from torch._inductor.lowering import lowerings

assert not any(name.split(".")[0] == "symcomm" for name in sys.modules), "autoloading is off"
KINDS = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)


def look():
    seen = {}
    loaded = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "torch" and m is not None]
    for module in [*loaded, torch.ops.symm_mem]:
        name = module.__name__
        for key, value in list(vars(module).items()):
            if isinstance(value, KINDS) or name.startswith("torch.ops."):
                seen[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                seen |= {(value.__module__, value.__qualname__, k): v for k, v in vars(value).items()
                         if isinstance(v, KINDS)}
    seen |= {("lowering", str(key)): value for key, value in lowerings.items()}
    seen |= {("finder", str(place)): finder for place, finder in enumerate(sys.meta_path)}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("symm_mem::", "_c10d_functional::")):
            seen["kernels", name] = torch._C._dispatch_dump_table(name)
            operator = getattr(torch.ops, name.split("::")[0])
            overload = getattr(getattr(operator, name.split("::")[1].split(".")[0]), "default", None)
            if overload is not None:
                seen["rules", name] = [sorted(map(str, t)) for t in (
                    overload.python_key_table, overload.py_kernels, overload.functorch_table)]
    return seen


def changed(before, now):
    def same(a, b):
        return a is b or (isinstance(a, (str, list)) and a == b)
    return sorted(str(key) for key in before.keys() | now.keys()
                  if not same(before.get(key), now.get(key)) and not (key not in before and is_new_module(key)))


def is_new_module(key):
    return key[0] not in {*known_modules, "lowering", "finder", "kernels", "rules"}


look()  # operators are made when they are first asked for
known_modules = {m.__name__ for n, m in sys.modules.items() if n.split(".")[0] == "torch" and m is not None}
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
        [sys.executable, "-c", LOOK, json.dumps(CHANGES)], capture_output=True, text=True, timeout=200, check=False,
        env=environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    there, unchanged = json.loads(done.stdout)
    assert len(there) >= len(CHANGES) - 2 and unchanged == [], "or the comparison says nothing"
