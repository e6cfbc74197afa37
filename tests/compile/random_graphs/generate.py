"""Makes a program from a seed, and smaller ones from a program."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from tests.compile.random_graphs.program import DTYPES, Dim, Illegal, Input, Program, State, Step, static, text_of
from tests.compile.random_graphs.steps import (
    ARGUMENTS,
    BY_HAND,
    NOT_TRACED,
    RESULTS,
    TABLE,
    VARIANTS,
    WEIGHTS,
)  # fmt: skip

# Half of all graphs are compiled as they come; the rest as they would be where more cores are idle, or people choose.
OPTIONS: tuple[tuple[tuple[str, bool], ...], ...] = (
    (), (), (), (), (("overlap", True),), (("block", False),), (("bucket", False),), (("zero_copy", False),),
)  # fmt: skip
OPERATIONS, ATTEMPTS = 20, 12  # tried in search of a step that fits, and arguments for each


def program_of(seed: int) -> Program:
    """The same for the same seed, on every rank."""
    chance = random.Random(seed)
    kind = chance.choices(["plain", "dynamic", "traced"], [65, 20, 15])[0]
    inputs = _inputs(chance)
    state, steps = State(inputs), []
    for _ in range(chance.randint(3, 16)):
        step, state = _next(chance, state, len(steps), kind == "traced")
        steps += [step] if step is not None else []
    steps += _last_waits(state, len(steps))
    outputs, options = _outputs(chance, state), chance.choice(OPTIONS)
    made = Program(seed, inputs, tuple(steps), outputs, options, kind == "dynamic", kind == "traced")
    text_of(made, TABLE)
    return made


def _inputs(chance: random.Random) -> tuple[Input, ...]:
    columns = chance.choice([3, 3, 3, 5, 600])  # values of 600 columns are made in symmetric memory
    made: list[Input] = []
    for number in range(chance.randint(1, 4)):
        rows = chance.choice([1, 1, 1, 2, Fraction(1, 2)])
        shape: tuple[Dim, ...] = (Dim(Fraction(rows)), static(columns))
        if chance.random() < 0.15:
            shape = shape[:1]
        dtype = made[0].dtype if made and chance.random() < 0.7 else chance.choice(DTYPES)
        given = Input(shape, dtype, transposed=len(shape) == 2 and chance.random() < 0.1)
        if made and chance.random() < 0.08:
            other = chance.randrange(number)
            given = replace(made[other], same_as=other)
        made.append(given)
    return tuple(made)


def _next(chance: random.Random, state: State, number: int, traced: bool) -> tuple[Step | None, State]:
    """A step that is legal here, and the state after it. Operations are chosen first, so that choosy ones come, too."""
    weights = {op: weight for op, weight in WEIGHTS.items() if op not in (NOT_TRACED if traced else BY_HAND)}
    for op in chance.choices(list(weights), list(weights.values()), k=OPERATIONS):
        for _ in range(ATTEMPTS):
            step = _propose(chance, op, state, number)
            tried = copy.deepcopy(state)
            try:
                TABLE[op](tried, step)
            except Illegal:
                continue
            return step, tried
    return None, state


def _propose(chance: random.Random, op: str, state: State, number: int) -> Step:
    wanted = [name for name, value in state.values.items() if value.pending == (op == "wait")]
    names = wanted or list(state.values)
    weights = range(1, len(names) + 1)  # new values rather than old ones
    args = tuple(chance.choices(names, weights)[0] for _ in range(ARGUMENTS[op]))
    results = tuple(f"v{number}{letter}" for letter in "ab"[: RESULTS[op]])
    return Step(op, args, results, chance.choice(VARIANTS[op]))


def _last_waits(state: State, number: int) -> list[Step]:
    """For whatever still writes an input: the caller has no name for that."""
    given = {value.memory for name, value in state.values.items() if name.startswith("x")}
    steps = []
    for memory in sorted(given):
        if writer := state.memories[memory].writer:
            steps.append(Step("wait", (writer,), (f"v{number + len(steps)}a",)))
            TABLE["wait"](state, steps[-1])
    return steps


def _may_leave(state: State, name: str) -> bool:
    value, memory = state.values[name], state.memory(name)
    return not value.stale and not memory.sealed if value.pending else not memory.writer


def _outputs(chance: random.Random, state: State) -> tuple[str, ...]:
    names = [name for name in state.values if _may_leave(state, name)]
    made = [name for name in names if name.startswith("v")]
    chosen = [name for name in made if chance.random() < 0.5] or made[-1:] or names[-1:]
    if chance.random() < 0.1:
        chosen.append(chance.choice(names))  # perhaps one twice, or an input
    return tuple(chosen)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the smallest first."""
    for number in range(len(program.steps)):
        for till in (len(program.steps), number + 1):
            yield from _legal(_without(program, range(number, till)))
    for number in range(len(program.outputs)):
        outputs = program.outputs[:number] + program.outputs[number + 1 :]
        yield from _legal(replace(program, outputs=outputs))
    if program.dynamic:
        yield from _legal(replace(program, dynamic=False))
    if program.options:
        yield from _legal(replace(program, options=()))


def _without(program: Program, gone: range) -> Program:
    """Without these steps, and all that needs them."""
    lost: set[str] = set()
    steps = []
    for number, step in enumerate(program.steps):
        if number in gone or lost.intersection(step.args):
            lost.update(step.results)
        else:
            steps.append(step)
    outputs = tuple(name for name in program.outputs if name not in lost)
    return replace(program, steps=tuple(steps), outputs=outputs)


def _legal(program: Program) -> Iterator[Program]:
    try:
        text_of(program, TABLE)
    except Illegal:
        return
    yield program
