"""``_native.pyi`` says what the C core has: the same names, the same arguments, the same kinds of constants."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from symcomm import _core
from symcomm._core import native

pytestmark = pytest.mark.without_torch

STUB = ast.parse(Path(_core.__file__).with_name("_native.pyi").read_text())
HANDLES = {"Plan", "Batch", "Message", "Pads", "Window"}  # capsules: only the stub has classes
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
CONSTANTS = {
    node.target.id: ast.unparse(node.annotation)
    for node in STUB.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}


def split_arguments(text: str) -> list[str]:
    """Of "group, ((address, bytes), ...)": commas inside brackets separate nothing here."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def told_arguments(name: str) -> list[str] | None:
    """What the function's own words say that it takes."""
    words = getattr(native, name).__doc__
    opening = re.match(rf"{name}\((.*)\)(?: ->|: |$|; )", words.splitlines()[0])
    if opening is None:
        return None
    text, depth = "", 1
    for letter in words[len(name) + 1 :]:
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            break
        text += letter
    return split_arguments(text)


def test_both_have_the_same_names():
    there = {name for name in dir(native) if not name.startswith("__")}
    assert set(FUNCTIONS) | set(CONSTANTS) | (set(CLASSES) - HANDLES) == there


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_function_takes_the_same_arguments(name: str):
    said = FUNCTIONS[name].args
    assert not said.args and not said.kwonlyargs, "C takes its arguments by position"
    told = told_arguments(name)
    if told is None:
        assert not said.posonlyargs, f"{name} does not say what it takes"
        return
    assert len(told) == len(said.posonlyargs), (told, [a.arg for a in said.posonlyargs])
    assert sum("=" in part for part in told) == len(said.defaults)


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_a_constant_is_of_its_type(name: str):
    assert type(getattr(native, name)).__name__ == CONSTANTS[name]


@pytest.mark.parametrize("name", sorted(set(CLASSES) - HANDLES))
def test_a_class_has_the_same_methods(name: str):
    body = CLASSES[name].body
    said = {node.name for node in body if isinstance(node, ast.FunctionDef)} - {"__new__", "__init__"}
    said |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    real = getattr(native, name)
    assert {m for m in set(dir(real)) - set(dir(real.__base__)) if not m.startswith("__")} == said
    bases = [ast.unparse(base) for base in CLASSES[name].bases]
    assert [base.__name__ for base in real.__bases__ if base is not object] == bases
