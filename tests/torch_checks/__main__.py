"""Forks the ranks of a process that has imported torch once and done nothing else with it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist

from symcomm.backend.register import register
from tests.torch_checks import CHECKS, RANKS, collectives, devices, groups, on_top, words

assert all((collectives, devices, groups, on_top, words))  # importing them is what fills CHECKS


def _on_rank(rank: int, names: list[str], folder: str, out: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    for name in names:
        function, world = CHECKS[name]
        text = ""
        try:
            if rank < world:
                function(rank, f"{folder}/{name}")
        except BaseException:
            text = traceback.format_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
        os.write(out, (json.dumps({"check": name, "rank": rank, "text": text}) + "\n").encode())


def main(names: list[str]) -> int:
    chosen = names or list(CHECKS)
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    _on_rank(rank, chosen, folder, 1)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
