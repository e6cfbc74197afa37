"""What has to change so that tests written for Gloo run on us.

Two ways, because each hides something that the other shows:

* ``alias``: groups are made under our own name. The suite's BACKEND compares equal to "gloo" (else most tests would
  skip), and its lists of backends with a feature learn our name.
* ``impersonate``: groups are made under the name "gloo", but what torch then builds is ours. Nothing in the suite
  changes, so code paths of torch that ask for Gloo by name are exercised too.

``gloo+mpi`` also opens the tests that the suite keeps for MPI: all_to_all on CPU, and groups of few ranks.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

MODES = ("alias", "impersonate", "stock")
# Left out when impersonating: DDP's C++ log knows whom it talks to, and the test wants Gloo's own threads and devices.
# (As an alias it passes.)
ASKS_GLOO_ITSELF = {"test_ddp_logging_data_cpu"}


class Alias(str):
    """A backend's name that is also equal to other backends' names."""

    also: frozenset[str]

    def __new__(cls, name: str, also: frozenset[str]) -> Alias:
        alias = super().__new__(cls, name)
        alias.also = also
        return alias

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (type(other) is str and other in self.also)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # so that `BACKEND in {"gloo", "nccl"}` looks in the right bucket


def load_suite(mode: str, names: frozenset[str], ranks: int, ddp: str = "", pretend: bool = False) -> Any:
    """The module with PyTorch's tests, imported so that it takes us for the backends in ``names``."""
    from torch.testing._internal import common_distributed

    if pretend:
        from tests.conformance.pretend import pretend_gpus

        pretend_gpus()
    if ddp:
        replace_ddp(views=ddp == "views")

    if mode != "stock":
        from symcomm.torch_backend.register import register

        register()
    ours = "symcomm" if mode == "alias" else "gloo"
    if mode == "alias":
        # Features a test may ask for by backend name. "plugin" makes the suite accept a name that torch did not ship.
        for backends in common_distributed.DistTestCases.backend_feature.values():
            backends.add(ours)
    elif mode == "impersonate":
        impersonate_gloo()
    # The suite decides at import which tests to skip, from this variable; a plain dict can hold our kind of str.
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["BACKEND"] = ours
    alias = Alias(ours, names)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": alias}):
        import torch.testing._internal.distributed.distributed_test as suite
    if "mpi" in names:
        # Read again inside the ranks, only to ask: is it MPI (which may use fewer than 8 ranks)?
        os.environ["BACKEND"] = "mpi"
    _expect_profiler_events(suite, mode)
    return suite


def replace_ddp(views: bool) -> None:
    """Put our data-parallel layer where PyTorch's is. ``views`` says what gradients are unless a test says so."""
    import torch
    import torch.distributed as dist

    import symcomm.c10d as ours
    from symcomm.ddp import DistributedDataParallel

    class OurDDP(DistributedDataParallel):
        def __init__(self, module: Any, *args: Any, **kwargs: Any):
            if len(args) < 10:  # else the test gives it by its place
                kwargs.setdefault("gradient_as_bucket_view", views)
            if next(module.parameters(), torch.empty(0)).is_cpu and kwargs.get("device_ids"):
                kwargs.pop("device_ids")  # of pretended GPUs
                kwargs.pop("output_device", None)
            super().__init__(module, *args, **kwargs)

    OurDDP.__qualname__ = "OurDDP"  # where pickle finds it
    globals()["OurDDP"] = OurDDP
    torch.nn.parallel.DistributedDataParallel = OurDDP  # type: ignore[misc,assignment]
    for name in (
        "Reducer", "Logger", "_broadcast_coalesced", "_compute_bucket_assignment_by_size", "_register_comm_hook",
        "_register_builtin_comm_hook", "_verify_params_across_processes",
    ):  # fmt: skip
        setattr(dist, name, getattr(ours, name))


def _expect_profiler_events(suite: Any, mode: str) -> None:
    """The suite looks for events "<backend name>:<operation>" of these backends. Ours always carry our own name."""
    for backends in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        if mode == "alias":
            backends.append("symcomm")
        elif mode == "impersonate":
            backends.remove("gloo")


def impersonate_gloo() -> None:
    """Let torch build our group wherever it would build its ProcessGroupGloo, by name or directly."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from symcomm.torch_backend.group import TorchGroup
    from symcomm.torch_backend.versions import dist2_factories

    gloo: Any = dist.ProcessGroupGloo

    class PassesForGloo(type):
        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, (TorchGroup, gloo))

        def __getattr__(cls, name: str) -> Any:
            return getattr(gloo, name)  # _Options, create_device and the like

        def __call__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            given = timeout or getattr(options, "_timeout", None) or c10d.default_pg_timeout
            if not isinstance(given, timedelta):
                given = timedelta(seconds=given)
            return TorchGroup(store, rank, size, given, "gloo", None, options)

    class ProcessGroupGloo(metaclass=PassesForGloo):
        """Stands where torch's class stood."""

    factories = dist2_factories()
    if "gloo" in factories:
        factories["gloo"] = factories["symcomm"]
    dist.ProcessGroupGloo = c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc,assignment]
