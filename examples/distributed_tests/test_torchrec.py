"""What torchrec's tests of its exchanges check, as tests of pytest: no launcher and no ports.

pip install 'symcomm[testing]' torchrec fbgemm-gpu-cpu
pytest examples/distributed_tests
BACKEND=gloo pytest examples/distributed_tests
"""

import os

import pytest
import torch
import torch.distributed as dist

from symcomm import testing

pytest.importorskip("torchrec")
from torchrec.distributed import dist_data
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ranks = testing.ranks([2, 3], mode="processes", backend=os.environ.get("BACKEND", "symcomm"))
BATCH = 2  # samples of a rank


def features(rank: int, n: int) -> dict[str, list[list[float]]]:
    """Of each feature the ids of each sample: as many as the rank's number, and one more in the second."""
    return {f"f{i}": [[100.0 * rank + 10 * i + k for k in range(rank + s)] for s in range(BATCH)] for i in range(n)}


def jagged(given: dict[str, list[list[float]]]) -> KeyedJaggedTensor:
    samples = [sample for feature in given.values() for sample in feature]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(given),
        values=torch.tensor([x for sample in samples for x in sample]),
        lengths=torch.tensor([len(sample) for sample in samples]),
    )


@ranks
def test_each_rank_gets_its_feature_from_all(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    exchange = dist_data.KJTAllToAll(dist.group.WORLD, [1] * n)
    found = exchange(jagged(features(rank, n))).wait().wait()
    expected = [sample for peer in range(n) for sample in features(peer, n)[f"f{rank}"]]
    assert found.keys() == [f"f{rank}"]
    assert found.lengths().tolist() == [len(sample) for sample in expected]
    assert found.values().tolist() == [x for sample in expected for x in sample]


@ranks
def test_pooled_embeddings_come_back_and_so_do_their_gradients(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    widths = [1 + r for r in range(n)]
    mine = torch.full((BATCH * n, widths[rank]), float(rank), requires_grad=True)
    found = dist_data.PooledEmbeddingsAllToAll(dist.group.WORLD, widths, torch.device("cpu"))(mine).wait()
    assert found.tolist() == [[float(r) for r in range(n) for _ in range(widths[r])]] * BATCH
    (found * (rank + 1)).sum().backward()
    sent = [float(peer + 1) for peer in range(n) for _ in range(BATCH)]
    torch.testing.assert_close(mine.grad[:, 0] * n, torch.tensor(sent))  # torchrec takes the mean over ranks


@ranks
def test_partial_sums_are_added_where_they_belong(group):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(float(BATCH * n)).reshape(-1, 1).expand(-1, 4).contiguous() * (rank + 1)
    found = dist_data.PooledEmbeddingsReduceScatter(dist.group.WORLD)(rows).wait()
    total = n * (n + 1) / 2
    assert found.tolist() == [[total * (BATCH * rank + s)] * 4 for s in range(BATCH)]
