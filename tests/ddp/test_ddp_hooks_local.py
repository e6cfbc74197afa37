"""Local SGD and DiLoCo: when ranks meet, and what an outer step is. How they train is in test_ddp_hooks.py."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import symcomm  # noqa: E402
from symcomm.ddp import hooks  # noqa: E402
from tests.support.ddp_jobs import (  # noqa: E402
    BF16,
    INT8,
    Bucket,
    dressed,
    parallel,
    run,
    small_model,
    train,
    weights_of,
)

pytestmark = pytest.mark.torch_versions


def test_diloco_without_momentum_is_local_sgd():
    sgd = run(lambda m, g: hooks.LocalSGDState(m.parameters(), 4, g), hooks.local_sgd_hook, n=2, steps=8)
    outer = run(
        lambda m, g: hooks.DiLoCoState(m.parameters(), 4, g, lr=1.0, momentum=0.0), hooks.local_sgd_hook, n=2, steps=8
    )
    torch.testing.assert_close(sgd[0][1], outer[0][1], rtol=0, atol=1e-6)


def test_a_period_of_one_is_plain_sgd():
    plain = run(None, n=2, steps=6)
    every = run(lambda m, g: hooks.LocalSGDState(m.parameters(), 1, g), hooks.local_sgd_hook, n=2, steps=6)
    torch.testing.assert_close(plain[0][1], every[0][1], rtol=0, atol=1e-6)


def test_outer_steps_are_those_of_torch_sgd_with_nesterov():
    """One parameter, known ways: compare with torch.optim.SGD fed with the averaged differences."""
    ways = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25]), torch.tensor([-1.0, 3.0])]

    def fn(group: Any) -> torch.Tensor:
        parameter = nn.Parameter(torch.tensor([10.0, 20.0]))
        state = hooks.DiLoCoState([parameter], 1, group, lr=0.7, momentum=0.9)
        for way in ways:
            parameter.data -= way * (2.0 * group.rank)  # 0 and 2: the mean is the way itself
            state.step()
        return parameter.detach()

    expected = nn.Parameter(torch.tensor([10.0, 20.0]))
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for way in ways:
        expected.grad = way.clone()
        optimizer.step()
    for got in symcomm.spawn(fn, 2, mode="threads", deadline=60):
        torch.testing.assert_close(got, expected.detach())


def test_gradients_are_averaged_until_the_ranks_part():
    def fn(group: Any) -> list[float]:
        parameter = nn.Parameter(torch.zeros(1))
        state = hooks.LocalSGDState([parameter], 2, group, start=2)
        seen = []
        for _ in range(4):
            gradient = torch.tensor([float(group.rank)])
            seen.append(hooks.local_sgd_hook(state, Bucket([parameter], [gradient])).wait().item())
            parameter.data += group.rank
            seen.append(float(state.step()))
        return [*seen, parameter.item()]

    assert symcomm.spawn(fn, 2, mode="threads", deadline=60) == [
        [0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0],
        [0.5, 0.0, 0.5, 0.0, 1.0, 0.0, 1.0, 1.0, 2.0],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, BF16], ids=str)
def test_diloco_with_other_dtypes_and_alone(dtype: torch.dtype):
    make = lambda m, g: hooks.DiLoCoState(m.parameters(), 2, g, dtype=INT8)  # noqa: E731
    for n in (1, 2):
        ranks = run(make, hooks.local_sgd_hook, n=n, steps=6, dtype=dtype)
        assert all(torch.equal(ranks[0][1], other[1]) for other in ranks)
        assert ranks[0][1].isfinite().all()


LOCAL: dict[str, Any] = {
    "local-sgd": lambda m, g: hooks.LocalSGDState(m.parameters(), 3, g),
    "diloco": lambda m, g: hooks.DiLoCoState(m.parameters(), 3, g, dtype=INT8),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_training_goes_on_where_it_stopped(name: str, tmp_path: Any):
    """Saved two steps after a common point, when ranks differ."""

    def begin(group: Any) -> tuple:
        model = small_model()
        state = LOCAL[name](model, dressed(group))
        wrapped = parallel(model, dressed(group))
        wrapped.register_comm_hook(state, hooks.local_sgd_hook)
        return model, wrapped, state

    def fn(group: Any) -> bool:
        model, wrapped, state = begin(group)
        train(wrapped, group.rank, 5, state.step)
        path = tmp_path / f"{group.rank}.pt"
        torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        train(wrapped, group.rank, 4, state.step, skip=5)
        again, wrapped, state = begin(group)
        saved = torch.load(path, weights_only=True)
        again.load_state_dict(saved["model"])
        state.load_state_dict(saved["hook"])
        train(wrapped, group.rank, 4, state.step, skip=5)
        return torch.equal(weights_of(model), weights_of(again))

    assert symcomm.spawn(fn, 2, mode="threads", deadline=60) == [True, True]
