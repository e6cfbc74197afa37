"""One process, many devices: what ``torch.cuda.comm`` and ``DataParallel`` do, for any list of devices.

devices.py         converts what callers write (0, "cuda:1", "cpu", -1) to torch.device
copies.py          broadcast, scatter, gather: plain copies, differentiable as they are
sums.py            reduce_add: adds one tensor from each device, as a tree
coalesce.py        broadcast and reduce_add of many tensors, packed where they cross devices
packing.py         many tensors <-> one flat buffer
nccl.py            the part NCCL takes over between different GPUs
bindings.py        the names torch's own module gives these functions
functions.py       the same as autograd functions, as replicas of a module need them
nested.py          scatter and gather of tuples, lists and dicts that hold tensors
replicate.py       one copy of a module per device
apply.py           run each copy on its input, one thread each
data_parallel.py   DataParallel: all of the above around a module

A device list may contain the CPU, and the same device several times, so you can try everything here on any machine.
Public names are in ``symcomm.comm``.
"""
