"""The steps of random programs: what each needs, does and looks like.

A step's function raises Illegal, or notes in the state what the step does and gives its text. ``c`` is
torch.ops._c10d_functional, ``F`` torch.distributed._functional_collectives, ``G`` the group's name, ``P`` the group,
``R`` this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tests.compile.random_graphs.program import FLOATS, Dim, Illegal, State, Step, Value, Write, static

WORLD = 2
TABLE: dict[str, Write] = {}
ARGUMENTS: dict[str, int] = {}  # how many tensors a step takes
RESULTS: dict[str, int] = {}
VARIANTS: dict[str, tuple[str, ...]] = {}
WEIGHTS: dict[str, int] = {}


def step(takes: int, makes: int, weight: int, *variants: str) -> Callable[[Write], Write]:
    def enter(function: Write) -> Write:
        name = function.__name__
        TABLE[name], ARGUMENTS[name], RESULTS[name], WEIGHTS[name] = function, takes, makes, weight
        VARIANTS[name] = variants or ("",)
        return function

    return enter


def _demand(condition: object, words: str = "") -> None:
    if not condition:
        raise Illegal(words)


# --- arithmetic ---------------------------------------------------------------------------------------------------

_UNARY: dict[str, tuple[str, Callable[[Fraction], Fraction]]] = {
    "twice": ("{0} * 2", lambda b: b * 2),
    "plus": ("{0} + 3", lambda b: b + 3),
    "neg": ("-{0}", lambda b: b),
    "relu": ("torch.relu({0})", lambda b: b),
    "remainder": ("torch.remainder({0}, 5)", lambda b: Fraction(5)),
    "clone": ("{0}.clone()", lambda b: b),
}
_BINARY: dict[str, tuple[str, Callable[[Fraction, Fraction], Fraction], bool]] = {
    "add": ("{0} + {1}", lambda a, b: a + b, False),
    "sub": ("{0} - {1}", lambda a, b: a - b if a < 0 else a + b, False),
    "mul": ("{0} * {1}", lambda a, b: a * b, True),
    "max": ("torch.maximum({0}, {1})", max, False),
    "where": ("torch.where({0} > 0, {0}, {1})", max, False),
}


@step(1, 1, 10, *_UNARY)
def unary(state: State, it: Step) -> str:
    text, bound = _UNARY[it.how]
    value, memory = state.reads(it.args[0]), state.memory(it.args[0])
    state.make(
        it.results[0], value.shape, value.dtype, bound(memory.bound), memory.halvings, contiguous=value.contiguous
    )
    return f"{it.results[0]} = {text.format(*it.args)}"


@step(2, 1, 10, *_BINARY)
def binary(state: State, it: Step) -> str:
    text, bound, multiplies = _BINARY[it.how]
    one, other = (state.reads(name) for name in it.args)
    _demand(one.shape == other.shape and one.dtype == other.dtype)
    first, second = (state.memory(name) for name in it.args)
    fine = first.halvings + second.halvings if multiplies else max(first.halvings, second.halvings)
    state.make(
        it.results[0], one.shape, one.dtype, bound(first.bound, second.bound), fine,
        contiguous=one.contiguous and other.contiguous,
    )  # fmt: skip
    return f"{it.results[0]} = {text.format(*it.args)}"


@step(1, 1, 3, *FLOATS, "int32", "int64", "int8")
def cast(state: State, it: Step) -> str:
    value, memory = state.reads(it.args[0]), state.memory(it.args[0])
    _demand(value.dtype != it.how)
    state.make(it.results[0], value.shape, it.how, memory.bound, memory.halvings, contiguous=value.contiguous)
    return f"{it.results[0]} = {it.args[0]}.to(torch.{it.how})"


@step(1, 1, 2)
def matmul(state: State, it: Step) -> str:
    value, memory = state.reads(it.args[0]), state.memory(it.args[0])
    _demand(len(value.shape) == 2 and value.shape[1] == static(3) and value.dtype in ("float32", "float64"))
    state.make(it.results[0], value.shape, value.dtype, memory.bound * 3, memory.halvings)
    return f"{it.results[0]} = torch.mm({it.args[0]}, {it.args[0]}.new_ones(3, 3))"


@step(2, 1, 3)
def cat(state: State, it: Step) -> str:
    one, other = (state.reads(name) for name in it.args)
    _demand(one.dtype == other.dtype and one.shape[1:] == other.shape[1:] and one.shape)
    first, second = (state.memory(name) for name in it.args)
    shape = (one.shape[0].joined(other.shape[0]), *one.shape[1:])
    state.make(it.results[0], shape, one.dtype, max(first.bound, second.bound), max(first.halvings, second.halvings))
    return f"{it.results[0]} = torch.cat([{it.args[0]}, {it.args[1]}])"


@step(1, 1, 6, "same", "double", "half")
def buffer(state: State, it: Step) -> str:
    """Something to write into."""
    value = state.reads(it.args[0])
    _demand(value.shape)
    rows, first = {
        "same": ("{0}", value.shape[0]), "double": ("{0} * 2", value.shape[0].times(2)), "half": ("{0} // 2", None),
    }[it.how]  # fmt: skip
    shape = (first or value.shape[0].halved(), *value.shape[1:])
    state.make(it.results[0], shape, value.dtype, 1)
    rows = rows.format(f"{it.args[0]}.shape[0]")
    return f"{it.results[0]} = {it.args[0]}.new_ones({rows}, *{it.args[0]}.shape[1:])"


# --- views --------------------------------------------------------------------------------------------------------


@step(1, 1, 10, "t", "head", "tail", "even", "flat", "row", "expand", "twice")
def view(state: State, it: Step) -> str:
    value = state.reads(it.args[0])
    text, shape, contiguous, overlaps = _view(value, it.how)
    state.alias(it.results[0], value, shape=shape, contiguous=contiguous, overlaps=overlaps or value.overlaps)
    return f"{it.results[0]} = {text.format(it.args[0])}"


def _view(value: Value, how: str) -> tuple[str, tuple[Dim, ...], bool, bool]:
    """(text, shape, whether it is contiguous, whether its elements overlap)."""
    shape, dense = value.shape, value.contiguous
    _demand(shape)
    if how == "t":
        _demand(len(shape) == 2)
        return "{0}.t()", shape[::-1], False, False
    if how == "head":
        return "{0}[: {0}.shape[0] // 2]", (shape[0].halved(), *shape[1:]), dense, False
    if how == "tail":
        _demand(shape[0].per > 0 and shape[0].const > -4)
        return "{0}[1:]", (shape[0].plus(-1), *shape[1:]), dense, False
    if how == "even":
        return "{0}[::2]", (shape[0].halved(), *shape[1:]), False, False
    if how == "flat":
        _demand(dense and len(shape) == 2 and shape[1].per == 0)
        return "{0}.view(-1)", (shape[0].times(shape[1].const),), True, False
    if how == "row":
        _demand(len(shape) > 1)
        return "{0}[0]", shape[1:], dense, False
    if how == "expand":
        return "{0}.expand(2, *{0}.shape)", (static(2), *shape), False, True
    _demand(dense)
    return "{0}.view(2, -1)", (static(2), shape[0].halved()) if len(shape) == 1 else _illegal(), True, False


def _illegal() -> tuple[Dim, ...]:
    raise Illegal


# --- in place -----------------------------------------------------------------------------------------------------

_IN_PLACE: dict[str, tuple[str, Callable[[Fraction], Fraction]]] = {
    "add": ("{0}.add_(1)", lambda b: b + 1),
    "mul": ("{0}.mul_(2)", lambda b: b * 2),
    "relu": ("{0}.relu_()", lambda b: b),
    "row": ("{0}[0].fill_(2)", lambda b: max(b, Fraction(2))),
    "tail": ("{0}[1:].add_(2)", lambda b: b + 2),
    "even": ("{0}[::2].neg_()", lambda b: b),
    "zero": ("{0}.zero_()", lambda b: b),
}


@step(1, 0, 7, *_IN_PLACE)
def in_place(state: State, it: Step) -> str:
    value, memory = state.writes(it.args[0]), state.memory(it.args[0])
    _demand(value.shape)
    text, bound = _IN_PLACE[it.how]
    state.grow(it.args[0], bound(memory.bound), memory.halvings)
    return text.format(it.args[0])


@step(2, 0, 5, "copy_", "add_")
def in_place_of_two(state: State, it: Step) -> str:
    target, source = state.writes(it.args[0]), state.reads(it.args[1])
    _demand(target.memory != source.memory and target.shape == source.shape and target.dtype == source.dtype)
    first, second = state.memory(it.args[0]), state.memory(it.args[1])
    grown = first.bound + second.bound if it.how == "add_" else second.bound
    state.grow(it.args[0], grown, second.halvings)
    return f"{it.args[0]}.{it.how}({it.args[1]})"


# --- collectives that have to be awaited --------------------------------------------------------------------------

REDUCTIONS = ("sum", "max", "min", "avg")


def _reduced(state: State, name: str, op: str) -> tuple[Fraction, int]:
    """(largest element, halvings) of a reduction over the ranks."""
    memory, value = state.memory(name), state.values[name]
    if op == "avg":
        _demand(value.is_float)
        return memory.bound, memory.halvings + 1
    return memory.bound * (WORLD if op == "sum" else 1), memory.halvings


def _launch(
    state: State, it: Step, shapes: list[tuple[Dim, ...]], facts: list[tuple[Fraction, int]], copies: bool = False
) -> None:
    """Results that are not there yet. ``copies``: the collective runs on copies, and inputs may change meanwhile."""
    for name, given, shape, (bound, halvings) in zip(it.results, it.args, shapes, facts, strict=True):
        state.make(name, shape, state.values[given].dtype, bound, halvings, pending=True)
        memory = state.memory(name)
        memory.from_collective, memory.writer = True, name
        if not copies:
            for other in it.args:
                state.memory(other).readers.add(name)


def _inputs(state: State, it: Step, contiguous: bool) -> list[Value]:
    values = [state.reads(name) for name in it.args]
    _demand(all(value.shape for value in values))
    _demand(not contiguous or all(value.contiguous for value in values))
    return values


def _gathered(value: Value) -> tuple[Dim, ...]:
    return (value.shape[0].times(WORLD), *value.shape[1:])


def _scattered(value: Value) -> tuple[Dim, ...]:
    return (value.shape[0].halved(), *value.shape[1:])


@step(1, 1, 14, *REDUCTIONS)
def all_reduce(state: State, it: Step) -> str:
    (value,) = _inputs(state, it, contiguous=False)
    _launch(state, it, [value.shape], [_reduced(state, it.args[0], it.how)], copies=True)
    return f"{it.results[0]} = c.all_reduce({it.args[0]}, {it.how!r}, G)"


@step(1, 1, 5, "0", "1")
def broadcast(state: State, it: Step) -> str:
    (value,) = _inputs(state, it, contiguous=False)
    memory = state.memory(it.args[0])
    _launch(state, it, [value.shape], [(memory.bound, memory.halvings)], copies=True)
    return f"{it.results[0]} = c.broadcast({it.args[0]}, {it.how}, G)"


@step(1, 1, 9)
def all_gather(state: State, it: Step) -> str:
    (value,) = _inputs(state, it, contiguous=True)
    memory = state.memory(it.args[0])
    _launch(state, it, [_gathered(value)], [(memory.bound, memory.halvings)])
    return f"{it.results[0]} = c.all_gather_into_tensor({it.args[0]}, {WORLD}, G)"


@step(1, 1, 9, *REDUCTIONS)
def reduce_scatter(state: State, it: Step) -> str:
    (value,) = _inputs(state, it, contiguous=True)
    _launch(state, it, [_scattered(value)], [_reduced(state, it.args[0], it.how)])
    return f"{it.results[0]} = c.reduce_scatter_tensor({it.args[0]}, {it.how!r}, {WORLD}, G)"


@step(1, 1, 6, "even", "uneven")
def all_to_all(state: State, it: Step) -> str:
    (value,) = _inputs(state, it, contiguous=True)
    memory = state.memory(it.args[0])
    rows = f"{it.args[0]}.shape[0]"
    if it.how == "even":
        value.shape[0].halved()
        splits = f"[{rows} // 2, {rows} // 2]"
    else:  # what one keeps, the other sends
        _demand(value.shape[0].per > 0 and value.shape[0].const > -4)
        splits = f"([1, {rows} - 1] if R == 0 else [{rows} - 1, 1])"
    _launch(state, it, [value.shape], [(memory.bound, memory.halvings)])
    return f"{it.results[0]} = c.all_to_all_single({it.args[0]}, {splits}, {splits}, G)"


@step(2, 2, 5, *REDUCTIONS)
def all_reduce_coalesced(state: State, it: Step) -> str:
    values = _inputs(state, it, contiguous=False)
    _demand(values[0].dtype == values[1].dtype)
    _launch(state, it, [v.shape for v in values], [_reduced(state, name, it.how) for name in it.args], copies=True)
    return f"{', '.join(it.results)} = c.all_reduce_coalesced([{', '.join(it.args)}], {it.how!r}, G)"


@step(2, 2, 4)
def all_gather_coalesced(state: State, it: Step) -> str:
    values = _inputs(state, it, contiguous=True)
    _demand(values[0].dtype == values[1].dtype)
    facts = [(state.memory(name).bound, state.memory(name).halvings) for name in it.args]
    _launch(state, it, [_gathered(v) for v in values], facts)
    return f"{', '.join(it.results)} = c.all_gather_into_tensor_coalesced([{', '.join(it.args)}], {WORLD}, G)"


@step(2, 2, 4, *REDUCTIONS)
def reduce_scatter_coalesced(state: State, it: Step) -> str:
    values = _inputs(state, it, contiguous=True)
    _demand(values[0].dtype == values[1].dtype)
    facts = [_reduced(state, name, it.how) for name in it.args]
    _launch(state, it, [_scattered(v) for v in values], facts)
    listed = ", ".join(it.args)
    return f"{', '.join(it.results)} = c.reduce_scatter_tensor_coalesced([{listed}], {it.how!r}, {WORLD}, G)"


@step(1, 1, 34)
def wait(state: State, it: Step) -> str:
    value = state.waits(it.args[0])
    state.alias(it.results[0], value, pending=False)
    return f"{it.results[0]} = c.wait_tensor({it.args[0]})"


# --- collectives that write what they are given -------------------------------------------------------------------
#
# torch.compile refuses these in anybody's program, whatever the backend ("whose output has alias annotations"). They
# come into graphs by torch's passes, and by make_fx, which leaves them as they are.


def _launch_in_place(state: State, it: Step, facts: list[tuple[Fraction, int]]) -> None:
    _demand(len({state.values[name].memory for name in it.args}) == len(it.args))
    for name in it.args:
        _demand(state.writes_later(name).contiguous)
    for name, given, (bound, halvings) in zip(it.results, it.args, facts, strict=True):
        value = state.values[given]
        state.grow(given, bound, halvings)
        memory = state.memory(given)
        state.alias(name, value, pending=True)
        memory.from_collective, memory.writer, memory.waits, memory.sealed = True, name, 0, False


@step(1, 1, 4, *REDUCTIONS)
def all_reduce_(state: State, it: Step) -> str:
    _inputs(state, it, contiguous=True)
    _launch_in_place(state, it, [_reduced(state, it.args[0], it.how)])
    return f"{it.results[0]} = c.all_reduce_({it.args[0]}, {it.how!r}, G)"


@step(1, 1, 3, "0", "1")
def broadcast_(state: State, it: Step) -> str:
    _inputs(state, it, contiguous=True)
    memory = state.memory(it.args[0])
    _launch_in_place(state, it, [(memory.bound, memory.halvings)])
    return f"{it.results[0]} = c.broadcast_({it.args[0]}, {it.how}, G)"


@step(2, 2, 3, *REDUCTIONS)
def all_reduce_coalesced_(state: State, it: Step) -> str:
    values = _inputs(state, it, contiguous=True)
    _demand(values[0].dtype == values[1].dtype)
    _launch_in_place(state, it, [_reduced(state, name, it.how) for name in it.args])
    return f"{', '.join(it.results)} = c.all_reduce_coalesced_([{', '.join(it.args)}], {it.how!r}, G)"


@step(2, 1, 5, "gather", "sum", "max", "avg")
def into(state: State, it: Step) -> str:
    """The out variants: the second tensor is written."""
    source, target = _inputs(state, it, contiguous=True)
    _demand(source.memory != target.memory and source.dtype == target.dtype)
    gathers = it.how == "gather"
    _demand(target.shape == (_gathered(source) if gathers else _scattered(source)))
    memory = state.memory(it.args[0])
    fact = (memory.bound, memory.halvings) if gathers else _reduced(state, it.args[0], it.how)
    _launch_in_place(state, Step(it.op, it.args[1:], it.results), [fact])
    memory.readers.add(it.results[0])
    if gathers:
        return f"{it.results[0]} = c.all_gather_into_tensor_out({it.args[0]}, {WORLD}, G, out={it.args[1]})"
    return f"{it.results[0]} = c.reduce_scatter_tensor_out({it.args[0]}, {it.how!r}, {WORLD}, G, out={it.args[1]})"


BY_HAND = ("all_reduce_", "broadcast_", "all_reduce_coalesced_", "into")
# In graphs of make_fx nothing keeps views and what they show apart: these have none, and change nothing else in place.
NOT_TRACED = ("view", "in_place", "in_place_of_two", "dist_all_reduce", "dist_into", "functional")


# --- torch.distributed's own, which Dynamo turns into functional ones -----------------------------------------------


@step(1, 0, 4, "SUM", "MAX", "AVG")
def dist_all_reduce(state: State, it: Step) -> str:
    value = state.writes(it.args[0])
    _demand(value.contiguous and value.shape)
    state.grow(it.args[0], *_reduced(state, it.args[0], it.how.lower()))
    return f"dist.all_reduce({it.args[0]}, dist.ReduceOp.{it.how}, group=P)"


@step(2, 0, 5, "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
def dist_into(state: State, it: Step) -> str:
    target, source = state.writes(it.args[0]), state.reads(it.args[1])
    _demand(target.contiguous and source.contiguous and source.shape)
    _demand(target.memory != source.memory and target.dtype == source.dtype)
    memory = state.memory(it.args[1])
    wanted, fact = source.shape, (memory.bound, memory.halvings)
    if it.how == "all_gather_into_tensor":
        wanted = _gathered(source)
    elif it.how == "reduce_scatter_tensor":
        wanted, fact = _scattered(source), _reduced(state, it.args[1], "sum")
    else:
        source.shape[0].halved()
    _demand(target.shape == wanted)
    state.grow(it.args[0], *fact)
    return f"dist.{it.how}({it.args[0]}, {it.args[1]}, group=P)"


# --- torch.distributed._functional_collectives: awaited when they are used ----------------------------------------


@step(1, 1, 6, "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
def functional(state: State, it: Step) -> str:
    value, memory = state.reads(it.args[0]), state.memory(it.args[0])
    _demand(value.contiguous and value.shape)
    given, same = it.args[0], (memory.bound, memory.halvings)
    rows = f"{given}.shape[0] // 2"
    text, shape, fact = {
        "all_reduce": (f"F.all_reduce({given}, 'sum', P)", lambda: value.shape, _reduced(state, given, "sum")),
        "all_gather": (f"F.all_gather_tensor({given}, 0, P)", lambda: _gathered(value), same),
        "reduce_scatter": (
            f"F.reduce_scatter_tensor({given}, 'sum', 0, P)", lambda: _scattered(value), _reduced(state, given, "sum"),
        ),
        "broadcast": (f"F.broadcast({given}, 1, P)", lambda: value.shape, same),
        "all_to_all": (
            f"F.all_to_all_single({given}, [{rows}, {rows}], [{rows}, {rows}], P)",
            lambda: _scattered(value) and value.shape, same,
        ),
    }[it.how]  # fmt: skip
    made = state.make(it.results[0], shape(), value.dtype, *fact)
    state.memories[made.memory].from_collective = True  # an AsyncCollectiveTensor: it is read, and not changed
    memory.readers.add(it.results[0])  # until the end: nothing in the text says when it is awaited
    return f"{it.results[0]} = {text}"
