"""Symcomm's own API: start with `symcomm run -n 4 examples/first_steps.py`."""

import torch

import symcomm

group = symcomm.init()

numbers = torch.arange(3.0) + group.rank
group.all_reduce(numbers)

collected = torch.empty(group.size)
group.all_gather_single(collected, torch.tensor([float(group.rank)]))

work = group.broadcast(numbers, root=0, async_op=True)  # something else could happen here
work.wait()

if group.size > 1 and group.rank == 0:
    group.send(torch.tensor([42.0]), peer=1)
elif group.rank == 1:
    answer = torch.empty(1)
    group.recv(answer, peer=0)
    assert answer.item() == 42.0

if group.rank == 0:
    print("sums:", numbers.tolist(), "ranks:", collected.tolist())
symcomm.destroy()
