"""Servers and clients of TCPStore, and calls that wait in threads of their own."""

from __future__ import annotations

import threading
from datetime import timedelta

from symcomm.store.tcp import TCPStore

TEN = timedelta(seconds=10)


def serve(**more) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **{"timeout": TEN, **more})


def client(port: int, **more) -> TCPStore:
    return TCPStore("127.0.0.1", port, **{"timeout": TEN, **more})


def in_thread(call, *args):
    """Start ``call`` and return a function that waits for its result."""
    box: list = []

    def run():
        try:
            box.append((True, call(*args)))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(seconds: float = 20):
        thread.join(seconds)
        assert box, f"{call} is still running after {seconds} s"
        good, value = box[0]
        if not good:
            raise value
        return value

    return result
