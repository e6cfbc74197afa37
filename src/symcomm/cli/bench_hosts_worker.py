"""One rank of ``symcomm bench hosts``: runs the whole plan on both sides; the first rank writes what was found."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

CARD = Path("/sys/class/net/net0/statistics/tx_bytes")


def main() -> None:
    plan, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    import torch
    import torch.distributed as dist

    import symcomm

    group = symcomm.init(timeout=300)
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=300)
    )
    sides: dict[str, Callable[[Any], Any]] = {"ours": group.all_reduce, "gloo": dist.all_reduce}
    rows: list[dict[str, Any]] = []
    for nbytes in plan["sizes"]:
        found = {side: _check(call, nbytes, group) for side, call in sides.items()}
        tensor = torch.zeros(nbytes // 4)
        for number in range(plan["rounds"]):
            for side in list(sides)[:: -1 if number % 2 else 1]:
                seconds, sent = _turn(sides[side], tensor, plan["steps"], group)
                found[side]["turns"].append(seconds)
                found[side]["sent"] = sent
                if group.rank == 0:
                    print(f"{nbytes} bytes, {side}", flush=True)
        rows += [{"nbytes": nbytes, "side": side, **figures} for side, figures in found.items()]
    if group.rank == 0:
        result.write_text(json.dumps(rows))
    group.barrier()
    dist.destroy_process_group()
    symcomm.destroy()


def _check(call: Callable[[Any], Any], nbytes: int, group: Any) -> dict[str, Any]:
    """Values first; this is also what warms everything up."""
    import torch

    inputs = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(r)) for r in range(group.size)]
    wanted = sum(inputs)
    tensor = inputs[group.rank].clone()
    call(tensor)
    error = float((tensor - wanted).abs().max() / torch.as_tensor(wanted).abs().max())
    if not error < 1e-5:
        raise SystemExit(f"values are {error:.2g} of their size from the sum")
    return {"error": error, "turns": [], "sent": 0.0}


def _turn(call: Callable[[Any], Any], tensor: Any, steps: int, group: Any) -> tuple[float, float]:
    """(seconds of a call, of the slowest rank; bytes that it made this host send)."""
    group.barrier()
    before, begun = int(CARD.read_text()), time.perf_counter()
    for _ in range(steps):
        call(tensor)
    seconds = (time.perf_counter() - begun) / steps
    sent = (int(CARD.read_text()) - before) / steps
    everyone = [json.loads(item) for item in group.all_gather_object(json.dumps(seconds).encode())]
    return max(everyone), sent


if __name__ == "__main__":
    main()
