"""Megatron-core: its tensor-parallel layers, vocabulary included, which run on CPUs. Its transformer asks for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed, training

VERSION = "0.16.1"
NEEDS = (f"megatron-core=={VERSION}",)
PARTS = ("tensor-parallel layers",)
ENVIRONMENT = "trainers"
WORDS, WIDTH, BATCH, LENGTH = 1024, 64, 4, 32


def train() -> Part:
    import torch
    import torch.nn.functional as F
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
    from torch import nn

    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = ModelParallelConfig(tensor_model_parallel_size=ranks, use_cpu_initialization=True)

    def init(weight: torch.Tensor) -> None:
        nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(0))

    embedding = tensor_parallel.VocabParallelEmbedding(WORDS, WIDTH, init_method=init, config=config)
    up = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, config=config, init_method=init, gather_output=False)
    down = tensor_parallel.RowParallelLinear(
        4 * WIDTH, WIDTH, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    head = tensor_parallel.ColumnParallelLinear(WIDTH, WORDS, config=config, init_method=init, gather_output=False)
    layers = nn.ModuleList([embedding, up, down, head])
    data = torch.Generator().manual_seed(0)

    def loss_of() -> torch.Tensor:
        words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=data)
        hidden = embedding(words)
        hidden = hidden + down(F.gelu(up(hidden)[0]))[0]
        logits = head(hidden)[0]
        return tensor_parallel.vocab_parallel_cross_entropy(logits.contiguous(), words).mean()

    losses, seconds = timed(training(loss_of, torch.optim.Adam(layers.parameters(), lr=0.01)))
    return Part(PARTS[0], losses + numbers(*layers.parameters()), seconds)


def main(backend: str) -> Iterator[Part]:
    with joined(backend):
        yield train()


if __name__ == "__main__":
    tell(main)
