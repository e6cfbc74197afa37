"""What: Inductor compiles collectives of our groups our way. We change five places: the lowerings of the table's
operators, the line that allocates a comm buffer (codegen.py), the function that compiles one graph (for the passes'
settings), the key of its cache and the loading of its code. Each asks whether a group is ours, and otherwise does what
it did before.
Why: torch's own lowerings copy into a buffer of their own, launch and wait.
Versions: all.
Undo: ``uninstall()``; what is compiled already stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symcomm.undo import Switch, Undo, all_of, replace, replace_item


def is_installed() -> bool:
    """Whether Inductor compiles collectives of our groups our way.

    Raises: nothing."""
    return bool(_installed)


def install() -> None:
    """Compile collectives of our groups our way. Harmless when called twice; loads Inductor.

    Raises: nothing."""
    # Before the switch takes its lock: threads that wait for this import install us as well, once it is over.
    importlib.import_module("torch._inductor.compile_fx")
    _installed.on()


def uninstall() -> None:
    """Undo install(). What is compiled already stays as it is.

    Raises: nothing."""
    _installed.off()


def _change_inductor() -> Undo:
    from torch._inductor import codecache, compile_fx, output_code

    from symcomm.compile import codegen

    graph, details = output_code.CompiledFxGraph, codecache.FxGraphHashDetails
    return all_of(
        *_lowerings(),
        codegen.write_for_cpu("lowerings"),
        replace(compile_fx, "fx_codegen_and_compile", _with_settings(compile_fx.fx_codegen_and_compile)),
        replace(graph, "post_compile", _with_operators(graph.post_compile)),
        replace(details, "__init__", _with_our_key(details.__init__)),
    )


_installed = Switch(_change_inductor)


def _lowerings() -> list[Undo]:
    import torch
    from torch._inductor.lowering import lowerings

    from symcomm.compile import lowering
    from symcomm.compile.table import TABLE, WAIT

    packets = [entry for entry in TABLE.values() if entry.packet is not None]
    keys = [(e, key) for e in packets for key in (e.packet, *(getattr(e.packet, n) for n in e.packet.overloads()))]
    undos = [replace_item(lowerings, key, _if_ours(e, lowerings[key])) for e, key in keys if key in lowerings]
    namespace, name = WAIT.split("::")
    wait = getattr(getattr(torch.ops, namespace), name).default
    return [*undos, replace_item(lowerings, wait, functools.partial(lowering.wait, lowerings[wait]))]


def _if_ours(entry: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.virtualized import V

    from symcomm.compile import one_shot
    from symcomm.compile.lowering import group_of, kept_until_awaited

    def lower(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
        node = V.graph.current_node
        on_cpu = hasattr(first, "get_device") and first.get_device().type == "cpu"
        if not on_cpu or V.graph.cpp_wrapper or group_of(node) is None:
            return theirs(inputs, *args, **kwargs)
        if entry.one_shot and one_shot.is_selected(inputs, *args):
            return one_shot.lower(entry, theirs, inputs, *args)
        with kept_until_awaited(node):
            return entry.lowering(entry, theirs, inputs, *args, **kwargs)

    return lower


def _with_settings(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def compile_graph(gm: Any, *args: Any, **kwargs: Any) -> Any:
        from symcomm.compile.passes import applied

        with applied(gm.graph):
            return theirs(gm, *args, **kwargs)

    return compile_graph


def _with_operators(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the loading of code from the compiler's cache: first installs operators that it may call, and that this
    process has not needed so far."""

    @functools.wraps(theirs)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch.ops.symm_mem." in (self.source_code or "") and _key():
            from symcomm import symm_mem

            symm_mem.install()
        return theirs(self, *args, **kwargs)

    return post_compile


def _with_our_key(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Adds our key to the cache's: a graph compiles differently if another backend's group has the same name."""

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.symcomm = _key()

    return init


def _key() -> str:
    import torch.distributed as dist

    from symcomm.compile import cost, options, report

    if not dist.is_initialized():
        return ""
    groups = [group for group in dist.distributed_c10d._world.pg_map if getattr(group, "is_symcomm", False)]
    ours = [(group.group_name, group.size()) for group in groups]
    idle = [cost.has_idle_cores(size) for _, size in ours]
    chosen = f"{options.current().key()} {cost.bucket_bytes()}"
    if report.is_debugging():  # graphs from the cache report nothing
        chosen += os.urandom(8).hex()
    return f"{options.digest(Path(__file__).parent)} {chosen} {sorted(ours)} {idle}" if ours else ""
