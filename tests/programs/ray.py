"""Ray Train: a small network trained by its TorchTrainer, whose TorchConfig takes the backend's name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.programs.frame import Part, tell

VERSION = "2.60.0"
NEEDS = (f"ray[train]=={VERSION}",)
PARTS = ("TorchTrainer, two workers",)
ENVIRONMENT = "ray"
LAUNCH = ()  # it starts its workers itself
ENVIRON = (("RAY_TRAIN_V2_ENABLED", "1"), ("RAY_USAGE_STATS_ENABLED", "0"))


def train(asked: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model
    from torch import nn

    from tests.programs.frame import numbers, timed, training

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)))
    data = torch.Generator().manual_seed(dist.get_rank())

    def loss_of() -> torch.Tensor:
        x = torch.randn(16, 128, generator=data)
        return (model(x) - x.flip(1)).square().mean()

    losses, seconds = timed(training(loss_of, torch.optim.Adam(model.parameters(), lr=0.01)))
    found = losses + numbers(*model.state_dict().values())
    (Path(asked["folder"]) / f"{dist.get_rank()}.json").write_text(json.dumps([found, seconds]))


def main(backend: str) -> Iterator[Part]:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    ray.shutdown()
    yield Part(PARTS[0], [value for values, _ in found for value in values], max(seconds for _, seconds in found))


if __name__ == "__main__":
    tell(main)
