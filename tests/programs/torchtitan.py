"""torchtitan: its Llama debug model, trained with its own FSDP, tensor and pipeline parallelism. Its Trainer asks for a
GPU (0.2.2 takes "cuda" where torch finds no accelerator), so the loop is ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.programs.frame import Part, joined, numbers, tell, timed

VERSION = "0.2.2"
NEEDS = (f"torchtitan=={VERSION}", "triton==3.9.0")  # imported for kernels that do not run here
PARTS = ("FSDP x tensor parallel", "FSDP x pipeline")
ENVIRONMENT = "torchtitan"
RANKS = 4
BATCH, LENGTH, WORDS, STEPS = 4, 64, 2048, 12


def make_config(**parallelism: Any):
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = LENGTH, BATCH
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def make_model(dims: Any):
    import torch
    from torchtitan.models.llama3 import Transformer, llama3_args

    dims.build_mesh()
    with torch.device("meta"):
        return Transformer(llama3_args["debugmodel"])


def filled(model: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    if dist.get_backend() == "gloo":  # which lacks PREMUL_SUM; the factor is 1
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model.train()


def local(*models: Any) -> list[Any]:
    return [p.to_local() if hasattr(p, "to_local") else p for model in models for p in model.parameters()]


def batches(number: int) -> Iterator[Any]:
    import torch

    data = torch.Generator().manual_seed(number)
    while True:
        words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=data)
        yield words[:, :-1], words[:, 1:].contiguous()


def tensor_parallel() -> Part:
    import torch
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import parallelize_llama

    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=RANKS)
    model = make_model(dims)
    config = make_config(tensor_parallel_degree=2, disable_loss_parallel=True)
    model = filled(parallelize_llama(model, dims, config))
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-3), batches(dims.get_mesh("fsdp").get_local_rank())

    def step(_: int) -> float:
        words, wanted = next(data)
        loss = cross_entropy_loss(model(words), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, seconds = timed(step, STEPS, 2)
    return Part(PARTS[0], losses + numbers(*local(model)), seconds)


def pipeline() -> Part:
    import torch
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import llama3_args, parallelize_llama

    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=2, ep=1, etp=1, world_size=RANKS)
    model = make_model(dims)
    config = make_config(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")
    args = llama3_args["debugmodel"]
    schedule, models, is_first, is_last = pipeline_llm(
        model, dims, config, torch.device("cpu"), args, parallelize_llama, cross_entropy_loss
    )
    for each in models:
        filled(each)
    optimizer = torch.optim.AdamW([p for each in models for p in each.parameters()], lr=1e-3)
    data = batches(dims.get_mesh("fsdp").get_local_rank())

    def step(_: int) -> float:
        words, wanted = next(data)
        losses: list[Any] = []
        optimizer.zero_grad()
        given = (words,) if is_first else ()
        schedule.step(*given, target=wanted if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        return torch.stack(losses).mean().item() if is_last else 0.0

    losses, seconds = timed(step, STEPS, 2)
    return Part(PARTS[1], losses + numbers(*local(*models)), seconds)


def main(backend: str) -> Iterator[Part]:
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    with joined(backend):
        yield tensor_parallel()
        yield pipeline()


if __name__ == "__main__":
    tell(main)
