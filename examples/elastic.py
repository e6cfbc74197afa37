"""A training that loses a rank and gets it back::

    symcomm run -n 4 --max-restarts 1 --restart failed examples/elastic.py

Arguments: where rank 2 dies the first time it runs ("never", "before", "middle", "after"), and "ddp" for
symcomm.DistributedDataParallel. The losses are the same wherever it dies.
"""

import os
import signal
import sys

import torch
from torch import nn

from symcomm import elastic

where, how = (*sys.argv[1:], *["middle", "plain"][len(sys.argv) - 1 :])
STEPS, BATCH, LAST_STEP_OF_RANK_2 = 20, 48, 7

torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # sums in another order then differ only in the last digits
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def die_if(session, moment):
    is_victim = os.environ["RANK"] == "2" and not elastic.is_newcomer()
    if moment == where and is_victim and session.step == LAST_STEP_OF_RANK_2:
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(session):
    # The batch depends on the step alone; each rank works on its share of it, however many ranks there are.
    data = torch.Generator().manual_seed(session.step)
    x = torch.randn(BATCH, 20, generator=data)[session.share(BATCH)]
    loss = (session.model(x) - x.sum(1, keepdim=True)).square().sum() / BATCH
    optimizer.zero_grad()
    die_if(session, "before")
    (loss * session.size if how == "ddp" else loss).backward()  # DistributedDataParallel divides by the ranks
    if how == "plain":
        for parameter in model.parameters():
            session.group.all_reduce(parameter.grad)
            die_if(session, "middle")
    else:
        die_if(session, "middle")
    optimizer.step()
    die_if(session, "after")
    total = loss.detach().clone()
    session.group.all_reduce(total)
    return total.item()


def on_change(session):
    if session.rank == 0:
        print(f"step {session.step}: ranks {session.group.global_ranks}", flush=True)


with elastic.Session(
    model=model, optimizer=optimizer, data_parallel=how == "ddp", wait=30.0, on_change=on_change
) as session:
    losses = session.run(train_step, STEPS)
    if session.rank == 0:
        for loss in losses:
            print("loss", loss, flush=True)
