"""accelerate: data parallel, and FSDP2, of a small transformer. It takes the process group that exists."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed

VERSION = "1.15.0"
NEEDS = (f"accelerate=={VERSION}",)
PARTS = ("data parallel", "FSDP2")
STEPS, BATCH, LENGTH, WIDTH = 20, 8, 32, 64


def make_model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, WIDTH))


def make_accelerator(kind: str):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    if kind == "data parallel":
        return Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def train(kind: str) -> Part:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    accelerator = make_accelerator(kind)
    data = torch.randn(STEPS * BATCH * accelerator.num_processes, LENGTH, WIDTH)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(data), batch_size=BATCH))
    batches = iter(loader)

    def step(_: int) -> float:
        (x,) = next(batches)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return accelerator.gather(loss.detach().reshape(1)).mean().item()

    losses, seconds = timed(step, STEPS)
    whole = accelerator.get_state_dict(model)
    return Part(kind, losses + numbers(*whole.values()), seconds)


def main(backend: str) -> Iterator[Part]:
    with joined(backend):
        for kind in PARTS:
            from accelerate.state import AcceleratorState

            yield train(kind)
            AcceleratorState._reset_state()  # the group stays


if __name__ == "__main__":
    tell(main)
