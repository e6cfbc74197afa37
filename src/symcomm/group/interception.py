"""Lets layers run code before and after the calls of a group.

A group without layers pays nothing for this. While it has one, the methods that make calls are shadowed on the
*instances* they belong to; the shadows go with the last layer. A group may be called through several objects (the group
itself, torch's view of it, a GPU's): layers see a call once, where it comes in.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from symcomm.group.call_names import HookOpName


@dataclass(frozen=True)
class CallSpec:
    """One method: the operation it is, and which of its parameters hold tensors and the root (or the peer)."""

    name: HookOpName
    inputs: str = ""
    outputs: str = ""
    root: str = ""
    is_async: bool | None = None  # None: its arguments say so


class CallTable(Protocol):
    """The methods of one kind of object, and how to read their arguments."""

    methods: Mapping[str, CallSpec]

    def is_async(self, arguments: Mapping[str, Any]) -> bool: ...

    def root(self, arguments: Mapping[str, Any], spec: CallSpec) -> int: ...

    def changed(self, owner: Any, is_intercepted: bool) -> None:
        """Calls through ``owner`` are seen from now on, or no longer."""


class Call:
    """One call: ``owner.method(**arguments)``."""

    def __init__(self, owner: Any, method: str, table: CallTable, arguments: Mapping[str, Any]):
        self.owner = owner
        self.method = method
        self.arguments = arguments
        self.spec = table.methods[method]
        self._table = table

    @property
    def name(self) -> HookOpName:
        return self.spec.name

    @property
    def is_async(self) -> bool:
        return self._table.is_async(self.arguments) if self.spec.is_async is None else self.spec.is_async

    @property
    def root(self) -> int:
        return self._table.root(self.arguments, self.spec) if self.spec.root else -1

    @property
    def inputs(self) -> list[Any]:
        return flat(self.arguments.get(self.spec.inputs))

    @property
    def outputs(self) -> list[Any]:
        return flat(self.arguments.get(self.spec.outputs))


def flat(tensors: Any) -> list[Any]:
    """A tensor, a list of them, or a list of lists, as one list."""
    if tensors is None:
        return []
    if not isinstance(tensors, (list, tuple)):
        return [tensors]
    return [t for item in tensors for t in flat(item)]


Layer = Callable[[Call, Callable[[], Any]], Any]  # (the call, what makes it) -> its result


class Interception:
    """The layers around one group's calls; the first added is the outermost."""

    def __init__(self) -> None:
        self._facades: list[tuple[weakref.ref[Any], CallTable]] = []
        self._layers: tuple[Layer, ...] = ()
        self._shadows: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # made once
        self._lock = threading.RLock()
        self._inside = threading.local()

    def add_facade(self, owner: Any, table: CallTable) -> None:
        """Calls of the group are also made through ``owner``."""
        with self._lock:
            self._facades = [(ref, known) for ref, known in self._facades if ref() is not None]
            self._facades.append((weakref.ref(owner), table))
            if self._layers:
                self._shadow(owner, table)

    def add(self, layer: Layer) -> None:
        with self._lock:
            if layer in self._layers:
                return
            first = not self._layers
            self._layers = (*self._layers, layer)
            if first:
                self._each_facade(self._shadow)

    def remove(self, layer: Layer) -> None:
        with self._lock:
            if layer not in self._layers:
                return
            self._layers = tuple(known for known in self._layers if known != layer)
            if not self._layers:
                self._each_facade(_unshadow)

    def _each_facade(self, act: Callable[[Any, CallTable], None]) -> None:
        for ref, table in self._facades:
            owner = ref()
            if owner is not None:
                act(owner, table)

    def _shadow(self, owner: Any, table: CallTable) -> None:
        shadows = self._shadows.get(owner)
        if shadows is None:
            signatures = {method: _signature(type(owner), method) for method in table.methods}
            shadows = {m: self._shadow_of(owner, m, table, s) for m, s in signatures.items() if s is not None}
            self._shadows[owner] = shadows
        for method, shadow in shadows.items():
            setattr(owner, method, shadow)
        table.changed(owner, True)

    def _shadow_of(self, owner: Any, method: str, table: CallTable, signature: inspect.Signature) -> Callable[..., Any]:
        whose = weakref.ref(owner)  # the owner holds the shadow, which must not hold the owner

        @functools.wraps(getattr(type(owner), method))
        def shadow(*args: Any, **named: Any) -> Any:
            target = whose()  # its class, or that class's methods, may have changed since
            make = functools.partial(getattr(type(target), method), target, *args, **named)
            if getattr(self._inside, "a_call", False):  # a call made of other calls is one call
                return make()
            return self._run(Call(target, method, table, _bound(signature, target, args, named)), make)

        return shadow

    def _run(self, call: Call, make: Callable[[], Any]) -> Any:
        for layer in reversed(self._layers):
            make = functools.partial(layer, call, make)
        self._inside.a_call = True
        try:
            return make()
        finally:
            self._inside.a_call = False


def _signature(kind: type, method: str) -> inspect.Signature | None:
    """The method's own signature, past subclasses that only pass ``**kwargs`` on; None where C++ defines it."""
    every = [vars(base)[method] for base in kind.__mro__ if inspect.isfunction(vars(base).get(method))]
    signatures = [_signature_of(function) for function in every]
    named = (s for s in signatures if all(p.kind is not p.VAR_KEYWORD for p in s.parameters.values()))
    return next(named, signatures[0] if signatures else None)


_signature_of = functools.lru_cache(1024)(inspect.signature)


def _bound(signature: inspect.Signature, owner: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments by name; none where they do not fit: the method itself refuses them, or takes other names."""
    try:
        bound = signature.bind(owner, *args, **named)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _unshadow(owner: Any, table: CallTable) -> None:
    for method in table.methods:
        vars(owner).pop(method, None)
    table.changed(owner, False)
