"""DeepSpeed's own launcher: ZeRO 2 under it, and a pipeline of two stages."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.deepspeed import BATCH, ENVIRON, NEEDS, STEPS, VERSION, WIDTH, train
from tests.programs.frame import Part, numbers, tell, timed

__all__ = ["ENVIRON", "NEEDS", "VERSION"]

PARTS = ("ZeRO stage 2", "a pipeline of two stages")
LAUNCH = ("-m", "deepspeed.launcher.runner", "--num_gpus", "{ranks}", "--master_port", "{port}")
MODULE = "--module"
PIECES = 4  # micro-batches of a step


def pipeline() -> Part:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    settings = {
        "train_batch_size": BATCH * PIECES,
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    data = torch.Generator().manual_seed(0)

    def batches():
        while True:
            x = torch.randn(BATCH, WIDTH, generator=data)
            yield x, x.flip(1)

    source = batches()
    losses, seconds = timed(lambda _: engine.train_batch(source).item(), STEPS)
    return Part(PARTS[1], losses + numbers(*model.parameters()), seconds)


def main(backend: str) -> Iterator[Part]:
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    torch.set_num_threads(1)
    yield train(2)
    yield pipeline()
    dist.destroy_process_group()


if __name__ == "__main__":
    tell(main)
