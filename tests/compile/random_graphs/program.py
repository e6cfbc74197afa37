"""A program: steps over named tensors, and the rules by which one means the same eagerly and compiled.

Eagerly, a collective that has not been awaited may still read its inputs and write its results. So a program never
reads what may be written, nor writes what may be read. Shapes are affine in ``n``: a program runs at several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

LARGEST = 100  # times 2 ** halvings: every dtype holds such numbers exactly
FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = (*FLOATS, "int32", "int64", "int8")


class Illegal(Exception):
    """A step that has no meaning here, or more than one."""


@dataclass(frozen=True)
class Dim:
    """``per * n + const``."""

    per: Fraction
    const: int = 0

    def at(self, n: int) -> int:
        return int(self.per * n) + self.const

    def plus(self, const: int) -> Dim:
        return Dim(self.per, self.const + const)

    def joined(self, other: Dim) -> Dim:
        return Dim(self.per + other.per, self.const + other.const)

    def times(self, factor: int) -> Dim:
        return Dim(self.per * factor, self.const * factor)

    def halved(self) -> Dim:
        if self.const % 2 or (self.per * 4).denominator != 1 or (self.per * 8) % 2:
            raise Illegal("an odd length")
        return Dim(self.per / 2, self.const // 2)


SIZES = (8, 24)  # values of n


def static(length: int) -> Dim:
    return Dim(Fraction(0), length)


@dataclass
class Memory:
    """What one or more names show."""

    bound: Fraction  # no element is larger
    halvings: int = 0  # elements are multiples of 2 ** -halvings
    readers: set[str] = field(default_factory=set)  # results not awaited yet, of collectives that read it
    writer: str = ""  # a collective that writes it, and has not been awaited
    waits: int = 0
    from_collective: bool = False
    sealed: bool = False  # changed since it was awaited


@dataclass
class Value:
    name: str
    shape: tuple[Dim, ...]
    dtype: str
    memory: int
    pending: bool = False
    contiguous: bool = True
    overlaps: bool = False  # its elements share memory
    stale: bool = False  # must not be used any more

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True)
class Input:
    shape: tuple[Dim, ...]
    dtype: str
    transposed: bool = False
    same_as: int | None = None  # the very tensor that another input is


@dataclass(frozen=True)
class Step:
    op: str
    args: tuple[str, ...]
    results: tuple[str, ...]
    how: str = ""  # a variant of the operation


class State:
    """What is known while a program runs."""

    def __init__(self, inputs: Sequence[Input]):
        self.values: dict[str, Value] = {}
        self.memories: list[Memory] = []
        for number, given in enumerate(inputs):
            if given.same_as is None:
                self.memories.append(Memory(Fraction(3)))
                memory = len(self.memories) - 1
            else:
                memory = self.values[f"x{given.same_as}"].memory
            name = f"x{number}"
            self.values[name] = Value(name, given.shape, given.dtype, memory, contiguous=not given.transposed)

    def memory(self, name: str) -> Memory:
        return self.memories[self.values[name].memory]

    def reads(self, name: str) -> Value:
        value = self._known(name)
        if value.pending or value.stale or self.memory(name).writer:
            raise Illegal(f"{name} is not ready")
        return value

    def writes(self, name: str) -> Value:
        """In place. Eagerly all waits for one result give the same tensor, compiled they do not (whoever's the group
        is): so a result is changed only when nobody else has it or will have it."""
        value, memory = self.reads(name), self.memory(name)
        if memory.readers or value.overlaps or (memory.from_collective and memory.waits != 1):
            raise Illegal(f"{name} cannot be written")
        memory.sealed = memory.from_collective
        return value

    def writes_later(self, name: str) -> Value:
        """In place, by a collective: what older ones wrote there is over."""
        value = self.writes(name)
        for other in self.values.values():
            other.stale |= other.pending and other.memory == value.memory
        return value

    def waits(self, name: str) -> Value:
        value, memory = self._known(name), self.memory(name)
        if not value.pending or value.stale or memory.sealed:
            raise Illegal(f"{name} cannot be awaited")
        memory.waits += 1
        memory.writer = ""
        for other in self.memories:
            other.readers.discard(name)
        return value

    def _known(self, name: str) -> Value:
        if name not in self.values:
            raise Illegal(f"{name} does not exist")
        return self.values[name]

    def make(
        self, name: str, shape: Iterable[Dim], dtype: str, bound: Fraction | int, halvings: int = 0, **facts: bool
    ) -> Value:
        """A value in memory of its own."""
        self.memories.append(Memory(Fraction(0)))
        self.values[name] = value = Value(name, tuple(shape), dtype, len(self.memories) - 1, **facts)
        self.grow(name, Fraction(bound), halvings)
        return value

    def alias(self, name: str, of: Value, **facts: Any) -> Value:
        self.values[name] = value = replace(of, name=name, **facts)
        return value

    def grow(self, name: str, bound: Fraction, halvings: int) -> None:
        """Elements may now be as large, and as fine, as this."""
        memory, value = self.memory(name), self.values[name]
        memory.bound, memory.halvings = max(memory.bound, bound), max(memory.halvings, halvings)
        if memory.bound * 2**memory.halvings > LARGEST or (memory.halvings and not value.is_float):
            raise Illegal(f"{name} might be rounded")


@dataclass(frozen=True)
class Program:
    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    options: tuple[tuple[str, bool], ...] = ()  # of symcomm.compile.configure
    dynamic: bool = False
    traced: bool = False  # by make_fx, and not by Dynamo and AOTAutograd

    @property
    def arguments(self) -> str:
        return ", ".join(f"x{number}" for number in range(len(self.inputs)))


Write = Callable[[State, Step], str]  # checks a step, notes what it does, and gives its text


def text_of(program: Program, table: dict[str, Write]) -> str:
    """The program as a Python function. Raises Illegal."""
    state = State(program.inputs)
    lines = [table[step.op](state, step) for step in program.steps]
    for name in program.outputs:
        value = state.values.get(name)
        if value is None or value.stale or (value.pending and state.memory(name).sealed):
            raise Illegal(f"{name} cannot be returned")
        if not value.pending:
            state.reads(name)
    given = {state.values[f"x{number}"].memory for number in range(len(program.inputs))}
    if not program.outputs or any(state.memories[memory].writer for memory in given):
        raise Illegal("nothing is returned, or an input is still being written")
    body = "\n".join(f"    {line}" for line in [*lines, f"return {', '.join(program.outputs)},"])
    return f"def graph({program.arguments}):\n{body}\n"
