"""Runs programs on the ranks of this process's groups: eagerly and compiled, on our group and on Gloo's."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from symcomm import compile as symcompile
from tests.compile.checks import uncached
from tests.compile.random_graphs.generate import smaller
from tests.compile.random_graphs.program import SIZES, Input, Program, text_of
from tests.compile.random_graphs.steps import TABLE

Outcome = tuple[list[torch.Tensor], list[torch.Tensor]]  # (results, inputs afterwards)


def function_of(texts: Sequence[str], group: Any) -> list[Callable[..., Any]]:
    """The functions of programs' texts, on a group."""
    names = {
        "torch": torch, "dist": dist, "c": torch.ops._c10d_functional, "F": functional, "G": group.group_name,
        "P": group, "R": dist.get_rank(),
    }  # fmt: skip
    made = []
    for text in texts:
        exec(compile(text, "<graph>", "exec"), names)
        made.append(names["graph"])
    return made


def inputs_of(program: Program, n: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(program.seed * 2 + dist.get_rank())
    made: list[torch.Tensor] = []
    for given in program.inputs:
        made.append(made[given.same_as] if given.same_as is not None else _input(given, n, source))
    return made


def _input(given: Input, n: int, source: torch.Generator) -> torch.Tensor:
    shape = [dim.at(n) for dim in given.shape]
    values = torch.randint(-3, 4, shape[::-1] if given.transposed else shape, generator=source)
    tensor = values.to(getattr(torch, given.dtype))
    return tensor.t() if given.transposed else tensor


def outcome(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Outcome:
    """Calls it; what it handed out before it was there is awaited here."""
    results = [torch.ops._c10d_functional.wait_tensor(result) for result in function(*inputs)]
    return [torch.as_tensor(result + 0) for result in results], inputs


def difference(got: Outcome, wanted: Outcome) -> str:
    """ "" if both are the same bits; else the first place where they are not."""
    for kind, ours, theirs in zip(("result", "input"), got, wanted, strict=True):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one.dtype != other.dtype or one.shape != other.shape or not torch.equal(one, other):
                return f"{kind} {number} is\n{one}\nand not\n{other}"
    return ""


def traced(function: Callable[..., Any], example: list[Any]) -> Callable[..., Any]:
    """Compiled from the graph that make_fx writes, in which operators that write their inputs stay as they are."""
    leaves, given_as = pytree.tree_flatten(example)
    made_as: list[Any] = []

    def flat(*inputs: Any) -> Any:
        results, shape = pytree.tree_flatten(function(pytree.tree_unflatten(inputs, given_as)))
        made_as.append(shape)
        return tuple(results)

    graph = make_fx(flat, select_decomp_table(), tracing_mode="fake")(*leaves)
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(detect_fake_mode(given))):
        compiled = compile_fx_inner(graph, given)
    return lambda inputs: pytree.tree_unflatten(compiled(pytree.tree_leaves(inputs)), made_as[-1])


def _is_for_gloo(programs: Sequence[Program]) -> bool:
    """Gloo refuses averages, or gives the sum (reduce_scatter of torch 2.13)."""
    return not any(step.how.lower() == "avg" for program in programs for step in program.steps)


class Trial:
    """``compiled_gloo``: graphs are compiled for Gloo as well, where it can run them."""

    def __init__(self, ours: Any, compiled_gloo: bool):
        self.ours, self._compiles_gloo = ours, compiled_gloo
        self._verdicts, self.gloo = _new_gloo(), _new_gloo()
        self.wrong_on_gloo: list[int] = []  # seeds
        self.unknown_to_gloo = 0
        self.compiled_on_gloo = 0

    def words(self, programs: Sequence[Program]) -> str:
        """What is wrong on any rank, with one compilation for all programs; "" if nothing is."""
        return self._any_rank(self._try(programs))

    def shrunk(self, program: Program) -> tuple[Program, str]:
        """The smallest program that still fails, and how."""
        words, found = self.words([program]), True
        while found:
            found = False
            for candidate in smaller(program):
                if said := self.words([candidate]):
                    program, words, found = candidate, said, True
                    break
        return program, words

    # --- on this rank ---------------------------------------------------------------------------------------------

    def _any_rank(self, mine: str) -> str:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._verdicts)
        return next((f"rank {rank}: {words}" for rank, words in enumerate(everyone) if words), "")

    def _try(self, programs: Sequence[Program]) -> str:
        try:
            sizes = SIZES if programs[0].dynamic else SIZES[:1]
            wanted = {n: self._run(programs, self.ours, n) for n in sizes}
            if words := self._beside_gloo(programs, wanted[sizes[0]]):
                return words
            compiled = self._compiled(programs, self.ours, sizes[0])
            for n in (*sizes, sizes[0]):
                if words := self._differ(self._run(programs, self.ours, n, compiled), wanted[n]):
                    return f"compiled, n = {n}: {words}"
            if self._compiles_gloo:
                self._compile_gloo(programs, wanted[sizes[0]])
        except Exception:
            return traceback.format_exc()
        return ""

    def _run(
        self, programs: Sequence[Program], group: Any, n: int, compiled: Callable[..., Any] | None = None
    ) -> list[Outcome]:
        given = [inputs_of(program, n) for program in programs]
        if compiled is None:
            functions = function_of([text_of(program, TABLE) for program in programs], group)
            return [outcome(function, inputs) for function, inputs in zip(functions, given, strict=True)]
        with symcompile.configure(**dict(programs[0].options)), uncached():
            results = compiled(given)
        return [outcome(lambda *_, made=made: made, inputs) for made, inputs in zip(results, given, strict=True)]

    def _compiled(self, programs: Sequence[Program], group: Any, n: int) -> Callable[..., Any]:
        torch._dynamo.reset()
        functions = function_of([text_of(program, TABLE) for program in programs], group)

        def all_of_them(given: Any) -> Any:
            return [function(*inputs) for function, inputs in zip(functions, given, strict=True)]

        if not programs[0].traced:
            return torch.compile(all_of_them, fullgraph=True, dynamic=programs[0].dynamic)
        with symcompile.configure(**dict(programs[0].options)), uncached():
            return traced(all_of_them, [inputs_of(program, n) for program in programs])

    def _differ(self, got: list[Outcome], wanted: list[Outcome]) -> str:
        return next(filter(None, map(difference, got, wanted)), "")

    def _beside_gloo(self, programs: Sequence[Program], wanted: list[Outcome]) -> str:
        """Gloo gives what we give, where it has the operation and the dtype."""
        if not _is_for_gloo(programs):
            return ""
        with self._may_refuse() as refused:
            got = self._run(programs, self.gloo, SIZES[0])
        words = "" if self._gave_up(refused) else self._differ(got, wanted)
        return f"eager, ours beside Gloo's: {words}" if words else ""

    def _compile_gloo(self, programs: Sequence[Program], wanted: list[Outcome]) -> None:
        """What torch makes of the same programs with another backend: counted, as it is not ours."""
        if not _is_for_gloo(programs):
            return
        with self._may_refuse() as refused:
            got = self._run(programs, self.gloo, SIZES[0], self._compiled(programs, self.gloo, SIZES[0]))
        if not self._gave_up(refused):
            self.compiled_on_gloo += 1
            self.wrong_on_gloo += [program.seed for program in programs] if self._differ(got, wanted) else []

    @contextlib.contextmanager
    def _may_refuse(self) -> Iterator[list[str]]:
        refused: list[str] = []
        try:
            yield refused
        except RuntimeError as error:
            refused.append(str(error))

    def _gave_up(self, refused: list[str]) -> bool:
        """Whether any rank did. Others may be left with half a collective, so there is another group then."""
        if not self._any_rank(next(iter(refused), "")):
            return False
        self.unknown_to_gloo += 1
        self.gloo = _new_gloo()
        return True


def _new_gloo() -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
