"""Hands tensors on other devices to the engine that the group's device map names for them.

If the map names us for CUDA tensors, they run on a CudaGroup if ranks share GPUs, and on NCCL, if torch has it, if each
rank has its own GPU. SYMCOMM_CUDA=symcomm or =nccl chooses one of them, on all ranks alike.

torch makes only our Python group for a map such as "cpu:symcomm,cuda:nccl", and nothing for the rest of it. So the
group makes the other engines itself, on the first such tensor, with its own store, ranks and time-out. The map is the
one that torch recorded for the group (``dist.get_backend_config``).
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symcomm import errors
from symcomm.ops import BY_NAME, Op
from symcomm.torch_backend import torch_patches
from symcomm.torch_backend.overloads import options_of
from symcomm.types import RedOpType

if TYPE_CHECKING:
    from symcomm.cuda.group import CudaGroup


def named_map(group: Any) -> dict[str, str]:
    """Device type -> the backend that was asked for, as torch recorded it; empty if torch does not know the group."""
    told = c10d._world.pg_backend_config.get(group)
    return dict(pair.split(":") for pair in str(told).lower().split(",")) if told else {}


def device_map(group: Any) -> dict[str, str]:
    """Device type -> the backend that serves ``group``, one of ours."""
    replaced = "gloo" if "replace_gloo" in torch_patches.applied() else ""
    return {device: "symcomm" if name == replaced else name for device, name in named_map(group).items()}


class Engines:
    """The engines of one group, by device type."""

    def __init__(self, group: Any):
        self._of = weakref.ref(group)  # weak, since the group owns this object
        self._in_making = ""  # the device type whose engine is being made
        self._made: dict[str, Any] = {}
        self._cuda = ""  # what carries our CUDA tensors: "symcomm" or "nccl"

    @property
    def _group(self) -> Any:
        return self._of()

    def abort(self) -> None:
        for engine in list(self._made.values()):
            engine.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        for engine in list(self._made.values()):
            engine.set_timeout(timeout)

    def shutdown(self) -> None:
        while self._made:
            self._made.popitem()[1].shutdown()

    def device_types(self) -> list[str]:
        """Other device types that this group can serve in this build of torch.

        While the group makes an engine, the engine's constructor may ask for the engines of all devices (torch's fake
        backend does since 2.15); it does not get itself."""
        others = {d: name for d, name in self._group.backends_by_device().items() if d not in ("cpu", self._in_making)}
        ours = ["cuda"] if others.get("cuda") == "symcomm" and torch.cuda.is_available() else []
        return [d for d, name in others.items() if name != "symcomm" and dist.is_backend_available(name)] + ours

    def carries(self, device_type: str) -> bool:
        """Whether the group's map names an engine for such tensors."""
        return device_type in self._group.backends_by_device()

    # --- CUDA tensors that are ours ---------------------------------------------------------------------------

    def is_ours(self, device: torch.device) -> bool:
        """Whether the group's map leaves tensors on ``device`` to us."""
        return device.type == "cuda" and self._group.backends_by_device().get("cuda", "symcomm") == "symcomm"

    def ours(self, device: torch.device) -> CudaGroup | None:
        """The CudaGroup for tensors on ``device``; None if another engine carries them. All ranks call this alike."""
        if not self.is_ours(device):
            return None
        from symcomm.cuda.group import device_group  # not needed before the first such tensor

        if not self._cuda:
            self._cuda = self._choose(device)
        return device_group(self._group.core, _index(device)) if self._cuda == "symcomm" else None

    def _choose(self, device: torch.device) -> str:
        core, wish = self._group.core, _wish()
        if core.spans_hosts:  # NCCL connects hosts itself
            return "nccl"
        if wish or core.size == 1 or not dist.is_nccl_available():
            return wish or "symcomm"
        from symcomm.cuda import devices

        card = json.dumps(devices.describe(_index(device)))
        cards = [json.loads(item) for item in core.all_gather_bytes(card.encode())]
        return "nccl" if len({(c["host"], c["gpu"]) for c in cards}) == core.size else "symcomm"

    # --- engines ----------------------------------------------------------------------------------------------

    def on(self, call: str, device: torch.device) -> Any:
        """The group that carries tensors on ``device``."""
        made = self._made.get(device.type)
        if made is None:
            name = self._group.backends_by_device().get(device.type, "symcomm")
            if name == "symcomm" and self._cuda == "nccl" and device.type == "cuda":
                name = "nccl"
            if name == "symcomm":
                raise _carried_by_nobody(call, device)
            self._in_making = device.type
            try:
                made = self._made[device.type] = self._make(call, name, device.type)
            finally:
                self._in_making = ""
        return made

    def forward(self, call: str, args: tuple[Any, ...], options: Any, timeout: Any, device: torch.device) -> Any:
        """One of our collectives, by the name of its method, on the engine for ``device``."""
        engine, op = self.on(call, device), BY_NAME[call]
        if call == "gather_single":  # not every engine has this call, so gather into parts of the output
            output, tensor, root = args
            parts = output.view(-1).chunk(engine.size()) if output is not None else ()
            args, op = ([part.view(tensor.shape) for part in parts] or None, tensor, root), BY_NAME["gather"]
        count = 2 if op.outputs else 1
        tensors, rest = args[:count], args[count:]
        if op.plan in _IN_LISTS and op.listed is not False:
            tensors = tuple([] if each is None else [each] for each in tensors)
        splits = rest if call == "all_to_all_single" else ()
        return getattr(engine, op.backend_name)(*tensors, *splits, _as_torchs(op, options, timeout, rest))

    def messages(self, device: torch.device) -> Any:
        """Our messages for tensors on ``device``; None if another engine carries them. Only a message's two ends call
        this, so ranks cannot agree on anything here."""
        if not self.is_ours(device):
            return None
        if not self._cuda and (self._group.core.spans_hosts or _wish() == "nccl"):
            self._cuda = "nccl"
        if self._cuda == "nccl":
            return None
        from symcomm.cuda.p2p import cuda_messages

        return cuda_messages(self._group.core, _index(device))

    def message(self, call: str, tensor: Any, args: tuple[Any, ...]) -> Any:
        """send, recv, or recv from any rank, on another engine."""
        engine = self.on(call, tensor.device)
        if call == "recvAnySource":
            return engine.recv_anysource([tensor], args[-1])
        return getattr(engine, call)([tensor], *args)

    def _make(self, call: str, name: str, device_type: str) -> Any:
        group = self._group
        # Groups split from this one share its store, but not its name.
        store = dist.PrefixStore(f"{group.group_name}/{device_type}/", group.get_group_store())
        maker = _MAKERS.get(name, _from_plugin)
        if not dist.is_backend_available(name):
            wanted = ",".join(f"{device}:{backend}" for device, backend in group.backends_by_device().items())
            raise errors.CallerError(
                f"{call}: this build of torch has no {name}, which the group's device map ({wanted}) names for "
                f"{device_type} tensors; install a build that has it, or move the tensor with .cpu()."
            )
        engine, kind = maker(name, store, group)
        if isinstance(engine, dist.ProcessGroup):
            return engine
        if kind != dist.ProcessGroup.BackendType.CUSTOM:
            engine._set_sequence_number_for_group()
        whole = dist.ProcessGroup(store, group.core.rank, group.core.size)
        whole._set_default_backend(kind)
        whole._register_backend(torch.device(device_type), kind, engine)
        whole._set_group_name(f"{group.group_name}:{device_type}")
        whole._set_group_desc(group.group_desc)
        return whole


def _carried_by_nobody(call: str, device: torch.device) -> errors.BadArgumentError:
    engine = {"cuda": "nccl", "xpu": "xccl"}.get(device.type)
    if device.type == "meta":
        fix = "it has no values; make one on the CPU"
    elif engine:
        fix = f'move it with .cpu(), or name an engine for its device: "cpu:symcomm,{device.type}:{engine}"'
    else:
        fix = "move it with .cpu()"
    allowed = "a CPU tensor" if device.type == "cuda" else "a CPU or CUDA tensor"
    return errors.bad_argument(call, "tensor", f"a tensor on {device}", allowed, fix)


def _wish() -> str:
    """The engine that SYMCOMM_CUDA names for CUDA tensors; empty: whichever can."""
    wish = os.environ.get("SYMCOMM_CUDA", "")
    if wish not in ("", "symcomm", "nccl"):
        raise errors.bad_argument("CUDA tensors", "SYMCOMM_CUDA", wish, "'symcomm' or 'nccl', or not set")
    return wish


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# --- making them ------------------------------------------------------------------------------------------------------


def _common(options: Any, group: Any) -> Any:
    options._timeout = group.options._timeout
    options.global_ranks_in_group = list(group.core.global_ranks)
    options.group_name = group.group_name
    return options


def _gloo(name: str, store: Any, group: Any) -> tuple[Any, Any]:
    gloo: Any = torch_c10d.ProcessGroupGloo
    options = _common(gloo._Options(), group)
    # Ranks come here one by one, or only a message's two ends, so connections are made on first use.
    options._devices = [gloo.create_default_device(lazy_init=True)]
    return gloo(store, group.core.rank, group.core.size, options), dist.ProcessGroup.BackendType.GLOO


def _nccl(name: str, store: Any, group: Any) -> tuple[Any, Any]:
    nccl: Any = vars(torch_c10d)["ProcessGroupNCCL"]
    given = group.options
    options = _common(given if isinstance(given, nccl.Options) else nccl.Options(), group)
    return nccl(store, group.core.rank, group.core.size, options), dist.ProcessGroup.BackendType.NCCL


def _xccl(name: str, store: Any, group: Any) -> tuple[Any, Any]:
    xccl: Any = vars(torch_c10d)["ProcessGroupXCCL"]
    options = _common(xccl.Options(), group)
    return xccl(store, group.core.rank, group.core.size, options), dist.ProcessGroup.BackendType.XCCL


def _from_plugin(name: str, store: Any, group: Any) -> tuple[Any, Any]:
    """A backend that registered itself with torch, as we do."""
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise errors.CallerError(f'device map: {name} cannot be used beside symcomm; "cuda:nccl" or "cuda:gloo" can.')
    rank, size, timeout = group.core.rank, group.core.size, group.options._timeout
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout), dist.ProcessGroup.BackendType.CUSTOM
    told: Any = vars(torch_c10d)["_DistributedBackendOptions"]()
    told.store, told.group_rank, told.group_size, told.timeout = store, rank, size, timeout
    told.group_id = group.group_name
    told.global_ranks_in_group = list(group.core.global_ranks)
    return plugin.creator_fn(told, None), dist.ProcessGroup.BackendType.CUSTOM


_MAKERS: dict[str, Callable[[str, Any, Any], tuple[Any, Any]]] = {"gloo": _gloo, "nccl": _nccl, "xccl": _xccl}


# --- our calls as torch's ---------------------------------------------------------------------------------------------


# In these calls torch takes several tensors of each rank, so it wraps a tensor, or a list of one per rank, in a list.
_IN_LISTS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "scatter")


def _as_torchs(op: Op, options: Any, timeout: Any, rest: Sequence[Any]) -> Any:
    """The caller's options, or new ones made of plain arguments, of which ``rest`` are the last."""
    if not hasattr(options, "asyncOp"):
        options = getattr(torch_c10d, options_of(op.torch))()
        if op.reduces:
            options.reduceOp = getattr(dist.ReduceOp, rest[-1].name) if isinstance(rest[-1], RedOpType) else rest[-1]
        if op.rooted:
            options.rootRank = rest[0]
    if timeout is not None:
        options.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    return options
