"""Finds where a file uses what another file keeps private: ``x._y`` where ``x`` is not evidently an object of a class
of the same file that has a ``_y``, and ``from symcomm.x import _y``.

What ``x`` is, the file must say itself: by an annotation, by asking for its type, or by making it there. That some
class of the file has a ``_y`` too proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
GIVES_ITS_ARGUMENT = ("list", "tuple", "reversed", "sorted", "set", "closing")  # or another with the same in it
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


@dataclass
class _Scope:
    """The known classes of names in a function. (``[Class]``: a container of such objects.)"""

    known: dict[str, str] = field(default_factory=dict)
    cls: str | None = None  # what ``self`` is


class File:
    """One file of ours."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._members: dict[str, set[str]] = {}  # of classes
        self._bases: dict[str, list[str]] = {}
        self._returned: dict[str, str] = {}  # by functions and methods: a class of this file
        self._fields: dict[tuple[str, str], str] = {}  # (class, attribute): the class of its value
        self._foreign: set[str] = set()  # other packages' modules, and what is imported from them
        nodes = list(ast.walk(self._tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for cls in classes:
            self._members[cls.name] = _names_in(cls.body)
            self._bases[cls.name] = [ast.unparse(base) for base in cls.bases]
        for cls in classes:
            self._look_into(cls)
        for node in nodes:
            if isinstance(node, FUNCTIONS) and (returned := self._annotated(node.returns)):
                self._returned[node.name] = returned
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or node.names[0].name
                if not module.startswith("symcomm"):
                    self._foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    def defined(self) -> set[str]:
        """Private names of the module and of its classes."""
        names = _names_in(self._tree.body).union(*self._members.values())
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    def foreign_privates(self, ours: set[str]) -> set[str]:
        """The expressions in which the file uses names among these."""
        return set(self._uses(ours | {"__dict__"}, self._tree, _Scope()))

    def _look_into(self, cls: ast.ClassDef) -> None:
        """Note the attributes that methods or slots give to objects, and the classes of their values."""
        members = self._members[cls.name]
        for node in ast.walk(cls):
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if is_self(value):
                    members.add(name)
                case ast.AnnAssign(target=target, annotation=annotation) if known := self._annotated(annotation):
                    self._fields[cls.name, ast.unparse(target).removeprefix("self.")] = known
                case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                    members |= {word.value for word in ast.walk(value) if isinstance(word, ast.Constant)}

    def _annotated(self, node: ast.expr | None) -> str | None:
        """The class of this file that an annotation names, maybe as one of its alternatives."""
        match node:
            case ast.Name(id=name) if name in self._members:
                return name
            case ast.BinOp(left=left, right=right):
                return self._annotated(left) or self._annotated(right)
            case ast.Constant(value=str(words)):
                return self._annotated(ast.parse(words, mode="eval").body)
            case ast.Subscript(slice=ast.Tuple(elts=[*_, inner]) | inner):
                return _many(self._annotated(inner))
        return None

    def _has(self, cls: str | None, name: str) -> bool:
        return cls in self._members and (
            name in self._members[cls] or name == "__dict__" or any(self._has(base, name) for base in self._bases[cls])
        )

    def _class_of(self, node: ast.expr | None, scope: _Scope) -> str | None:
        """The class of a value; of a class itself, that class, since its attributes are the same file's."""
        if node is None or is_self(node):
            return scope.cls if node else None
        match node:
            case ast.Name(id=name):
                return scope.known.get(name) or (name if name in self._members else None)
            case ast.Attribute(value=value, attr=name):
                return self._fields.get((self._class_of(value, scope) or "", name))
            case ast.Subscript(value=value):
                return _one_of(self._class_of(value, scope))
            case ast.List(elts=[first, *_]):
                return _many(self._class_of(first, scope))
            case ast.BoolOp(values=values):
                return next(filter(None, (self._class_of(value, scope) for value in values)), None)
            case ast.Call(func=ast.Attribute(attr="__new__"), args=[cls, *_]):
                return self._class_of(cls, scope)
            case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in ("type", *GIVES_ITS_ARGUMENT):
                return self._class_of(value, scope)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if is_self(value):
                return self._returned.get(name)
            case ast.Call(func=ast.Name(id=name) as func):
                return self._class_of(func, scope) or self._returned.get(name)
        return None

    def _scope_of(self, node: ast.AST, own: list[ast.AST], outer: _Scope) -> _Scope:
        """The classes that a module or a function gives to its names, in any of its lines."""
        scope = _Scope(dict(outer.known), outer.cls)
        if isinstance(node, FUNCTIONS):
            for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                scope.known.pop(arg.arg, None)
                if cls := self._annotated(arg.annotation):
                    scope.known[arg.arg] = cls
        for inner in own:
            for name, known in self._said(inner, scope):
                if isinstance(name, ast.Name) and known:
                    scope.known[name.id] = known
        return scope

    def _said(self, node: ast.AST, scope: _Scope) -> Iterator[tuple[ast.expr, str | None]]:
        """Names, and the classes that this node gives them."""
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target, self._class_of(value, scope)) for target in targets)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                yield target, self._annotated(annotation) or self._class_of(value, scope)
            case ast.NamedExpr(target=target, value=value):
                yield target, self._class_of(value, scope)
            case ast.withitem(context_expr=value, optional_vars=ast.Name() as target):
                yield target, self._class_of(value, scope)
            case ast.For(target=target, iter=many) | ast.comprehension(target=target, iter=many):
                yield target, _one_of(self._class_of(many, scope))
            case (
                ast.Call(func=ast.Name(id="isinstance"), args=[asked, cls])
                | ast.Compare(left=ast.Call(func=ast.Name(id="type"), args=[asked]), ops=[ast.Is()], comparators=[cls])
            ):
                yield asked, self._class_of(cls, scope)

    def _uses(self, ours: set[str], node: ast.AST, outer: _Scope) -> Iterator[str]:
        own = _own(node)
        scope = self._scope_of(node, own, outer)
        for inner in own:
            if isinstance(inner, (*FUNCTIONS, ast.ClassDef)):
                cls = inner.name if isinstance(inner, ast.ClassDef) else scope.cls
                yield from self._uses(ours, inner, _Scope(scope.known, cls))
            elif used := _used(inner):
                value, name = used
                if name in ours and not self._may(value, name, scope):
                    yield f"{ast.unparse(value.target if isinstance(value, ast.NamedExpr) else value)}.{name}"
            elif isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("symcomm"):
                names = {alias.name for alias in inner.names} & ours
                if inner.module != "symcomm._core":  # whose one file loads the other
                    yield from (f"import {inner.module}.{name}" for name in names)

    def _may(self, value: ast.expr, name: str, scope: _Scope) -> bool:
        root = value
        while isinstance(root, ast.Attribute):
            root = root.value
        elsewhere = isinstance(root, ast.Name) and root.id in self._foreign and root.id not in scope.known
        return is_self(value) or elsewhere or self._has(self._class_of(value, scope), name)


def is_self(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"), args=[]):
            return True
    return False


def _names_in(body: list[ast.stmt]) -> set[str]:
    """The names that statements of a module or a class define."""
    found = {node.name for node in body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def _used(node: ast.AST) -> tuple[ast.expr, str] | None:
    """An object and its attribute, if that is what this node is."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return value, name
        case ast.Call(func=ast.Name(id=by), args=[value, ast.Constant(value=str(name)), *_]) if by in BY_NAME:
            return value, name
        case ast.Call(func=ast.Name(id="vars"), args=[value]):
            return value, "__dict__"
    return None


def _many(cls: str | None) -> str | None:
    return f"[{cls}]" if cls else None


def _one_of(cls: str | None) -> str | None:
    return cls[1:-1] if cls and cls.startswith("[") else None


def _own(node: ast.AST) -> list[ast.AST]:
    """The nodes of a function, a class or a module, in order, without those of its inner functions and classes."""
    found = []
    left = list(ast.iter_child_nodes(node))[::-1]
    while left:
        found.append(child := left.pop())
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            left += list(ast.iter_child_nodes(child))[::-1]
    return found
