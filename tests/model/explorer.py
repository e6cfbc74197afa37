"""Explores every interleaving of a few small processes, breadth first, and prints the shortest way to a wrong state.

A process is a generator. It yields what it does to shared memory, one access at a time, and is sent what came of it::

    def sleeper():
        yield store("sleeping", 1, RELEASE)
        yield fence()
        if (yield load("arrived", ACQUIRE)):
            return "awake"

Between two yields a process is alone with its local variables, so the accesses are all that can interleave. A process's
state is where it is in its code and the values of its local variables; generators cannot be copied, so one is played
again from its start when a state is first needed, and what a step leads to is remembered. Therefore
    - local variables hold numbers, strings, tuples and the like
    - what it does may depend on nothing but what it was sent
    - an expression holds one yield, or several joined by `and`, `or`, `not` (``check_source`` makes sure): a value that
      waits for another yield of the same expression would be in no variable
    - a ``for`` runs over things that differ

``memory`` is how shared memory behaves: sequentially consistent (``Strong``) or as C11 allows (``weak.Weak``).
"""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RELAXED, ACQUIRE, RELEASE, BOTH = "relaxed", "acquire", "release", "acq_rel"
DEAD = -1


class Step(NamedTuple):
    """One thing that a process does; the meaning of ``a`` and ``b`` depends on ``kind``."""

    kind: str
    place: Hashable = None
    a: Any = None
    b: Any = None
    order: str = RELAXED

    def __str__(self) -> str:
        words = [self.kind, *(str(x) for x in (self.place, self.a, self.b) if x is not None)]
        return " ".join(words) + (f" ({self.order})" if self.order != RELAXED else "")


def load(place: Hashable, order: str = RELAXED) -> Step:
    return Step("load", place, order=order)


def store(place: Hashable, value: Any, order: str = RELAXED) -> Step:
    return Step("store", place, value, order=order)


def swap(place: Hashable, value: Any) -> Step:
    """Returns the value before."""
    return Step("swap", place, value, order=BOTH)


def compare_and_swap(place: Hashable, expected: Any, value: Any) -> Step:
    """Returns whether it was as expected."""
    return Step("compare_and_swap", place, expected, value, order=BOTH)


def fetch_max(place: Hashable, value: Any) -> Step:
    return Step("fetch_max", place, value, order=BOTH)


def fetch_add(place: Hashable, value: int, order: str = BOTH) -> Step:
    return Step("fetch_add", place, value, order=order)


def fence(order: str = "seq_cst") -> Step:
    return Step("fence", order=order)


def futex_wait(place: Hashable, seen: Any) -> Generator[Step, Any, None]:
    """The kernel compares and puts to sleep in one step. Nothing but a wake-up ends it, or a slice where somebody
    died.
    """
    if (yield Step("futex_wait", place, seen)):
        yield Step("asleep", place)


def futex_wake(place: Hashable) -> Step:
    return Step("futex_wake", place)


def choose(*ways: Any) -> Step:
    """One of them: what the world decides, such as that a deadline has passed."""
    return Step("choose", None, ways)


def lock(place: Hashable) -> Step:
    return Step("lock", place, order=BOTH)


def unlock(place: Hashable) -> Step:
    return store(place, 0, RELEASE)


def until(place: Hashable, *values: Any) -> Step:
    """Until a load (acquire) gives one of these; returns it. A loop of loads, without the states of looking in vain."""
    return Step("until", place, values, order=ACQUIRE)


def own(place: Hashable) -> Step:
    """A load of what only this process writes: nobody can come between, so it is no step of its own."""
    return Step("own", place)


def check(true: bool, message: str) -> Step:
    return Step("check", None, bool(true), message)


def give_back(block: Hashable) -> Step:
    """Whoever touches a place of this block from now on is wrong."""
    return Step("give_back", block)


Process = Callable[[], Generator[Step, Any, Any]]


class WrongError(Exception):
    """An access that must never happen."""


# --- processes ---------------------------------------------------------------------------------------


def check_source(module: Any) -> None:
    """Refuses expressions in which one yield's value would wait on the stack for another's."""
    tree = ast.parse(inspect.getsource(module))

    def yields(node: ast.AST) -> int:
        parts = list(map(yields, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return 1
        if isinstance(node, ast.expr) and not isinstance(node, ast.BoolOp | ast.IfExp) and sum(parts) > 1:
            raise ValueError(f"{module.__name__}, line {node.lineno}: two yields in one expression")
        return max(parts, default=0) if isinstance(node, ast.expr) else 0

    yields(tree)


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return frozenset(value) if isinstance(value, set) else value


def _where(generator: Any) -> tuple:
    """Everything that decides what a suspended generator does next."""
    chain = []
    while generator is not None and inspect.isgenerator(generator):
        frame = generator.gi_frame
        variables = tuple((k, _frozen(v)) for k, v in sorted(frame.f_locals.items()) if not inspect.isgenerator(v))
        chain.append((generator.gi_code, frame.f_lasti, variables))
        generator = generator.gi_yieldfrom
    return tuple(chain)


class Player:
    """One process: its states are small numbers, ``steps[n]`` is what it does next in state n."""

    def __init__(self, process: Process):
        self.process = process
        self.numbers: dict[tuple, int] = {}
        self.steps: list[Step] = []
        self.histories: list[tuple] = []
        self.after: dict[tuple[int, Any], int] = {}
        self.start = self._enter(())

    def _enter(self, history: tuple) -> int:
        generator = self.process()
        step, key = None, ()
        try:
            step = next(generator)
            for value in history:
                step = generator.send(value)
            key = _where(generator)
        except StopIteration as end:
            step, key = Step("end", None, _frozen(end.value)), ("end", _frozen(end.value))
        if not isinstance(step, Step):
            raise TypeError(f"{self.process} yields {step!r}, which is no step")
        key = (*key, step)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.steps)
            self.steps.append(step)
            self.histories.append(history)
        return number

    def send(self, state: int, value: Any) -> int:
        key = state, value
        if key not in self.after:
            self.after[key] = self._enter((*self.histories[state], value))
        return self.after[key]


# --- memory ------------------------------------------------------------------------------------------


def block_of(place: Hashable) -> Hashable:
    """Places are named (word, block) or by a plain string."""
    return place[1] if isinstance(place, tuple) else None


READS_AND_WRITES: dict[str, Callable[[Any, Step], Any]] = {
    "lock": lambda old, step: 1,
    "swap": lambda old, step: step.a,
    "compare_and_swap": lambda old, step: step.b if old == step.a else old,
    "fetch_max": lambda old, step: max(old, step.a),
    "fetch_add": lambda old, step: old + step.a,
}


def answer(step: Step, old: Any) -> Any:
    return old == step.a if step.kind == "compare_and_swap" else old


class Strong:
    """Sequential consistency: every access takes effect at once, in the order of the interleaving."""

    def __init__(self, initial: dict[Hashable, Any]):
        self.index = {place: n for n, place in enumerate(initial)}
        self.initial = (
            tuple(initial.values()),
            frozenset(),
            frozenset(),
        )  # values, blocks given back, (process, word) asleep

    def do(self, state: tuple, who: int, step: Step) -> Iterator[tuple[Any, tuple]]:
        """What the step may return, and memory then. Nothing when it has to wait."""
        values, freed, asleep = state
        kind = step.kind
        if kind == "fence":
            yield None, state
            return
        if kind == "asleep":
            if (who, step.place) not in asleep:
                yield None, state
            return
        if kind == "give_back":
            yield None, (values, freed | {step.place}, asleep)
            return
        if freed and block_of(step.place) in freed:
            raise WrongError(f"touches {step.place}, which was given back")
        at = self.index[step.place]
        old = values[at]
        if kind == "load":
            yield old, state
        elif kind == "until":
            if old in step.a:
                yield old, state
        elif kind == "store":
            yield None, (values[:at] + (step.a,) + values[at + 1 :], freed, asleep)
        elif kind == "futex_wait":
            yield old == step.a, (values, freed, asleep | {(who, step.place)} if old == step.a else asleep)
        elif kind == "futex_wake":
            yield None, (values, freed, frozenset(s for s in asleep if s[1] != step.place))
        elif kind != "lock" or old == 0:
            new = READS_AND_WRITES[kind](old, step)
            yield answer(step, old), (values[:at] + (new,) + values[at + 1 :], freed, asleep)

    @staticmethod
    def nudge(state: tuple, who: int) -> tuple:
        """A sleep ends by itself."""
        return *state[:2], frozenset(s for s in state[2] if s[0] != who)

    @staticmethod
    def end(state: tuple, who: int) -> tuple:
        """The process will do nothing more."""
        return state

    def peek(self, state: tuple, place: Hashable) -> Any:
        return state[0][self.index[place]]

    def die(self, state: tuple, who: int, place: Hashable) -> tuple:
        """The kernel marks the word that tells of a death, after everything that the process did."""
        ((_, after),) = self.do(self.nudge(state, who), who, store(place, 1, RELEASE))
        return after


# --- exploring ---------------------------------------------------------------------------------------


@dataclass
class Model:
    """Processes on a memory, and what must hold.

    ``mortal``  processes that may be killed at any step, ``deaths`` of them at most; the kernel then stores 1 in
    ``life``
    ``ends``    told every final state's results by process (None: killed); returns what is wrong with them, or ""
    ``stuck``   whether processes that wait for ever are wrong
    ``joined``  loads that happen at once with what the process did before: for models that are too large otherwise
    ``nudge``   whether a sleeper may wake by itself once somebody has died (the core looks for the dead in slices)
    """

    name: str
    processes: dict[str, Process]
    memory: Any
    ends: Callable[[dict[str, Any]], str] = lambda results: ""
    mortal: Sequence[str] = ()
    deaths: int = 0
    life: Callable[[str], Hashable] = lambda name: ("life", name)
    stuck: bool = True
    nudge: bool = True
    joined: Callable[[Step], bool] = lambda step: False
    most: int = 5_000_000


@dataclass
class Verdict:
    """How the exploration of a model ended: ``wrong`` is "" or what is wrong, ``trace`` the way there."""

    model: str
    states: int
    wrong: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.model}: {self.states:,} states, none is wrong"
        return "\n".join(
            [f"{self.model}: {self.wrong} ({self.states:,} states)", *(f"    {line}" for line in self.trace)]
        )


class _Explorer:
    def __init__(self, model: Model):
        self.model, self.memory = model, model.memory
        self.names = list(model.processes)
        self.players = [Player(process) for process in model.processes.values()]
        self.mortal = [self.names.index(name) for name in model.mortal]

    def next(self, state: tuple) -> Iterator[tuple[tuple, tuple]]:
        """Every (what happened, state then)."""
        memory, at = state
        for who, here in enumerate(at):
            if here == DEAD:
                continue
            step = self.players[who].steps[here]
            if step.kind == "asleep" and self.model.nudge and DEAD in at:
                outcomes: Any = [(None, self.memory.nudge(memory, who))]
            else:
                outcomes = () if step.kind == "end" else self.memory.do(memory, who, step)
            for value, then in outcomes:
                there = self.players[who].send(here, value)
                for also, place in self.alone(then, who, there):
                    ended = self.players[who].steps[place].kind == "end"
                    after = self.memory.end(then, who) if ended else then
                    yield (who, ((step, value), *also)), (after, (*at[:who], place, *at[who + 1 :]))
        if sum(here == DEAD for here in at) < self.model.deaths:
            yield from self.kill(state)

    def alone(self, memory: Any, who: int, here: int) -> Iterator[tuple[tuple, int]]:
        """What a process does without touching what others touch is part of the step before: it can be seen by
        nobody.
        """
        player = self.players[who]
        step = player.steps[here]
        if step.kind == "check" and not step.a:
            raise WrongError(step.b)
        if step.kind in ("choose", "check", "own") or self.model.joined(step):
            ways = (
                step.a
                if step.kind == "choose"
                else [None if step.kind == "check" else self.memory.peek(memory, step.place)]
            )
            for way in ways:
                for also, there in self.alone(memory, who, player.send(here, way)):
                    yield ((step, way), *also), there
        else:
            yield (), here

    def kill(self, state: tuple) -> Iterator[tuple[tuple, tuple]]:
        memory, at = state
        for who in self.mortal:
            if at[who] == DEAD or self.players[who].steps[at[who]].kind == "end":
                continue
            then = self.memory.die(memory, who, self.model.life(self.names[who]))
            yield (who, ((Step("killed"), None),)), (then, (*at[:who], DEAD, *at[who + 1 :]))

    def final(self, state: tuple) -> str:
        """What is wrong with a state that has no next one."""
        results: dict[str, Any] = {}
        for name, player, here in zip(self.names, self.players, state[1], strict=True):
            step = player.steps[here] if here != DEAD else None
            if step is None or step.kind == "end":
                results[name] = step.a if step else None
            elif self.model.stuck:
                return f"{name} waits for ever: {step}"
            else:
                results[name] = "stuck"
        return self.model.ends(results)

    def starts(self) -> list[tuple]:
        ways = [[place for _, place in self.alone(self.memory.initial, n, p.start)] for n, p in enumerate(self.players)]
        return [(self.memory.initial, places) for places in itertools.product(*ways)]

    def run(self) -> Verdict:
        firsts = self.starts()
        numbers = {first: n for n, first in enumerate(firsts)}
        states: list[tuple] = list(firsts)
        before: list[Any] = [(-1, None) for _ in firsts]
        ways: list[list[int]] = [[] for _ in firsts]  # which states lead to a state, other than by a death
        final = []
        for number in itertools.count():
            if number == len(states):
                break
            state, moved = states[number], False
            try:
                for event, then in self.next(state):
                    there = numbers.setdefault(then, len(states))
                    if there == len(states):
                        states.append(then)
                        before.append((number, event))
                        ways.append([])
                    if event[1][0][0].kind != "killed":
                        moved = True
                        ways[there].append(number)
                wrong = "" if moved else self.final(state)
            except WrongError as error:
                wrong = str(error)
            if wrong:
                return Verdict(self.model.name, len(states), wrong, self.trace(before, number))
            if not moved:
                final.append(number)
            if len(states) > self.model.most:
                raise MemoryError(f"{self.model.name}: more than {self.model.most:,} states")
        lost = self.never_ends(final, ways) if self.model.stuck else None
        if lost is not None:
            return Verdict(self.model.name, len(states), "goes on for ever", self.trace(before, lost))
        return Verdict(self.model.name, len(states))

    @staticmethod
    def never_ends(final: list[int], ways: list[list[int]]) -> int | None:
        """The first state from which no end can be reached, if there is one."""
        ending = set(final)
        todo = list(final)
        while todo:
            for earlier in ways[todo.pop()]:
                if earlier not in ending:
                    ending.add(earlier)
                    todo.append(earlier)
        return next((n for n in range(len(ways)) if n not in ending), None)

    def trace(self, before: list, number: int) -> list[str]:
        lines: list[str] = []
        while before[number][1] is not None:
            number, (who, steps) = before[number]
            told = [
                f"{self.names[who]}: {step}" + (f" -> {value}" if value is not None else "") for step, value in steps
            ]
            lines += told[::-1]
        return lines[::-1]


def explore(model: Model) -> Verdict:
    """Visits every state that can be reached, or stops at the first wrong one."""
    collecting = gc.isenabled()
    gc.disable()  # it would look at all states again and again, and there are no cycles in them
    try:
        return _Explorer(model).run()
    finally:
        if collecting:
            gc.enable()
