"""Stores by PyTorch's names: the same calls on both kinds, and each kind used by the other side."""

from __future__ import annotations

import gc
import pickle
import re
import socket
import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.errors import DeadlineError, SymcommError
from symcomm.torch_backend.register import register
from tests.support.c10d_compare import ours, outcome, plain, same, since_2_15, theirs

pytestmark = pytest.mark.torch_versions

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
    same(expression)


@pytest.mark.parametrize("call", table(CALLS))
def test_calls_on_an_empty_store(call: str):
    same(f"s = m.HashStore()\ns.{call}")


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


FAKE = [
    "set('a', 'b')", "get('a')", "add('a', 3)", "check(['a'])", "wait(['a'])", "compare_set('a', 'b', 'c')",
    "delete_key('a')", "num_keys()", "multi_get(['a', 'b'])", "multi_set(['a'], ['b'])", "append('a', 'b')",
    "list_keys()", "queue_push('a', 'b')", "queue_pop('a')", "queue_len('a')", "has_extended_api()", "timeout",
    "clone()", "barrier('k', 2, td(seconds=1))", "wait(['q'], td(seconds=1))",
]  # fmt: skip


@since_2_15
@pytest.mark.parametrize("call", FAKE)
def test_the_fake_store(call: str):
    same(f"m.FakeStore().{call}")


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


def wait_in_vain(store) -> None:
    store.set_timeout(timedelta(milliseconds=20))
    store.get("never")


FAILURES = {
    "a key": (lambda _: wait_in_vain(ours.HashStore()), dist.DistStoreError),
    "a key in a file": (lambda tmp: wait_in_vain(ours.FileStore(str(tmp / "store"), 1)), dist.DistStoreError),
    "a key of a server": (lambda _: wait_in_vain(ours.TCPStore("localhost", 0, 1, True)), dist.DistStoreError),
    "a part": (lambda _: wait_in_vain(ours.PrefixStore("p", ours.HashStore())), dist.DistStoreError),
    "a barrier": (lambda _: ours.HashStore().barrier("b", 2, timedelta(milliseconds=20)), dist.DistStoreError),
    "a queue": (lambda _: ours.HashStore().queue_pop("q", False), dist.QueueEmptyError),
    "workers": (lambda _: ours.TCPStore("localhost", 0, 2, True, timedelta(milliseconds=20)), dist.DistStoreError),
    "a server": (lambda _: ours.TCPStore("localhost", 1, timeout=timedelta(milliseconds=20)), dist.DistNetworkError),
    "a port": (lambda _: [ours.TCPStore("localhost", s.port, 1, True) for s in [serve()]], dist.DistNetworkError),
    "the server's end": (lambda _: get_from_the_dead(), dist.DistNetworkError),
}


def serve():
    return ours.TCPStore("localhost", 0, 1, True, timedelta(seconds=20))


def get_from_the_dead() -> None:
    server = serve()
    client = ours.TCPStore("localhost", server.port)
    server.close()
    client.get("a")


@pytest.mark.parametrize("what", FAILURES)
def test_failures_can_be_caught_by_pytorchs_names(what: str, tmp_path):
    fail, theirs_is = FAILURES[what]
    with pytest.raises(theirs_is) as info:
        fail(tmp_path)
    assert isinstance(info.value, dist.DistError) and isinstance(info.value, SymcommError)
    again = pickle.loads(pickle.dumps(info.value))
    assert type(again) is type(info.value) and str(again) == str(info.value)


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


def test_init_process_group_takes_our_stores_as_they_are(tmp_path):
    register()
    for store in (serve(), ours.FileStore(str(tmp_path / "store"), 1), ours.PrefixStore("p", ours.HashStore())):
        dist.init_process_group("symcomm", store=store, rank=0, world_size=1)
        try:
            dist.barrier()
            inner = dist.distributed_c10d._get_default_store()
            while isinstance(inner, dist.PrefixStore):
                inner = inner.underlying_store
            assert inner is store
        finally:
            dist.destroy_process_group()


def test_a_dressed_store_tells_what_the_store_has():
    store = serve()
    dressed = ours.as_torch_store(store)
    assert (dressed.host, dressed.port, dressed.libuvBackend) == ("localhost", store.port, True)
    with pytest.raises(AttributeError, match="nonsense"):
        dressed.nonsense  # noqa: B018


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


def make_small(base):
    """A store that defines the required methods only, and checks its arguments strictly."""

    class Small(base):
        def __init__(self):
            super().__init__()
            self.data = {}

        def set(self, key, value):
            assert type(key) is str and type(value) is bytes
            self.data[key] = value

        def get(self, key):
            return self.data[key]

        def add(self, key, amount):
            self.data[key] = b"%d" % (int(self.data.get(key, 0)) + amount)
            return int(self.data[key])

        def compare_set(self, key, expected, desired):
            assert type(expected) is type(desired) is bytes
            if self.data.get(key, b"") == expected:
                self.data[key] = desired
            return self.data.get(key, expected)

        def clone(self):
            return self

    return Small()


@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "theirs"])
def test_a_small_store_gets_bytes_and_need_not_define_the_rest(module):
    store = make_small(module.Store)
    module._test_python_store(store)
    part = module.PrefixStore("p", store)
    part.set("a", "1")
    part.append("b", "2")
    part.append("b", "3")
    part.multi_set(["c", "d"], ["4", b"5"])
    assert part.compare_set("a", "1", "6") == b"6"
    assert part.multi_get(["a", "b", "c", "d"]) == [b"6", b"23", b"4", b"5"]
    for call in ("queue_push('q', 'x')", "queue_pop('q')", "queue_len('q')", "list_keys()"):
        for s in (store, part):
            with pytest.raises(NotImplementedError):
                eval(f"s.{call}", {"s": s})


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
    same(expression)


def test_scattering_too_little_is_refused():
    """PyTorch accepts it, and a rank waits forever."""
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


WORDS = [[3, [b"from 0", b"from 1"], [b"mine", b"yours"], b"for 0"], [3, [b"from 0", b"from 1"], b"news", b"for 1"]]


def test_two_ranks():
    assert run_collectives(ours, ours.HashStore()) == run_collectives(ours, theirs.HashStore()) == WORDS


@pytest.mark.skipif(not hasattr(theirs, "_StoreCollectives"), reason="torch 2.15 has no collectives on stores any more")
def test_two_ranks_as_in_pytorch():
    wanted = run_collectives(theirs, theirs.HashStore())
    assert None not in wanted
    assert run_collectives(ours, ours.HashStore()) == wanted
    assert run_collectives(ours, theirs.HashStore()) == wanted
    assert run_collectives(theirs, ours.as_torch_store(ours.HashStore())) == wanted


def test_who_is_missing_is_named():
    with pytest.raises(DeadlineError, match="rank 1 did not come"):
        ours._StoreCollectives(ours.HashStore(), 0, 2).barrier("a", timedelta(milliseconds=20))


@pytest.mark.parametrize("through", ["itself", "a prefix"])
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "theirs"])
def test_a_class_is_asked_by_the_names_that_c_plus_plus_has(module, through: str):
    asked = []

    class Counting(module.Store):
        def getNumKeys(self) -> int:
            return 7

        def deleteKey(self, key: str) -> bool:
            asked.append(key)
            return True

    store = Counting()
    used = store if through == "itself" else module.PrefixStore("p", store)
    assert used.num_keys() == 7 and used.delete_key("k") is True
    assert asked == ["k" if through == "itself" else "p/k"]


def test_a_class_that_defines_pythons_names_answers_to_both():
    class Plain(ours.Store):
        def num_keys(self) -> int:
            return 3

        def delete_key(self, key: str) -> bool:
            return key == "there"

    assert Plain().getNumKeys() == 3 and Plain().deleteKey("there") and not Plain().deleteKey("not there")


TCP = "s = m.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
FREE = "with socket.socket() as q: q.bind(('127.0.0.1', 0)); p = q.getsockname()[1]"
# calls of real programs, and the words that they look for in the error
LOOKED_FOR = [
    ("m.HashStore().wait(['k'], td(milliseconds=20))", "(?i)timeout"),
    ("m.PrefixStore('p', m.HashStore()).wait(['k'], td(milliseconds=20))", "(?i)timeout"),
    (f"{TCP}\ns.wait(['k'], td(milliseconds=20))", "wait timeout after 20ms, keys: /k"),
    (f"{TCP}\ns.set_timeout(td(milliseconds=20))\ns.get('k')", "wait timeout after 20ms, keys: /k"),
    (f"{TCP}\ns.set_timeout(td(milliseconds=20))\ns.multi_get(['k'])", "wait timeout after 20ms, keys: /k"),
    (f"{TCP}\ns.set_timeout(td(milliseconds=20))\ns.queue_pop('q')", "wait timeout after 20ms, keys: /q"),
    (f"{TCP}\ns.barrier('b', 2, td(milliseconds=20))", "barrier timeout after 20ms, key: b"),
    (f"{TCP}\ns.queue_pop('q', False)", "queue is empty"),
    (f"{TCP}\nm.TCPStore('127.0.0.1', s.port, is_master=True)", "^The server socket has failed to listen on any "),
    (f"{FREE}\nm.TCPStore('127.0.0.1', p, is_master=False, timeout=td(milliseconds=200))",
     r"(?i)the client socket has timed out after 200ms while trying to connect to \(127.0.0.1, "),
    ("m.TCPStore('127.0.0.1', 0, 2, True, timeout=td(milliseconds=200))", "1/2 clients joined"),
    ("class X(m.Store): pass\nX().set('a', 'b')", "Not implemented"),
    ("class X(m.Store): pass\nX().get('a')", "Not implemented"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "words"), LOOKED_FOR, ids=[code.splitlines()[-1] for code, _ in LOOKED_FOR])
@pytest.mark.parametrize("module", [theirs, ours], ids=["theirs", "ours"])
def test_words_that_programs_look_for(module, code: str, words: str):
    if module is theirs and ".barrier(" in code and not hasattr(theirs.TCPStore, "barrier"):
        pytest.skip("this torch's stores have no barrier")
    kind, error = outcome(code, module, socket=socket)
    assert kind == "raised" and isinstance(error, RuntimeError) and re.search(words, str(error)), error


def keys_of_a_file(module, path) -> list:
    """The number of keys and what deleting returns, at each step."""
    store = module.FileStore(path, 2)
    seen = [store.num_keys()]
    store.set("a", "1")
    seen += [store.num_keys(), store.delete_key("a"), store.num_keys(), store.delete_key("a"), store.delete_key("b")]
    store.add("n", 1)
    store.append("c", "x")
    other = module.FileStore(path, 2)
    part = module.PrefixStore("p", store)
    seen += [store.num_keys(), other.num_keys(), part.num_keys(), part.delete_key("n"), part.num_keys()]
    store.multi_set(["d", "e"], ["1", "2"])
    return [*seen, store.num_keys(), store.delete_key("e"), store.num_keys(), other.check(["e"])]


def test_keys_of_a_file_are_counted_as_in_pytorch(tmp_path):
    mine, wanted = keys_of_a_file(ours, str(tmp_path / "mine")), keys_of_a_file(theirs, str(tmp_path / "theirs"))
    assert mine == wanted and mine[0] == 1
