"""The line on stderr about a call across hosts that waits: one rank of all speaks, by the numbers that users know."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy
import pytest

from tests.support.host_ranks import run_on_hosts
from tests.support.ranks import returned

pytest.importorskip("torch")  # Gloo, which carries their data, is torch's

HERE = Path(__file__).name
HOSTS = [0, 0, 1, 1]
LINES = {
    found[1]: number
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
    if (found := re.search(r"# line: (.*)$", text))
}


def at(name: str) -> str:
    return f"{HERE}:{LINES[name]}"


def exact(text: str) -> str:
    """With paths shortened, and without what differs from run to run and from machine to machine."""
    text = re.sub(rf"[\w./-]*(?={HERE})", "", re.sub(r"\(pid \d+ on [^)]*\)", "(pid N on H)", text))
    return re.sub(r"kill -CONT \d+", "kill -CONT N", re.sub(r"(waited|after) [\d.]+ m?s", r"\1 N s", text))


def lines_of(capfd) -> list[str]:
    return [exact(line) for line in capfd.readouterr().err.splitlines() if line.startswith("symcomm: ")]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "0.4")


def be_late() -> None:
    time.sleep(3)  # line: late


def one_is_late(group, late: int) -> float:
    x = numpy.ones(8, "f4")
    if group.rank == late:
        be_late()
    group.all_reduce(x)  # line: all_reduce
    time.sleep(0.5)  # for the line about going on
    group.barrier()
    return float(x[0])


@pytest.mark.parametrize("late", range(4))
def test_one_rank_speaks_for_all_hosts(capfd, late: int):
    assert returned(run_on_hosts(one_is_late, HOSTS, [late])[0]) == [4.0] * 4
    first = 1 if late == 0 else 0
    assert lines_of(capfd) == [
        f"symcomm: rank {first} has waited N s in all_reduce(float32 x 8, SUM) #1 on group 'world' at "
        f"{at('all_reduce')} for rank {late} (pid N on H), which is at {at('late')} in be_late.",
        f"symcomm: all_reduce(float32 x 8, SUM) #1 on group 'world' goes on: rank {late} came after N s.",
    ]


def a_host_is_late(group, _) -> None:
    if group.rank >= 2:
        be_late()
    group.barrier()  # line: barrier
    time.sleep(0.5)
    group.barrier()


def test_several_are_late(capfd):
    returned(run_on_hosts(a_host_is_late, HOSTS, [0])[0])
    place = f"(pid N on H) is at {at('late')} in be_late"
    assert lines_of(capfd) == [
        f"symcomm: rank 0 has waited N s in barrier() #1 on group 'world' at {at('barrier')} for ranks 2, 3: "
        f"rank 2 {place}; rank 3 {place}.",
        "symcomm: barrier() #1 on group 'world' goes on: ranks 2, 3 came after N s.",
    ]


def a_message_is_late(group, _) -> float:
    """Rank 3 waits for 2, on its host, which waits for 0, on the other: only rank 2 waits for one that is late."""
    x = numpy.full(1 << 17, float(group.rank))
    if group.rank == 0:
        be_late()
        group.send(x, 2)
    elif group.rank == 2:
        group.recv(x, 0)  # line: recv
        time.sleep(0.5)
        group.send(x, 3)
    elif group.rank == 3:
        group.recv(x, 2)
    return float(x[0])


def test_messages(capfd):
    assert returned(run_on_hosts(a_message_is_late, HOSTS, [0])[0]) == [0.0, 1.0, 0.0, 0.0]
    assert lines_of(capfd) == [
        f"symcomm: rank 2 has waited N s in recv from rank 0 on group 'world' at {at('recv')} for rank 0 (pid N on H), "
        f"which is at {at('late')} in be_late.",
        "symcomm: recv from rank 0 on group 'world' goes on: rank 0 came after N s.",
    ]


def stops(group, _) -> None:
    if group.rank == 1:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGSTOP]).start()
        time.sleep(0.5)
    elif group.rank == 0:
        pid = group.peer_info[1]["pid"]
        threading.Timer(3, os.kill, [pid, signal.SIGCONT]).start()
    group.barrier()  # line: stopped
    time.sleep(0.5)
    group.barrier()


def test_a_stopped_rank_of_ones_host(capfd):
    returned(run_on_hosts(stops, HOSTS, [0])[0])
    assert lines_of(capfd)[0] == (
        f"symcomm: rank 0 has waited N s in barrier() #1 on group 'world' at {at('stopped')} for rank 1 (pid N on H), "
        "which is stopped (`kill -CONT N` lets it go on)."
    )


def fails(group, _) -> str:
    if group.rank == 3:
        be_late()
        group.destroy()
        return "left"
    with pytest.raises(Exception, match="rank 3 .* left the group"):
        group.barrier()
    time.sleep(0.5)
    return "told"


def test_a_failure_has_its_own_words(capfd):
    """Nothing is said of going on."""
    assert returned(run_on_hosts(fails, HOSTS, [0])[0]) == ["told", "told", "told", "left"]
    assert [line.split(" ")[3] for line in lines_of(capfd)] == ["has"]


def has_no_watcher(group, _) -> bool:
    one_is_late(group, 0)
    return "symcomm-long-waits" not in {thread.name for thread in threading.enumerate()}


def test_never(capfd, monkeypatch):
    monkeypatch.setenv("SYMCOMM_HANG_SECONDS", "0")
    assert returned(run_on_hosts(has_no_watcher, HOSTS, [0])[0]) == [True] * 4
    assert lines_of(capfd) == []


def sends_garbage(group, _) -> str:
    if group.rank == 3:
        group.tell(0, {"kind": "ask", "survey": 1})
        return "asked"
    with pytest.raises(Exception, match="rank 3"):
        group.barrier()
    return "told"


def test_a_question_without_its_fields_is_refused():
    assert returned(run_on_hosts(sends_garbage, HOSTS, [0])[0]) == ["told"] * 3 + ["asked"]
