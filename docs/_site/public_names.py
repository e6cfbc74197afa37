"""For the API reference: names that Python makes at run time, and links from errors to what they mean.

``symcomm`` and ``symcomm.ddp`` load names on first use, and ``symcomm.all_reduce(...)`` and its like are made from the
methods of ProcessGroup: reading the sources alone finds neither. What follows ``Raises:`` in a docstring names
errors, which become links.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from griffe import Alias, Extension, Function, Module, Parameter, ParameterKind, Parameters

LAZY = ("symcomm", "symcomm.ddp")
ERRORS = set(importlib.import_module("symcomm.errors").__all__)


class PublicNames(Extension):
    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        if pkg.path != "symcomm":
            return
        for package in LAZY:
            module = pkg[package.removeprefix("symcomm").lstrip(".")] if package != "symcomm" else pkg
            for source, names in importlib.import_module(package)._PUBLIC.items():
                for name in names:
                    found = pkg[source.removeprefix("symcomm.")]
                    if name in found.members:
                        module.set_member(name, Alias(name, found[name].path, parent=module))
                    else:
                        module.set_member(name, on_default_group(pkg, name, module))

    def on_module_members(self, *, mod: Module, **kwargs: Any) -> None:
        mod.exports = None  # __all__ holds names that are only known at run time

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring and "Raises" in obj.docstring.value:
            obj.docstring.value = link_errors(obj.docstring.value)


def on_default_group(pkg: Module, name: str, module: Module) -> Function:
    """The function that calls a method of the default group."""
    method = next(base[name] for base in group_classes(pkg) if name in base.members)
    parameters = [p for p in method.parameters if p.name != "self"]
    group = Parameter("group", annotation="ProcessGroup | None", kind=ParameterKind.keyword_only, default="None")
    function = Function(name, parameters=Parameters(*parameters, group), returns=method.returns, parent=module)
    function.docstring = method.docstring
    return function


def group_classes(pkg: Module) -> list[Any]:
    group = pkg["group.process_group.ProcessGroup"]
    return [group, *(pkg[str(base.canonical_path).removeprefix("symcomm.")] for base in every_base(pkg, group))]


def every_base(pkg: Module, cls: Any) -> list[Any]:
    found = []
    for base in cls.bases:
        found.append(base)
        found += every_base(pkg, pkg[str(base.canonical_path).removeprefix("symcomm.")])
    return found


def link_errors(text: str) -> str:
    def link(line: re.Match[str]) -> str:
        def one(name: re.Match[str]) -> str:
            return f"[{name[0]}][symcomm.errors.{name[0]}]" if name[0] in ERRORS else name[0]

        return re.sub(r"(?<![\[.])\b\w+Error\b", one, line[0])  # not what is a link already

    return re.sub(r"\bRaises\b.*(?:\n[ \t]*\S.*)*", link, text)
