"""A decoder of Llama's shape with random weights, split over ranks.

What is split is cut into parts, which are computed one by one. A rank has one, as a rule; with as many parts over all
ranks whatever their number (`ShardedRanks`), the model computes the same bits on any number of ranks.

`examples/llama.py` is a program around it, and `symcomm bench llm` measures it; see docs/tutorials/inference.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symcomm.nn import sum_shards

HEAD = 64  # elements of an attention head


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 512
    vocabulary: int = 2048
    length: int = 64  # of the key-value cache, in tokens
    batch: int = 1

    @property
    def heads(self) -> int:
        return self.width // HEAD

    @property
    def kv_heads(self) -> int:
        return max(4, self.heads // 4)  # grouped-query attention

    @property
    def hidden(self) -> int:
        return 256 * round(self.width * 8 / 3 / 256)


class Parallel:
    """What a rank is, and how ranks combine what they have. This one is alone."""

    rank, size = 0, 1
    parts = 1  # of each rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, where ``x`` was."""
        return x

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all ranks' parts."""
        return self.all_reduce(parts[0])


class ShardedRanks(Parallel):
    """The ranks of a Symcomm group, which split a model into ``shards`` parts, whatever their number."""

    def __init__(self, group: Any, shards: int):
        self.group, self.shards, self.rank, self.size = group, shards, group.rank, group.size
        self.parts = len(group.shard_range(shards))

    def all_reduce(self, x: Tensor) -> Tensor:
        self.group.all_reduce(x)
        return x

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        return sum_shards(parts, self.shards, self.group)


class Weights:
    """Random matrices. All ranks draw the same ones, and each keeps its parts."""

    def __init__(self, ranks: Parallel, seed: int = 0):
        self.ranks, self.generator = ranks, torch.Generator().manual_seed(seed)

    def whole(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def by_rows(self, rows: int, columns: int) -> list[Tensor]:
        """For a layer whose outputs are divided among the ranks ("column parallel", by how the papers write x A)."""
        return self._mine(self.whole(rows, columns), 0)

    def by_columns(self, rows: int, columns: int) -> list[Tensor]:
        """For a layer whose inputs are divided ("row parallel"): each part has a part of every sum."""
        return self._mine(self.whole(rows, columns), 1)

    def _mine(self, whole: Tensor, dimension: int) -> list[Tensor]:
        first, count = self.ranks.rank * self.ranks.parts, self.ranks.parts
        pieces = whole.chunk(self.ranks.size * count, dimension)[first : first + count]
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]


def _joined(matrices: Iterable[list[Tensor]]) -> list[Tensor]:
    """Several matrices' parts, as parts of one."""
    return [torch.cat(of_part) for of_part in zip(*matrices, strict=True)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: turns each pair (x[i], x[i + 32]); ``sin`` has the minus of the first of each pair in it."""
    return torch.addcmul(x * cos, x.roll(HEAD // 2, -1), sin)


class Part(nn.Module):
    """Some heads of a layer, and some elements of its MLP."""

    def __init__(self, config: Config, count: int, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.heads, self.kv_heads = config.heads // count, config.kv_heads // count
        self.register_buffer("qkv", qkv)
        self.register_buffer("out", out)
        self.register_buffer("gate_up", gate_up)
        self.register_buffer("down", down)
        cache = (config.batch, self.kv_heads, config.length, HEAD)
        self.register_buffer("keys", torch.zeros(cache))
        self.register_buffer("values", torch.zeros(cache))

    def attend(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = F.linear(x, self.qkv).view(batch, tokens, -1, HEAD).transpose(1, 2)
        turned = rotate(qkv[:, : -self.kv_heads], cos, sin)
        self.keys.index_copy_(2, positions, turned[:, self.heads :])
        self.values.index_copy_(2, positions, qkv[:, -self.kv_heads :])
        # Query heads that share keys are more rows of the same product.
        query = turned[:, : self.heads].reshape(batch, self.kv_heads, -1, HEAD)
        mixed = F.scaled_dot_product_attention(query, self.keys, self.values, mask)
        mixed = mixed.reshape(batch, self.heads, tokens, HEAD).transpose(1, 2).reshape(batch, tokens, -1)
        return F.linear(mixed, self.out)

    def transform(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class Layer(nn.Module):
    """A rank's parts of a layer. Two all_reduces: after attention, and after the MLP."""

    def __init__(self, config: Config, ranks: Parallel, draw: Weights):
        super().__init__()
        wide, kv_wide = config.heads * HEAD, config.kv_heads * HEAD
        self.ranks = ranks
        qkv = _joined(draw.by_rows(n, config.width) for n in (wide, kv_wide, kv_wide))
        out = draw.by_columns(config.width, wide)
        gate_up = _joined(draw.by_rows(config.hidden, config.width) for _ in range(2))
        down = draw.by_columns(config.width, config.hidden)
        weights = zip(qkv, out, gate_up, down, strict=True)
        self.parts = nn.ModuleList(Part(config, ranks.size * ranks.parts, *of_part) for of_part in weights)
        self.register_buffer("norms", torch.ones(2, config.width))

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.norms[0])
        x = x + self.ranks.add([part.attend(normed, positions, cos, sin, mask) for part in self.parts])
        normed = F.rms_norm(x, x.shape[-1:], self.norms[1])
        return x + self.ranks.add([part.transform(normed) for part in self.parts])


class Llama(nn.Module):
    """Tokens in, the most likely next token out. Each rank has its rows of the vocabulary's last layer."""

    def __init__(self, config: Config, ranks: Parallel):
        super().__init__()
        draw = Weights(ranks)
        self.config, self.ranks = config, ranks
        self.register_buffer("embedding", draw.whole(config.vocabulary, config.width))
        self.layers = nn.ModuleList(Layer(config, ranks, draw) for _ in range(config.layers))
        self.register_buffer("head", torch.cat(draw.by_rows(config.vocabulary, config.width)))
        self.register_buffer("norm", torch.ones(config.width))
        angles = torch.outer(torch.arange(config.length), 10000.0 ** -torch.arange(0, 1, 2 / HEAD))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], -1))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.most_likely(self.logits(tokens, positions))

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """This rank's, of the last place in each text."""
        x = self.embedding[tokens]
        cos, sin = self.cos[positions], self.sin[positions]
        seen = torch.arange(self.config.length) <= positions[:, None]
        mask = seen.repeat(self.config.heads // self.config.kv_heads, 1)
        for layer in self.layers:
            x = layer(x, positions, cos, sin, mask)
        x = F.rms_norm(x[:, -1], x.shape[-1:], self.norm)
        return torch.cat([F.linear(x, rows) for rows in self.head.chunk(self.ranks.parts)], -1)

    def most_likely(self, scores: Tensor) -> Tensor:
        """Ranks compare the best of their rows: two numbers a text, each rank's in a place that is 0 elsewhere."""
        rank, rows = self.ranks.rank, scores.shape[-1]
        found = scores.new_zeros(self.ranks.size, 2, len(scores))
        found[rank] = torch.stack([scores.amax(-1), scores.argmax(-1) + float(rank * rows)])
        best, row = self.ranks.all_reduce(found).unbind(1)
        return row.gather(0, best.argmax(0, keepdim=True))[0].long()


def generate(step: Any, prompt: Tensor, count: int) -> Tensor:
    """Greedy: prefill with the whole prompt, then token by token."""
    length = prompt.shape[1]
    found = [step(prompt, torch.arange(length))]
    for place in range(length, length + count - 1):
        found.append(step(found[-1][:, None], torch.tensor([place])))
    return torch.stack(found, 1)
