"""Across hosts, after an error: what a rank overwrites is nobody's result, and nobody writes to what it has back.

Hosts are pretended (SYMCOMM_HOST_ID), the ranks are processes.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from typing import Any

import pytest

from symcomm import errors
from tests.support.ranks import run_ranks

N = 16 << 20  # elements: more than connections hold on their way, up to 36 MiB where the kernel is generous


def _join(rank: int, world: int, path: str, timeout: float = 30.0) -> Any:
    import symcomm

    os.environ["SYMCOMM_HOST_ID"] = str(rank)
    return symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=timeout)


def _stop_once_something_moves(group: Any) -> None:
    """This process stops when the engine has begun to carry something to it."""
    start = group.engine.start

    def stopping(*args: Any, **more: Any) -> Any:
        transfer = start(*args, **more)
        group.engine.start = start
        os.kill(os.getpid(), signal.SIGSTOP)
        return transfer

    group.engine.start = stopping


def _end_slowly(group: Any) -> None:
    """The engine takes a second to stop, and the others are not told in time: the network carries on meanwhile."""
    abort, told = group.engine.abort, group.tell

    def late() -> None:
        time.sleep(1.0)
        abort()

    def silent(rank: int, header: dict[str, Any], *args: Any, **more: Any) -> bool:
        return header.get("kind") == "fail" or told(rank, header, *args, **more)

    group.engine.abort, group.tell = late, silent


def _await_stop(pid: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with open(f"/proc/{pid}/status") as file:
            if "State:\tT" in file.read():
                return
        time.sleep(0.001)
    raise AssertionError(f"process {pid} did not stop")


def _sender_gives_up(rank: int, world: int, path: str, way: str) -> tuple[str, float]:
    """Rank 1 stops in the middle of receiving; rank 0's deadline passes, and it uses its tensor for something else."""
    import torch

    from symcomm.hierarchical import message_works

    message_works.ARRIVING = 0.1
    group = _join(rank, world, path)
    tensor = torch.full((N,), 1.0 if rank == 0 else 0.0)
    group.barrier()
    said = "nothing"
    if rank == 1:
        _stop_once_something_moves(group)
        try:
            group.recv(tensor, 0) if way == "message" else group.broadcast(tensor, 0)
        except errors.SymcommError as error:
            said = type(error).__name__
        return said, (tensor != 1.0).float().mean().item()
    pid = group.peer_info[1]["pid"]
    _end_slowly(group)
    try:
        try:
            if way == "message":
                group.isend(tensor, 1).wait(0.7)
            else:
                group.broadcast(tensor, 0, timeout=1.5)
        except errors.SymcommError as error:
            said = type(error).__name__
        _await_stop(pid)
        tensor.fill_(-1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)  # the process, and so its connections, outlive what is on its way
    return said, 0.0


@pytest.mark.parametrize("way", ["collective", "message"])
def test_what_a_sender_overwrites_after_its_deadline_is_no_result(tmp_path, way):
    (gave_up, _), (said, wrong) = run_ranks(_sender_gives_up, 2, str(tmp_path / "store"), way, linger=False)
    assert gave_up == "DeadlineError"
    assert said != "nothing" or wrong == 0, f"returned with {wrong:.0%} wrong elements"


def _receiver_gives_up(rank: int, world: int, path: str, way: str) -> tuple[str, bool, list[float]]:
    """Rank 0 stops in the middle of sending; rank 1's deadline passes, and it uses its tensor for something else.

    Also says whether all had come before: a busy machine may stop rank 0 too late."""
    import torch

    from symcomm.hierarchical import message_works

    message_works.ARRIVING = 0.1
    group = _join(rank, world, path)
    tensor = torch.full((N,), 1.0 if rank == 0 else 0.0)
    group.barrier()
    said = "nothing"
    if rank == 0:
        _stop_once_something_moves(group)
    else:
        _end_slowly(group)
    try:
        if way == "message":
            group.send(tensor, 1) if rank == 0 else group.irecv(tensor, 0).wait(0.7)
        else:
            group.broadcast(tensor, 0, timeout=30.0 if rank == 0 else 1.5)
    except errors.SymcommError as error:
        said = type(error).__name__
    if rank == 0:
        return said, False, []
    pid, whole = group.peer_info[0]["pid"], said == "nothing" and bool((tensor == 1.0).all())
    try:
        _await_stop(pid)
        tensor.fill_(5.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    return said, whole, torch.unique(tensor).tolist()


@pytest.mark.parametrize("way", ["collective", "message"])
def test_nothing_is_written_to_a_receivers_tensor_after_its_deadline(tmp_path, way):
    for trial in range(5):
        _, (said, whole, values) = run_ranks(_receiver_gives_up, 2, str(tmp_path / f"store{trial}"), way, linger=False)
        assert values == [5.0]
        if not whole:
            break
    assert said == "DeadlineError"


# --- shortages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL], ids=["descriptors", "ports"])
def test_a_shortage_here_is_not_a_dead_rank_there(monkeypatch: pytest.MonkeyPatch, number: int):
    """This process cannot open a connection for a moment. The other rank is not at fault."""
    from symcomm.hierarchical.control_channel import ControlChannel

    class Member:
        lost: list[str] = []
        heard: list[Any] = []

        def on_message(self, sender: str, header: dict[str, Any], payload: Any) -> None:
            self.heard.append(header["text"])

        def on_leader_link(self, sender: str, line: Any) -> None: ...

        def on_lost(self, nonce: str) -> None:
            self.lost.append(nonce)

    here, there, member = ControlChannel("here"), ControlChannel("there"), Member()
    for channel in (here, there):
        assert channel.join("group", member)
    connect = socket.create_connection
    refusals = iter([number] * 3)

    def short(*args: Any, **more: Any) -> Any:
        if (refused := next(refusals, None)) is not None:
            raise OSError(refused, os.strerror(refused))
        return connect(*args, **more)

    monkeypatch.setattr(socket, "create_connection", short)
    to = there.open_endpoint("127.0.0.1")
    try:
        with pytest.warns(RuntimeWarning, match=os.strerror(number)):
            assert not here.send(to, {"group": "group", "text": "first"}, timeout=0.0)
        assert not here.is_lost(to.nonce) and member.lost == []
        assert here.send(to, {"group": "group", "text": "second"})  # the shortage ends while it tries
        end = time.monotonic() + 10
        while member.heard != ["second"] and time.monotonic() < end:
            time.sleep(0.001)
        assert member.heard == ["second"]
    finally:
        here.close()
        there.close()
