"""Programs one after the other, each in a process and a folder of its own, forked from one that has loaded torch:

    python tests/support/in_turn.py one.py two.py ...
    python -m symcomm run -n 2 tests/support/in_turn.py one.py two.py ... -- words that each of them gets

The first rank says "== one.py" before each, and "== one.py: 0" after it, with its exit code; others say that only of a
failure. ``parts`` reads it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

SECONDS = 60  # for each program


def parts(lines: Sequence[str], programs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(exit code, lines) of each program; those that never began, or never ended, have no code."""
    found = []
    for program in programs:
        said: list[str] = []
        code, inside = "", False
        for line in lines:
            if line.startswith(f"== {program}: "):
                code, inside = line.rpartition(" ")[2], False
            inside = inside or line == f"== {program}"
            if inside:
                said.append(line)
        found.append((code, said))
    return found


def run(program: str, words: Sequence[str], number: int) -> int:
    """The exit code of a program in a child of this process."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            os.chdir(folder)
            _own_keys(f"program {number}")
            if "gloo" in words:
                _keep_groups()
            sys.argv, sys.path[0] = [program, *words], os.path.dirname(program)
            runpy.run_path(program, run_name="__main__")
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)  # taking torch down takes a second; and on a busy machine Gloo's threads may prevent it
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _own_keys(prefix: str) -> None:
    """In the store of the launcher, which all programs use."""
    from torch.distributed import PrefixStore

    module: Any = sys.modules["torch.distributed.rendezvous"]
    make = module._create_c10d_store
    module._create_c10d_store = lambda *args, **options: PrefixStore(prefix, make(*args, **options))


_kept: list[Any] = []


def _keep_groups() -> None:
    """Gloo's groups outlive the program: taking one down may deadlock (see ``torch_checks.leave``)."""
    import torch.distributed as dist

    known = dist.destroy_process_group

    def destroy(*args: Any) -> None:
        _kept.extend(dist.distributed_c10d._world.pg_map)
        known(*args)

    dist.destroy_process_group = destroy


def main(arguments: Sequence[str]) -> int:
    import torch._dynamo
    import torch.distributed

    import symcomm.ddp
    import symcomm.torch_backend.group

    assert torch._dynamo and torch.distributed and symcomm.torch_backend.group and symcomm.ddp  # what many of them load
    end = arguments.index("--") if "--" in arguments else len(arguments)
    speaks, failed = os.environ.get("RANK", "0") == "0", False
    for number, program in enumerate(arguments[:end]):
        if speaks:
            print("==", program, flush=True)
        code = run(program, arguments[end + 1 :], number)
        failed = failed or code != 0
        if speaks or code != 0:
            print(f"== {program}: {code}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
