"""Stores by PyTorch's names: the same calls on both kinds, and each kind used by the other side."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.errors import DeadlineError
from tests.c10d_compare import ours, outcome, plain, same, theirs

CONSTRUCTORS = """
m.HashStore() | m.HashStore(3) | m.FileStore() | m.FileStore(3) | m.PrefixStore('a') | m.PrefixStore('a', 3)
m.PrefixStore(3, m.HashStore()) | m.PrefixStore('a', m.HashStore()) | m.PrefixStore(prefix='a', store=m.HashStore())
m.PrefixStore('a', m.HashStore()).underlying_store | m.TCPStore() | m.TCPStore('localhost') | m.Store() | m.Store(3)
m.PrefixStore('a', m.PrefixStore('b', m.HashStore()))._underlying_non_prefix_store | m.Store().timeout
m.Store().has_extended_api() | m.Store().get('a') | m.Store().set('a', 'b') | m.HashStore().has_extended_api()
isinstance(m.HashStore(), m.Store) | isinstance(m.PrefixStore('a', m.HashStore()), m.Store)
issubclass(m.TCPStore, m.Store)
m.HashStore().timeout | m.HashStore().set_timeout(td(seconds=2)) | m.HashStore().set_timeout('x')
m.HashStore().clone()
"""
CALLS = """
set('a', 'b') | set('a', b'b') | set('a') | set('a', 3) | set(3, 'a') | set('', '') | get() | check(['a']) | check([])
check('a') | check(3) | wait('a') | wait(['a'], td(milliseconds=20)) | wait([], td(milliseconds=20)) | add('a', 1)
add('a', 'x') | add('a') | add('a', -3) | compare_set('a', 'x', 'y') | compare_set('a', '', 'y') | compare_set('a')
delete_key('a') | delete_key() | num_keys() | list_keys() | append('a', 'b') | append('a') | multi_get([])
multi_set([], [])
queue_len('a') | queue_pop('a', False) | queue_push('a', 'b') | queue_push('a') | barrier('a', 1) | barrier('a')
barrier('a', 2, td(milliseconds=20)) | get(None) | multi_get('a') | multi_set('ab', 'cd')
"""


def table(text: str) -> list[str]:
    return [item.strip() for item in text.replace("\n", "|").split("|") if item.strip()]


@pytest.mark.parametrize("expression", table(CONSTRUCTORS))
def test_constructors(expression: str):
    same(expression, loosely=True)


@pytest.mark.parametrize("call", table(CALLS))
def test_calls_on_an_empty_store(call: str):
    same(f"s = m.HashStore()\ns.{call}", loosely=True)


STORY = """
s.set('a', '1')
s.set('b', b'2')
s.append('a', 'x')
s.append('new', 'y')
s.multi_set(['c', 'd'], ['3', '4'])
s.queue_push('q', 'first')
s.queue_push('q', 'second')
seen = [s.get('a'), s.multi_get(['b', 'c', 'd']), s.add('n', 5), s.add('n', -2), s.get('n'), s.check(['a', 'zz'])]
seen += [s.compare_set('b', '2', '22'), s.compare_set('b', 'no', '3'), s.get('b'), s.delete_key('c'), s.check(['c'])]
seen += [s.queue_len('q'), s.queue_pop('q'), s.queue_pop('q', block=False), s.queue_len('q'), s.get('new')]
s.wait(['a', 'b'])
s.wait(['a'], td(seconds=1))
[*seen, sorted(s.list_keys())]
"""


@pytest.mark.parametrize("store", ["m.HashStore()", "m.PrefixStore('p', m.HashStore())"])
def test_a_story(store: str):
    same(f"s = {store}\n{STORY.strip()}")


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore", "PrefixStore"])
def test_the_same_story_on_ours_dressed_as_pytorchs(kind: str, tmp_path):
    made = {
        "HashStore": lambda: ours.HashStore(),
        "FileStore": lambda: ours.FileStore(str(tmp_path / "store"), 1),
        "TCPStore": lambda: ours.TCPStore("localhost", 0, 1, True, timedelta(seconds=20)),
        "PrefixStore": lambda: ours.PrefixStore("p", ours.HashStore()),
    }[kind]()
    dressed = ours.as_torch_store(made)
    assert isinstance(dressed, dist.Store)
    wanted = outcome(f"s = m.HashStore()\n{STORY.strip()}", theirs)
    got = outcome(STORY, ours, s=dressed)
    assert plain(got[1]) == plain(wanted[1]) and got[0] == "gave"


def test_cpp_reaches_ours():
    """PyTorch's PrefixStore is C++: every call below goes through it into ours and back."""
    inner = ours.HashStore()
    dressed = ours.as_torch_store(inner)
    outside = theirs.PrefixStore("p", dressed)
    outside.set("a", "1")
    outside.append("a", "2")
    outside.multi_set(["b"], ["3"])
    assert outside.multi_get(["a", "b"]) == [b"12", b"3"]
    assert outside.add("n", 4) == 4 and outside.check(["a", "n"])
    assert outside.compare_set("a", "12", "new") == b"new" and outside.get("a") == b"new"
    outside.wait(["a"], timedelta(seconds=1))
    if hasattr(outside, "barrier"):  # since torch 2.13
        outside.barrier("all", 1)
    assert outside.delete_key("a") and not outside.check(["a"])
    assert outside.num_keys() == inner.num_keys() and inner.get("p/n") == b"4"
    with pytest.raises(dist.DistStoreError, match="nobody set key 'p/never'"):
        outside.wait(["never"], timedelta(milliseconds=20))


def test_as_torch_store_leaves_pytorchs_alone():
    store = dist.HashStore()
    assert ours.as_torch_store(store) is store
    with pytest.raises(TypeError, match="as_torch_store: store must be a Store, got 3"):
        ours.as_torch_store(3)


def test_empty_queue_in_words_of_both():
    with pytest.raises(dist.QueueEmptyError):
        ours.as_torch_store(ours.HashStore()).queue_pop("q", block=False)
    with pytest.raises(ours.QueueEmptyError):
        ours.HashStore().queue_pop("q", block=False)
    assert issubclass(ours.QueueEmptyError, RuntimeError) and issubclass(dist.QueueEmptyError, RuntimeError)


def test_nobody_needs_to_hold_the_dressed_store():
    outside = theirs.PrefixStore("p", ours.as_torch_store(ours.HashStore()))
    clone = outside.clone()
    gc.collect()
    clone.set("a", "1")
    assert outside.get("a") == b"1"


def test_gloo_on_our_store():
    group = dist.ProcessGroupGloo(ours.as_torch_store(ours.HashStore()), 0, 1, timedelta(seconds=20))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1, 1, 1]


def test_init_process_group_with_our_store():
    store = ours.as_torch_store(ours.HashStore())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        got = [None]
        dist.all_gather_object(got, {"a": 1})
        assert got == [{"a": 1}]
    finally:
        dist.destroy_process_group()


# --- Python subclasses --------------------------------------------------------------------------------------------


def make_subclass(base):
    class Dict(base):
        def __init__(self):
            super().__init__()
            self.data = {}

        def set(self, key, value):
            self.data[key] = value.encode() if isinstance(value, str) else value

        def get(self, key):
            return self.data[key]

        def add(self, key, amount):
            self.data[key] = str(int(self.data.get(key, b"0")) + amount).encode()
            return int(self.data[key])

        def check(self, keys):
            return all(key in self.data for key in keys)

        def compare_set(self, key, expected, desired):
            old, new = (v.encode() if isinstance(v, str) else v for v in (expected, desired))
            if self.data.get(key, b"") == old:
                self.data[key] = new
            return self.data.get(key, old)

        def delete_key(self, key):
            return self.data.pop(key, None) is not None

        deleteKey = delete_key

        def wait(self, keys, timeout=None):
            if not self.check(keys):
                raise RuntimeError("not there")

    return Dict()


def test_a_store_written_in_python_passes_both_tests():
    ours._test_python_store(make_subclass(ours.Store))
    ours._test_python_store(ours.HashStore())
    ours._test_python_store(dist.HashStore())
    theirs._test_python_store(ours.as_torch_store(make_subclass(ours.Store)))
    theirs._test_python_store(ours.as_torch_store(ours.HashStore()))
    same("m._test_python_store(3)")


def test_a_store_that_forgets_is_noticed():
    store = make_subclass(ours.Store)
    store.add = lambda key, amount: amount
    with pytest.raises(RuntimeError, match=r"_test_python_store: Dict.add gave 2, not 3"):
        ours._test_python_store(store)


# --- control collectives ------------------------------------------------------------------------------------------

COLLECTIVES = """
m._ControlCollectives() | m._StoreCollectives(3, 0, 1) | m._StoreCollectives()
m._StoreCollectives(m.HashStore(), 0, 1)
isinstance(m._StoreCollectives(m.HashStore(), 0, 1), m._ControlCollectives)
m._StoreCollectives(m.HashStore(), 0, 1).all_sum('a', 3) | m._StoreCollectives(m.HashStore(), 0, 1).all_gather('a', 'x')
m._StoreCollectives(m.HashStore(), 0, 1).barrier('a') | m._StoreCollectives(m.HashStore(), 0, 1).gather_recv('a', 'x')
m._StoreCollectives(m.HashStore(), 0, 1).scatter_send('a', ['x'])
m._StoreCollectives(m.HashStore(), 0, 1).all_sum('a')
m._StoreCollectives(m.HashStore(), 0, 2).barrier('a', td(milliseconds=20))
m._StoreCollectives(m.HashStore(), 0, 2).broadcast_recv('a', td(milliseconds=20))
"""


@pytest.mark.parametrize("expression", table(COLLECTIVES))
def test_collectives_alone(expression: str):
    same(expression, loosely=True)


def test_scattering_too_little_is_refused():
    """PyTorch's takes it, and a rank waits in vain."""
    with pytest.raises(ValueError, match="scatter_send: data must be a list of 2 items"):
        ours._StoreCollectives(ours.HashStore(), 0, 2).scatter_send("a", ["x"])


def test_a_key_serves_once():
    same("c = m._StoreCollectives(m.HashStore(), 0, 1)\nc.barrier('a')\nc.barrier('a')")


def run_collectives(module, store) -> list:
    """Two ranks that make every call once."""
    seen: list = [None, None]

    def rank_main(rank: int) -> None:
        c = module._StoreCollectives(store, rank, 2)
        limit = timedelta(seconds=20)
        got = [c.all_sum("sum", rank + 1, limit), c.all_gather("all", f"from {rank}", limit)]
        if rank == 0:
            c.broadcast_send("b", "news")
            got += [c.gather_recv("g", "mine", limit), c.scatter_send("s", ["for 0", "for 1"], limit)]
        else:
            c.gather_send("g", "yours")
            got += [c.broadcast_recv("b", limit), c.scatter_recv("s", limit)]
        c.barrier("end", limit)
        seen[rank] = got

    threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return seen


def test_two_ranks():
    wanted = run_collectives(theirs, theirs.HashStore())
    assert None not in wanted
    assert run_collectives(ours, ours.HashStore()) == wanted
    assert run_collectives(ours, theirs.HashStore()) == wanted
    assert run_collectives(theirs, ours.as_torch_store(ours.HashStore())) == wanted


def test_who_is_missing_is_named():
    with pytest.raises(DeadlineError, match="rank 1 did not come"):
        ours._StoreCollectives(ours.HashStore(), 0, 2).barrier("a", timedelta(milliseconds=20))
