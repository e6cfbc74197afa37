"""Any sequence of calls: a dict, our stores and PyTorch's answer alike."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from symcomm.store import FileStore, HashStore

pytestmark = [pytest.mark.torch_versions, pytest.mark.without_torch]

try:
    from torch.distributed import HashStore as TorchHashStore
except ModuleNotFoundError:  # then ours are compared with the dict alone
    TorchHashStore = HashStore

KEYS, NUMBERS, QUEUES = st.sampled_from(["", "k", "k/1"]), st.sampled_from(["n", "m"]), st.sampled_from(["q", "k"])
VALUES = st.sampled_from([b"", b"a", b"b", b"\x00\xff", b"a" * 300])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("add"), NUMBERS, st.integers(-(2**57), 2**57)),  # 40 of them fit in 64 bits
    st.tuples(st.just("delete_key"), st.one_of(KEYS, NUMBERS)),
    st.tuples(st.just("check"), st.lists(st.one_of(KEYS, NUMBERS, QUEUES), max_size=3)),
    st.tuples(st.just("multi_set"), st.just(["k", "k/1"]), st.lists(VALUES, min_size=2, max_size=2)),
    st.tuples(st.just("queue_push"), QUEUES, VALUES),
    st.tuples(st.just("queue_pop"), QUEUES, st.just(False)),
    st.tuples(st.just("queue_len"), QUEUES),
    st.tuples(st.just("num_keys")),
)


class Model:
    """The same calls in the plainest way."""

    def __init__(self):
        self.data, self.queues = {}, {}

    def set(self, key, value):
        self.data[key] = value

    def append(self, key, value):
        self.data[key] = self.data.get(key, b"") + value

    def compare_set(self, key, expected, desired):
        if self.data.get(key, b"") == expected:
            self.data[key] = desired
        return self.data.get(key, expected)

    def add(self, key, amount):
        total = int(self.data.get(key, 0)) + amount
        self.data[key] = str(total).encode()
        return total

    def delete_key(self, key):
        return self.data.pop(key, None) is not None

    def check(self, keys):
        return all(key in self.data or self.queues.get(key) for key in keys)

    def multi_set(self, keys, values):
        self.data.update(zip(keys, values, strict=True))

    def queue_push(self, key, value):
        self.queues.setdefault(key, []).append(value)

    def queue_pop(self, key, block):
        return self.queues[key].pop(0) if self.queues.get(key) else "empty"

    def queue_len(self, key):
        return len(self.queues.get(key, []))

    def num_keys(self):
        return len(self.data)

    def list_keys(self):
        return list(self.data)

    def get(self, key):
        return self.data[key]


def result_of(store, call):
    name, *arguments = call
    try:
        return getattr(store, name)(*arguments)
    except RuntimeError as error:
        assert "empty" in str(error)
        return "empty"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=40))
def test_any_sequence_of_calls(calls, tmp_path):
    """A dict, HashStore, two handles on a FileStore in turn, and PyTorch's HashStore answer alike."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        handles = [FileStore(f"{folder}/log"), FileStore(f"{folder}/log")]
        model, hashed, theirs = Model(), HashStore(), TorchHashStore()
        for i, call in enumerate(calls):
            answers = [result_of(store, call) for store in (model, hashed, handles[i % 2], theirs)]
            assert answers == answers[:1] * 4, call
        for store in (model, hashed, *handles, FileStore(f"{folder}/log"), theirs):
            assert {key: store.get(key) for key in store.list_keys()} == model.data
