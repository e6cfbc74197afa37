"""One process, many devices, where there is a GPU: CPU and GPU mixed, one GPU twice, several streams."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import symcomm
from symcomm import comm
from symcomm.errors import BadArgumentError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

GPU = torch.device("cuda:0")
LISTS = {
    "gpu": [0],
    "twice": [0, "cuda:0"],
    "mixed": ["cuda:0", "cpu"],
    "cpu first": ["cpu", 0, torch.device("cuda", 0)],
}


def devices_of(tensors) -> list[str]:
    return [t.device.type for t in tensors]


def kinds(devices) -> list[str]:
    return ["cpu" if d == "cpu" else "cuda" for d in devices]


@pytest.fixture(params=["cpu", "cuda:0"])
def home(request) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("pinned", [False, True])
def test_broadcast(home, devices, pinned):
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    x = x.pin_memory() if pinned and home.type == "cpu" else x.to(home)
    results = comm.broadcast(x, devices)
    assert devices_of(results) == kinds(devices)
    for result in results:
        assert torch.equal(result.cpu(), x.cpu()) and result.is_contiguous(memory_format=torch.channels_last)
        assert (result is x) == (result.device == x.device)
    out = [torch.empty(2, 3, 4, 4, device=r.device) for r in results]
    assert all(r is o for r, o in zip(comm.broadcast(x, out=out), out, strict=True))
    assert all(torch.equal(o.cpu(), x.cpu()) for o in out)


@pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("dim", [0, -1])
def test_scatter_and_gather(home, devices, dim):
    x = torch.randn(6, 7, device=home)
    pieces = comm.scatter(x, devices, dim=dim)
    assert devices_of(pieces) == kinds(devices)
    for destination in ("cpu", 0, -1, "cuda", GPU):
        joined = comm.gather(pieces, dim, destination)
        assert torch.equal(joined.cpu(), x.cpu())
        assert joined.device.type == ("cpu" if destination in ("cpu", -1) else "cuda")
    assert comm.gather(pieces, dim).device.type == ("cuda" if "cuda" in devices_of(pieces) else "cpu")
    out = torch.empty(6, 7)
    assert torch.equal(comm.gather(pieces, dim, out=out), x.cpu())
    into = [torch.empty_like(p) for p in pieces]
    assert torch.equal(comm.gather(comm.scatter(x, dim=dim, out=into), dim, "cpu"), x.cpu())


def test_scatter_on_streams(home):
    x = torch.randn(1 << 22, device=home)
    expected = x.cpu() * 2
    streams = [torch.cuda.Stream(GPU), None, torch.cuda.Stream(GPU)]
    for _ in range(5):
        if home.type == "cuda":
            torch.cuda._sleep(5_000_000)
            doubled = x * 2  # still running when the copies are asked for
        else:
            doubled = (x * 2).pin_memory()
        out = [torch.empty(n, device=GPU) for n in (1 << 20, 1 << 20, 1 << 21)]
        for stream in streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())  # the caller's: out may be in use
        pieces = comm.scatter(doubled, out=out, streams=streams)
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(torch.cat(pieces).cpu(), expected)
        del doubled, out, pieces


def test_streams_must_fit():
    x = torch.zeros(4)
    stream = torch.cuda.Stream(GPU)
    assert devices_of(comm.scatter(x, [0, "cpu"], streams=[stream, None])) == ["cuda", "cpu"]
    stream.synchronize()
    with pytest.raises(BadArgumentError, match=r"streams\[1\] must be a stream of cpu, or None"):
        comm.scatter(x, [0, "cpu"], streams=[stream, stream])
    count = torch.cuda.device_count()
    with pytest.raises(BadArgumentError, match=rf"devices\[0\] must be one of this machine's {count} cuda devices"):
        comm.scatter(x, [count])
    with pytest.raises(BadArgumentError, match=r"devices\[1\] must be a device: an index of 0 or more"):
        comm.broadcast(x, [0, -1])


def test_results_on_the_cpu_are_complete():
    for _ in range(5):
        torch.cuda._sleep(5_000_000)
        x = torch.ones(1 << 20, device=GPU) * 3
        pieces = comm.scatter(x, ["cpu", "cpu"])
        assert all(p.eq(3).all() for p in pieces)
        torch.cuda._sleep(5_000_000)
        assert comm.gather([x * 2, x * 2], destination=-1).eq(6).all()
        torch.cuda._sleep(5_000_000)
        assert comm.broadcast_coalesced([x * 3, x[:5] * 3], [0, "cpu"])[1][0].eq(9).all()


def mixture(device) -> list[torch.Tensor]:
    tensors = [
        torch.randn(n % 37, 3).to(kind) for n in range(300) for kind in (torch.float32, torch.float16, torch.int32)
    ]
    tensors.append(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    tensors += [torch.eye(3).to_sparse(), torch.randn(4, dtype=torch.complex64), torch.tensor(2.0), torch.randn(6)[::2]]
    return [t.to(device) for t in tensors]


def dense(tensor):
    return tensor.to_dense().cpu() if tensor.is_sparse else tensor.cpu()


@pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("buffer_size", [100, 10 << 20])
def test_broadcast_coalesced(home, devices, buffer_size):
    tensors = mixture(home)
    results = comm.broadcast_coalesced(tensors, devices, buffer_size)
    expected = [dense(t) for t in tensors]
    seen_home = False
    for made, kind in zip(results, kinds(devices), strict=True):
        assert {t.device.type for t in made} == {kind}
        assert all(
            torch.equal(dense(a), b) and a.layout == t.layout for a, b, t in zip(made, expected, tensors, strict=True)
        )
        assert made[900].is_contiguous(memory_format=torch.channels_last)
        itself = kind == home.type and not seen_home
        seen_home = seen_home or itself
        assert all((a is b) == itself for a, b in zip(made, tensors, strict=True))
        if not itself:
            before = made[3]._version, made[4]._version
            made[3].zero_()
            assert (made[3]._version, made[4]._version) == (before[0] + 1, before[1])


@pytest.mark.parametrize("sources", [["cuda:0"] * 2, ["cuda:0"] * 3, ["cuda:0", "cpu"], ["cpu", "cpu"]], ids=str)
@pytest.mark.parametrize("destination", ["cpu", 0])
@pytest.mark.parametrize("buffer_size", [100, 10 << 20])
def test_reduce_add_coalesced(sources, destination, buffer_size):
    tensors = [(t * 8).to(t.dtype) if not t.is_sparse else t for t in mixture("cpu")]
    lists = [[t.to(d) for t in tensors] for d in sources]
    sums = comm.reduce_add_coalesced(lists, destination, buffer_size)
    for total, tensor in zip(sums, tensors, strict=True):
        assert total.device.type == ("cpu" if destination == "cpu" else "cuda") and total.layout == tensor.layout
        torch.testing.assert_close(dense(total), dense(tensor) * len(sources), rtol=2e-3, atol=0)


def test_reduce_add():
    x = torch.randn(1000)
    assert torch.equal(comm.reduce_add([x, x.to(GPU)]).cpu(), x + x)
    assert comm.reduce_add([x, x.to(GPU)], "cpu").device.type == "cpu"
    ones = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.ones(1, dtype=torch.bfloat16)] * 4
    assert comm.reduce_add([t.to(GPU) for t in ones]).item() == 260
    (total,) = comm.reduce_add_coalesced([[t.to(GPU)] for t in ones])
    assert total.item() == 260


@pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
def test_derivatives(home, devices):
    a = torch.randn(4, 2, dtype=torch.float64, device=home, requires_grad=True)
    b = torch.randn(3, dtype=torch.float64, device=home, requires_grad=True)

    def there_and_back(a, b):
        copies = comm.Broadcast.apply(devices, a, b)
        joined = comm.Gather.apply(home, 0, *copies[::2])
        pieces = comm.Scatter.apply(devices, None, 0, joined)
        plain = comm.gather(comm.scatter(a, devices), destination=home)
        return (
            joined,
            comm.reduce_add([p.sum() for p in pieces], home) + plain.sum(),
            *(c.to(home) for c in copies[1::2]),
        )

    assert torch.autograd.gradcheck(there_and_back, (a, b), check_forward_ad=True)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("devices", [[0], [0, 0], [0, "cpu"], ["cpu", 0], None], ids=str)
def test_data_parallel_trains(devices):
    first = torch.device("cpu") if devices and devices[0] == "cpu" else GPU
    plain, wrapped = net().eval(), symcomm.DataParallel(net().eval().to(first), devices)
    x = torch.randn(7, 6, dtype=torch.float64)
    for _ in range(3):
        outputs = []
        for model in (plain, wrapped):
            model.zero_grad()
            out = model(x)
            out.square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            outputs.append(out.detach().cpu())
        torch.testing.assert_close(*outputs)
    assert out.device == first
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu())


def test_data_parallel_follows_the_callers_stream_and_autocast():
    model = symcomm.DataParallel(nn.Linear(64, 64).cuda(), [0, 0])
    x = torch.randn(32, 64, device=GPU)
    expected = model.module(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        out = model(x * 1)
    stream.synchronize()
    torch.testing.assert_close(out, expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert not model(x).requires_grad


def test_the_module_must_be_on_the_first_device():
    with pytest.raises(BadArgumentError, match=r"module.0.weight must be on cuda:0, which is device_ids\[0\]"):
        symcomm.DataParallel(net(), [0, 0])(torch.ones(2, 6))


@several
def test_several_gpus_through_nccl():
    tensors = mixture(GPU)
    first, second = comm.broadcast_coalesced(tensors, [0, 1])
    assert all(a is b for a, b in zip(first, tensors, strict=True))
    assert {t.device.index for t in second} == {1}
    sums = comm.reduce_add_coalesced([first, second], 0)
    for total, copy, tensor in zip(sums, second, tensors, strict=True):
        assert torch.equal(dense(copy), dense(tensor)) and total.device == GPU
        torch.testing.assert_close(dense(total), dense(tensor) * 2, rtol=2e-3, atol=0)
    x = torch.randn(5, device=GPU)
    assert [t.device.index for t in comm.broadcast(x, [1, 0])] == [1, 0]
    assert torch.equal(comm.reduce_add([x, x.to("cuda:1")], 1).cpu(), (x + x).cpu())


@several
def test_data_parallel_on_several_gpus():
    ours, theirs = symcomm.DataParallel(net().cuda(), [0, 1]), nn.DataParallel(net().cuda(), [0, 1])
    x = torch.randn(9, 6, dtype=torch.float64)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
