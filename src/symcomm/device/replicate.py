"""One copy of a module per device. Gradients of the copies' parameters flow back to the module's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from symcomm import errors
from symcomm.device.coalesce import broadcast_coalesced
from symcomm.device.devices import as_devices
from symcomm.device.functions import Broadcast


def replicate(module: nn.Module, devices: Any, detach: bool = False) -> list[nn.Module]:
    """A copy of ``module`` for each of ``devices``; the first has the module's own memory if it is on that device.

    The copies' parameters are plain tensors, and the module's parameters collect their gradients. With ``detach`` they
    are cut off, except those that are the module's own. Buffers are copied, except where the module's own memory is
    shared: what the first copy writes in place, stays.

    Raises: BadArgumentError.
    """
    if not isinstance(module, nn.Module):
        raise errors.bad_argument("replicate", "module", type(module), "a torch.nn.Module")
    targets = as_devices("replicate", "devices", devices, allow_none=True)
    if not targets:
        return []
    _check_scripted(module)
    tensors = _Copies(module, targets, detach)
    modules = list(module.modules())
    position = {m: i for i, m in enumerate(modules)}
    replicas = [[_shell(m) for m in modules] for _ in targets]
    for d, copies in enumerate(replicas):
        for original, copy in zip(modules, copies, strict=True):
            for name, child in original._modules.items():
                _attach(copy, "_modules", name, None if child is None else copies[position[child]])
            for name, parameter in original._parameters.items():
                copied = None if parameter is None else tensors.of(parameter, d)
                _attach(copy, "_parameters", name, copied)
                if copied is not None:
                    copy._former_parameters[name] = copied
            for name, buffer in original._buffers.items():
                _attach(copy, "_buffers", name, None if buffer is None else tensors.of(buffer, d))
    return [copies[0] for copies in replicas]


def _shell(module: nn.Module) -> Any:
    """The module without its tensors and children, which are attached later."""
    copy = module._replicate_for_data_parallel()
    copy._former_parameters = OrderedDict()
    return copy


def _attach(module: Any, table: str, name: str, value: Any) -> None:
    """A copy's parameters are not leaves, so they become plain attributes; None stays in its table."""
    if value is None:
        getattr(module, table)[name] = None
    else:
        setattr(module, name, value)


class _Copies:
    """Every parameter and buffer of a module on every device, sent together."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], detach: bool):
        tensors = list(dict.fromkeys([*module.parameters(), *module.buffers()]))
        followed = [t for t in tensors if isinstance(t, nn.Parameter) or t.requires_grad]
        if detach or not torch.is_grad_enabled():
            followed = []
        chosen = set(map(id, followed))
        plain = [t for t in tensors if id(t) not in chosen]
        self._place = {id(t): i for i, t in enumerate([*followed, *plain])}
        copies = Broadcast.apply(devices, *followed) if followed else ()
        detached = broadcast_coalesced(plain, devices)
        n = len(followed)
        self._copies = [[*copies[d * n : (d + 1) * n], *detached[d]] for d in range(len(devices))]

    def of(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        return self._copies[device][self._place[id(tensor)]]


def _check_scripted(module: nn.Module) -> None:
    """A scripted module runs its children from C++, where Python copies of them would not be found."""
    for name, scripted in module.named_modules():
        if isinstance(scripted, torch.jit.ScriptModule):
            for child_name, child in scripted.named_modules():
                if not isinstance(child, torch.jit.ScriptModule):
                    where = f"module.{name}.{child_name}".replace("..", ".")
                    allowed = "scripted like the module that holds it"
                    raise errors.bad_argument("replicate", where, type(child), allowed)
