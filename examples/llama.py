"""Tensor-parallel inference: a decoder of Llama's shape with random weights, split over the ranks.

    symcomm run -n 2 examples/llama.py                  # dist.all_reduce on the symcomm backend
    symcomm run -n 2 examples/llama.py direct           # Symcomm's own calls
    symcomm run -n 2 examples/llama.py gloo --compile
    symcomm run -n 2 examples/llama.py --shards 4       # the same bits on 1, 2 and 4 ranks

The model is symcomm.llama, in plain PyTorch. `--check` compares the tokens with those of one rank that has the whole
model; `--shards` prints a hash of all logits. docs/tutorials/inference.md explains it.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

import symcomm
from symcomm.llama import Config, Llama, Parallel, ShardedRanks, generate

PROMPT = 16  # tokens


class TorchRanks(Parallel):
    """The ranks of torch's default group, through torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


class DirectRanks(TorchRanks):
    """The same ranks, past torch.distributed: the Symcomm group behind torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.group = symcomm.of(dist.group.WORLD)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.group.all_reduce(x)
        return x


class Hashed(Llama):
    """Keeps a hash of all ranks' logits."""

    def __init__(self, config: Config, ranks: Parallel) -> None:
        super().__init__(config, ranks)
        self.hash = hashlib.sha256()

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        own = super().logits(tokens, positions)
        parts = [torch.empty_like(own) for _ in range(self.ranks.size)]
        dist.all_gather(parts, own)
        self.hash.update(torch.cat(parts, -1).numpy().tobytes())
        return own


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("by", nargs="?", choices=("symcomm", "direct", "gloo"), default="symcomm")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--check", action="store_true", help="compare with one rank that has the whole model")
    parser.add_argument("--tokens", type=int, default=16, help="to generate")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--shards", type=int, help="cut the model into so many parts, whatever the number of ranks")
    options = parser.parse_args()
    if options.shards and (options.compile or options.by == "gloo"):
        parser.error("--shards makes Symcomm's own calls: it goes neither with --compile nor with gloo")
    if options.compile and options.by == "direct":
        parser.error("compiled graphs make their own calls: --compile goes with symcomm or gloo")
    return options


@torch.inference_mode()
def main() -> None:
    options = read_options()
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("WORLD_SIZE", 1)))
    torch.set_num_threads(1 if options.shards else threads)  # other numbers of threads may give other bits
    dist.init_process_group("gloo" if options.by == "gloo" else "symcomm")
    config = Config(options.layers, options.width, length=PROMPT + options.tokens)
    ranks: Parallel = DirectRanks() if options.by == "direct" else TorchRanks()
    if options.shards:
        ranks = ShardedRanks(symcomm.of(dist.group.WORLD), options.shards)
    assert config.kv_heads % ranks.size == 0, f"{config.kv_heads} key heads cannot be divided among {ranks.size} ranks"
    model = (Hashed if options.shards else Llama)(config, ranks)
    step = torch.compile(model, dynamic=False) if options.compile else model
    prompt = torch.randint(config.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    tokens = generate(step, prompt, options.tokens)
    begin = time.perf_counter()
    assert torch.equal(tokens, generate(step, prompt, options.tokens)), "a second run gave other tokens"
    seconds = time.perf_counter() - begin
    if options.check:
        assert torch.equal(tokens, generate(Llama(config, Parallel()), prompt, options.tokens)), "one rank disagrees"
    if ranks.rank == 0:
        print("tokens", *tokens[0].tolist(), flush=True)
        if isinstance(model, Hashed):
            print("logits", model.hash.hexdigest(), flush=True)
        print(f"{options.tokens / seconds:.0f} tokens/s on {ranks.size} ranks, prefill included", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
