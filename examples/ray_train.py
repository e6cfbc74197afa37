"""Ray Train: TorchConfig takes the backend's name. Started by itself: `python examples/ray_train.py symcomm`."""

import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(config):
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        x = torch.randn(16, 20, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    if dist.get_rank() == 0:
        Path(config["losses"]).write_text("\n".join(map(str, losses)))


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={"losses": f"{folder}/losses"},
            torch_config=TorchConfig(backend=sys.argv[1] if len(sys.argv) > 1 else "symcomm"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        for loss in Path(f"{folder}/losses").read_text().split():
            print("loss", loss)
