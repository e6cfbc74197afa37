"""broadcast, scatter, gather and reduce_add of one tensor: values, memory, formats, and the words of every refusal."""

from __future__ import annotations

import itertools
import threading
import time
import warnings

import pytest
import torch
import torch._prims_common

from symcomm import comm
from symcomm._core import native
from symcomm.device.copies import suggested_memory_format
from symcomm.errors import BadArgumentError
from symcomm.group.buffers import torch_dtypes
from tests.support.plan_cases import tree

pytestmark = pytest.mark.torch_versions

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def refuses(words: str):
    return pytest.raises(BadArgumentError, match=words)


# --- broadcast -------------------------------------------------------------------------------------------------


def test_broadcast_gives_the_source_itself_where_it_is():
    x = numbers(3, 4)
    results = comm.broadcast(x, ["cpu", torch.device("cpu"), "cpu:0"])
    assert isinstance(results, tuple) and all(r is x for r in results)
    assert comm.broadcast(x, []) == ()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_to_meta_keeps_shape_and_type(shape, dtype):
    (there,) = comm.broadcast(numbers(*shape, dtype=dtype), ["meta"])
    assert there.device.type == "meta" and there.shape == shape and there.dtype == dtype


def test_broadcast_keeps_strides():
    for x in (numbers(2, 3, 4, 5).to(memory_format=torch.channels_last), numbers(3, 4).t()):
        (there,) = comm.broadcast(x, ["meta"])
        assert there.stride() == x.stride()


def test_broadcast_into_out():
    x = numbers(2, 3)
    out = [torch.zeros(2, 3), torch.zeros(3, 2).t(), x, torch.zeros(2, 3, dtype=torch.float64)]
    results = comm.broadcast(x, out=out)
    assert all(r is o for r, o in zip(results, out, strict=True))
    assert all(torch.equal(o.float(), x) for o in out)


def test_broadcast_refusals():
    x = numbers(2, 3)
    with refuses("broadcast: exactly one of devices and out must be given, got 'neither'"):
        comm.broadcast(x)
    with refuses("got 'both'"):
        comm.broadcast(x, ["cpu"], out=[x])
    with refuses(r"broadcast: out\[1\] must be of the tensor's shape \(2, 3\), got \(3, 2\)"):
        comm.broadcast(x, out=[x.clone(), torch.empty(3, 2)])
    with refuses(r"broadcast: devices\[1\] must be a device: an index of 0 or more.*got -1"):
        comm.broadcast(x, ["cpu", -1])
    with refuses(r"devices\[0\] must be a device.*got 'gpu9'"):
        comm.broadcast(x, ["gpu9"])
    with refuses(r"devices\[0\] must be a device.*got 1.5"):
        comm.broadcast(x, [1.5])
    with refuses("devices must be a list of devices, got 'cpu'; put a single device in a list"):
        comm.broadcast(x, "cpu")
    with refuses("tensor must be a tensor, got <class 'list'>"):
        comm.broadcast([1.0], ["cpu"])
    with refuses("tensor must be a tensor with data, since it goes to cpu"):
        comm.broadcast(x.to("meta"), ["cpu"])
    with refuses(r"out\[0\] must be a tensor, got <class 'int'>"):
        comm.broadcast(x, out=[3])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_an_index_needs_an_accelerator():
    with refuses(r"devices\[1\] must be a device of this machine, got 0; this machine has no accelerator"):
        comm.broadcast(numbers(2), ["cpu", 0])
    with refuses(r"devices\[0\] must be a device of this machine, which has no accelerator, got 'cuda:0'"):
        comm.broadcast(numbers(2), ["cuda:0"])


# --- scatter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (1, 1), (0, 2)])
def test_scatter_is_chunk(shape, devices, dim):
    x = numbers(*shape)
    pieces = comm.scatter(x, ["cpu"] * devices, dim=dim)
    expected = x.chunk(devices, dim)
    assert all(torch.equal(a, b) for a, b in zip(pieces, expected, strict=True))
    assert torch.equal(torch.cat(pieces, dim), x)


def test_scatter_gives_views_where_the_tensor_is():
    x = numbers(4, 2)
    first, second = comm.scatter(x, ["cpu", "cpu"])
    assert first.data_ptr() == x.data_ptr() and second.data_ptr() == x[2:].data_ptr()
    second.zero_()
    assert x[2:].sum() == 0


@pytest.mark.parametrize("sizes", [(2, 4), (0, 6), (6, 0), (1, 2, 3)])
def test_scatter_of_given_sizes(sizes):
    x = numbers(3, 6)
    pieces = comm.scatter(x, ["cpu"] * len(sizes), sizes, dim=-1)
    assert [p.size(1) for p in pieces] == list(sizes)
    assert all(torch.equal(a, b) for a, b in zip(pieces, x.split(sizes, 1), strict=True))


def test_scatter_into_out():
    x = numbers(6, 4)
    out = [torch.empty(1, 4), torch.empty(4, 5).t()[:5, :]]
    results = comm.scatter(x, out=out)
    assert results[0] is out[0] and results[1] is out[1]
    assert torch.equal(torch.cat(results), x)
    assert comm.scatter(x, dim=-1, out=[torch.empty(6, 3), torch.empty(6, 1)])[1].flatten().tolist() == x[:, 3].tolist()


def test_scatter_keeps_channels_last():
    x = numbers(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for piece in (*comm.scatter(x, ["cpu", "meta"]), *comm.scatter(x, ["meta", "cpu"])):
        assert piece.is_contiguous(memory_format=torch.channels_last) and not piece.is_contiguous()


def test_scatter_refusals():
    x = numbers(6, 4)
    with refuses(r"chunk_sizes must be sizes that add up to 6, the tensor's size in dimension 0, got \[2, 3\]; .* 5"):
        comm.scatter(x, ["cpu", "cpu"], [2, 3])
    with refuses(r"chunk_sizes must be one size for each of 2 devices, got \[6\]"):
        comm.scatter(x, ["cpu", "cpu"], [6])
    with refuses(r"chunk_sizes\[1\] must be a size of 0 or more, got -1"):
        comm.scatter(x, ["cpu", "cpu"], [7, -1])
    with refuses("dim must be from -2 to 1, got 2"):
        comm.scatter(x, ["cpu"], dim=2)
    with refuses("dim must be of a tensor that has dimensions, got 0"):
        comm.scatter(torch.tensor(1.0), ["cpu"])
    with refuses("devices must be at least one device"):
        comm.scatter(x, [])
    with refuses("devices must be left out when out is given"):
        comm.scatter(x, ["cpu"], out=[x])
    with refuses(r"chunk_sizes must be left out when out is given, got \[6\]"):
        comm.scatter(x, chunk_sizes=[6], out=[x])
    with refuses(r"out\[1\] must be of the tensor's shape \(6, 4\) but for dimension 0, got \(1, 3, 4\)"):
        comm.scatter(x, out=[torch.empty(3, 4), torch.empty(1, 3, 4)])
    with refuses(r"out must be tensors whose sizes in dimension 0 add up to the tensor's 6, got \[3, 2\]"):
        comm.scatter(x, out=[torch.empty(3, 4), torch.empty(2, 4)])
    with refuses("out must be at least one tensor"):
        comm.scatter(x, out=[])
    with refuses("streams must be one stream or None for each of 2 devices"):
        comm.scatter(x, ["cpu", "cpu"], streams=[None])
    assert len(comm.scatter(x, ["cpu", "cpu"], streams=[None, None])) == 2
    with refuses(r"streams\[1\] must be a stream of cpu, or None, got 3"):
        comm.scatter(x, ["cpu", "cpu"], streams=[None, 3])
    with refuses("streams must be a list, one stream or None for each of 2 devices, got 5"):
        comm.scatter(x, ["cpu", "cpu"], streams=5)
    with refuses("chunk_sizes must be a list, one size for each of 2 devices, got 3"):
        comm.scatter(x, ["cpu", "cpu"], 3)
    with refuses(r"tensor must be dense, to be split, got torch.sparse_coo; use .to_dense\(\) first"):
        comm.scatter(x.to_sparse(), ["cpu", "cpu"])
    with refuses("Scatter: tensor must be a tensor, got <class 'int'>"):
        comm.Scatter.apply(["cpu"], None, 0, 5)
    with refuses(r"Broadcast: tensors\[1\] must be a tensor, got <class 'str'>"):
        comm.Broadcast.apply(["cpu"], x, "x")


def test_integers_of_other_kinds():
    x, numpy = numbers(6, 4), pytest.importorskip("numpy")
    assert [len(p) for p in comm.scatter(x, ["cpu", "cpu"], numpy.array([2, 4]), numpy.int64(0))] == [2, 4]
    assert [len(p) for p in comm.scatter(x, ["cpu", "cpu"], torch.tensor([2, 4]))] == [2, 4]
    assert comm.gather([x, x], numpy.int32(1)).shape == (6, 8)
    assert comm.broadcast_coalesced([x], ["cpu"], numpy.int64(64))[0][0] is x


# --- gather ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_is_cat(dtype, dim):
    parts = [numbers(2, 3, dtype=dtype) for _ in range(3)]
    if dim == 0:
        parts.append(numbers(0, 3, dtype=dtype))
    for destination in (None, "cpu", torch.device("cpu")):
        result = comm.gather(parts, dim, destination)
        assert torch.equal(result, torch.cat(parts, dim)) and result.device.type == "cpu"
    out = torch.empty_like(torch.cat(parts, dim))
    assert comm.gather(parts, dim, out=out) is out
    assert torch.equal(out, torch.cat(parts, dim))


def test_gather_takes_the_first_dtype():
    result = comm.gather([numbers(2, dtype=torch.float64), numbers(3)])
    assert result.dtype == torch.float64 and result.tolist() == [0, 1, 0, 1, 2]


def test_gather_is_a_copy_even_of_one():
    x = numbers(3)
    assert comm.gather([x]).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("destination", ["cpu", "meta"])
def test_gather_keeps_a_common_memory_format(destination):
    plain = numbers(2, 3, 4, 4)
    last = plain.to(memory_format=torch.channels_last)
    assert comm.gather([last, last], 0, destination).is_contiguous(memory_format=torch.channels_last)
    assert comm.gather([last, plain], 0, destination).shape == (4, 3, 4, 4)
    last3d = numbers(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    assert comm.gather([last3d, last3d], 0, destination).is_contiguous(memory_format=torch.channels_last_3d)


def test_gather_of_scalars_warns():
    with pytest.warns(UserWarning, match="2 tensors without dimensions become a vector of 2 elements"):
        result = comm.gather([torch.tensor(1.0), torch.tensor(2.0)])
    assert result.tolist() == [1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.gather([numbers(1), numbers(1)])


def test_gather_refusals():
    x = numbers(2, 5)
    with refuses("tensors must be at least one tensor"):
        comm.gather([])
    with refuses("tensors must be a list of tensors"):
        comm.gather(x)
    with refuses(r"tensors\[1\] must be of 2 dimensions as tensors\[0\] is, got \(1, 2, 5\)"):
        comm.gather([x, x[None]])
    with refuses(r"tensors\[1\] must be of the shape \(2, 5\) of tensors\[0\] but for dimension 0, got \(2, 4\)"):
        comm.gather([x, x[:, 1:]])
    with refuses("destination must be left out when out is given, got 'cpu'"):
        comm.gather([x], destination="cpu", out=x)
    with refuses(r"out must be of shape \(4, 5\), got \(2, 5\)"):
        comm.gather([x, x], out=x)
    with refuses("destination must be a device: .*, got -2"):
        comm.gather([x], destination=-2)
    with refuses("dim must be from -2 to 1, got -3"):
        comm.gather([x], dim=-3)
    with refuses(r"tensors\[0\] must be a tensor with data, since it goes to cpu"):
        comm.gather([x.to("meta"), x], destination="cpu")


# --- reduce_add ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_reduce_add_adds_as_a_tree(dtype, count):
    inputs = [(torch.randn(4, 3) * 10).to(dtype) for _ in range(count)]
    result = comm.reduce_add(inputs, "cpu")
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tree(torch.add, [x.to(wide) for x in inputs])
    assert torch.equal(result, total.to(dtype))
    assert torch.equal(result, comm.reduce_add_coalesced([[x] for x in inputs], "cpu")[0])
    assert (result is inputs[0]) == (count == 1)


def test_reduce_add_rounds_once():
    inputs = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([1.0], dtype=torch.bfloat16)] * 4
    assert comm.reduce_add(inputs).item() == 260  # one by one, each 1 would be lost


def test_reduce_add_of_sparse():
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
    result = comm.reduce_add([x, x, x])
    assert result.is_sparse and torch.equal(result.to_dense(), 3 * x.to_dense())


def test_reduce_add_on_meta():
    result = comm.reduce_add([numbers(2), numbers(2)], "meta")
    assert result.device.type == "meta" and result.shape == (2,)


def test_reduce_add_refusals():
    x = numbers(2, 3)
    with refuses("inputs must be at least one tensor"):
        comm.reduce_add([])
    with refuses(r"inputs\[1\] must be of the shape \(2, 3\) of inputs\[0\], got \(3, 2\)"):
        comm.reduce_add([x, x.t()])
    with refuses(r"inputs\[2\] must be of the dtype torch.float32 of inputs\[0\], got torch.float64"):
        comm.reduce_add([x, x, x.double()])
    with refuses(r"inputs\[1\] must be of the layout torch.strided of inputs\[0\], got torch.sparse_coo"):
        comm.reduce_add([x, x.to_sparse()])


# --- torch's own names, and the interpreter lock -----------------------------------------------------------------


def test_names_of_the_bindings():
    x = numbers(4, 2)
    assert comm._broadcast(x, ["cpu"]) == [x]
    assert torch.equal(comm._broadcast_out(x, [torch.empty(4, 2)])[0], x)
    assert comm._broadcast_coalesced([x], ["cpu"], 1024)[0][0] is x
    assert [len(p) for p in comm._scatter(x, ["cpu", "cpu"], [1, 3], 0, None)] == [1, 3]
    assert torch.equal(comm._scatter_out(x, [torch.empty(4, 2)], 0, None)[0], x)
    assert torch.equal(comm._gather([x, x], 0, -1), torch.cat([x, x]))
    assert torch.equal(comm._gather_out([x], torch.empty(4, 2), 0), x)


@pytest.mark.parametrize("call", ["gather", "broadcast_coalesced", "pack", "add_many"])
def test_other_threads_run_while_data_moves(call):
    big = [torch.zeros(1 << 20) for _ in range(30)]
    flat, sums = torch.empty(30 << 20), [torch.empty(1 << 20) for _ in big]
    torch_dtypes()
    calls = {
        "gather": lambda: comm.gather(big),
        "broadcast_coalesced": lambda: comm.broadcast_coalesced(big, ["cpu", "cpu"]),
        "pack": lambda: native.pack(flat.data_ptr(), big) or pytest.fail("not taken"),
        "add_many": lambda: native.add_many(sums, [big] * 4, 1 << 30) == [] or pytest.fail("not taken"),
    }
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0002)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        start = time.perf_counter()
        calls[call]()
        end = time.perf_counter()
    finally:
        done.set()
        thread.join(10)
    assert sum(start < t < end for t in ticks) >= 2, "nobody else ran during the call"


def test_bindings_take_their_arguments_by_the_names_that_torch_gives_them():
    """As torch/csrc/cuda/python_comm.cpp declares them; a CPU build has none to compare with."""
    source, twice = torch.arange(6.0).reshape(2, 3), [torch.empty(2, 3), torch.empty(2, 3)]
    cpu = [torch.device("cpu")] * 2
    assert all(t.equal(source) for t in comm._broadcast(tensor=source, devices=cpu))
    assert comm._broadcast_out(tensor=source, out=twice) == twice and all(t.equal(source) for t in twice)
    ((copy,), _) = comm._broadcast_coalesced(tensors=[source], devices=cpu, buffer_size=100)
    assert copy.equal(source)
    parts = comm._scatter(tensor=source, devices=cpu, chunk_sizes=[1, 1], dim=0, streams=None)
    assert [p.tolist() for p in parts] == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
    rows = [torch.empty(1, 3), torch.empty(1, 3)]
    assert comm._scatter_out(tensor=source, out=rows, dim=0, streams=None) == rows and rows[1].equal(source[1:])
    assert comm._gather(tensors=rows, dim=0, destination_index=None).equal(source)
    whole = torch.empty(2, 3)
    assert comm._gather_out(tensors=rows, out=whole, dim=0) is whole and whole.equal(source)


def torchs_own(tensor: torch.Tensor) -> torch.memory_format:
    """What PyTorch's C++ takes its strides for, as an operator shows whose result is in that format: its Python has
    said something else in some versions."""
    if tensor.dim() == 3:
        return torch.contiguous_format
    enlarge = torch.ops.aten.upsample_nearest2d if tensor.dim() == 4 else torch.ops.aten.upsample_nearest3d
    result = enlarge(tensor, [2 * n for n in tensor.shape[2:]])
    if result.stride(1) != 1:  # each plane has several elements
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_memory_formats_are_what_pytorch_takes_strides_for(dims: int):
    formats = [torch.contiguous_format, *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(dims, []))]
    seen = set()
    for shape in itertools.product((1, 2, 3), repeat=dims):
        for given in formats:
            whole = torch.empty([2 * n for n in shape]).to(memory_format=given)
            exact = torch.empty(shape).to(memory_format=given)
            sliced = [
                whole[:, : shape[1]],
                whole[..., : shape[-1]],
                whole[: shape[0]].transpose(0, 1),
                exact.expand(shape),
            ]
            for tensor in (whole, exact, *sliced):
                assert suggested_memory_format(tensor) == torchs_own(tensor), (tensor.shape, tensor.stride())
                seen.add(suggested_memory_format(tensor))
    assert seen == set(formats)


def test_gather_to_minus_one_is_deprecated_as_in_torch():
    with pytest.warns(FutureWarning, match='-1 for the CPU is deprecated; say destination="cpu"'):
        assert comm.gather([torch.ones(1, 2)] * 2, 0, -1).equal(torch.ones(2, 2))
