"""Calls every method of every store with odd arguments, on PyTorch's and on ours. Ours returns the same value, or
raises an exception that a program which catches PyTorch's catches too. DIFFERENT lists what differs on purpose, with
the reason; each entry must really differ."""

from __future__ import annotations

import functools
import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy
from torch.distributed import DistNetworkError

from tests.support.c10d_compare import family, ours, outcome, plain, since_2_13, theirs

pytestmark = [
    pytest.mark.torch_versions,
    since_2_13,  # an older binding takes fewer kinds of lists and numbers
]


class Index:
    def __index__(self):
        return 3


class Integer:
    def __int__(self):
        return 3


KEYS = [
    "'k'", "''", "'\\u00e9'", "b'k'", "bytearray(b'k')", "memoryview(b'k')", "b'\\xff'", "3", "3.5", "None", "True",
    "['k']", "('k',)", "'a\\0b'", "'\\ud800'", "np.str_('k')", "np.bytes_(b'k')", "{}", "'k/l'", "object()",
]  # fmt: skip
OF_A_KEY = [
    "set(X, 'v')", "set('new', X)", "compare_set(X, '', 'y')", "compare_set('k', X, 'y')", "compare_set('k', 'v', X)",
    "append(X, 'z')", "append('k', X)", "delete_key(X)", "check([X])", "queue_len(X)", "queue_push(X, 'i')",
    "queue_push('p', X)", "queue_pop(X, False)", "multi_set([X], ['v'])", "multi_set(['new'], [X])",
    "barrier(X, 1)",
]  # fmt: skip
INTS = [
    "0", "-1", "True", "3.0", "2**31", "2**63-1", "2**63", "-2**63", "-2**63-1", "'1'", "b'1'", "None", "np.int64(3)",
    "np.int8(3)", "np.float64(3)", "np.float32(3)", "Index()", "Integer()", "torch.tensor(3)", "torch.tensor(3.0)",
    "torch.ones(2)", "[1]", "float('nan')", "10**30", "1j", "np.bool_(True)", "object()",
]  # fmt: skip
OF_AN_INT = ["add('fresh', X)", "barrier('b', X, td(milliseconds=9))", "queue_pop('q', X)"]
TIMES = [
    "td(seconds=1)", "1", "0.5", "None", "'1'", "td(seconds=-1)", "-1.0", "-1", "np.float64(1)", "np.float32(1)",
    "np.int64(1)", "True", "float('nan')", "float('inf')", "1e300", "[1]", "b'1'", "Index()", "td(milliseconds=1500)",
]  # fmt: skip
OF_A_TIME = ["wait(['k'], X)", "barrier('b', 1, X)", "barrier('b', 1, timeout=X)"]
LISTS = [
    "['k']", "('k',)", "{'k'}", "frozenset('k')", "iter(['k'])", "{'k': 1}", "{'k': 1}.keys()", "{1: 'k'}.values()",
    "map(str, 'k')", "'k'", "b'k'", "bytearray(b'k')", "[b'k']", "[bytearray(b'k')]", "[3]", "[None]", "None", "3",
    "[['k']]", "np.array(['k'])", "range(1)", "['\\ud800']", "(k for k in ['k'])", "object()",
]  # fmt: skip
OF_A_LIST = ["check(X)", "wait(X, td(milliseconds=9))", "multi_get(X)", "multi_set(X, ['v'])", "multi_set(['new'], X)"]
NUMBERS = [
    "5", "5x", " 5 ", "+5", "-5", "5.5", "0x10", "9223372036854775806", "-9223372036854775807", "1_000", "\\n7",
    "007", "5\\0 6", "0" * 70 + "9",
]  # fmt: skip
NO_NUMBERS = ["x", "--5", " ", "\\u0663", "9" * 20, "-" + "9" * 20, "9223372036854775808", "-9223372036854775809"]
FORMS = """
set() | set('a') | set('a', 'b', 'c') | get() | get('k', 'n') | add('n') | add('n', value=1) | check() | wait()
wait(['k'], td(seconds=1), 3) | compare_set('k', 'v') | delete_key() | num_keys() | num_keys(1) | list_keys(1)
append('k') | queue_pop(key='q', block=False) | queue_pop('q', block=True) | queue_pop('q', None) | queue_pop('q', 'x')
barrier(key='b', world_size=1) | barrier('b', 1, td(seconds=1), 3) | barrier('b', '1') | barrier('b') | barrier()
has_extended_api(1) | clone(1) | timeout() | set_timeout() | nonsense | check([]) | multi_get([]) | multi_set([], [])
compare_set('no', 'x', 'y') | compare_set('no', '', '') | compare_set('k', 'v', '') | queue_pop('gone', False)
wait(['gone'], td(milliseconds=9)) | wait(['k', 'gone'], td(milliseconds=9)) | wait([]) | wait(['k']) | get('k')
set(key='a', value='b') | add(key='n', amount=1) | check(keys=['k']) | wait(['k'], timeout=td(seconds=1))
delete_key(key='k') | set_timeout(timeout=td(seconds=1)) | get(key='k') | queue_len(key='q')
"""
STORIES = """
(s.queue_push('k', 'i'), s.num_keys(), s.delete_key('k'), s.queue_len('k'), s.check(['k']), s.num_keys())
(s.queue_push('z', 'i'), s.check(['z']), s.num_keys(), s.delete_key('z'), s.queue_len('z'), s.queue_pop('z'))
(s.set('q', 'v'), s.num_keys(), s.get('q'), s.queue_len('q'), s.delete_key('q'), s.queue_pop('q'), s.num_keys())
(s.append('f', 'a'), s.append('f', b'\\xff'), s.get('f'), s.compare_set('f', b'a\\xff', 'x'), s.multi_get(['f', 'k']))
(s.add('c', 1), s.add('c', np.int64(4)), s.get('c'), s.set('c', '7'), s.add('c', -9), s.delete_key('c'), s.add('c', 1))
(s.set_timeout(2.5), s.timeout, s.set_timeout(td(seconds=7)), s.timeout)
"""


def expanded(forms: list[str], values: list[str]) -> list[str]:
    return [f"s.{form.replace('X', value)}" for form in forms for value in values]


CALLS = [
    *expanded(OF_A_KEY, KEYS),
    *expanded(OF_AN_INT, INTS),
    *expanded(OF_A_TIME, TIMES),
    *expanded(["set_timeout(X)"], TIMES),
    *[call for call in expanded(OF_A_LIST, LISTS) if "multi_set" not in call or "range" not in call],
    *[f"(s.set('n', '{text}'), s.add('n', 1), s.get('n'))" for text in NUMBERS],
    *[f"(s.set('n', '{text}'), s.add('n', {more}))" for text in NO_NUMBERS for more in (0, -1)],
    *[f"s.{call.strip()}" for call in FORMS.replace("\n", "|").split("|") if call.strip()],
    *STORIES.strip().splitlines(),
    "(s.set('n', '9223372036854775807'), s.add('n', 1))",
    "(s.set('n', '-9223372036854775808'), s.add('n', -1))",
    "(s.set('n', ''), s.add('n', 1))",
]

KINDS = ["HashStore", "FileStore", "TCPStore", "PrefixStore on HashStore", "PrefixStore on TCPStore"]
# (where, which calls, the reason)
DIFFERENT = [
    ("", r"memoryview\(", "a value may be any bytes"),
    ("", r"xff'[,\])]", "bytes that are no text are no key: list_keys of PyTorch's fails from then on"),
    ("", r"\((key|keys|timeout)=|timeout=td\(seconds=1\)\)$", "arguments have names"),
    ("HashStore|TCPStore", r"barrier\('b', (0|-1|-2\*\*63), ", "a barrier for nobody is refused at once"),
    ("", r"('nan'|'inf'|1e300)", "a time that no clock can hold is refused; PyTorch's makes another time of it"),
    ("", r"set_timeout\((td\(seconds=-1\)|-1.0)", "a negative time is refused as every later wait would fail"),
    ("", r"922337203685477580[78]'\), s.add\('n', (1|-1)\)", "a sum that does not fit is refused, not another number"),
    ("FileStore", r"queue_", "PyTorch's file store has no queues"),
    ("TCPStore", r"s.add\('n', (0|-1)\)\)$", "the value is named; PyTorch's server hangs up"),
    ("TCPStore", r"'n', ''\), s.add", "nothing counts as 0, as in PyTorch's other stores"),
]  # fmt: skip


def make(kind: str, module: Any, path: str) -> Any:
    if kind.startswith("PrefixStore on "):
        return module.PrefixStore("p", make(kind.split()[-1], module, path))
    if kind == "TCPStore":
        return module.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
    return module.FileStore(path) if kind == "FileStore" else module.HashStore()


class Fresh:
    """One store for all calls, emptied and filled again before each."""

    def __init__(self, kind: str, module: Any, path: str):
        self.kind, self.module, self.path, self.number = kind, module, path, 0
        self.store: Any = None

    def filled(self) -> Any:
        if self.store is None or "TCPStore" not in self.kind:
            self.number += 1
            self.store = make(self.kind, self.module, f"{self.path}/{self.module.__name__}-{self.number}")
        else:
            self.empty()
        self.store.set_timeout(timedelta(seconds=60))
        self.store.multi_set(["k", "n"], ["v", "5"])
        if self.kind != "FileStore" or self.module is ours:
            self.store.queue_push("q", "i")
        return self.store

    def empty(self) -> None:
        for key in self.store.list_keys():
            self.store.delete_key(key)
        for name in ("k", "", "é", "a\0b", "k/l", "p", "q", "z"):
            while self.store.queue_len(name):
                self.store.queue_pop(name, False)

    def content(self) -> Any:
        """The content afterwards, without a barrier's keys (ours can be used again) and FileStore's counts."""
        kept = [k for k in sorted(self.store.list_keys()) if not re.search("count/|leanup/|^b$|_member", k)]
        return [(key, self.store.get(key)) for key in kept]


NAMES = {"np": numpy, "Index": Index, "Integer": Integer}


@functools.cache
def what_the_binding_refuses(call: str) -> TypeError | None:
    """The TypeError that pybind11 raises for any store, asked of a HashStore. (The message has the store's repr, and a
    TCPStore's repr looks up the name of an address, which may take seconds.)"""
    kind, value = outcome(call, theirs, **NAMES, s=Fresh("HashStore", theirs, "").filled())
    return value if kind == "raised" and isinstance(value, TypeError) else None


def tried(side: Fresh, call: str) -> tuple[str, Any, Any]:
    """The call's outcome, and the store's content afterwards (None where that cannot be asked)."""
    if side.module is theirs and (refusal := what_the_binding_refuses(call)):
        return "raised", refusal, [("k", b"v"), ("n", b"5")]
    kind, value = outcome(call, side.module, **NAMES, s=side.filled())
    side.store.set_timeout(timedelta(seconds=60))
    hung_up = kind == "raised" and isinstance(value, DistNetworkError)
    if hung_up or "xff" in call:  # list_keys of PyTorch's cannot show such a key
        side.store = None
        return kind, value, None
    return kind, value, side.content()


def compared(call: str, sides: list[Fresh]) -> str:
    """What differs, or ""."""
    found = [tried(side, call) for side in sides]
    (their_kind, their_value, before), (our_kind, our_value, after) = found
    if their_kind == our_kind == "gave":
        alike = plain(their_value) == plain(our_value)
    else:
        alike = their_kind == our_kind and isinstance(our_value, type(their_value))
        alike = alike and isinstance(our_value, TypeError) == isinstance(their_value, TypeError)
    if alike and (None in (before, after) or before == after):
        return ""
    return f"{call}: PyTorch {their_kind} {their_value!r:.80} {before}, ours {our_kind} {our_value!r:.120} {after}"


@pytest.mark.parametrize("kind", KINDS)
def test_odd_arguments(kind: str, tmp_path, capfd):
    """(capfd: PyTorch's TCPStore logs a page for each refusal.)"""
    sides = [Fresh(kind, module, str(tmp_path)) for module in (theirs, ours)]
    known = [(re.compile(calls), why) for where, calls, why in DIFFERENT if re.search(where, kind)]
    differing, unused = [], {why for _, why in known}
    for call in CALLS:
        if kind == "FileStore" and "barrier" in call and "milliseconds" in call:
            continue  # PyTorch's looks once a second whether its time is over
        reasons = [why for calls, why in known if calls.search(call)]
        if said := compared(call, sides):
            unused.difference_update(reasons)
            if not reasons:
                differing.append(said)
    assert not differing, f"{len(differing)} differ:\n" + "\n".join(differing)
    assert not unused, f"these do not differ any more: {unused}"


# --- making one -----------------------------------------------------------------------------------------

SERVER = "m.TCPStore('127.0.0.1', X, None, True, td(seconds=9), False).port > 0"
MADE = [
    *[SERVER.replace("X", port) for port in ("0", "-1", "'0'", "None", "0.0", "False", "65536", "2**40", "np.int64(0)",
                                             "np.uint16(0)", "[0]", "-2**40", "1.5", "b'0'")],
    *[f"m.TCPStore('127.0.0.1', 0, {size}, True, td(seconds=9)).port > 0"
      for size in ("None", "-1", "1", "1.0", "'1'", "np.int64(1)", "True", "2**40", "[1]")],
    *[f"m.TCPStore('127.0.0.1', 0, None, True, {when}, False).port > 0"
      for when in ("9", "9.0", "None", "'9'", "np.float64(9)", "np.int64(9)", "True", "[9]")],
    *[f"m.TCPStore('127.0.0.1', 0, None, True, td(seconds=9), {which}={flag}).port > 0"
      for which in ("wait_for_workers", "multi_tenant", "use_libuv") for flag in ("1", "None", "'x'", "[]", "2.5")],
    *[f"m.TCPStore({host}, 0, None, True, td(seconds=9), False).host"
      for host in ("'127.0.0.1'", "b'127.0.0.1'", "bytearray(b'127.0.0.1')", "None", "3", "['localhost']")],
    "m.TCPStore('127.0.0.1', 0, None, 'x', td(seconds=9), False)", "m.TCPStore('127.0.0.1')",
    "m.TCPStore(host='127.0.0.1', port=0)", "m.TCPStore('127.0.0.1', 0, None, True, nonsense=1)",
    *[f"m.FileStore({name}).path[-1]" for name in ("path + 's'", "(path + 'b').encode()", "None", "3", "['a']",
                                                   "bytearray(path.encode() + b'y')")],
    *[f"m.FileStore(path + 'w', {size}).num_keys()"
      for size in ("0", "-1", "1.0", "'1'", "None", "np.int64(1)", "True", "2**40", "Index()")],
    *[f"(h := m.HashStore(), m.PrefixStore({prefix}, h).set('a', 'b'), h.list_keys())[2]"
      for prefix in ("'p'", "b'p'", "bytearray(b'p')", "None", "3", "''", "'\\ud800'")],
    *[f"m.PrefixStore('p', {store}).timeout" for store in ("3", "object()", "m.HashStore", "{}")],
]  # fmt: skip


@pytest.mark.parametrize("expression", MADE)
def test_making_one(expression: str, tmp_path):
    found = []
    for module in (theirs, ours):
        kind, value = outcome(expression, module, **NAMES, path=f"{tmp_path}/{module.__name__}-")
        found.append((kind, plain(value) if kind == "gave" else family(value)))
    assert found[0] == found[1], f"PyTorch {found[0]}, ours {found[1]}: {value!r}"


# --- one file for both ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_file_is_shared_with_pytorchs(first: str, tmp_path):
    path = str(tmp_path / "store")
    made = {"theirs": lambda: theirs.FileStore(path, 2), "ours": lambda: ours.FileStore(path, 2)}
    second = {"theirs": "ours", "ours": "theirs"}[first]
    one, two = made[first](), made[second]()
    one.set("a", b"\x00\xff")
    two.set("b", "2")
    assert one.add("n", 2) == 2 and two.add("n", 3) == 5 and one.get("n") == b"5"
    two.append("a", "more")
    one.multi_set(["c", "d"], ["3", "4"])
    two.delete_key("c")
    assert [one.compare_set("b", "2", "22"), two.compare_set("b", "2", "no")] == [b"22", b"22"]
    for store in (one, two):
        assert store.multi_get(["a", "b", "n", "d"]) == [b"\x00\xffmore", b"22", b"5", b"4"]
        assert not store.check(["c"]) and store.num_keys() == 5
    one.barrier("met", 1)
    two.wait(["met/last_member"], timedelta(seconds=20))
    del one, store
    gc.collect()
    assert os.path.exists(path) and two.get("d") == b"4"
    del two
    gc.collect()
    assert not os.path.exists(path)


def test_processes_count_in_one_file(tmp_path):
    """Ours and PyTorch's add to one file at the same time: each number is given once."""
    path = str(tmp_path / "store")
    stores = [module.FileStore(path, 4) for module in (theirs, ours, theirs, ours)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda store: [store.add("n", 1) for _ in range(100)], stores))
    assert sorted(number for numbers in got for number in numbers) == list(range(1, 401))
    assert [store.get("n") for store in stores] == [b"400"] * 4


def test_queues_in_a_file_that_pytorchs_made(tmp_path):
    theirs_is = theirs.FileStore(str(tmp_path / "store"), -1)
    stores = [ours.FileStore(str(tmp_path / "store"), -1) for _ in range(2)]
    stores[0].queue_push("q", "1")
    stores[1].queue_push("q", "2")
    theirs_is.set("k", "v")
    assert [stores[1].queue_pop("q"), stores[0].queue_pop("q"), stores[0].queue_len("q")] == [b"1", b"2", 0]
    assert stores[0].get("k") == b"v" and theirs_is.get("k") == b"v"
