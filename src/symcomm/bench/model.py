"""A small language model that learns Symcomm's own source, character by character, for the demo and the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SYMBOLS = 128  # ASCII
HEADS, TEMPERATURE = 4, 0.6
PREVIOUS = 2  # earlier characters that each place also sees: the demo is too short to learn attention for that


def own_source() -> bytes:
    """Every Python file of the installed package: text that is always there. What is not ASCII becomes '?'."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    return "\n".join(file.read_text() for file in files).encode("ascii", "replace")


def decoder(width: int, layers: int, context: int) -> Any:
    """A decoder-only transformer over characters: (batch, length <= context) -> (batch, length, SYMBOLS) logits."""
    import torch
    from torch import nn

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(SYMBOLS, width)
            self.previous = nn.ModuleList(nn.Embedding(SYMBOLS, width) for _ in range(PREVIOUS))
            self.places = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, SYMBOLS)
            self.context = context
            future = nn.Transformer.generate_square_subsequent_mask(context)  # -inf where a character may not look
            self.register_buffer("future", future, persistent=False)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            length = text.shape[1]
            hidden = self.characters(text) + self.places.weight[:length]
            for back, table in enumerate(self.previous, 1):
                hidden = hidden + table(nn.functional.pad(text, (back, 0))[:, :length])
            for block in self.blocks:
                hidden = block(hidden, src_mask=self.future[:length, :length], is_causal=True)
            return self.head(self.norm(hidden))

    return Decoder()


def draw_texts(text: Any, length: int, count: int, draw: Any) -> Any:
    """Pieces of ``text`` from places that the generator ``draw`` chooses."""
    import torch

    starts = torch.randint(len(text) - length, (count,), generator=draw)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def loss_of(model: Any, texts: Any) -> Any:
    """Of guessing each character from those before it."""
    import torch

    logits = model(texts[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


def sample(model: Any, start: str, length: int) -> str:
    """``start`` and the ``length`` characters with which the model continues it."""
    import torch

    draw = torch.Generator().manual_seed(0)
    text = list(start.encode("ascii", "replace"))
    with torch.no_grad():
        for _ in range(length):
            seen = torch.tensor([text[-model.context :]])
            chances = torch.softmax(model(seen)[0, -1] / TEMPERATURE, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=draw)))
    return bytes(text).decode("ascii")
