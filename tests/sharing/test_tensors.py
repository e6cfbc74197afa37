"""Tensors in messages and versions: values, dtypes, ties, and whose memory they are."""

from __future__ import annotations

import gc

import pytest

import symcomm

torch = pytest.importorskip("torch", reason="about tensors")
pytestmark = pytest.mark.torch_versions

LARGE = 1 << 18  # elements
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


def send(obj):
    with symcomm.Queue() as queue, symcomm.QueueReader(queue.fileno()) as reader:
        queue.put(obj)
        return reader.get(timeout=10)


@pytest.mark.parametrize("count", [0, 1, 5000, LARGE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtypes(dtype: torch.dtype, count: int):
    sent = torch.randint(0, 2, (2, count)).to(dtype)
    got = send({"x": sent})["x"]
    assert got.dtype == dtype and got.shape == sent.shape
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8)) if count else got.numel() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(LARGE * 2.0).reshape(2, LARGE).t(),
        lambda: torch.arange(LARGE * 2.0)[::2],
        lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
        lambda: torch.nn.Parameter(torch.ones(LARGE)),
        lambda: torch.ones(LARGE).expand(3, LARGE),
        lambda: torch.tensor(2.5),
    ],
    ids=["transposed", "strided", "conjugate", "parameter", "expanded", "scalar"],
)
def test_every_kind_of_tensor_arrives_as_a_plain_one(make):
    sent = make()
    got = send([sent])[0]
    assert type(got) is torch.Tensor and got.is_contiguous() and not got.requires_grad
    assert torch.equal(got, sent.detach().resolve_conj())


def test_tied_weights_stay_tied():
    weight = torch.nn.Parameter(torch.randn(LARGE))
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        board.publish({"embedding": weight.detach(), "head": weight.detach()})
        state = reader.newest().state
        assert state["embedding"].data_ptr() == state["head"].data_ptr() and torch.equal(state["head"], weight)


def test_a_model_runs_on_the_weights_that_were_published():
    torch.manual_seed(0)
    model, other = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
    x = torch.randn(3, 600)
    with symcomm.Board() as board, symcomm.BoardReader(board.fileno()) as reader:
        for version in (1, 2):
            board.publish(model.state_dict())
            other.load_state_dict(reader.newest().state, assign=True)
            with torch.no_grad():
                assert torch.equal(other(x), model(x)) and reader.newest().version == version
                model.weight.mul_(2)
                assert not torch.equal(other(x), model(x))  # nobody sees a change that was not published


def test_a_tensor_outlives_its_reader_and_queue():
    kept = send(torch.full((LARGE,), 3.0))
    gc.collect()
    assert (kept == 3).all()
    kept.zero_()
    assert (kept == 0).all()
