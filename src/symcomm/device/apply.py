"""Run each module on its input, each in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from symcomm import errors
from symcomm.device.devices import accelerator, as_device


def parallel_apply(
    modules: Sequence[Any], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]] | None = None, devices: Any = None
) -> list[Any]:
    """``modules[i](*inputs[i], **kwargs[i])`` on ``devices[i]`` for every i, at the same time; results in order.

    An input that is not a tuple or list is a single argument. The default device is that of the input's first tensor.
    Grad mode, inference mode and autocast are the caller's. If a module fails, an exception of the same type names it
    and carries its traceback.

    Raises: BadArgumentError; what a module raises, with its replica and device.
    """
    count = len(modules)
    for name, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", devices)):
        if given is not None and len(given) != count:
            raise errors.bad_argument("parallel_apply", name, f"{len(given)} entries", f"{count}, one for each module")
    runs = [
        _Run(i, module, inputs[i], kwargs[i] if kwargs is not None else {}, devices[i] if devices is not None else None)
        for i, module in enumerate(modules)
    ]
    state = _CallerState(run.device for run in runs)
    if count == 1:
        runs[0].go(state)
    else:  # none runs in this thread, so torch's other state per thread is the same for all of them
        threads = [threading.Thread(target=run.go, args=(state,), name=f"replica {run.index}") for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failed = [run for run in runs if run.error is not None]
    if failed:
        _raise_first(failed)
    return [run.output for run in runs]


class _CallerState:
    """The per-thread state of torch that replicas share with the caller."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        kinds = ["cpu", *filter(None, [accelerator()])]
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.cache = torch.is_autocast_cache_enabled()
        self.streams = {d: torch.cuda.current_stream(d) for d in set(devices) if d.type == "cuda"}

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self.cache))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            yield


class _Run:
    """One module's call and how it ended."""

    def __init__(self, index: int, module: Any, inputs: Any, kwargs: dict[str, Any], device: Any):
        self.index, self.module, self.kwargs = index, module, kwargs
        self.inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        if device is not None:
            self.device = as_device("parallel_apply", f"devices[{index}]", device)
        else:
            tensor = first_tensor(inputs)
            self.device = tensor.device if tensor is not None else torch.device("cpu")
        self.output: Any = None
        self.error: BaseException | None = None

    def go(self, state: _CallerState) -> None:
        try:
            with state.on(self.device):
                self.output = self.module(*self.inputs, **self.kwargs)
        except BaseException as error:  # whatever ended the thread
            self.error = error


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(first_tensor, items) if found is not None), None)


class _Text(str):
    """A message that prints unchanged even if an exception shows the repr of its argument, as KeyError does."""

    def __repr__(self) -> str:
        return str(self)


def _raise_first(failed: list[_Run]) -> NoReturn:
    run = failed[0]
    error = run.error
    assert error is not None
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit: no message could make them clearer
        raise error
    rest = ", ".join(f"replica {r.index} on device {r.device}: {type(r.error).__name__}" for r in failed[1:])
    others = f" (so did {rest})" if rest else ""
    original = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"{type(error).__name__} in replica {run.index} on device {run.device}{others}. Its traceback:\n{original}"
    try:
        told = type(error)(_Text(text))
    except Exception:  # its constructor has a different signature
        told = RuntimeError(text)
    raise told from error
