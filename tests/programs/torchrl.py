"""torchrl: two workers collect from an environment, and get the policy's weights again after each batch.

Not by DistributedSyncCollector: of 0.14.1, it waits for ever if a worker ends before the last weights are sent."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.programs.frame import Part, free_port, numbers, tell

VERSION = "0.14.1"
NEEDS = (f"torchrl=={VERSION}",)
PARTS = ("a batch of two workers, with weights sent",)
ENVIRONMENT = "torchrl"  # it asks for another tensordict
LAUNCH = ()  # it starts its workers itself
WORKERS, BATCHES, FRAMES = 2, 20, 200  # frames of a batch


def make_env():
    import torch
    from torchrl.envs import PendulumEnv

    torch.set_num_threads(1)
    return PendulumEnv(seed=0)


def make_policy():
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn

    class Turn(nn.Module):
        """Of the state, so that what workers see depends on the weights they were sent."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))

        def forward(self, angle, speed):
            return (self.weight[0] * angle + self.weight[1] * speed).unsqueeze(-1)

    return TensorDictModule(Turn(), in_keys=["th", "thdot"], out_keys=["action"])


def main(backend: str) -> Iterator[Part]:
    import statistics

    import torch
    from torchrl.collectors.distributed import DistributedCollector

    torch.manual_seed(0)
    policy = make_policy()
    collector = DistributedCollector(
        [make_env] * WORKERS, policy, policy_factory=make_policy, backend=backend, launcher="mp", sync=True,
        frames_per_batch=FRAMES, total_frames=FRAMES * BATCHES, update_interval=1, tcp_port=str(free_port()),
    )  # fmt: skip
    found, times, begun = [], [], time.perf_counter()
    for batch in collector:
        times.append(time.perf_counter() - begun)
        found += numbers(batch["th"], batch["action"], batch["next", "reward"])
        with torch.no_grad():
            next(policy.parameters()).mul_(0.9)
        begun = time.perf_counter()
    collector.shutdown()
    yield Part(PARTS[0], found, statistics.median(times[5:]))


if __name__ == "__main__":
    tell(main)
