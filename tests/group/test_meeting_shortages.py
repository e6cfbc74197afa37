"""Ranks that lack descriptors for the store where they meet, or whose port another program has: they say so at once."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

import symcomm
from symcomm import errors
from tests.support.faults import few_descriptors
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

SOON = 30.0  # a wide bound of "at once", where ranks would wait for minutes


def _meet(rank: int, world: int, port: int, victim: int, spare: int) -> tuple[str, str, float]:
    if rank == victim:
        few_descriptors(spare)
    begun = time.monotonic()
    try:
        symcomm.init(f"tcp://127.0.0.1:{port}", rank, world)
        symcomm.barrier()
    except errors.SymcommError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


@pytest.mark.parametrize(("victim", "spare"), [(2, 0), (2, 1), (0, 0)])
def test_a_rank_that_cannot_reach_the_store(victim: int, spare: int):
    told = run_ranks(_meet, 3, free_port(), victim, spare, deadline=SOON)
    kind, own, _ = told.pop(victim)
    assert kind == "ResourceError" and "ulimit -n" in own, own
    for kind, words, _ in told:
        assert kind == "_GaveUp" and words == f"init: rank {victim} gave up: {own}", told


@pytest.mark.parametrize("spare", [3, 12])
def test_the_rank_that_serves_the_store_makes_room_for_the_others(spare: int):
    assert run_ranks(_meet, 3, free_port(), 0, spare, deadline=SOON) == [("", "", 0.0)] * 3


class _Greeter(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"220 mail.example.org\r\n")
        self.request.recv(1)


@contextlib.contextmanager
def _other_program(answers: bool) -> Iterator[int]:
    """A port where a mail server listens, or something that says nothing."""
    if not answers:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield silent.getsockname()[1]
        return
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Greeter) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_another_program_has_the_port():
    with _other_program(answers=True) as port:
        (first, own, _), *others = run_ranks(_meet, 3, port, -1, 0, deadline=SOON)
    assert first == "StoreConnectionError" and "another server has that port: choose another" in own
    for kind, words, _ in others:
        assert kind == "StoreConnectionError"
        assert words == f"what answers at 127.0.0.1:{port} is not a store; end that program, or choose another port."


def test_a_silent_program_has_the_port_of_the_rank_that_would_serve():
    with _other_program(answers=False) as port:
        (kind, words, seconds) = run_ranks(_meet_as_first, 1, port, deadline=SOON)[0]
    assert kind == "StoreConnectionError" and "another server has that port: choose another" in words
    assert seconds < SOON


def _meet_as_first(rank: int, world: int, port: int) -> tuple[str, str, float]:
    return _meet(0, 2, port, -1, 0)
