"""The state of torch that others may change: its functions, classes, kernels, lowerings and the finders of modules.

For processes of their own, in which nothing of ours has touched torch before the first look.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.tensor.debug
import torch.fx.experimental.proxy_tensor
from torch._inductor.lowering import lowerings

__all__ = ["State", "changed", "look"]

KINDS = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
State = dict[tuple[str, ...], Any]

assert not any(name.split(".")[0] == "symcomm" for name in sys.modules), "autoloading is off"


def look() -> State:
    seen: State = {}
    classes: set[type] = set()  # many modules have the same ones
    loaded = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "torch" and m is not None]
    for module in [*loaded, torch.ops.symm_mem]:
        name = module.__name__
        for key, value in list(vars(module).items()):
            if isinstance(value, KINDS) or name.startswith("torch.ops."):
                seen[name, key] = value
            if isinstance(value, type) and value not in classes and value.__module__.startswith("torch"):
                classes.add(value)
                own = {k: v for k, v in vars(value).items() if isinstance(v, KINDS) or k == "__init__"}
                seen |= {(value.__module__, value.__qualname__, k): v for k, v in own.items()}
    seen |= {("lowering", str(key)): value for key, value in lowerings.items()}
    seen |= {("finder", str(place)): finder for place, finder in enumerate(sys.meta_path)}
    seen["skipped", "Dynamo"] = list(torch._dynamo.trace_rules.SKIP_DIRS)
    seen["defaults", "Backend"] = [f"{k}: {v}" for k, v in dist.Backend.default_device_backend_map.items()]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("symm_mem::", "_c10d_functional::", "c10d::")):
            seen["kernels", name] = torch._C._dispatch_dump_table(name)
            operator = getattr(torch.ops, name.split("::")[0])
            overload = getattr(getattr(operator, name.split("::")[1].split(".")[0]), "default", None)
            if overload is not None:
                tables = (overload.python_key_table, overload.py_kernels, overload.functorch_table)
                seen["rules", name] = [sorted(map(str, table)) for table in tables]
    return seen


look()  # operators are made when they are first asked for
_modules = {m.__name__ for n, m in sys.modules.items() if n.split(".")[0] == "torch" and m is not None}
_modules |= {"lowering", "finder", "skipped", "defaults", "kernels", "rules"}


def changed(before: State, now: State) -> list[str]:
    """What has changed since ``before``, and what is new in modules that were loaded then."""

    def same(a: Any, b: Any) -> bool:
        return a is b or (isinstance(a, (str, list)) and a == b)

    keys = [key for key in before.keys() | now.keys() if key in before or key[0] in _modules]
    return sorted(str(key) for key in keys if not same(before.get(key), now.get(key)))
