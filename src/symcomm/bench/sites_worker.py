"""One rank of ``symcomm bench sites``: trains with every method in turn; the first rank writes how each went."""

from __future__ import annotations

import math
import os
import sys
import time
from datetime import timedelta
from typing import Any

from symcomm.bench.model import decoder, draw_texts, loss_of, own_source
from symcomm.bench.namespaces import carried
from symcomm.bench.torch_worker import read_plan, say

WARM_UP = 20  # steps in which the learning rate rises
CHECKED = 32  # texts on which every method is judged
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.5  # of DiLoCo; more momentum needs more meetings than a short run has
METHODS = {
    "plain": "plain DDP", "int8": "int8, error feedback", "power": "PowerSGD, rank 4", "topk": "top 2 %",
    "diloco": "DiLoCo", "diloco-int8": "DiLoCo, int8",
}  # fmt: skip


def attach(method: str, model: Any, period: int) -> Any:
    """Register the method's hook on a DistributedDataParallel; returns its outer optimizer, if it has one."""
    import torch

    from symcomm.ddp import hooks

    module = model.module
    if method == "int8":
        model.register_comm_hook(
            hooks.BlockwiseState(torch.int8, error_feedback=True, model=module), hooks.blockwise_hook
        )
    elif method == "power":
        model.register_comm_hook(hooks.PowerSGDState(4, model=module), hooks.power_sgd_hook)
    elif method == "topk":
        model.register_comm_hook(hooks.TopKState(0.02, model=module), hooks.topk_hook)
    elif method.startswith("diloco"):
        dtype = torch.int8 if method == "diloco-int8" else None
        outer = hooks.DiLoCoState(module.parameters(), period, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, dtype=dtype)
        model.register_comm_hook(outer, hooks.local_sgd_hook)
        return outer
    return None


class SitesTraining:
    """One method. All start with the same parameters and read the same texts."""

    def __init__(self, method: str, workload: dict[str, Any], data: Any, rank: int):
        import torch

        from symcomm.ddp import DistributedDataParallel

        torch.manual_seed(0)
        self.workload, self.data, self.done = workload, data, 0
        self.module = decoder(workload["width"], workload["layers"], workload["context"])
        self.model = DistributedDataParallel(self.module, forward_sync_buffers=False)  # they never change
        self.outer = attach(method, self.model, workload["period"])
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=workload["rate"], betas=(0.9, 0.98))
        self.draw = torch.Generator().manual_seed(1 + rank)
        self.checked = self.texts(torch.Generator().manual_seed(0), CHECKED)

    def texts(self, draw: Any, count: int) -> Any:
        return draw_texts(self.data, self.workload["context"] + 1, count, draw)

    def step(self) -> None:
        self.done += 1
        self.optimizer.param_groups[0]["lr"] = self.workload["rate"] * min(1.0, self.done / WARM_UP)
        loss_of(self.model, self.texts(self.draw, self.workload["batch"])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.outer is not None:
            self.outer.step()

    def check(self) -> float:
        """The loss on texts that are the same for all methods."""
        import torch

        with torch.no_grad():
            return float(loss_of(self.module, self.checked))


def train(method: str, workload: dict[str, Any], data: Any, rank: int) -> dict[str, Any]:
    """Train until the loss reaches the target or the steps run out. The clock stops while we check the loss: every few
    steps, or with an outer optimizer whenever the ranks have met, since their models differ in between."""
    import torch
    import torch.distributed as dist

    training = SitesTraining(method, workload, data, rank)
    between = workload["period"] if training.outer is not None else workload["every"]
    seconds, curve = 0.0, [(0, 0.0, training.check())]
    before = carried()[0]
    while training.done < workload["limit"]:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(between):
            training.step()
        seconds += time.perf_counter() - begun
        found = torch.tensor([training.check() if rank == 0 else 0.0])
        dist.broadcast(found, 0)
        curve.append((training.done, seconds, found.item()))
        say(f"{METHODS[method]}, loss {found.item():.2f}")
        if not workload["target"] < found.item() < math.inf:
            break
    for _ in range(training.done, workload["limit"], between):
        say(f"{METHODS[method]}, done")  # the bar also counts the checks that are left out
    return {"method": method, "curve": curve, "sent": carried()[0] - before}


def main() -> None:
    workload = read_plan()
    import torch
    import torch.distributed as dist

    from symcomm.torch_backend.register import register

    register()
    torch.set_num_threads(1)
    dist.init_process_group("symcomm", timeout=timedelta(seconds=300))
    rank = int(os.environ["RANK"])
    data = torch.frombuffer(bytearray(own_source()), dtype=torch.uint8)
    SitesTraining("plain", workload, data, rank).step()  # makes connections and touches memory
    for method in workload["methods"]:
        say([train(method, workload, data, rank)])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # all is reported; models and groups end with the process


if __name__ == "__main__":
    main()
