"""Symcomm as a ``torch.distributed`` backend.

register.py  tells torch about us; torch calls it by itself through the ``torch.backends`` entry point
group.py     TorchGroup: torch's ProcessGroup on ours
arguments.py what torch passes -> what ours takes
work.py      what torch expects of a Work and of its future
sparse.py    sums of sparse tensors
lists.py     calls with several tensors of one rank
profile.py   events for torch's profiler
"""
