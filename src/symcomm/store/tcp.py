"""TCPStore: a store that processes on any host reach over TCP, in PyTorch's own wire protocol.

Its clients and servers can be mixed with PyTorch's in one job. One process starts the server (``is_master=True``); the
server is a C thread that needs nothing of the interpreter (see ``symcomm._core``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.store import tcp_wire as wire
from symcomm.store.base import (
    DEFAULT_TIMEOUT,
    QueueEmptyError,
    Store,
    Timeout,
    Value,
    add_to,
    barrier_late,
    keys_missing,
    to_bytes,
    to_flag,
    to_int,
    to_key,
    to_keys,
    to_pairs,
    to_seconds,
    to_world_size,
    wait_late,
)
from symcomm.store.tcp_server import StoreLimits, StoreServer, start_server
from symcomm.store.tcp_wire import StoreConnection

__all__ = ["StoreLimits", "TCPStore"]

_NO_KEYS = native.STORE_NO_KEYS
_MOST_LOOKED_AT = 256  # keys, to find out which ones are missing
_JOIN_PAUSE = 0.010  # seconds between two looks at the workers' count
_ANSWER_SECONDS = 1.0  # that a store may take to say hello

_stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A connection cannot be shared: the child makes its own at its next call."""
    for store in list(_stores):
        store._lock = threading.RLock()
        store._in_call = False
        store._server = None
        store._drop()


os.register_at_fork(after_in_child=_after_fork_in_child)


class TCPStore(Store):
    """``TCPStore(host_name, port, world_size, is_master)``: connect to a store, or with ``is_master`` also serve it.

    The first nine arguments are PyTorch's. ``token`` (or the environment's SYMCOMM_TOKEN) is a secret of the job that
    client and server then prove to each other; with ``token_is_optional`` a server also takes clients that do not ask
    for a proof and give none, as PyTorch's cannot. ``bind`` says where a server listens, if not where ``host_name``
    points. ``limits`` is what a server grants a client. A client that is not ``patient`` raises at once where no server
    listens, instead of trying again until ``timeout``.

    Raises: BadArgumentError, StoreDeadlineError, StoreConnectionError, StoreUnreachableError, StoreAuthError,
    QueueEmptyError.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: str | bytes | None = None,
        bind: str | list[str] | None = None,
        limits: StoreLimits | None = None,
        patient: bool = True,
        token_is_optional: bool = False,
    ):
        call = "TCPStore"
        port = to_int(call, "port", port, range(1 << 16), "an int from 0 to 65535")
        host_name, workers = _to_host(host_name), _to_workers(world_size)
        is_master, use_libuv = to_flag(call, "is_master", is_master), to_flag(call, "use_libuv", use_libuv)
        wait_for_workers = to_flag(call, "wait_for_workers", wait_for_workers)
        self.set_timeout(timeout)
        self._host = host_name
        self._token, self._own_token = _find_token(token)
        self._use_libuv = use_libuv
        self._lock = threading.RLock()
        self._in_call = False  # the connection waits for an answer; see _call()
        self._connection: StoreConnection | None = None
        self._wait_before_get = not use_libuv  # see _ask()
        self._unanswered = ""  # the last call, if it was one that gets no answer
        self._server: StoreServer | None = None
        if is_master:
            try:
                self._server = start_server(
                    host_name,
                    port,
                    bind=bind,
                    listen_fd=master_listen_fd,
                    token=self._token,
                    token_is_optional=token_is_optional,
                    limits=limits or StoreLimits(),
                    world_size=workers,
                    multi_tenant=to_flag(call, "multi_tenant", multi_tenant),
                    seconds=self._timeout_s,
                )
            except errors.StoreConnectionError:
                if not _agent_serves(port):
                    raise
        self._port = self._server.port if self._server else port
        self._connect_host = self._server.connect_host if self._server else host_name
        self._connection = wire.connect(self._connect_host, self._port, self._timeout_s, self._token, patient=patient)
        _stores.add(self)
        if workers is not None and wait_for_workers:
            self._wait_for_workers(workers)

    # --- values ------------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        self._call("set", wire.SET, _key("set", key), _value("set", value), "-")

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it is set."""
        key = _key("get", key)
        return self._ask("get", [key], wire.GET, key, "v")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = _keys("multi_get", keys)
        return self._ask("multi_get", names, wire.MULTI_GET, names, "m")

    def _ask(self, call: str, keys: list[str], command: int, asked: Any, shape: str) -> Any:
        """Ask for values right away, which takes one exchange instead of PyTorch's two. An empty one may mean that its
        key does not exist yet; only then wait."""
        if not self._wait_before_get:
            try:
                found = self._call(call, command, asked, None, shape)
                if all(found) if shape == "m" else found:
                    return found
            except errors.StoreConnectionError as error:
                self._blame_old_server(error)
        self._wait(call, keys, self._timeout_s)
        return self._call(call, command, asked, None, shape)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = to_pairs("TCPStore.multi_set", keys, values)
        fields = [field for key, value in pairs for field in (f"/{key}", value)]
        self._call("multi_set", wire.MULTI_SET, _NO_KEYS, (len(pairs), *fields), "-")

    def add(self, key: str, amount: int) -> int:
        key, amount = _key("add", key), to_int("TCPStore.add", "amount", amount)
        try:
            return self._call("add", wire.ADD, key, amount, "8")
        except errors.StoreConnectionError as error:
            self._blame_value(key, amount, error)
            raise

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        body = (_value("compare_set", expected), _value("compare_set", desired))
        return self._call("compare_set", wire.COMPARE_SET, _key("compare_set", key), body, "v")

    def append(self, key: str, value: Value) -> None:
        self._call("append", wire.APPEND, _key("append", key), _value("append", value), "-")

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("check", wire.CHECK, _keys("check", keys), None, "1") == 0

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", wire.DELETE, _key("delete_key", key), None, "8") == 1

    def num_keys(self) -> int:
        """How many keys there are, the store's own among them."""
        return self._call("num_keys", wire.NUM_KEYS, _NO_KEYS, None, "8")

    def list_keys(self) -> list[str]:
        names = self._call("list_keys", wire.LIST_KEYS, _NO_KEYS, None, "l")
        return [name[1:].decode(errors="replace") for name in names if name.startswith(b"/")]

    # --- waiting -----------------------------------------------------------------------------------

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        seconds = self._timeout_s if timeout is None else to_seconds(timeout, "TCPStore.wait")
        self._wait("wait", _keys("wait", keys), seconds)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return once ``world_size`` callers have come.

        On our server you can reuse a key, and a caller that gives up or dies does not count. PyTorch's server lets
        everyone through from the second use on.
        """
        key, world_size = _key("barrier", key), to_world_size("TCPStore.barrier", world_size)
        seconds = self._timeout_s if timeout is None else to_seconds(timeout, "TCPStore.barrier")
        if not self._call("barrier", wire.BARRIER, key, world_size, "1", seconds):
            raise barrier_late(f"TCPStore.barrier({key!r})", key, seconds, f"fewer than {world_size} came")

    def _wait(self, call: str, keys: list[str], seconds: float) -> None:
        if not self._call(call, wire.WAIT, keys, None, "1", seconds):
            missing = [key for key in keys[:_MOST_LOOKED_AT] if not self.check([key])] if len(keys) > 1 else keys
            raise keys_missing(self, call, missing or keys, seconds)

    # --- queues ------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: Value) -> None:
        self._call("queue_push", wire.PUSH, _key("queue_push", key), _value("queue_push", value), "-")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value of the queue; if it is empty wait for one, or raise QueueEmptyError."""
        key, block = _key("queue_pop", key), to_flag("TCPStore.queue_pop", "block", block)
        end = None
        while (value := self._call("queue_pop", wire.POP, key, None, "q")) is None:
            if not block:
                raise QueueEmptyError(f"TCPStore.queue_pop({key!r}, block=False): the queue is empty.")
            end = end or time.monotonic() + self._timeout_s
            left = max(end - time.monotonic(), 0.0)  # another client may have been faster: wait again
            if not self._call("queue_pop", wire.WAIT, [key], None, "1", left):
                raise wait_late(f"TCPStore.queue_pop({key!r})", [key], self._timeout_s, "nobody pushed a value")
        return value

    def queue_len(self, key: str) -> int:
        return self._call("queue_len", wire.QUEUE_LEN, _key("queue_len", key), None, "8")

    # --- about the store ---------------------------------------------------------------------------

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        """The server's port; for port 0, the one chosen."""
        return self._port

    @property
    def libuvBackend(self) -> bool:
        """What ``use_libuv`` was. Without it a client expects PyTorch's older server; ours is always C."""
        return self._use_libuv

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._timeout_s = to_seconds(timeout, "TCPStore.set_timeout")

    def has_extended_api(self) -> bool:
        return True

    @staticmethod
    def _another(*args: Any, **named: Any) -> TCPStore:
        """For ``clone``: a subclass overrides this to make clones of its own class."""
        return TCPStore(*args, **named)

    def clone(self) -> TCPStore:
        """A second connection to the same server, so that two threads need not wait for each other."""
        token = self._token if self._token is not None else b""
        facts: Any = {"timeout": self.timeout, "use_libuv": self._use_libuv, "token": token}
        twin = self._another(self._connect_host, self._port, **facts)
        twin._host = self._host
        return twin

    def server_stats(self) -> dict[str, Any]:
        """Statistics of the server in this process (empty for a mere client)."""
        return self._server.stats() if self._server else {}

    @property
    def is_serving(self) -> bool:
        """Whether this object keeps a server in this process."""
        return self._server is not None

    def close(self) -> None:
        """End the connection, and the server if it is ours and not shared. A client's next call reconnects."""
        with self._lock:
            self._drop()
            self._server = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a client of the same server. A token from the environment is left to the other environment."""
        token = (self._token if self._own_token else None) if self._token is not None else b""
        return _client, (self._host, self._port, self.timeout, self._use_libuv, token)

    def __repr__(self) -> str:
        serving = ", serving it" if self._server else ""
        return f"TCPStore({self._host}:{self._port}{serving})"

    # --- the exchange ------------------------------------------------------------------------------

    def _call(self, call: str, command: int, keys: Any, body: Any, shape: str, seconds: float | None = None) -> Any:
        """One frame (the command, its keys, what follows them), one answer; see _core/store/client.c. With ``seconds``:
        whether what the call waits for has happened by then.

        A signal handler (or a finalizer) may call while its own thread is in another call, whose answer is still under
        way: it gets a connection of its own."""
        with self._lock:
            if self._in_call:
                with closing(self.clone()) as twin:
                    return twin._call(call, command, keys, body, shape, seconds)
            connection = self._connection or self._reconnect()
            try:
                self._in_call = True
                if seconds is not None:
                    return self._has_happened(connection, command, keys, body, seconds)
                answer = native.store_call(connection.fd, command, keys, body, shape, self._timeout_s)
                self._unanswered = call if shape == "-" else ""
                return answer
            except BaseException as error:
                self._drop()  # in any case, an answer may still be under way
                raise self._explain(call, keys, error) from None
            finally:
                self._in_call = False

    def _has_happened(self, connection: StoreConnection, command: int, keys: Any, body: Any, seconds: float) -> bool:
        try:
            native.store_call(connection.fd, command, keys, body, "1", seconds)
            return True
        except native.StoreLate:
            answer = native.store_call(connection.fd, wire.CANCEL, _NO_KEYS, None, "1", self._timeout_s)
            if answer == 0:  # it happened while we were giving up; the cancelling is answered, too
                connection.exchange(b"", "1", 0, self._timeout_s)
            return answer == 0

    def _explain(self, call: str, keys: Any, error: BaseException) -> BaseException:
        if isinstance(error, TypeError | UnicodeError):
            return _bad_argument(call, keys, error)
        named = "" if keys is _NO_KEYS else ", ".join(map(repr, keys[:4] if isinstance(keys, list) else [keys]))
        where = f"{self._host}:{self._port}"
        if isinstance(error, native.StoreLate):
            return errors.StoreDeadlineError(
                f"the store at {where} did not answer {call}({named}) in {errors.format_seconds(self._timeout_s)}."
            )
        if isinstance(error, native.StoreGone):
            cause = "its process ended, or it refused " + _REFUSALS.get(call, "the call")
            if self._unanswered:
                cause += f" or the {self._unanswered} before it"
            return errors.StoreConnectionError(
                f"the store at {where} closed the connection during {call}({named}); {cause} (its log says why)."
            )
        if isinstance(error, native.StoreBroken):
            return errors.StoreConnectionError(
                f"the connection to the store at {where} broke in {call}({named}): {error}."
            )
        return error

    def _reconnect(self) -> StoreConnection:
        self._connection = wire.connect(self._connect_host, self._port, self._timeout_s, self._token, patient=False)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _blame_old_server(self, error: errors.StoreConnectionError) -> None:
        """PyTorch's server without libuv ends a connection that asks for an absent key; if this is one, wait first
        from now on. Anything else that ends a connection is an error."""
        absent = f"symcomm/absent/{os.urandom(8).hex()}"
        try:
            connection = wire.connect(self._connect_host, self._port, self._timeout_s, self._token, patient=False)
        except errors.StoreConnectionError:
            raise error from None
        try:
            native.store_call(connection.fd, wire.GET, absent, None, "v", self._timeout_s)
        except native.StoreGone:
            self._wait_before_get = True
            return
        finally:
            connection.close()
        raise error

    def _blame_value(self, key: str, amount: int, error: errors.StoreConnectionError) -> None:
        """Find out why ``add`` failed: if the value is no number or too large, the server can only hang up."""
        try:
            value = self._call("get", wire.GET, key, None, "v")
        except errors.StoreConnectionError:
            raise error from None
        add_to("TCPStore.add", key, value, amount)

    def _wait_for_workers(self, world_size: int) -> None:
        """Every process counts itself. The server's process stays until all have, so that it does not leave early."""
        came = self._count_workers(1)
        end = time.monotonic() + self._timeout_s
        while self._server is not None and came < world_size:
            if time.monotonic() >= end:
                raise errors.StoreDeadlineError(
                    f"TCPStore: {came} of {world_size} workers joined the store on port {self._port} "
                    f"in {errors.format_seconds(self._timeout_s)}; start the missing ranks with the same MASTER_ADDR "
                    f"and MASTER_PORT, or lower WORLD_SIZE ({came}/{world_size} clients joined)."
                )
            time.sleep(_JOIN_PAUSE)
            came = self._count_workers(0)

    def _count_workers(self, more: int) -> int:
        """Under PyTorch's key for this, which unlike a user's has no slash before it."""
        return self._call("add", wire.ADD, _NO_KEYS, ("init/", more), "8")


_REFUSALS = {
    "add": "to add to a value that is not a number or too large",
    "barrier": "to count on a value that is not a number, or is of a PyTorch before 2.13, which knows no barrier",
}


def _value(call: str, value: Value) -> str | bytes:
    return value if type(value) is bytes or type(value) is str else to_bytes(f"TCPStore.{call}", value)


def _key(call: str, key: str) -> str:
    return key if type(key) is str else to_key(f"TCPStore.{call}", key)


def _keys(call: str, keys: Sequence[str]) -> list[str]:
    return keys if type(keys) is list and {*map(type, keys)} <= {str} else to_keys(f"TCPStore.{call}", keys)


def _bad_argument(call: str, keys: Any, error: Exception) -> Exception:
    """The error for an argument that the native code could not use."""
    try:
        for key in keys if isinstance(keys, list) else [] if keys is _NO_KEYS else [keys]:
            to_key(f"TCPStore.{call}", key)
        if isinstance(error, UnicodeEncodeError):
            to_bytes(f"TCPStore.{call}", error.object)
    except errors.BadArgumentError as known:
        return known
    return error


def _client(host: str, port: int, timeout: timedelta, use_libuv: bool, token: bytes | None) -> TCPStore:
    return TCPStore(host, port, timeout=timeout, use_libuv=use_libuv, token=token)


def _to_host(host_name: object) -> str:
    if isinstance(host_name, bytes | bytearray):
        return host_name.decode(errors="replace")
    if not isinstance(host_name, str):
        raise errors.wrong_type("TCPStore", "host_name", host_name, "a str: a host name or an address")
    return host_name


def _to_workers(world_size: object) -> int | None:
    """How many workers there will be; None if that is not known."""
    allowed = "a positive int, or None (or negative) for any number"
    number = -1 if world_size is None else to_int("TCPStore", "world_size", world_size, range(-(2**31), 2**31), allowed)
    if number == 0:
        raise errors.bad_argument("TCPStore", "world_size", number, allowed)
    return number if number > 0 else None


def store_answers(host: str, port: int) -> bool:
    """Whether a store is there, of this job or of another one."""
    return wire.answers(host, port, _ANSWER_SECONDS, _find_token(None)[0])


def _agent_serves(port: int) -> bool:
    """Whether torchrun's agent keeps a store on ``port``: then all ranks are clients there, rank 0 included."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "t", "true", "y", "yes")
    return agent and os.environ.get("MASTER_PORT") == str(port)


def _find_token(token: str | bytes | None) -> tuple[bytes | None, bool]:
    """The job token, and whether it was passed (not found in the environment). An empty one means none."""
    if token is None:
        return os.environ.get("SYMCOMM_TOKEN", "").encode() or None, False
    return to_bytes("TCPStore", token) or None, True
