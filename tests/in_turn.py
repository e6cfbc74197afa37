"""Programs one after the other in one rank: ``python -m symcomm run -n 2 tests/in_turn.py BACKEND one.py two.py ...``

Each runs in a process of its own, forked from one that has loaded torch. Between them a line names the next.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch._dynamo
import torch.distributed

assert torch._dynamo and torch.distributed  # what all of them load

backend, *programs = sys.argv[1:]
for number, program in enumerate(programs):
    if os.environ["RANK"] == "0":
        print("==", program, flush=True)
    child = os.fork()
    if child == 0:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # keys in the launcher's store that nobody has used
        sys.argv = [program, backend]
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"{program} on rank {os.environ['RANK']}: exit code {code}")
