"""DeepSpeed: ZeRO stages 1 to 3 of a small network, in float32 on CPUs, and its sums for inference."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, numbers, tell, timed

VERSION = "0.19.8"
NEEDS = (f"deepspeed=={VERSION}",)
STAGES = (1, 2, 3)
SUMS = "inference_all_reduce, 1 x 4096"  # on Gloo, DeepSpeed's own shared memory
PARTS = (*(f"ZeRO stage {stage}" for stage in STAGES), SUMS)
ENVIRON = (("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"))
STEPS, BATCH, WIDTH = 20, 16, 128


def train(stage: int) -> Part:
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    data = torch.Generator().manual_seed(dist.get_rank())

    def step(_: int) -> float:
        x = torch.randn(BATCH, WIDTH, generator=data)
        loss = (engine(x) - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    losses, seconds = timed(step, STEPS)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = numbers(*engine.module.parameters())
    return Part(f"ZeRO stage {stage}", losses + weights, seconds)


def add_up() -> Part:
    import deepspeed
    import torch
    import torch.distributed as dist

    x = torch.arange(4096.0) * (1 + dist.get_rank())  # whole numbers, whose sum has no rounding

    def step(_: int) -> list[float]:
        deepspeed.comm.inference_all_reduce(total := x.clone())
        return numbers(total)

    sums, seconds = timed(step, 200)
    return Part(SUMS, sums[-1], seconds)


def main(backend: str) -> Iterator[Part]:
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    torch.set_num_threads(1)
    for stage in STAGES:
        yield train(stage)
    yield add_up()
    dist.destroy_process_group()


if __name__ == "__main__":
    tell(main)
