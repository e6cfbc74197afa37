"""The models of the core's protocols: no reachable state is wrong, and each line that protects them is needed.

`make prove` explores the larger ones too. What each stands for is in docs/explanation/model.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.model import (
    admitting,
    agreeing,
    attaching,
    copying,
    deciding,
    explorer,
    giving_up,
    leaving,
    refusing,
    sleeping,
    suite,
    voiding,
)
from tests.model.explorer import ACQUIRE, RELEASE, Model, Step, Strong, check, explore, fence, load, own, store
from tests.model.weak import Weak

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MODULES = [admitting, agreeing, attaching, copying, deciding, giving_up, leaving, refusing, sleeping, voiding]


@pytest.mark.parametrize("make", suite.QUICK, ids=lambda make: make().name)
def test_no_state_is_wrong(make: Callable[[], Model]):
    verdict = explore(make())
    assert not verdict.wrong, str(verdict)
    assert verdict.states > 50


@pytest.mark.parametrize(("name", "what", "makers"), list(suite.mutants()), ids=[m[0] for m in suite.mutants()])
def test_every_line_is_needed(name: str, what: str, makers: list[suite.Maker]):
    found = next((verdict for make in makers if (verdict := explore(make(name))).wrong), None)
    assert found, f"nothing goes wrong without a line of {what}"
    assert found.trace


def test_a_value_handed_on_needs_a_fence_or_one_copy_of_memory():
    """What arm64 and x86 promise beyond C11, and what it is good for."""
    without = "signals without a fence"
    assert not explore(voiding.relayed(without, one_copy=True)).wrong
    assert "succeeded with values from after a failure" in explore(voiding.relayed(without)).wrong


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_models_keep_their_state_in_variables(module: Any):
    explorer.check_source(module)


def test_two_quorums_have_a_rank_in_common():
    for world in range(1, 9):
        ranks = range(world)
        sets = [frozenset(some) for size in range(world + 1) for some in combinations(ranks, size)]
        quorums = [some for some in sets if deciding.is_quorum(some, world)]
        assert frozenset(ranks) in quorums
        assert all(one & other for one in quorums for other in quorums)


# --- the explorer itself -------------------------------------------------------------------------------


def program(*steps: Step) -> Callable[[], Generator[Step, Any, Any]]:
    """Does these, and returns what the loads gave."""

    def process() -> Generator[Step, Any, Any]:
        got: tuple = ()
        for number in range(len(steps)):
            value = yield steps[number]
            if steps[number].kind == "load":
                got = (*got, value)
            value = None
        return got

    return process


def outcomes(memory: Any, **programs: Callable) -> set[tuple]:
    seen: set[tuple] = set()
    verdict = explore(Model("litmus", programs, memory, lambda results: seen.add(tuple(results.values())) or ""))
    assert not verdict.wrong
    return {tuple(value for result in outcome for value in result) for outcome in seen}


def xy(**more: Any) -> Weak:
    return Weak({"x": 0, "y": 0}, 2, **more)


def test_store_buffering():
    one, other = (store("x", 1), load("y")), (store("y", 1), load("x"))
    assert (0, 0) in outcomes(xy(), a=program(*one), b=program(*other))
    assert (0, 0) not in outcomes(Strong({"x": 0, "y": 0}), a=program(*one), b=program(*other))
    fenced = outcomes(xy(), a=program(one[0], fence(), one[1]), b=program(other[0], fence(), other[1]))
    assert fenced == {(0, 1), (1, 0), (1, 1)}
    half = outcomes(xy(), a=program(one[0], fence(), one[1]), b=program(*other))
    assert (0, 0) in half


def test_message_passing():
    """The flag is seen, the data is not: only without release and acquire."""
    for released in ("relaxed", RELEASE):
        for acquired in ("relaxed", ACQUIRE):
            got = outcomes(
                xy(), a=program(store("x", 1), store("y", 1, released)), b=program(load("y", acquired), load("x"))
            )
            assert ((1, 0) in got) == (released != RELEASE or acquired != ACQUIRE)


def test_a_fence_between_reads():
    """Data, fence, flag against flag, fence, data: who reads the new data sees the flag."""
    writer = program(store("y", 1), fence(), store("x", 1))
    assert (1, 0) in outcomes(xy(), a=writer, b=program(load("x"), load("y")))
    assert (1, 0) not in outcomes(xy(), a=writer, b=program(load("x"), fence("acquire"), load("y")))


def test_reads_of_one_place_do_not_go_back():
    got = outcomes(Weak({"x": 0}, 2), a=program(store("x", 1), store("x", 2)), b=program(load("x"), load("x")))
    assert {pair for pair in got if pair[0] > pair[1]} == set()
    assert len(got) == 6


def test_contended_stores_are_ordered_place_by_place():
    """Two writers, two places, opposite orders: each may win one of them."""

    def finals(contended: list[str]) -> set:
        seen = set()
        memory = Weak({"x": 0, "y": 0}, 2, contended=contended)
        end = memory.end

        def note(state: Any, who: int) -> Any:
            seen.add(tuple(writes[-1].value for writes in state.writes))
            return end(state, who)

        memory.end = note  # type: ignore[method-assign]
        one, other = program(store("x", 1), store("y", 2)), program(store("y", 1), store("x", 2))
        explore(Model("2+2W", {"a": one, "b": other}, memory))
        return seen

    assert (1, 1) in finals(["x", "y"])
    assert (1, 1) not in finals([])


def test_a_wrong_state_comes_with_the_shortest_way_there():
    def careless() -> Generator[Step, Any, None]:
        before = yield load("x")
        yield store("x", before + 1)

    def reader() -> Generator[Step, Any, None]:
        got = yield load("x")
        yield check(got < 2, "counted to two")

    verdict = explore(Model("counter", {"a": careless, "b": careless, "c": reader}, Strong({"x": 0})))
    assert verdict.wrong == "counted to two"
    assert [line.split(":")[0] for line in verdict.trace] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_whoever_waits_for_ever_is_named():
    def waiter() -> Generator[Step, Any, None]:
        while not (yield load("x")):
            pass

    def starved() -> Generator[Step, Any, None]:
        yield explorer.until("x", 1)

    assert explore(Model("loop", {"a": waiter}, Strong({"x": 0}))).wrong == "goes on for ever"
    assert explore(Model("wait", {"a": starved}, Strong({"x": 0}))).wrong.startswith("a waits for ever: until x")


def test_a_death_is_possible_at_every_step():
    seen: set[Any] = set()

    def reader() -> Generator[Step, Any, Any]:
        yield explorer.until(("life", "a"), 1)
        return (yield load("x"))

    def ends(results: dict[str, Any]) -> str:
        seen.add(results["b"])
        return ""

    writer = program(store("x", 1), store("x", 2))
    model = Model(
        "death", {"a": writer, "b": reader}, Strong({"x": 0, ("life", "a"): 0}), ends, ["a"], deaths=1, stuck=False
    )
    assert not explore(model).wrong
    assert seen >= {0, 1}


def test_values_that_wait_on_the_stack_are_refused():
    module = type("Module", (), {"__name__": "module"})
    source = "def process():\n    total = (yield 1) + (yield 2)\n"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="two yields in one expression"):
        patch.setattr(explorer.inspect, "getsource", lambda module: source)
        explorer.check_source(module)


def test_own_words_are_no_steps():
    assert explore(Model("own", {"a": program(own("x"), own("x"))}, Strong({"x": 0}))).states == 1


def test_the_page_names_functions_that_exist():
    """docs/explanation/model.md says which model stands for which function of the core."""
    source, missing = ROOT / "src" / "symcomm", []
    named = re.findall(r"`([\w/]+\.(?:c|py)): (\w+)\(\)`", (ROOT / "docs/explanation/model.md").read_text())
    for file, function in named:
        path = source / "_core" / file if file.endswith(".c") else source / file
        if not path.exists() or not re.search(rf"\b{function}\(", path.read_text()):
            missing.append(f"{file}: {function}()")
    assert len(named) > 30
    assert missing == []
