"""torchrec: a small recommender whose tables are split over the ranks in each of the ways that torchrec knows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.programs.frame import Part, joined, numbers, tell, timed, training

VERSION = "1.8.0"
NEEDS = ("fbgemm-gpu-cpu==1.8.0", "tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions")
ALONE = (f"torchrec=={VERSION}",)  # it asks for fbgemm-gpu, which has the same files as fbgemm-gpu-cpu
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
PARTS = tuple(f"a training step, tables {kind}" for kind in SHARDINGS)
ENVIRONMENT = "torchrec"
BUSY = True

TABLES, ROWS, WIDTH, BATCH, DENSE = 6, 20_000, 64, 256, 16


def make_model(sharding: str):
    import torch
    import torch.distributed as dist
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel, ShardingEnv
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = torchrec.EmbeddingBagCollection(
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=f"t{i}", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=[f"f{i}"]
                    )
                    for i in range(TABLES)
                ]
            )
            nn = torch.nn
            self.over = nn.Sequential(nn.Linear(TABLES * WIDTH + DENSE, 128), nn.ReLU(), nn.Linear(128, 1))

        def forward(self, dense, sparse):
            return self.over(torch.cat([dense, self.tables(sparse).values()], 1))

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type):  # on CPUs torchrec offers no rows by itself
            return [sharding]

    torch.manual_seed(0)
    model = Model()
    kind = (
        {} if sharding == "data_parallel" else {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    sharders = [Sharder(fused_params=kind)]
    only = {f"t{i}": ParameterConstraints(sharding_types=[sharding], min_partition=WIDTH // 2) for i in range(TABLES)}
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology, constraints=only).collective_plan(
        model, sharders, dist.group.WORLD
    )
    return DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"), plan=plan,
        sharders=sharders,
    )  # fmt: skip


def loss_of(model, generator):
    """On a batch of bags of 1 to 7 rows."""
    import torch
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(1, 8, (TABLES * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    sparse = KeyedJaggedTensor.from_lengths_sync([f"f{i}" for i in range(TABLES)], values, lengths)
    found = model(torch.randn(BATCH, DENSE, generator=generator), sparse)
    wanted = torch.rand(BATCH, 1, generator=generator)
    return torch.nn.functional.binary_cross_entropy_with_logits(found, wanted)


def local_tensors(state):
    for value in state:
        yield from [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]


def main(backend: str) -> Iterator[Part]:
    import torch
    import torch.distributed as dist

    with joined(backend):
        for name, sharding in zip(PARTS, SHARDINGS, strict=True):
            model = make_model(sharding)
            generator = torch.Generator().manual_seed(dist.get_rank())
            find_loss = functools.partial(loss_of, model, generator)
            losses, seconds = timed(training(find_loss, torch.optim.SGD(model.parameters(), lr=0.1)))
            yield Part(name, losses + numbers(*local_tensors(model.state_dict().values())), seconds)


if __name__ == "__main__":
    tell(main)
