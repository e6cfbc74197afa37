"""A large message, in a pid namespace of its own, where a process gets the pid that the program wants it to have.

    unshare --pid --fork --mount-proc python -m tests.support.other_pids read    # or write

A rank is held just before it reads, or writes, the other's memory. The other is killed, and its pid goes to a process
which has memory at the same address. Prints whether the rank raised, how many elements of that process it has got, and
how many it has overwritten.

    unshare --pid --fork python -m tests.support.other_pids PID

The sender is in the middle of a write, and its pid, in a /proc that is another namespace's, is that of a stopped
process. Prints what the receiver raised, and how much was written after that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch

from symcomm._core import native
from symcomm.group.process_group import ProcessGroup
from tests.support.call_gate import CallGate
from tests.support.faults import attempt, run_group
from tests.support.halted_messages import COUNT, NOBODY, halted_in_kernel
from tests.support.page_gate import Words, ordinary, state_of
from tests.support.ranks import until

HIT, PID, ADDRESS, READY, OVERWRITTEN, DONE = range(6)
OURS, OTHERS = 7.0, 9.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def next_pid(pid: int) -> None:
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))


def _message(g: ProcessGroup, how: str, gate: CallGate, words: Words) -> tuple[str, int]:
    x, y = ordinary(COUNT), ordinary(COUNT)
    x.fill_(OURS)
    doomed = how == "read"  # whose sender dies, or else its receiver

    def exchange() -> None:
        g.send(x, 1) if g.rank == 0 else g.recv(y, 0)

    for _ in range(3):
        exchange()
    if (g.rank == 0) == doomed:
        words[PID] = int.from_bytes(native.peek(g.peers[g.rank].life, 4), "little") & 0x3FFFFFFF
        words[ADDRESS] = (x if doomed else y).data_ptr()
    g.barrier()
    if (g.rank == 0) != doomed:
        gate.close(f"process_vm_{how}v")
    raised = attempt(exchange)
    while how == "write" and not raised and not words[HIT]:
        raised = attempt(exchange)
    return raised, int((y == OTHERS).sum())


def _other(words: Words) -> None:
    """A process which happens to have memory there."""
    nbytes, read_write, private_anonymous_fixed = 4 * COUNT, 3, 0x32
    assert _libc.mmap(words[ADDRESS], nbytes, read_write, private_anonymous_fixed, -1, 0) == words[ADDRESS]
    tensor = torch.frombuffer((ctypes.c_char * nbytes).from_address(words[ADDRESS]), dtype=torch.float32)
    tensor.fill_(OTHERS)
    words[READY] = 1
    words.reach(DONE, 1, 15)
    words[OVERWRITTEN] = int((tensor != OTHERS).sum())


def fork_as(wanted: int, words: Words) -> bool:
    """False: the pid went to somebody else, or was not free yet."""
    next_pid(wanted)
    pid = os.fork()
    if pid == 0:
        try:
            if os.getpid() == wanted:
                _other(words)
        finally:
            os._exit(0)
    if pid != wanted:
        os.waitpid(pid, 0)
    return pid == wanted


def replace_a_rank(how: str) -> None:
    words = Words()
    gate = CallGate(words, HIT)

    def during(pids: list[int]) -> None:
        assert words.reach(HIT, 1)
        time.sleep(0.3)  # the sender copies what the receiver leaves to it
        doomed = pids[0 if how == "read" else 1]
        os.kill(doomed, signal.SIGKILL)
        assert until(lambda: state_of(doomed) in "ZX" and not os.path.exists(f"/proc/{words[PID]}"))
        assert until(lambda: fork_as(words[PID], words), 15) and words.reach(READY, 1)
        gate.open()
        time.sleep(0.5)
        words[DONE] = 1
        os.waitpid(words[PID], 0)

    outcomes = run_group(_message, 2, how, gate, words, timeout=8, during=during)
    raised, got = outcomes[1 if how == "read" else 0].value
    print(raised, got, words[OVERWRITTEN])


def name_a_sender(pid: int) -> None:
    next_pid(pid)
    words = Words()
    outcomes = run_group(halted_in_kernel, 2, "receiver gives up", CallGate(words, NOBODY), words)
    print(*outcomes[1].value, words[HIT])


if __name__ == "__main__":
    name_a_sender(int(sys.argv[1])) if sys.argv[1].isdigit() else replace_a_rank(sys.argv[1])
