"""ProcessGroup: sends each operation to the backend of the tensors' device.

It is a ``torch.distributed.ProcessGroup``, so PyTorch's code takes it. Backends may be ours (TorchGroup, the fake one,
a subclass of ``Backend``) or PyTorch's. A group made with a store needs no backend to be registered: the first
operation on a device that has none starts our engine among the ranks that meet in that store.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm import errors
from symcomm.c10d.backend import Backend
from symcomm.c10d.enums import BackendType, OpType, named
from symcomm.c10d.options import DEFAULT_TIMEOUT, NO_TIMEOUT, for_torch, short
from symcomm.c10d.stores import Store
from symcomm.c10d.works import WorkInfo
from symcomm.errors import wrong_type
from symcomm.group.call_hooks import CallHooks
from symcomm.group.interception import Interception, flat
from symcomm.ops import BY_TORCH_NAME, OPS
from symcomm.store import PrefixStore
from symcomm.torch_backend import checks, derived, values, versions
from symcomm.torch_backend.call_hooks import TORCH_CALLS
from symcomm.torch_backend.group import TorchGroup
from symcomm.torch_backend.overloads import fit, positional
from symcomm.torch_backend.python_group import Names, PythonGroup

_CPU = torch.device("cpu")

# The same operations by the names that PyTorch 2.10 to 2.12 use.
OLDER_NAMES = {name: op.torch for op in OPS for name in (op.older, op.alias) if name}


class _AnyGroup(type(dist.ProcessGroup)):  # type: ignore[misc]
    """``isinstance(g, ProcessGroup)`` holds for every group that torch would take, TorchGroup included."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls is ProcessGroup and isinstance(instance, dist.ProcessGroup))


def device_of(args: Any) -> torch.device | None:
    """The device of the first tensor in ``args``, which may be lists of lists."""
    return next((item.device for item in flat(args) if isinstance(item, torch.Tensor)), None)


def _of_default_backend(name: str) -> property:
    """A property of the default backend; False if it has none of that name."""
    return property(lambda self: bool(getattr(self._default_backend(), name, False)))


class ProcessGroup(PythonGroup, metaclass=_AnyGroup):
    """``ProcessGroup(rank, size)`` or ``ProcessGroup(store, rank, size)``: operations go to their device's backend.

    With a store, Symcomm's engine serves a device that no backend was registered for.

    Raises: WrongTypeError, CallerError where no backend can serve; its operations, what the backend's raise."""

    BackendType = BackendType

    def __init__(self, *args: Any, **named: Any):
        store, rank, size = _who(*args, **named)
        super().__init__(rank, size, store, Names())
        self._rank, self._size = rank, size
        self._timeout = DEFAULT_TIMEOUT
        self._backends: dict[str, Any] = {}  # device type -> backend
        self._kinds: dict[BackendType, Any] = {}  # kind -> backend
        self._default = BackendType.UNDEFINED
        self._started = 0
        self._bound: torch.device | None = None
        # PyTorch's C++ backends are called through this group of PyTorch's, which knows how.
        self._theirs = dist.ProcessGroup(rank, size)

    # --- backends ---------------------------------------------------------------------------------------------

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any = None) -> None:
        """Send what is on ``device`` to ``backend``; without one, to the one registered for ``backend_type``."""
        kind = _kind(backend_type)
        values.device("_register_backend: device", device)
        if backend is not None:
            if not isinstance(backend, Backend):
                raise wrong_type("_register_backend", "backend", backend, "a Backend")
            self._kinds[kind] = backend
        self._backends[device.type] = chosen = self._kinds.get(kind)
        if isinstance(chosen, torch_c10d.Backend):
            self._theirs._register_backend(device, torch_c10d.ProcessGroup.BackendType(int(kind)), chosen)

    def _set_default_backend(self, backend_type: Any) -> None:
        self._default = _kind(backend_type)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends]

    def _get_backend(self, device: torch.device) -> Any:
        backend: Any = self._backends.get(values.device("_get_backend: device", device).type)
        if backend is None and self.group_store is not None:
            backend = self._own_engine()
            self._register_backend(device, BackendType.CUSTOM, backend)
        if backend is None:
            raise errors.CallerError(
                f"No backend type associated with device type {device.type}; call _register_backend, or make the "
                "group with a store."
            )
        return backend

    get_backend = _get_backend  # its name after torch 2.13

    def _own_engine(self) -> TorchGroup:
        existing = self._kinds.get(BackendType.CUSTOM)
        if isinstance(existing, TorchGroup):
            return existing
        # Several groups may meet in one store: each rank counts its own, in the order in which it makes them.
        name = self.names.name or "group"
        turn = self.group_store.add(f"symcomm/{name}/groups of {self._rank}", 1)
        meeting = PrefixStore(f"symcomm/{name}/{turn}", self.group_store)
        return TorchGroup(meeting, self._rank, self._size, self._timeout, name)

    def _default_backend(self) -> Any:
        backend = self._kinds.get(self._default) or next(iter(self._kinds.values()), None)
        if backend is None and self.group_store is not None:
            backend = self._get_backend(_CPU)
        if backend is None:
            kind, name = int(self._default), self.name()
            raise errors.CallerError(
                f"Could not find the default backend type {kind} for Process Group with name {name}; call "
                "_register_backend."
            )
        return backend

    def _backend_id(self, backend_type: Any) -> int:
        kind = _kind(backend_type)
        if kind not in self._kinds:
            raise errors.CallerError(f"Could not find backend type {int(kind)} for Process Group with name {kind.name}")
        return id(self._kinds[kind])

    # --- running ----------------------------------------------------------------------------------------------

    def _run(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        op = BY_TORCH_NAME[name]
        fit(name, args, named)
        args = positional(args, named)
        where = device_of(args)
        if where is None and name != "barrier":
            raise wrong_type(name, "tensors", args[0] if args else None, "a tensor or a list of tensors")
        backend = self._get_backend(where or self._bound or (self._device_types or [_CPU])[0])
        begun = time.monotonic()
        if isinstance(backend, torch_c10d.Backend):
            call = versions.method_of_group(self._theirs, name, op.backend_name)
            if call is None:
                raise errors.CallerError(f"{name}: backends of this PyTorch do not have it; newer ones do.")
            work = call(*map(for_torch, args), **{key: for_torch(value) for key, value in named.items()})
        else:
            work = getattr(backend, op.backend_name)(*args, **named)
        self._started += 1
        if self.completion.hook is not None:
            ended = self.completion.teller(OpType[op.op_type], self._started, time.monotonic() - begun)
            work.get_future().add_done_callback(ended)
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come."""
        values.flag("monitored_barrier: wait_all_ranks", wait_all_ranks)
        timeout = values.optional(values.duration, "monitored_barrier: timeout", timeout)
        backend = self._get_backend(_CPU)
        if timeout is None and not hasattr(backend, "is_symcomm"):
            timeout = NO_TIMEOUT
        backend.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._get_backend(device_type)._start_coalescing()

    def _end_coalescing(self, device_type: torch.device) -> Any:
        return self._get_backend(device_type)._end_coalescing()

    supports_window = _of_default_backend("supports_window")
    supports_reconfigure = _of_default_backend("supports_reconfigure")

    def new_window(self, tensor: Any = None) -> Any:
        """One-sided puts and signals, by the default backend. Every rank of the group calls it."""
        return self._default_backend().new_window(tensor)

    def get_reconfigure_handle(self) -> str:
        """Names this process to those that it may form a group with."""
        return self._default_backend().get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Any:
        """The processes that ``opts.handles`` name are the members from now on; each of them calls it."""
        return self._default_backend().reconfigure(for_torch(opts))

    # --- hooks: around the group's own calls, whichever backend they go to ----------------------------------------

    @functools.cached_property
    def call_hooks(self) -> CallHooks:
        interception = Interception()
        interception.add_facade(self, TORCH_CALLS)
        return CallHooks(interception)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], Any]) -> None:
        """The default backend tells of aborts."""
        self._default_backend().register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._default_backend().unregister_abort_hook(hook_id)

    supports_abort_hooks = _of_default_backend("supports_abort_hooks")
    supports_completion_hooks = _of_default_backend("supports_completion_hooks")

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], Any]) -> None:
        self._default_backend()  # raises where there is none
        super()._register_on_completion_hook(hook)

    def _wait_for_pending_works(self) -> None:
        backend = self._default_backend()
        if hasattr(backend, "_wait_for_pending_works"):
            backend._wait_for_pending_works()

    # --- groups from groups -----------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A group of some of our ranks; every rank of this group calls it, those outside get None."""
        checks.split_group(ranks, timeout, opts, group_name, group_desc)
        backend = self._default_backend()
        part = backend.split_group(list(ranks), timeout, opts, group_name, group_desc)
        if part is None:
            return None
        return self._around(part, group_desc or f"{self.names.desc}:split", device_types or self._device_types)

    def _around(self, engine: Any, desc: str, devices: Sequence[torch.device]) -> ProcessGroup:
        """A group whose operations on ``devices`` go to ``engine``."""
        group = ProcessGroup(engine.rank(), engine.size())
        group.group_store = engine.get_group_store()
        for device in devices:
            group._register_backend(device, BackendType.CUSTOM, engine)
        group._set_default_backend(BackendType.CUSTOM)
        group._set_group_name(engine.getGroupName())
        group._set_group_desc(desc)
        return group

    splitGroup = split_group

    def merge_remote_group(
        self,
        store: Any,
        size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """One group of all ranks that meet in ``store``: ``size`` in all, numbered in the order in which they come."""
        checks.merge_group(store, size, self._size, timeout, group_name, group_desc)
        ours = next((b for b in self._kinds.values() if isinstance(b, TorchGroup)), None)
        # PyTorch's groups do not say who lives.
        check = (lambda: None) if ours is None else derived.merge_check(ours.core, store)
        engine = derived.merged(TorchGroup, store, size, timeout, group_name or f"{self.names.name}:merge", check)
        return self._around(engine, group_desc or f"{self.names.desc}:merge", self._device_types or [_CPU])

    mergeRemoteGroup = merge_remote_group

    # --- life -------------------------------------------------------------------------------------------------

    def _each(self, call: str, *args: Any) -> None:
        for backend in set(self._kinds.values()):
            getattr(backend, call)(*args)

    def abort(self) -> None:
        self._each("abort")

    def shutdown(self) -> None:
        self._each("shutdown")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = values.duration("set_timeout: timeout", timeout)
        self._each("set_timeout", timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        for backend in set(self._kinds.values()):
            if hasattr(backend, "_add_ephemeral_timeout"):  # PyTorch's have it since 2.15
                backend._add_ephemeral_timeout(timeout)

    # --- facts ------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    def name(self) -> str:
        """What a subclass says, or the kind of the default backend."""
        if type(self).getBackendName is not ProcessGroup.getBackendName:
            return self.getBackendName()
        return self._kind_name()

    def _kind_name(self) -> str:
        if self._default is not BackendType.UNDEFINED:
            return self._default.name.lower()
        return "symcomm" if self.group_store is not None else "undefined"

    _get_backend_name = name
    getBackendName = _kind_name

    def _id(self) -> int:
        return id(self)

    def getGroupName(self) -> str:
        if not self.names.name:
            raise errors.CallerError("ProcessGroup name not set; call _set_group_name.")
        return self.names.name

    group_name = property(getGroupName)

    def _get_sequence_number_for_group(self) -> int:
        return self._default_backend()._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        self._default_backend()._set_sequence_number_for_group()

    @property
    def bound_device_id(self) -> torch.device | None:
        """The one device this rank uses."""
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        if device is not None and device.index is None:
            raise errors.bad_argument("bound_device_id", "device", device, "one with an index, such as cuda:0")
        self._bound = device

    use_pg_for_symm_mem_rendezvous = _of_default_backend("_used_for_symmetric_memory").setter(
        lambda self, value: self._default_backend().setUsePgForSymmMemRendezvous(bool(value))
    )


def _who(*args: Any, **named: Any) -> tuple[Any, int, int]:
    """(store, rank, size) from what the constructor was given."""
    names = ("store", "rank", "size") if len(args) + len(named) == 3 else ("rank", "size")
    given = {**dict(zip(names, args, strict=False)), **named}
    if len(args) > 3 or set(given) != set(names):
        raise wrong_type("ProcessGroup", "arguments", args or named, "(rank, size) or (store, rank, size)")
    store = given.get("store")
    if store is not None and not isinstance(store, Store):
        raise wrong_type("ProcessGroup", "store", store, "a Store")
    return store, short("ProcessGroup: rank", given["rank"]), short("ProcessGroup: size", given["size"])


def _kind(backend_type: Any) -> BackendType:
    if not isinstance(backend_type, (BackendType, torch_c10d.ProcessGroup.BackendType)):
        raise wrong_type("ProcessGroup", "backend_type", backend_type, "a ProcessGroup.BackendType")
    return BackendType(backend_type.value)


def _operation(name: str, operation: str) -> Callable[..., Any]:
    def call(self: ProcessGroup, *args: Any, **named: Any) -> Any:
        return self._run(operation, args, named)

    call.__signature__ = inspect.signature(getattr(TorchGroup, operation))  # type: ignore[attr-defined]
    return named(call, name, f"{operation}, by the backend of the tensors' device.")


for _kind_of_backend in BackendType:
    setattr(ProcessGroup, _kind_of_backend.name, _kind_of_backend)
for _name in BY_TORCH_NAME:
    setattr(ProcessGroup, _name, _operation(_name, _name))
for _name, _newer in OLDER_NAMES.items():
    setattr(ProcessGroup, _name, _operation(_name, _newer))
