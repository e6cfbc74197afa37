"""Shared memory as weak as C11 allows, in the form of views.

Every place keeps the writes it got, in the order in which all processes agree on them (its modification order). A view
says of every place which write is the oldest one that may still be read. Each process has three:
    now       what its next load must respect
    seen      what it has come across in relaxed loads: an acquire fence makes it count
    released  what it had seen at its last release fence: every later store carries it
A load returns *any* write that is not older than its view allows, so loads overtake each other and stores linger, as
they do on arm64. A store carries the view that an acquire load of it must respect. A seq_cst fence adds its view to
one that all such fences share.

What C11 does not promise but every processor with one copy of memory (arm64, x86) does: a release also carries what
relaxed loads have come across. ``one_copy`` adds that.

Left out: a store that takes effect before an earlier load of its own process (load buffering). Whatever the core stores
because of a load is behind an acquire or a release.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

from tests.model.explorer import READS_AND_WRITES, RELEASE, Step, WrongError, answer, block_of, store

View = tuple[int, ...]
ACQUIRING, RELEASING = ("acquire", "acq_rel", "seq_cst"), ("release", "acq_rel", "seq_cst")


class Write(NamedTuple):
    value: Any
    view: View
    joined: bool = False  # an atomic read-and-write: nothing can come between it and the write before it


class Views(NamedTuple):
    now: View
    seen: View
    released: View


class State(NamedTuple):
    writes: tuple[tuple[Write, ...], ...]  # by place
    views: tuple[Views | None, ...]  # by process
    fences: View
    freed: frozenset
    asleep: frozenset


def later(one: View, other: View) -> View:
    return one if one == other else tuple(map(max, one, other))


def put(view: View, at: int, index: int) -> View:
    return view if view[at] == index else (*view[:at], index, *view[at + 1 :])


class Weak:
    """``contended``: places that several processes write with plain stores, whose order they may disagree about until
    it is settled. ``blocks``: memory that is given back; then every earlier access must be over, not only every
    store."""

    def __init__(
        self,
        initial: dict[Hashable, Any],
        processes: int,
        contended: Collection[Hashable] = (),
        blocks: Collection[Hashable] = (),
        one_copy: bool = False,
    ):
        touched = {(("touched by", who), block): None for who in range(processes) for block in blocks}
        initial = initial | touched
        self.index = {place: n for n, place in enumerate(initial)}
        self.contended = {self.index[place] for place in contended}
        self.blocks = {b: [n for place, n in self.index.items() if block_of(place) == b] for b in blocks}
        self.one_copy = one_copy
        zero = (0,) * len(initial)
        writes = tuple((Write(value, zero),) for value in initial.values())
        self.initial = State(writes, (Views(zero, zero, zero),) * processes, zero, frozenset(), frozenset())

    def do(self, state: State, who: int, step: Step) -> Iterator[tuple[Any, State]]:
        """What the step may return, and memory then. Nothing when it has to wait."""
        for value, then in self._do(state, who, step):
            yield value, self._forget(then)

    def _do(self, state: State, who: int, step: Step) -> Iterator[tuple[Any, State]]:
        kind = step.kind
        if kind == "fence":
            yield None, self._fence(state, who, step.order)
        elif kind == "asleep":
            if (who, step.place) not in state.asleep:
                yield None, state
        elif kind == "give_back":
            yield None, self._give_back(state, who, step.place)
        else:
            block = block_of(step.place)
            if block in state.freed:
                raise WrongError(f"touches {step.place}, which was given back")
            if block in self.blocks:
                state = self._append(state, who, self.index[("touched by", who), block], None, Step("store"))
            yield from self._access(state, who, step, self.index[step.place])

    def _access(self, state: State, who: int, step: Step, at: int) -> Iterator[tuple[Any, State]]:
        kind, writes = step.kind, state.writes[at]
        if kind in ("load", "until"):
            for index in range(state.views[who].now[at], len(writes)):
                if kind == "load" or writes[index].value in step.a:
                    yield writes[index].value, self._read(state, who, at, index, step.order)
        elif kind == "store":
            yield from ((None, then) for then in self._store(state, who, at, step))
        elif kind == "futex_wait":
            state = self._fence(self._read(state, who, at, len(writes) - 1, "acquire"), who, "seq_cst")
            sleeps = writes[-1].value == step.a
            yield sleeps, state._replace(asleep=state.asleep | {(who, step.place)}) if sleeps else state
        elif kind == "futex_wake":
            state = self._fence(state, who, "seq_cst")
            yield None, state._replace(asleep=frozenset(s for s in state.asleep if s[1] != step.place))
        else:
            yield from self._read_and_write(state, who, at, step)

    # loads and stores ----------------------------------------------------------------------------

    def _read(self, state: State, who: int, at: int, index: int, order: str) -> State:
        now, seen, released = state.views[who]
        view = put(state.writes[at][index].view, at, index)
        now = later(now, view) if order in ACQUIRING else put(now, at, max(now[at], index))
        return self._with(state, who, Views(now, later(seen, view), released))

    def _carried(self, views: Views, order: str) -> View:
        if order in RELEASING:
            return later(views.now, views.seen) if self.one_copy else views.now
        return views.released

    def _append(self, state: State, who: int, at: int, value: Any, step: Step, inherited: View | None = None) -> State:
        return self._insert(state, who, at, len(state.writes[at]), value, step, inherited)

    def _store(self, state: State, who: int, at: int, step: Step) -> Iterator[State]:
        writes = state.writes[at]
        first = state.views[who].now[at] + 1 if at in self.contended else len(writes)
        for index in range(first, len(writes) + 1):
            if index == len(writes) or not writes[index].joined:
                yield self._insert(state, who, at, index, step.a, step, None)

    def _read_and_write(self, state: State, who: int, at: int, step: Step) -> Iterator[tuple[Any, State]]:
        writes = state.writes[at]
        first = state.views[who].now[at] if at in self.contended else len(writes) - 1
        for index in range(first, len(writes)):
            if index + 1 < len(writes) and writes[index + 1].joined:
                continue
            old = writes[index].value
            if step.kind == "lock" and (old != 0 or index + 1 < len(writes)):
                continue
            read = self._read(state, who, at, index, step.order)
            new = READS_AND_WRITES[step.kind](old, step)
            if step.kind == "compare_and_swap" and old != step.a:
                yield False, read
            else:
                then = self._insert(read, who, at, index + 1, new, step, writes[index].view)
                yield answer(step, old), then

    def _insert(
        self, state: State, who: int, at: int, index: int, value: Any, step: Step, inherited: View | None
    ) -> State:
        """A write at this place of the order; what comes after it moves up. ``inherited``: of the write it replaces."""
        if index < len(state.writes[at]):
            state = self._move_up(state, at, index)
        now, seen, released = state.views[who]
        now, seen = put(now, at, index), put(seen, at, max(seen[at], index))
        view = put(self._carried(Views(now, seen, released), step.order), at, index)
        if inherited is not None:
            view = later(view, inherited)
        writes = state.writes[at]
        mine = (*writes[:index], Write(value, view, inherited is not None), *writes[index:])
        state = state._replace(writes=(*state.writes[:at], mine, *state.writes[at + 1 :]))
        return self._with(state, who, Views(now, seen, released))

    def _move_up(self, state: State, at: int, index: int) -> State:
        return self._map(state, lambda view: put(view, at, view[at] + (view[at] >= index)))

    # fences and the rest -------------------------------------------------------------------------

    def _fence(self, state: State, who: int, order: str) -> State:
        now, seen, released = state.views[who]
        if order in ACQUIRING:
            now = later(now, seen)
        if order == "seq_cst":
            now = later(now, state.fences)
            state = state._replace(fences=now)
            seen = later(seen, now)
        if order in RELEASING:
            released = self._carried(Views(now, seen, released), order)
        return self._with(state, who, Views(now, seen, released))

    def _give_back(self, state: State, who: int, block: Hashable) -> State:
        for at in self.blocks[block]:
            if state.views[who].now[at] < len(state.writes[at]) - 1:
                place = next(p for p, n in self.index.items() if n == at)
                raise WrongError(f"gives {block} back, but an access may come later: {place}")
        return state._replace(freed=state.freed | {block})

    def nudge(self, state: State, who: int) -> State:
        """A sleep ends by itself."""
        return state._replace(asleep=frozenset(s for s in state.asleep if s[0] != who))

    def end(self, state: State, who: int) -> State:
        """The process will do nothing more."""
        return self._forget(self._with(state, who, None))

    def die(self, state: State, who: int, place: Hashable) -> State:
        """The kernel marks the word that tells of a death, after everything that the process did."""
        views = state.views[who]
        state = self._with(state, who, Views(later(views.now, views.seen), views.seen, views.released))
        state = self._append(state, who, self.index[place], 1, store(place, 1, RELEASE))
        return self.end(self.nudge(state, who), who)

    # bookkeeping ---------------------------------------------------------------------------------

    @staticmethod
    def _with(state: State, who: int, views: Views | None) -> State:
        return state._replace(views=(*state.views[:who], views, *state.views[who + 1 :]))

    @staticmethod
    def _map(state: State, change: Any) -> State:
        return state._replace(
            writes=tuple(tuple(Write(w.value, change(w.view), w.joined) for w in place) for place in state.writes),
            views=tuple(v and Views(*map(change, v)) for v in state.views),
            fences=change(state.fences),
        )

    def _forget(self, state: State) -> State:
        """Writes that nobody can read any more make no difference: without them more states are the same."""
        alive = [v.now for v in state.views if v]
        drop = tuple(map(min, *alive, alive[0])) if alive else tuple(len(w) - 1 for w in state.writes)
        if not any(drop):
            return state
        state = state._replace(writes=tuple(w[n:] for w, n in zip(state.writes, drop, strict=True)))
        return self._map(state, lambda view: tuple(max(0, v - n) for v, n in zip(view, drop, strict=True)))
