"""One rank of one side of `symcomm bench compile`: a compiled graph, run step by step when the controller asks for it.

order      answer
prepare    {"bytes": that one step communicates, "calls": collectives in it}; compiles the graph
check      {"apart": how far the result is from that of one process, in units of its size}
time       {"seconds": [one step, ...]}

Sides: "alone" leaves the collectives out; "gloo" and "eager" compile them as torch does, on that backend and on ours;
"symcomm" compiles them our way, on our backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from symcomm.bench.torch_worker import join, time_steps
from symcomm.bench.worker import serve

Reduce = Callable[[Any, str], Any]  # (tensor, operation) -> the same on all ranks
LAYERS, WIDTH, TOKENS, HEADS = 4, 512, 64, 8


# --- graphs: name -> (arguments of one rank, the graph's function); with a world of one it is what all ranks must give


def mlp(rank: int, world: int, scale: int) -> tuple[list[Any], Callable[..., Any]]:
    """4 tensor-parallel layers of 512 - 2048 - 512 on 64 tokens: 4 all_reduces of 128 KiB, one after the other."""
    width = WIDTH // scale
    first = [_draw(k, width, 4 * width).chunk(world, 1)[rank].contiguous() for k in range(LAYERS)]
    second = [_draw(9 + k, 4 * width, width).chunk(world, 0)[rank].contiguous() for k in range(LAYERS)]

    def function(reduce: Reduce, x: Any, *weights: Any) -> Any:
        for up, down in zip(weights[:LAYERS], weights[LAYERS:], strict=True):
            x = x + reduce((x @ up).relu() @ down, "sum")
        return x

    return [_draw(99, TOKENS, width), *first, *second], function


def attention(rank: int, world: int, scale: int) -> tuple[list[Any], Callable[..., Any]]:
    """4 blocks of attention with the heads (8 of 64) divided among the ranks, 64 tokens: 4 all_reduces of 128 KiB."""
    import torch

    width, heads = WIDTH // scale, HEADS // world

    def part(seed: int, dim: int) -> Any:
        return _draw(seed, width, width).chunk(world, dim)[rank].contiguous()

    weights = [part(4 * layer + k, 0 if k == 3 else 1) for layer in range(LAYERS) for k in range(4)]

    def function(reduce: Reduce, x: Any, *weights: Any) -> Any:
        for layer in range(LAYERS):
            *projections, out = weights[4 * layer : 4 * layer + 4]
            q, k, v = ((x @ w).view(TOKENS, heads, -1).transpose(0, 1) for w in projections)
            mixed = torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v
            x = x + reduce(mixed.transpose(0, 1).reshape(TOKENS, -1) @ out, "sum")
        return x

    return [_draw(99, TOKENS, width), *weights], function


def ddp(rank: int, world: int, scale: int) -> tuple[list[Any], Callable[..., Any]]:
    """Gradients of 8 layers of 512 x 512 with biases, averaged in the graph: 8 of 1 MiB and 8 of 2 KiB."""
    import torch

    width = WIDTH // scale
    weights = [_draw(k, width, width) for k in range(2 * LAYERS)]
    biases = [_draw(20 + k, width) for k in range(2 * LAYERS)]
    whole = _draw(99, TOKENS, width)
    batch = whole.chunk(world, 0)[rank]

    def loss(parameters: list[Any], x: Any) -> Any:
        for weight, bias in zip(parameters[: 2 * LAYERS], parameters[2 * LAYERS :], strict=True):
            x = torch.tanh(x @ weight + bias)
        return x.square().mean()

    def function(reduce: Reduce, x: Any, *parameters: Any) -> Any:
        return [reduce(g, "avg") for g in torch.func.grad(loss)(list(parameters), x)]

    return [batch, *weights, *biases], function


GRAPHS = {"mlp": mlp, "attention": attention, "ddp": ddp}


def _draw(seed: int, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[0] ** 0.5


# --- sides -------------------------------------------------------------------------------------------------------


@dataclass
class CompileSide:
    rank: int
    world: int
    reduce: Reduce
    barrier: Callable[[], Any]
    ours: bool = True  # whether graphs are lowered our way


def make_side(args: SimpleNamespace) -> CompileSide:
    import torch

    rank, world = args.rank, args.world
    torch.set_num_threads(1)
    if args.name == "alone":
        return CompileSide(rank, world, lambda tensor, _: tensor, lambda: None)
    import torch.distributed._functional_collectives as functional

    dist = join("gloo" if args.name == "gloo" else "symcomm", args)

    def reduce(tensor: Any, op: str) -> Any:
        if op == "avg" and args.name == "gloo":  # which has no average
            return functional.all_reduce(tensor / world, "sum", "0")
        return functional.all_reduce(tensor, op, "0")

    return CompileSide(rank, world, reduce, dist.barrier, args.name != "eager")


class CompiledRun:
    """One graph on one rank of one side."""

    def __init__(self, side: CompileSide, graph: str, scale: int):
        import torch

        from symcomm import compile as symcompile

        self.side, self.graph, self.scale = side, graph, scale
        self.arguments, function = GRAPHS[graph](side.rank, side.world, scale)
        self.moved: list[int] = []

        def counted(tensor: Any, op: str) -> Any:
            self.moved.append(tensor.numel() * tensor.dtype.itemsize)
            return side.reduce(tensor, op)

        symcompile.install()  # here, not before: it loads the compiler
        if not side.ours:
            symcompile.uninstall()
        with torch.no_grad():
            function(counted, *self.arguments)
        self.function = torch.compile(lambda *args: function(side.reduce, *args), fullgraph=True)
        self.step()

    def step(self) -> Any:
        import torch

        with torch.no_grad():
            return self.function(*self.arguments)

    def apart(self) -> float:
        """Relative difference from the same function in a world of one."""
        import torch

        arguments, function = GRAPHS[self.graph](0, 1, self.scale)
        with torch.no_grad():
            right = function(lambda tensor, _: tensor, *arguments)
        worst = 0.0
        for one, other in zip(*(x if isinstance(x, list) else [x] for x in (self.step(), right)), strict=True):
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
        return worst


class CompileOrders:
    def __init__(self, args: SimpleNamespace):
        self.side, self.rank = make_side(args), args.rank

    def prepare(self, graph: str, scale: int) -> dict[str, int]:
        self.run = CompiledRun(self.side, graph, scale)
        return {"bytes": sum(self.run.moved), "calls": len(self.run.moved)}

    def check(self) -> dict[str, float]:
        return {"apart": self.run.apart()}

    def time(self, steps: int) -> dict[str, list[float]]:
        return time_steps(self.side.barrier, self.run.step, steps)


if __name__ == "__main__":
    serve(CompileOrders)
