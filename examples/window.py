"""Halo exchange with a window: heat spreads along a rod that ranks share; each writes its edges into its neighbours'.

Run it with `symcomm run -n 2 examples/window.py`. The result is that of one process, bit for bit.
"""

import torch

import symcomm

CELLS, STEPS = 1000, 200  # of each rank


def spread(rod):
    """One step on the cells between the first and the last."""
    return rod[1:-1] + 0.25 * (rod[:-2] - 2 * rod[1:-1] + rod[2:])


group = symcomm.init()
torch.set_num_threads(1)
neighbours = {0: group.rank - 1, CELLS + 1: group.rank + 1}  # which rank a halo cell's value comes from
neighbours = {cell: rank for cell, rank in neighbours.items() if 0 <= rank < group.size}

whole = torch.rand(CELLS * group.size + 2, generator=torch.Generator().manual_seed(0))
mine = whole[CELLS * group.rank : CELLS * (group.rank + 1) + 2].clone()  # with a halo cell at each end
window = group.new_window(mine)  # every rank calls it

for _ in range(STEPS):
    new = spread(mine)
    for rank in neighbours.values():
        window.signal(rank)  # we have read the halo cells: they may be written
        window.wait_signal(rank)
    mine[1:-1] = new
    for cell, rank in neighbours.items():
        edge, theirs = (new[:1], CELLS + 1) if cell == 0 else (new[-1:], 0)
        window.put(edge, rank, theirs)
        window.signal(rank)
    for rank in neighbours.values():
        window.wait_signal(rank)  # what that rank put is here

for _ in range(STEPS):
    whole[1:-1] = spread(whole)
expected = whole[CELLS * group.rank + 1 : CELLS * (group.rank + 1) + 1]
print(f"rank {group.rank}: the same as in one process: {torch.equal(mine[1:-1], expected)}", flush=True)
window.tensor_deregister()
symcomm.destroy()
