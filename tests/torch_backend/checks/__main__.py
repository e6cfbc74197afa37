"""Forks the ranks of a process that has imported torch once and done nothing else with it."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from symcomm.torch_backend.register import register
from tests.torch_backend.checks import (
    CHECKS,
    at_once,
    autograd,
    collectives,
    devices,
    fsdp,
    groups,
    leave,
    on_top,
    ways,
    words,
)

# importing them is what fills CHECKS
assert all((at_once, autograd, collectives, devices, fsdp, groups, on_top, ways, words))


def _on_rank(rank: int, names: list[str], folder: str, out: int, checks: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    for name in names:
        function, world = checks[name]
        text = ""
        try:
            if rank < world:
                function(rank, f"{folder}/{name}")
        except BaseException:
            text = traceback.format_exc()
            if dist.is_initialized():
                leave()
        os.write(out, (json.dumps({"check": name, "rank": rank, "text": text}) + "\n").encode())


def main(names: list[str], checks: dict[str, Any] = CHECKS) -> int:
    # A rank that is in few checks is not to wait for those that are in the others.
    chosen = sorted(names or checks, key=lambda name: checks[name][1], reverse=True)
    children = []
    gc.freeze()  # ranks share what is loaded, and need not look at it when they collect
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(max(checks[name][1] for name in chosen)):
            child = os.fork()
            if child == 0:
                try:
                    _on_rank(rank, chosen, folder, 1, checks)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
