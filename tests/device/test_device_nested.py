"""scatter and gather of nested structures; modules applied side by side; copies of modules."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from symcomm import comm
from symcomm.errors import BadArgumentError

pytestmark = pytest.mark.torch_versions

CPU2 = ["cpu", "cpu"]


def refuses(words: str):
    return pytest.raises(BadArgumentError, match=words)


class Pair(NamedTuple):
    a: torch.Tensor
    b: list


@dataclasses.dataclass
class Record:
    x: torch.Tensor


class FromPair(collections.namedtuple("FromPair", "left right")):
    def __new__(cls, pair):
        return super().__new__(cls, *pair)


def test_scatter_splits_tensors_and_shares_the_rest():
    marker = object()
    x = torch.arange(4.0)
    value = (x, [x, {"k": x, "n": 3}], Pair(x, [x, "text"]), marker, None, (), [], {})
    first, second = comm.scatter_nested(value, CPU2)
    assert first[0].tolist() == [0, 1] and second[1][1]["k"].tolist() == [2, 3]
    assert isinstance(first[2], Pair) and second[2].b[0].tolist() == [2, 3] and first[2].b[1] == "text"
    assert first[3] is second[3] is marker and first[4] is None and first[1][1]["n"] == 3
    assert first[5:] == ((), [], {})


@pytest.mark.parametrize("value", [3, None, (1, "a"), [1, [2, (3,)]], {"a": 1, "b": [2]}, (), [], {}, ((), [{}])])
def test_structures_without_tensors_are_torchs(value):
    assert comm.scatter_nested(value, CPU2) == torch.nn.parallel.scatter_gather.scatter(value, [0, 1])


def test_dicts_keep_their_type():
    x = torch.arange(4.0)
    ordered = collections.OrderedDict(b=x, a=x)
    default = collections.defaultdict(list, a=x)
    (first, _), (other, _) = comm.scatter_nested(ordered, CPU2), comm.scatter_nested(default, CPU2)
    assert type(first) is collections.OrderedDict and list(first) == ["b", "a"]
    assert type(other) is collections.defaultdict and other["new"] == []
    joined = comm.gather_nested(comm.scatter_nested(ordered, CPU2), "cpu")
    assert type(joined) is collections.OrderedDict and torch.equal(joined["a"], x)


def test_fewer_pieces_than_devices():
    x = torch.arange(2.0)
    assert len(comm.scatter_nested((x, 5), ["cpu"] * 4)) == 2
    inputs, kwargs = comm.scatter_kwargs((x,), {"scale": 2, "mask": x}, ["cpu"] * 4)
    assert len(inputs) == len(kwargs) == 2 and kwargs[1]["mask"].tolist() == [1]


def test_no_rows_are_lost():
    x = torch.arange(8.0)
    with refuses(
        r"scatter_kwargs: kwargs\['y'\] must be of a size in dimension 0 that splits into 2 as inputs\[0\], of size 8, "
        r"does, got 'size 1, which splits into 1'; pass"
    ):
        comm.scatter_kwargs((x,), {"y": x[:1]}, CPU2)
    with refuses(r"scatter_nested: value\[1\]\['k'\] must be of a size .* got 'size 2, which splits into 2'"):
        comm.scatter_nested((x, {"k": x[:2]}), ["cpu"] * 4)
    with refuses(r"value\['t'\] must be a tensor that can be split, got 'a tensor without dimensions'; pass a number"):
        comm.scatter_nested({"t": torch.tensor(1.0)}, CPU2)
    with refuses(r"dim must be from -1 to 0 for value\[1\], got 1"):
        comm.scatter_nested((x.reshape(2, 4), x), CPU2, dim=1)
    assert len(comm.scatter_nested((x[:1], x[:0]), CPU2)) == 1  # of an empty one nothing can be lost


def test_arguments_are_paired():
    x = torch.arange(4.0)
    assert comm.scatter_kwargs((), None, CPU2) == ((), ())
    inputs, kwargs = comm.scatter_kwargs((), {"x": x}, CPU2)
    assert inputs == ((), ()) and kwargs[1]["x"].tolist() == [2, 3]
    inputs, kwargs = comm.scatter_kwargs((x,), {}, CPU2)
    assert len(inputs) == 2 and kwargs == ({}, {})
    inputs, kwargs = comm.scatter_kwargs((7,), {"x": x[:1]}, CPU2)  # one row: one device works
    assert inputs == ((7,),) and kwargs[0]["x"].tolist() == [0]


def test_gather_joins_what_scatter_split():
    x = torch.arange(12.0).reshape(4, 3)
    value = (x, [x, {"k": x, "n": 3}], Pair(x, [x, "text"]), None, True)
    joined = comm.gather_nested(comm.scatter_nested(value, ["cpu"] * 3), "cpu")
    assert torch.equal(joined[0], x) and torch.equal(joined[1][1]["k"], x) and joined[1][1]["n"] == 3
    assert isinstance(joined[2], Pair) and torch.equal(joined[2].b[0], x) and joined[2].b[1] == "text"
    assert joined[3:] == (None, True)
    across = comm.gather_nested(comm.scatter_nested(x, CPU2, dim=1), -1, dim=1)
    assert torch.equal(across, x)


def test_gather_names_what_differs():
    x = torch.zeros(1)
    with refuses(r"outputs\[1\]\['k'\]\[0\] must be a Tensor as outputs\[0\]\['k'\]\[0\] is, got 3"):
        comm.gather_nested([{"k": [x]}, {"k": [3]}], "cpu")
    with refuses(r"outputs\[1\] must be a dict with the keys \['a'\] of outputs\[0\], got \['b'\]"):
        comm.gather_nested([{"a": x}, {"b": x}], "cpu")
    with refuses(r"outputs\[1\] must be of length 2 as outputs\[0\] is, got \(1,\)"):
        comm.gather_nested([(1, 2), (1,)], "cpu")
    with refuses(r"outputs\[1\]\[0\] must be a tensor, or the same as outputs\[0\]\[0\], which is 0.5, got 0.75"):
        comm.gather_nested([[0.5], [0.75]], "cpu")
    with refuses("outputs must be at least one output"):
        comm.gather_nested([], "cpu")
    with refuses("outputs must be a list, one output for each device, got <class 'torch.Tensor'>"):
        comm.gather_nested(x, "cpu")


def test_gather_of_what_is_no_tensor():
    numpy = pytest.importorskip("numpy")
    nan, array = float("nan"), numpy.arange(3)
    assert comm.gather_nested([nan, nan + 1], "cpu") != comm.gather_nested([0.5, 0.5], "cpu")
    assert comm.gather_nested([array, array.copy()], "cpu") is array
    with refuses(r"outputs\[1\] must be a tensor, or the same as outputs\[0\].*got array\(\[0, 1, 3\]\)"):
        comm.gather_nested([array, numpy.array([0, 1, 3])], "cpu")
    with refuses(r"outputs\[1\] must be a tensor, or the same as outputs\[0\]"):
        comm.gather_nested([array, array[:2]], "cpu")
    first, second = Record(torch.zeros(2)), Record(torch.ones(2))
    with refuses(r"outputs\[1\] must be a tensor, or the same as outputs\[0\], which is .*Record\(x=tensor"):
        comm.gather_nested([first, second], "cpu")
    assert comm.gather_nested([first, first], "cpu") is first


def test_namedtuples_that_are_made_differently():
    one, two = comm.scatter_nested(FromPair((torch.arange(4.0), 1)), CPU2)
    assert isinstance(two, FromPair) and two.left.tolist() == [2, 3]
    joined = comm.gather_nested([one, two], "cpu")
    assert isinstance(joined, FromPair) and joined.left.tolist() == [0, 1, 2, 3] and joined.right == 1


# --- modules side by side ----------------------------------------------------------------------------------------


def test_apply_takes_one_argument_or_several():
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    for inputs in ([(a,), (b,)], [a, b], [[a], [b]]):
        outputs = comm.parallel_apply([one, two], inputs)
        assert torch.equal(outputs[0], one(a)) and torch.equal(outputs[1], two(b))
    assert comm.parallel_apply([], []) == []
    scaled = comm.parallel_apply([lambda x, by: x * by] * 2, [a, b], [{"by": 2}, {"by": 3}], CPU2)
    assert torch.equal(scaled[1], b * 3)


def test_apply_is_as_the_caller_is():
    seen = []

    def look(x):
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((*state, torch.get_autocast_dtype("cpu")))
        return x @ x

    x = torch.randn(2, 2)
    plain = (True, False, False, torch.bfloat16)
    comm.parallel_apply([look] * 3, [x] * 3)
    assert seen == [plain] * 3
    for context, expected in (
        (torch.no_grad(), (False, *plain[1:])),
        (torch.inference_mode(), (False, True, *plain[2:])),
        (torch.autocast("cpu", dtype=torch.float16), (True, False, True, torch.float16)),
    ):
        seen.clear()
        with context:
            outputs = comm.parallel_apply([look] * 3, [x] * 3)
        assert seen == [expected] * 3
        assert len({o.dtype for o in outputs}) == 1
    assert outputs[0].dtype == torch.float16


def test_a_failure_is_named_and_carries_its_traceback():
    def fine(x):
        return x

    def wonderful(x):
        return {}["wonderful"]

    with pytest.raises(KeyError) as caught:
        comm.parallel_apply([fine, wonderful, fine], [1, 2, 3], devices=["cpu"] * 3)
    text = str(caught.value)
    assert text.startswith("KeyError in replica 1 on device cpu. Its traceback:\nTraceback (most recent call last)")
    assert 'return {}["wonderful"]' in text and isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError, match=r"in replica 0 .*\(so did replica 1 on device cpu: KeyError\)"):
        comm.parallel_apply([wonderful] * 2, [1, 2])


def test_failures_that_need_more_than_a_message():
    class Odd(Exception):
        def __init__(self, code, why):
            super().__init__(code, why)

    def odd(x):
        raise Odd(3, "because")

    with pytest.raises(RuntimeError, match="Odd in replica 0 on device cpu") as caught:
        comm.parallel_apply([odd], [1])
    assert isinstance(caught.value.__cause__, Odd)

    def leave(x):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        comm.parallel_apply([leave, leave], [1, 2])


def test_apply_refusals():
    with refuses("parallel_apply: inputs must be 2, one for each module, got '1 entries'"):
        comm.parallel_apply([abs, abs], [1])
    with refuses("devices must be 1, one for each module"):
        comm.parallel_apply([abs], [1], None, CPU2)


# --- copies of modules -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.again = self.inner  # shared
        self.tied = self.inner.weight
        self.missing = None
        self.register_parameter("no_parameter", None)
        self.register_buffer("no_buffer", None)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scale", torch.ones(3, requires_grad=True))
        self.list = nn.ParameterList([torch.ones(2), torch.ones(3)])

    def forward(self, x):
        self.count += 1
        return self.again(self.inner(x)) * self.scale + self.list[1]


def test_replicas_are_the_module_over_again():
    net = Net()
    first, second = comm.replicate(net, CPU2)
    x = torch.randn(2, 3)
    assert torch.allclose(first(x), second(x))
    assert second.inner is second.again and second.inner.weight is second.tied
    assert second.no_parameter is None and second.no_buffer is None
    assert list(second.parameters()) == [] and second.inner._former_parameters["weight"] is second.tied
    assert net.count.item() == 1 and second.count.item() == 1  # the first copy counts in the module's own memory
    assert first.inner.weight.data_ptr() == net.inner.weight.data_ptr() != second.inner.weight.data_ptr()


def test_gradients_come_home():
    net = Net()
    x = torch.randn(2, 3)
    sum(r(x).sum() for r in comm.replicate(net, CPU2)).backward()
    doubled = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    scale = net.scale.grad.clone()
    net.zero_grad()
    net.scale.grad = None
    net(x).sum().backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and name in doubled:
            torch.testing.assert_close(doubled[name], 2 * parameter.grad)
    torch.testing.assert_close(scale, 2 * net.scale.grad)


def test_detached_replicas():
    for replica in comm.replicate(Net(), CPU2, detach=True)[1:]:
        assert not replica.inner.weight.requires_grad and not replica.scale.requires_grad
    assert comm.replicate(Net(), []) == []


def test_replicate_refusals():
    with refuses("module must be a torch.nn.Module, got <class 'int'>"):
        comm.replicate(3, CPU2)
    with refuses(r"tensors\[0\] must be a tensor with a shape.*run the module once"):
        comm.replicate(nn.LazyLinear(2), CPU2)
