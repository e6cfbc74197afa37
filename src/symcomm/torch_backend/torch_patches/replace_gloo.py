"""What: wherever torch turns a name into a backend, Gloo's name means Symcomm.
Why: for scripts that name Gloo, and cannot be changed.
Versions: all. Applied only where SYMCOMM_REPLACE=gloo is set.
Undo: names mean what they did.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

from symcomm.torch_backend import versions
from symcomm.torch_backend.torch_patches.patch import Undo, all_of, replace


def apply() -> Undo:
    """Every place goes through Backend(name), but for the newest interface."""
    make = dist.Backend.__new__

    def rename(cls: Any, name: str) -> Any:
        if isinstance(name, str):
            name = ",".join(
                ":".join("symcomm" if word.lower() == "gloo" else word for word in part.split(":"))
                for part in name.split(",")
            )
        return make(cls, name)

    defaults, factories = dist.Backend.default_device_backend_map, versions.dist2_factories()
    known_defaults, known_factories = dict(defaults), dict(factories)
    named = replace(dist.Backend, "__new__", staticmethod(rename))
    defaults.update({device: "symcomm" for device, name in defaults.items() if name == "gloo"})
    if "gloo" in factories:
        factories["gloo"] = factories["symcomm"]
    return all_of(named, lambda: defaults.update(known_defaults), lambda: factories.update(known_factories))


@functools.cache  # once a process
def say_replaced() -> None:
    print(
        "symcomm: SYMCOMM_REPLACE=gloo is set: groups asked of gloo are made by symcomm.", file=sys.stderr, flush=True
    )
