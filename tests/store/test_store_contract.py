"""What every store does, checked on all of ours and on PyTorch's own, side by side.

Where PyTorch's differ, ``PYTORCH_DIFFERS`` says so, and the difference itself is checked: the test must fail there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from symcomm.errors import BadArgumentError, CallerError, DeadlineError
from symcomm.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from symcomm.store.base import QueueEmptyError
from tests.support.stores import MinimalStore, TinyStore

pytestmark = [pytest.mark.torch_versions, pytest.mark.without_torch, pytest.mark.long]

try:
    import torch.distributed as dist
except ModuleNotFoundError:  # our own stores do not need it
    dist = None  # type: ignore[assignment]

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=30)
Connect = Callable[[], Any]  # gives one more handle on the same store


# --- the stores ------------------------------------------------------------------------------------


def same(store: Any) -> Connect:
    return lambda: store


def tcp(cls: Any) -> Connect:
    server = cls("127.0.0.1", 0, None, True, wait_for_workers=False)
    first = [server]

    def connect() -> Any:
        return first.pop() if first else cls("127.0.0.1", server.port, None, False, wait_for_workers=False)

    return connect


def prefixed(cls: Any, connect: Connect) -> Connect:
    return lambda: cls("part", connect())


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], Connect]

    @property
    def pytorch(self) -> bool:
        return "torch" in self.name


CASES = [
    Case("HashStore", lambda path: same(HashStore())),
    Case("FileStore", lambda path: lambda: FileStore(str(path / "store"))),
    Case("MinimalStore", lambda path: same(MinimalStore())),
    Case("PrefixStore on HashStore", lambda path: prefixed(PrefixStore, same(HashStore()))),
    Case("PrefixStore on FileStore", lambda path: prefixed(PrefixStore, lambda: FileStore(str(path / "store")))),
    Case("PrefixStore on MinimalStore", lambda path: prefixed(PrefixStore, same(MinimalStore()))),
    Case("torch HashStore", lambda path: same(dist.HashStore())),
    Case("torch FileStore", lambda path: lambda: dist.FileStore(str(path / "store"))),
    Case("torch TCPStore", lambda path: tcp(dist.TCPStore)),
    Case("torch PrefixStore on HashStore", lambda path: prefixed(dist.PrefixStore, same(dist.HashStore()))),
    Case(
        "torch PrefixStore on FileStore",
        lambda path: prefixed(dist.PrefixStore, lambda: dist.FileStore(str(path / "store"))),
    ),
    Case("torch PrefixStore on TCPStore", lambda path: prefixed(dist.PrefixStore, tcp(dist.TCPStore))),
    Case("PrefixStore on torch HashStore", lambda path: prefixed(PrefixStore, same(dist.HashStore()))),
    Case("TCPStore", lambda path: tcp(TCPStore)),
    Case("PrefixStore on TCPStore", lambda path: prefixed(PrefixStore, tcp(TCPStore))),
]
CASES = [case for case in CASES if dist is not None or not case.pytorch]

# --- known differences -------------------------------------------------------------------------------
# A plain text: the test must fail there. MAYBE: it is a race, so it may. SKIP: it cannot be tried.

NO_QUEUES = {
    "test_queue_is_first_in_first_out": "has no queues",
    "test_queue_and_key_of_one_name_are_apart": "has no queues",
    "test_queue_pop_of_nothing": "has no queues",
    "test_queue_pop_waits": "has no queues",
    "test_queue_pop_takes_each_value_once": "has no queues",
    "test_check_and_wait_see_a_filled_queue": "has no queues",
}
ANY_PYTORCH = {
    "test_barrier_can_be_used_again": "a second barrier with the same key lets everybody through",
    "test_barrier_forgets_who_gave_up": "whoever gave up is still counted, and the next caller is let through alone",
    "test_add_refuses_a_sum_that_does_not_fit": "wraps around to another number",
    "test_bad_input_is_one_clear_sentence": "raises a TypeError that lists C++ signatures",
    "test_uneven_multi_set_is_refused": "SKIP: reads memory that is not its own, and may crash",
    "test_bytes_that_are_no_text_are_no_key": "takes them, and list_keys fails from then on",
    "test_timeout_names_the_missing_keys": "does not say which keys",
}
PYTORCH = {
    "HashStore": {"test_zero_timeout_does_not_wait": "SKIP: waits for ever"},
    "FileStore": NO_QUEUES
    | {
        "test_zero_timeout_does_not_wait": "SKIP: waits for ever",
        "test_delete_key": "delete_key is always True",
        "test_num_keys_counts_ours_only": "counts its own bookkeeping",
        "test_list_keys": "shows its own bookkeeping",
        "test_extended_api": "has_extended_api is False, though append and multi_get work",
        "test_clone_keeps_the_timeout": "a clone has the default timeout",
        "test_concurrent_append": "MAYBE: loses a value that is appended twice in a row",
    },
    "TCPStore": {
        "test_add_to_an_empty_value": "the server drops the connection",
        "test_timeout_names_the_missing_keys": "names the keys that came as well",
        "test_zero_timeout_does_not_wait": "MAYBE: times out for keys that are there",
        "test_queue_pop_takes_each_value_once": "MAYBE: a waiting pop may say that the queue is empty",
    },
}
PYTORCH_PREFIX = {
    "test_barrier_times_out_as_the_store_does": "SKIP: waits 300 s, whatever set_timeout said",
    "test_list_keys": "",
}
OUR_PREFIX_ON_PYTORCH = dict.fromkeys(
    [
        "test_add_refuses_a_sum_that_does_not_fit",
        "test_barrier_forgets_who_gave_up",
        "test_bad_input_is_one_clear_sentence",
        "test_uneven_multi_set_is_refused",
        "test_timeout_names_the_missing_keys",
        "test_zero_timeout_does_not_wait",
    ],
    "SKIP: this is the inner store's to do, which is PyTorch's",
)
SUBCLASS = (
    NO_QUEUES
    | {"test_extended_api": "made of simpler calls, as it should say"}
    | dict.fromkeys(
        [
            "test_add_to_an_empty_value",
            "test_add_refuses_a_sum_that_does_not_fit",
            "test_add_refuses_a_value_that_does_not_fit",
            "test_add_takes_the_number_at_the_start",
            "test_bad_input_is_one_clear_sentence",
            "test_bytes_that_are_no_text_are_no_key",
        ],
        "SKIP: this is for the user's class to do",
    )
)


def difference(case: Case, test: str) -> str:
    """How ``test`` must end for ``case`` if not well; see above."""
    if "MinimalStore" in case.name:
        return SUBCLASS.get(test, "")
    if not case.pytorch:
        return ""
    if case.name.startswith("PrefixStore"):
        return OUR_PREFIX_ON_PYTORCH.get(test, "")
    prefix = PYTORCH_PREFIX if "PrefixStore" in case.name else {}
    return prefix.get(test, PYTORCH[case.name.split()[-1]].get(test, ANY_PYTORCH.get(test, "")))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    why = difference(request.param, request.function.__name__)
    if why.startswith("SKIP"):
        pytest.skip(why)
    if why:
        request.applymarker(pytest.mark.xfail(reason=why, strict=not why.startswith("MAYBE")))
    return request.param


@pytest.fixture
def connect(case: Case, tmp_path: Path) -> Connect:
    return case.make(tmp_path)


@pytest.fixture
def store(connect: Connect) -> Any:
    one = connect()
    one.set_timeout(LONG)
    return one


def in_background(fn: Callable[..., Any], *args: Any) -> Any:
    """Start ``fn`` in a thread; ``.result(timeout)`` has what it returned."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(fn, *args)
    pool.shutdown(wait=False)
    return future


# --- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [b"", b"x", b"\x00\xff" * 3, "text", "ü", b"long" * 50_000], ids=lambda v: repr(v[:4])
)
def test_set_then_get(store, value):
    store.set("key", value)
    got = store.get("key")
    assert type(got) is bytes
    assert got == (value.encode() if isinstance(value, str) else value)


def test_set_replaces(store):
    store.set("key", "one")
    store.set("key", "two")
    assert store.get("key") == b"two"


@pytest.mark.parametrize("key", ["", "a/b", "with space", "ключ", "k" * 5000, "new\nline"])
def test_any_text_is_a_key(store, key):
    store.set(key, "value")
    assert store.get(key) == b"value"
    assert store.check([key])


def test_other_handles_see_the_same(connect):
    one, two = connect(), connect()
    one.set("key", "value")
    assert two.get("key") == b"value"
    assert two.add("n", 1) == 1
    assert one.add("n", 1) == 2


def test_check(store):
    store.set("here", "")
    assert store.check(["here"]) is True
    assert store.check(["here", "not"]) is False
    assert store.check([]) is True


def test_append(store):
    store.append("key", "one")
    store.append("key", b"\x00two")
    assert store.get("key") == b"one\x00two"


def test_append_nothing(store):
    store.append("key", "")
    assert store.get("key") == b""


def test_multi_set_and_get(store):
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    store.multi_set([], [])
    assert store.multi_get([]) == []


def test_delete_key(store):
    store.set("key", "value")
    assert store.delete_key("key") is True
    assert store.check(["key"]) is False
    assert store.delete_key("key") is False


def test_num_keys_counts_ours_only(store):
    assert store.num_keys() == 0
    store.set("a", "1")
    store.set("a", "2")
    store.add("b", 1)
    assert store.num_keys() == 2


def test_list_keys(store):
    store.set("a", "1")
    store.add("b/c", 1)
    assert sorted(store.list_keys()) == ["a", "b/c"]


def test_extended_api(store):
    assert store.has_extended_api() is True


# --- counters and compare_set ------------------------------------------------------------------------


def test_add(store):
    assert store.add("n", 0) == 0
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_add_to_an_empty_value(store):
    store.set("n", "")
    assert store.add("n", 3) == 3


def test_add_refuses_a_sum_that_does_not_fit(store):
    assert store.add("n", 2**62) == 2**62
    with pytest.raises(IndexError):
        store.add("n", 2**62)
    assert store.get("n") == b"%d" % 2**62 and store.add("n", 2**62 - 1) == 2**63 - 1


@pytest.mark.parametrize("text", ["9" * 20, "-" + "9" * 20, str(2**63), str(-(2**63) - 1), "9" * 5000])
def test_add_refuses_a_value_that_does_not_fit(store, case, text: str):
    store.set("key", text)
    with pytest.raises((IndexError, RuntimeError)) as info:
        store.add("key", 1)
    if not case.pytorch or "HashStore" in case.name:  # PyTorch's server hangs up
        assert isinstance(info.value, IndexError)
        assert store.get("key") == text.encode()


def test_add_takes_the_number_at_the_start(store):
    for text, number in (("5x", 5), (" \t-7 apples", -7), ("+3.9", 3), ("0x10", 0), ("1_000", 1), ("0" * 80 + "8", 8)):
        store.set("key", text)
        assert store.add("key", 1) == number + 1 and store.get("key") == b"%d" % (number + 1)


@pytest.mark.parametrize("text", ["words", "--5", " ", "x5"])
def test_add_refuses_what_is_not_a_number(store, case, text: str):
    store.set("key", text)
    with pytest.raises((ValueError, RuntimeError)):
        store.add("key", 1)
    if not case.pytorch:  # PyTorch's server hangs up
        assert store.get("key") == text.encode()


@pytest.mark.parametrize(
    ("before", "expected", "desired", "returned", "after"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "other", "new", b"other", None),
        ("old", "old", "new", b"new", b"new"),
        ("old", "other", "new", b"old", b"old"),
        ("old", "", "new", b"old", b"old"),
        ("", "", "new", b"new", b"new"),
        (b"\x00", b"\x00", b"", b"", b""),
    ],
)
def test_compare_set(store, before, expected, desired, returned, after):
    if before is not None:
        store.set("key", before)
    assert store.compare_set("key", expected, desired) == returned
    assert store.check(["key"]) == (after is not None)
    if after is not None:
        assert store.get("key") == after


# --- waiting -----------------------------------------------------------------------------------------


def test_get_and_wait_return_when_the_key_comes(connect):
    waiter, setter = connect(), connect()
    waiter.set_timeout(LONG)
    got = in_background(waiter.get, "key")
    time.sleep(0.05)
    setter.set("key", "value")
    assert got.result(20) == b"value"
    done = in_background(connect().wait, ["key", "later"], LONG)
    time.sleep(0.05)
    assert not done.done()
    setter.set("later", "")
    assert done.result(20) is None


@pytest.mark.parametrize("call", ["get", "wait", "wait with timeout", "multi_get"])
def test_waiting_ends_at_the_timeout(store, case, call):
    store.set("here", "1")
    store.set_timeout(SHORT if call != "wait with timeout" else LONG)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as info:
        if call == "get":
            store.get("absent")
        elif call == "multi_get":
            store.multi_get(["here", "absent"])
        elif call == "wait":
            store.wait(["here", "absent"])
        else:
            store.wait(["here", "absent"], SHORT)
    assert 0.15 < time.monotonic() - start < 10
    if not case.pytorch:
        assert isinstance(info.value, DeadlineError) and isinstance(info.value, TimeoutError)


def test_timeout_names_the_missing_keys(store):
    store.set("here", "1")
    with pytest.raises(RuntimeError) as info:
        store.wait(["here", "absent"], SHORT)
    assert "absent" in str(info.value) and "200 ms" in str(info.value)
    assert "here" not in str(info.value)


def test_zero_timeout_does_not_wait(store):
    store.set("here", "1")
    store.wait(["here"], timedelta(0))
    with pytest.raises(RuntimeError):
        store.wait(["absent"], timedelta(0))


def test_timeout_property(store):
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)


def test_default_timeout(connect):
    assert connect().timeout == timedelta(seconds=300)


def test_many_waiters_wake(connect):
    waiters = [in_background(connect().wait, ["go"], LONG) for _ in range(8)]
    time.sleep(0.05)
    connect().set("go", "1")
    assert [w.result(20) for w in waiters] == [None] * 8


# --- many at once ------------------------------------------------------------------------------------


def at_once(n: int, fn: Callable[[int], Any]) -> list[Any]:
    start = threading.Barrier(n)

    def go(i: int) -> Any:
        start.wait(20)
        return fn(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(go, range(n), timeout=60))


def test_concurrent_add(connect):
    handles = [connect() for _ in range(4)]
    sums = at_once(4, lambda i: [handles[i].add("n", 1) for _ in range(50)])
    assert sorted(chain(*sums)) == list(range(1, 201))


def test_compare_set_has_one_winner(connect):
    handles = [connect() for _ in range(4)]
    for turn in range(20):
        after = at_once(4, lambda i, turn=turn: handles[i].compare_set(f"key{turn}", "", f"rank {i}"))
        assert len(set(after)) == 1, "everybody sees the winner's value"


def test_concurrent_append(connect):
    handles = [connect() for _ in range(4)]

    def work(i: int) -> None:
        for _ in range(25):
            handles[i].append("key", f"<{i}>")
        assert handles[i].check(["key"])  # over TCP appends get no answer: all have arrived when this one has

    at_once(4, work)
    text = handles[0].get("key").decode()
    assert len(text) == 300
    assert [text.count(f"<{i}>") for i in range(4)] == [25] * 4


def test_clones_work_in_threads(store):
    clones = [store.clone() for _ in range(4)]
    sums = at_once(4, lambda i: clones[i].add("n", 1))
    assert sorted(sums) == [1, 2, 3, 4]
    assert store.add("n", 0) == 4


def test_clone_keeps_the_timeout(store):
    store.set_timeout(timedelta(seconds=7))
    assert store.clone().timeout == timedelta(seconds=7)


# --- queues ------------------------------------------------------------------------------------------


def test_queue_is_first_in_first_out(connect):
    one, two = connect(), connect()
    assert one.queue_len("q") == 0
    for value in ("1", b"2", ""):
        one.queue_push("q", value)
    assert one.queue_len("q") == 3  # and so they have arrived, which over TCP pushes do not wait for
    assert two.queue_len("q") == 3
    assert [two.queue_pop("q"), one.queue_pop("q"), two.queue_pop("q")] == [b"1", b"2", b""]
    assert one.queue_len("q") == 0


def test_queue_and_key_of_one_name_are_apart(store):
    store.set("name", "plain")
    store.queue_push("name", "queued")
    assert store.get("name") == b"plain"
    assert store.queue_pop("name") == b"queued"
    assert store.get("name") == b"plain"
    store.queue_push("other", "queued")
    assert "other" not in store.list_keys()
    assert store.delete_key("other") is False
    assert store.queue_len("other") == 1


def test_check_and_wait_see_a_filled_queue(store):
    store.queue_push("q", "1")
    assert store.check(["q"])
    store.wait(["q"], SHORT)
    store.queue_pop("q")
    assert not store.check(["q"])


def test_queue_pop_of_nothing(store, case):
    store.set_timeout(SHORT)
    with pytest.raises(dist.QueueEmptyError if case.pytorch else QueueEmptyError):
        store.queue_pop("q", block=False)
    with pytest.raises(dist.DistStoreError if case.pytorch else DeadlineError):
        store.queue_pop("q")


def test_queue_pop_waits(connect):
    popper, pusher = connect(), connect()
    popper.set_timeout(LONG)
    got = in_background(popper.queue_pop, "q")
    time.sleep(0.05)
    pusher.queue_push("q", "value")
    assert got.result(20) == b"value"


def test_queue_pop_takes_each_value_once(connect):
    handles = [connect() for _ in range(4)]
    for handle in handles:
        handle.set_timeout(LONG)

    def work(i: int) -> list[bytes]:
        if i == 0:
            for n in range(30):
                handles[0].queue_push("q", str(n))
            return []
        return [handles[i].queue_pop("q") for _ in range(10)]

    taken = at_once(4, work)
    assert sorted(chain(*taken), key=int) == [str(n).encode() for n in range(30)]
    for mine in taken:
        assert mine == sorted(mine, key=int), "each popper sees the queue's order"


# --- barrier -----------------------------------------------------------------------------------------


def skip_without_barrier(store: Any) -> None:
    if not hasattr(store, "barrier"):
        pytest.skip("PyTorch's stores have barriers since 2.13")


def test_barrier_of_one(store):
    skip_without_barrier(store)
    for _ in range(2):
        assert store.barrier("b", 1) is None  # at once


def test_barrier_waits_for_all(connect):
    handles = [connect() for _ in range(3)]
    skip_without_barrier(handles[0])
    early = [in_background(handles[i].barrier, "b", 3, LONG) for i in range(2)]
    time.sleep(0.1)
    assert not any(e.done() for e in early)
    handles[2].barrier("b", 3, LONG)
    assert [e.result(20) for e in early] == [None, None]


def test_barrier_times_out(store):
    skip_without_barrier(store)
    with pytest.raises(RuntimeError):
        store.barrier("b", 2, SHORT)


def test_barrier_times_out_as_the_store_does(store):
    skip_without_barrier(store)
    store.set_timeout(SHORT)
    with pytest.raises(RuntimeError):
        store.barrier("b", 2)


def test_barrier_can_be_used_again(connect):
    handles = [connect() for _ in range(2)]
    skip_without_barrier(handles[0])
    for _ in range(3):
        early = in_background(handles[0].barrier, "b", 2, LONG)
        time.sleep(0.1)
        try:
            assert not early.done()
        finally:
            handles[1].barrier("b", 2, LONG)
        early.result(20)


def test_barrier_forgets_who_gave_up(connect):
    handles = [connect() for _ in range(3)]
    skip_without_barrier(handles[0])

    def give_up(i: int) -> str:
        with pytest.raises(RuntimeError):
            handles[i].barrier("b", 4, SHORT)
        return "gave up"

    for _ in range(2):
        assert at_once(3, give_up) == ["gave up"] * 3
    assert handles[0].add("b/num_members", 0) == 0
    assert at_once(4, lambda i: connect().barrier("b", 4, LONG)) == [None] * 4


# --- bad input ---------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_sentence(store):
    for call in (
        lambda: store.set("key", 3),
        lambda: store.set(3, "value"),
        lambda: store.add("key", 1.5),
        lambda: store.add("key", 2**63),
        lambda: store.wait("key"),
        lambda: store.check("key"),
        lambda: store.multi_get("key"),
        lambda: store.wait(["key"], -1.0),
        lambda: store.set_timeout(-1),
        lambda: store.set_timeout("soon"),
        lambda: store.barrier("key", 0),
        lambda: store.compare_set("key", None, ""),
    ):
        with pytest.raises(BadArgumentError) as info:
            call()
        assert str(info.value).count("\n") == 0 and "must be" in str(info.value)


def test_bytes_that_are_no_text_are_no_key(store):
    store.set(b"name", "value")
    assert store.get("name") == b"value"
    with pytest.raises(BadArgumentError, match="key must be"):
        store.set(b"\xff", "value")


def test_uneven_multi_set_is_refused(store):
    with pytest.raises(BadArgumentError, match="as many as the 2 keys"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


# --- only ours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: PrefixStore("p", s)], ids=["bare", "prefixed"])
def test_a_store_says_what_it_lacks(wrap):
    store = wrap(TinyStore())
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    store.barrier("b", 1)
    with pytest.raises(DeadlineError, match="1 of 2 came"):
        store.barrier("c", 2, SHORT)
    for call in (
        lambda: store.compare_set("a", "", "x"),
        lambda: store.append("a", "x"),
        lambda: store.delete_key("a"),
        lambda: store.list_keys(),
        lambda: store.num_keys(),
        lambda: store.queue_push("q", "x"),
        lambda: store.queue_pop("q"),
        lambda: store.queue_len("q"),
    ):
        with pytest.raises(CallerError, match="TinyStore does not define|define it in TinyStore"):
            call()
    with pytest.raises(CallerError, match="Store.set: Not implemented. This store class does not define"):
        Store().set("a", "b")


@pytest.mark.parametrize("ours", [True, False] if dist is not None else [True], ids=lambda o: "ours" if o else "torch")
def test_prefixes_nest(ours):
    base = HashStore() if ours else dist.HashStore()
    prefix = PrefixStore if ours else dist.PrefixStore
    inner = prefix("inner", base)
    outer = prefix("outer", inner)
    outer.set("key", "value")
    base.set("other", "1")
    assert base.get("inner/outer/key") == b"value"
    assert outer.list_keys() == ["key"]
    assert inner.list_keys() == ["outer/key"]
    assert outer.num_keys() == base.num_keys() == 2
    assert type(outer.underlying_store) is type(inner)
    assert type(outer._underlying_non_prefix_store) is type(base)
    outer.set_timeout(timedelta(seconds=3))
    assert base.timeout == timedelta(seconds=3)


def test_the_examples_in_the_docs_run():
    text = (Path(__file__).parents[2] / "docs/how-to/stores.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/how-to/stores.md", "exec"), names)
