"""DataParallel: splits a module's input over devices, runs a copy on each, and joins the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from symcomm import errors
from symcomm.device.apply import parallel_apply
from symcomm.device.devices import accelerators, as_device, as_devices
from symcomm.device.nested import gather_nested, scatter_kwargs
from symcomm.device.replicate import replicate

BALANCED = 0.75  # warn if a GPU has less than this part of another's memory or cores


class DataParallel(nn.Module):
    """``module`` on every device of ``device_ids``: each gets a part of the batch (dimension ``dim``).

    A forward copies the module to the devices, splits the tensors among its arguments, runs the copies at the same time
    and joins their outputs on ``output_device`` (the first device unless given). A backward adds the copies' gradients
    in the module's parameters. Devices may be GPUs, "cpu", and the same device several times. Without ``device_ids`` it
    uses all GPUs; if there are none, the module runs as it is.

    Raises: BadArgumentError; what the module raises, with its replica and device.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0):
        super().__init__()
        _check_module("DataParallel", module)
        self.module = module
        self.dim = dim
        self.device_ids = _devices("DataParallel", device_ids)
        if not self.device_ids:
            self.output_device: torch.device | None = None
            return
        self.output_device = _output_device("DataParallel", output_device, self.device_ids)
        self.src_device_obj = self.device_ids[0]  # where the module is; subclasses use torch's name for it
        _warn_of_imbalance(self.device_ids)
        if len(self.device_ids) == 1:
            self.module.to(self.device_ids[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            _check_home("DataParallel", self.module, self.device_ids[0])
            rows, named = self.scatter(inputs, kwargs, self.device_ids)
            rows, named = rows or ((),), named or ({},)  # no argument at all: one call on the first device
            if len(self.device_ids) == 1:
                return self.module(*rows[0], **named[0])
            outputs = self.parallel_apply(self.replicate(self.module, self.device_ids[: len(rows)]), rows, named)
            return self.gather(outputs, self.output_device)

    # The four steps; a subclass may change any of them.

    def scatter(self, inputs: Sequence[Any], kwargs: dict[str, Any], device_ids: Any) -> tuple[Any, Any]:
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        return gather_nested(outputs, output_device, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """One such forward, without a wrapper around the module.

    Raises: BadArgumentError; what the module raises, with its replica and device."""
    _check_module("data_parallel", module)
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = _devices("data_parallel", device_ids)
    if not devices:
        return module(*arguments, **(module_kwargs or {}))
    target = _output_device("data_parallel", output_device, devices)
    _check_home("data_parallel", module, devices[0])
    rows, named = scatter_kwargs(arguments, module_kwargs, devices, dim)
    rows, named = rows or ((),), named or ({},)
    if len(devices) == 1:
        return module(*rows[0], **named[0])
    replicas = replicate(module, devices[: len(rows)])
    return gather_nested(parallel_apply(replicas, rows, named, devices[: len(rows)]), target, dim)


def _check_module(call: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise errors.bad_argument(call, "module", type(module), "a torch.nn.Module")


def _devices(call: str, device_ids: Any) -> list[torch.device]:
    return list(accelerators()) if device_ids is None else as_devices(call, "device_ids", device_ids)


def _output_device(call: str, value: Any, devices: Sequence[torch.device]) -> torch.device:
    return devices[0] if value is None else as_device(call, "output_device", value, minus_one_is_cpu=True)


def _check_home(call: str, module: nn.Module, home: torch.device) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != home:
            fix = f"move the module there first: module.to({str(home)!r})"
            raise errors.bad_argument(call, f"module.{name}", tensor.device, f"on {home}, which is device_ids[0]", fix)


def _warn_of_imbalance(devices: Sequence[torch.device]) -> None:
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    seen = {i: torch.cuda.get_device_properties(i) for i in gpus}
    for what, amount in (("memory", "total_memory"), ("cores", "multi_processor_count")):
        amounts = {i: getattr(properties, amount) for i, properties in seen.items()}
        if not amounts:
            return
        least, most = min(amounts, key=amounts.__getitem__), max(amounts, key=amounts.__getitem__)
        if amounts[least] < BALANCED * amounts[most]:
            text = (
                f"DataParallel: cuda:{least} has less than {BALANCED:.0%} of the {what} of cuda:{most}, which will wait"
            )
            warnings.warn(f"{text} for it; leave it out of device_ids.", stacklevel=3)
            return
