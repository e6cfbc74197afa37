"""FileStore: what a file can do to you. Killed writers, cut files, damage, forks, full disks.

(No torch in this module: its functions run in fresh processes, which would each import it.)
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from symcomm.errors import BadArgumentError, DeadlineError, ResourceError, StoreConnectionError, SymcommError
from symcomm.store import FileStore, StoreCollectives
from symcomm.store.file_formats import FRAMES, HEAD, RECORDS, LoggedTable
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.without_torch


def encode_frame(changes: list, place: int) -> bytes:
    table = LoggedTable()
    table.unwritten = list(changes)
    return FRAMES.encode(table, place)


def content(store: FileStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list_keys()}


# --- frames ---------------------------------------------------------------------------------------------


def test_frames_round_trip():
    changes = [("set", "key", b"\x00value"), ("append", "", b""), ("delete", "ключ", b""), ("push", "q", b"x" * 1000)]
    one, two = encode_frame(changes[:1], 8), encode_frame(changes[1:], 8 + len(encode_frame(changes[:1], 8)))
    assert FRAMES.decode(one + two, 8) == (changes, len(one + two), "end")
    assert FRAMES.decode(b"", 8) == ([], 0, "end")


def test_a_piece_of_a_frame_is_torn_and_anything_else_is_damage():
    frame = encode_frame([("set", "key", b"value")], 8)
    for cut in range(1, len(frame)):
        assert FRAMES.decode(frame[:cut], 8) == ([], 0, "torn")
    for at in range(len(frame)):
        for bit in range(8):
            bad = bytearray(frame)
            bad[at] ^= 1 << bit
            assert FRAMES.decode(bytes(bad), 8) == ([], 0, "damaged")
    assert FRAMES.decode(frame, 9)[2] == "damaged", "a frame belongs to its place"
    assert FRAMES.decode(bytes(64), 8)[2] == "damaged", "zeros are no frames"


# --- cut and damaged files ------------------------------------------------------------------------------


def small_log(path: Path) -> list[tuple[int, dict[str, bytes]]]:
    """Make a log; returns the size of the file and the content after each call."""
    store = FileStore(str(path))
    history = [(path.stat().st_size, content(store))]
    for call in (
        lambda: store.set("a", "first"),
        lambda: store.add("n", 41),
        lambda: store.set("a", "second"),
        lambda: store.add("n", 1),
        lambda: store.append("b", "x" * 20),
        lambda: store.delete_key("a"),
        lambda: store.multi_set(["c", "d"], ["1", "2"]),
    ):
        call()
        history.append((path.stat().st_size, content(store)))
    return history


def test_a_log_cut_at_any_byte_recovers(tmp_path):
    """Whoever opens it next sees every change that is whole, nothing of the one that is not, and can go on."""
    history = small_log(tmp_path / "log")
    log = (tmp_path / "log").read_bytes()
    for cut in range(len(log) + 1):
        cut_file = tmp_path / f"cut{cut}"
        cut_file.write_bytes(log[:cut])
        expected = next((state for size, state in reversed(history) if size <= cut), {})
        store = FileStore(str(cut_file))
        assert content(store) == expected, f"cut at byte {cut}"
        store.set("after", "more")
        assert store.add("n", 1) == int(expected.get("n", b"0")) + 1
        again = FileStore(str(cut_file))
        assert content(again) == {**expected, "after": b"more", "n": b"%d" % (int(expected.get("n", b"0")) + 1)}


def test_a_reader_does_not_see_a_piece_and_goes_on_when_it_is_whole(tmp_path):
    path = tmp_path / "log"
    store = FileStore(str(path))
    store.set("a", "1")
    frame = encode_frame([("set", "b", b"2")], path.stat().st_size)
    with open(path, "ab", buffering=0) as file:
        for byte in frame[:-1]:
            file.write(bytes([byte]))
            assert not store.check(["b"])
        file.write(frame[-1:])
    assert store.get("b") == b"2"


def test_damage_is_reported_not_guessed_at(tmp_path):
    history = small_log(tmp_path / "log")
    log = (tmp_path / "log").read_bytes()
    bad_file = tmp_path / "bad"
    for at in range(len(FRAMES.opening), len(log)):
        bad = bytearray(log)
        bad[at] ^= 0x20
        bad_file.write_bytes(bytes(bad))
        with pytest.raises(StoreConnectionError, match=r"is damaged at byte \d+; remove it"):
            FileStore(str(bad_file))
        assert bad_file.read_bytes() == bad, "left as it was, for whoever wants to look"
    assert history


def test_frames_cut_off_under_a_reader(tmp_path):
    path = tmp_path / "log"
    store = FileStore(str(path))
    store.set("a", "1")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StoreConnectionError, match="is damaged"):
        store.set("b", "2")


@pytest.mark.parametrize("text", [b"hello", b"SymStor", b"SymStor2 and more", b"\x00" * 100])
def test_somebody_elses_file_is_left_alone(tmp_path, text):
    path = tmp_path / "notes"
    path.write_bytes(text)
    if FRAMES.opening.startswith(text):
        FileStore(str(path)).set("a", "1")  # a header that was cut short
        return
    with pytest.raises(BadArgumentError, match="a new file, or one that a FileStore made"):
        FileStore(str(path))
    assert path.read_bytes() == text


def test_bad_names():
    for name in ("", 3, None, "/nonexistent/dir/file", "/"):
        with pytest.raises(BadArgumentError, match="FileStore: file_name must be"):
            FileStore(name)


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    store = FileStore(str(tmp_path / "log"))
    store.set("a", "1")
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) <= 5:
            raise OSError(28, "No space left on device")
        return real(fd, data[:5], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError, match="No space left on device"):
        store.set("a", "a longer value")
    monkeypatch.undo()
    assert store.get("a") == b"1"
    store.set("b", "2")
    assert content(FileStore(str(tmp_path / "log"))) == {"a": b"1", "b": b"2"}


def test_short_writes_are_completed(tmp_path, monkeypatch):
    store = FileStore(str(tmp_path / "log"))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    store.set("a", "value")
    assert FileStore(str(tmp_path / "log")).get("a") == b"value"


def test_an_interrupt_does_not_apply_a_change_twice(tmp_path, monkeypatch):
    store = FileStore(str(tmp_path / "log"))
    store.append("a", "1")
    real = os.pwrite

    def interrupted(fd, data, offset):
        real(fd, data, offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.append("a", "2")
    monkeypatch.undo()
    assert store.get("a") == b"12"
    store.append("a", "3")
    assert store.get("a") == FileStore(str(tmp_path / "log")).get("a") == b"123"


# --- locks and lifetimes --------------------------------------------------------------------------------


def test_a_held_lock_is_a_deadline_not_a_hang(tmp_path):
    path = tmp_path / "log"
    store = FileStore(str(path))
    store.set("a", "1")
    with open(path, "rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store.set_timeout(0.2)
        with pytest.raises(DeadlineError, match=r"locking .* timed out after 200 ms. Another process holds it"):
            store.set("a", "2")
        assert store.get("a") == b"1", "readers need no lock"
    store.set("a", "2")


def test_a_removed_file_is_no_trouble(tmp_path):
    path = tmp_path / "log"
    store = FileStore(str(path), 1)
    path.unlink()
    store.set("a", "1")
    assert store.get("a") == b"1"
    other = FileStore(str(path))
    assert not other.check(["a"])
    del store
    assert path.exists(), "not ours to remove: it is another file"


@pytest.mark.parametrize(("world_size", "stores", "left"), [(2, 2, False), (2, 1, True), (1, 2, False), (-1, 3, True)])
def test_the_last_store_removes_the_file(tmp_path, world_size, stores, left):
    path = tmp_path / "log"
    opened = [FileStore(str(path), world_size) for _ in range(stores)]
    while opened:
        assert path.exists()
        opened.pop()
        gc.collect()
    assert path.exists() == left


def test_a_clone_counts(tmp_path):
    path = tmp_path / "log"
    store = FileStore(str(path), 1)
    clone = store.clone()
    del store
    assert path.exists()
    clone.set("a", "1")
    del clone
    assert not path.exists()


def test_the_file_goes_when_the_process_ends(tmp_path):
    path = tmp_path / "log"
    code = f"from symcomm.store import FileStore; s = FileStore({str(path)!r}, 1); s.set('a', '1')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not path.exists()


def test_path_is_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = FileStore("log")
    assert store.path == "log"
    monkeypatch.chdir("/")
    clone = FileStore(str(tmp_path / "log"))
    store.set("a", "1")
    assert clone.get("a") == b"1"


def test_no_descriptor_is_leaked(tmp_path):
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        FileStore(str(tmp_path / "log"), 1).set("a", "1")
    for bad in ("/nonexistent/x", sys.executable):
        with pytest.raises(SymcommError):
            FileStore(bad)
    assert count() == before


def test_forked_children_lock_for_themselves(tmp_path):
    """A child that used its parent's descriptor would share the lock, and both would write at once."""
    path = tmp_path / "log"
    store = FileStore(str(path), 1)
    store.set("a", "1")
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for _ in range(50):
                    store.add("n", 1)
                code = 0 if store.get("a") == b"1" else 2
            finally:
                os._exit(code)
        children.append(pid)
    for _ in range(50):
        store.add("n", 1)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert store.add("n", 0) == 250
    assert path.exists(), "the children were not counted out"


# --- processes ------------------------------------------------------------------------------------------


def _over_a_file(rank: int, world: int, path: str) -> tuple[list[bytes], int]:
    c = StoreCollectives(FileStore(path, world), rank, world)
    c.barrier("start", 40)
    return c.all_gather("names", f"rank {rank}", 40), c.all_sum("sum", rank, 40)


def test_collectives_between_processes(tmp_path):
    path = tmp_path / "store"
    for names, total in run_ranks(_over_a_file, 3, str(path)):
        assert names == [b"rank 0", b"rank 1", b"rank 2"]
        assert total == 3
    assert not path.exists(), "the last of the three removed it"


def _write_many(rank: int, world: int, path: str, count: int) -> list[int]:
    store = FileStore(path)
    sums = []
    for i in range(count):
        sums.append(store.add("n", 1))
        store.set(f"{rank}/{i}", str(i) * (i % 50))
        store.append("log", f"<{rank}>")
        store.queue_push("q", f"{rank}")
    return sums


def test_many_writing_processes_lose_nothing(tmp_path):
    path = str(tmp_path / "log")
    sums = run_ranks(_write_many, 4, path, 60)
    assert sorted(n for mine in sums for n in mine) == list(range(1, 241))
    store = FileStore(path)
    assert store.num_keys() == 4 * 60 + 2
    assert all(store.get(f"{r}/{i}") == (str(i) * (i % 50)).encode() for r in range(4) for i in range(60))
    text = store.get("log").decode()
    assert [text.count(f"<{r}>") for r in range(4)] == [60] * 4 and len(text) == 4 * 60 * 3
    assert store.queue_len("q") == 240


def _write_until_killed(rank: int, world: int, path: str) -> None:
    store = FileStore(path)
    store.set_timeout(30)
    i = 0
    while True:
        i += 1
        store.multi_set([f"{rank}/i", f"{rank}/value"], [str(i), str(i) * random.randrange(1, 30_000)])
        store.add("n", 1)


@pytest.mark.parametrize("seed", range(3))
def test_killed_writers_leave_a_good_file(tmp_path, seed):
    """SIGKILL at random moments: no hang for the others, both keys of a multi_set or none, and no count lost."""
    path = str(tmp_path / "log")
    rng = random.Random(seed)
    watcher = FileStore(path)
    watcher.set_timeout(30)

    def kill(procs) -> None:
        watcher.wait([f"{r}/i" for r in range(4)], 40)
        for proc in rng.sample(procs, len(procs)):
            time.sleep(rng.random() * 0.15)
            assert proc.pid is not None
            os.kill(proc.pid, signal.SIGKILL)

    ended = run_ranks(_write_until_killed, 4, path, outcomes=True, deadline=60, during=kill)
    assert {outcome.kind for outcome in ended} == {"died"}
    for store in (watcher, FileStore(path)):
        total = 0
        for rank in range(4):
            i, value = store.multi_get([f"{rank}/i", f"{rank}/value"])
            assert value == i * (len(value) // len(i)) and len(value) % len(i) == 0
            total += int(i)
        assert total - 4 <= store.add("n", 0) <= total
    watcher.set("still", "writable")
    assert FileStore(path).get("still") == b"writable"


def _die_in_the_middle_of_a_write(rank: int, world: int, path: str, stop: int) -> None:
    real = os.pwrite

    def dying(fd, data, offset):
        if len(data) < 100:
            return real(fd, data, offset)
        real(fd, data[:stop], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    store = FileStore(path)
    os.pwrite = dying
    store.set("torn", "x" * 200)


@pytest.mark.parametrize("stop", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + 5, 150])
def test_a_writer_killed_within_a_write(tmp_path, stop):
    """It dies with the lock held and a piece written; a store that was there all along goes on."""
    path = str(tmp_path / "log")
    store = FileStore(path)
    store.set("before", "1")
    size = os.path.getsize(path)
    (ended,) = run_ranks(_die_in_the_middle_of_a_write, 1, path, stop, outcomes=True)
    assert ended.text == "SIGKILL"
    assert os.path.getsize(path) > size or stop == 0
    assert store.list_keys() == ["before"]
    store.set("after", "2")
    assert content(store) == content(FileStore(path)) == {"before": b"1", "after": b"2"}


# --- PyTorch's format ---------------------------------------------------------------------------------------


class TorchsFormat(FileStore):
    """Makes its file as PyTorch's does, as the FileStore of symcomm.c10d."""

    _preferred = RECORDS


def test_records_round_trip(tmp_path: Path):
    path = str(tmp_path / "store")
    one, two = TorchsFormat(path, 2), FileStore(path, 2)
    one.set("key", b"\x00value")
    two.append("key", "more")
    one.add("n", 3)
    one.set("ключ", "")
    two.delete_key("never there")
    one.queue_push("q", "first")
    two.queue_push("q", "second")
    one.set("gone", "x")
    two.delete_key("gone")
    assert one.queue_pop("q") == b"first"
    third = FileStore(path, 2)
    wanted = {"key": b"\x00valuemore", "n": b"3", "ключ": b""}
    assert content(one) == content(two) == content(third) == wanted and third.queue_pop("q") == b"second"
    assert Path(path).read_bytes().startswith(b"\x09\0\0\0refcount/\x01\0\0\x001\x09\0\0\0refcount/\x01\0\0\x002")
    del one, two
    assert Path(path).exists()
    del third
    assert not Path(path).exists()


def test_a_record_that_was_cut_never_happened(tmp_path: Path):
    path = tmp_path / "store"
    store = TorchsFormat(path)
    store.set("a", "1")
    whole = path.read_bytes()
    store.set("b", "2")
    last = path.read_bytes()[len(whole) :]
    for cut in range(len(last)):
        path.write_bytes(whole + last[:cut])
        other = FileStore(path)
        assert content(other) == {"a": b"1"}
        other.set("c", "3")
        assert content(FileStore(path)) == {"a": b"1", "c": b"3"}
        del other


@pytest.mark.parametrize("what", [b"\x02\0\0\0xk\0\0\0\0", b"\x08\0\0\0cleanup/\x01\0\0\0x", bytes(8)])
def test_records_that_nobody_wrote_are_reported_and_left(tmp_path: Path, what: bytes):
    path = tmp_path / "store"
    store = TorchsFormat(path)
    store.set("a", "1")
    with open(path, "ab") as file:
        file.write(what)
    before = path.read_bytes()
    for call in (lambda: store.get("a"), lambda: store.set("b", "2"), lambda: FileStore(path)):
        with pytest.raises(StoreConnectionError, match="is damaged at byte"):
            call()
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", [str, os.fsencode, lambda path: bytearray(os.fsencode(path)), Path])
def test_names_of_files(tmp_path: Path, name):
    store = FileStore(name(tmp_path / "store"))
    store.set("a", "1")
    assert store.path == str(tmp_path / "store") and store.clone().get("a") == b"1"


@pytest.mark.parametrize("name", ["", b"", "a\0b", "/no/such/folder/file"])
def test_names_that_are_none(name):
    with pytest.raises(BadArgumentError, match="FileStore: file_name must be a"):
        FileStore(name)
