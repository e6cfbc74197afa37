"""One process, many devices: what ``torch.cuda.comm`` and ``DataParallel`` do, for any list of devices.

=================  ====================================================================
file               what it holds
=================  ====================================================================
devices.py         from what callers write (0, "cuda:1", "cpu", -1) to torch.device
copies.py          broadcast, scatter, gather: plain copies, differentiable as they are
sums.py            reduce_add: one tensor from each device, added in the order given
coalesce.py        broadcast and reduce_add of many tensors, packed where they cross devices
packing.py         many tensors <-> one flat buffer
nccl.py            the part NCCL takes over between different GPUs
bindings.py        the names torch's own module gives these functions
functions.py       the same as autograd functions, as replicas of a module need them
nested.py          scatter and gather of tuples, lists and dicts that hold tensors
replicate.py       one copy of a module per device
apply.py           run each copy on its input, one thread each
data_parallel.py   DataParallel: all of the above around a module
=================  ====================================================================

An entry of a device list may be the CPU, and one device may be listed several times, so everything here can be tried
on any machine. Public names are in ``symcomm.comm``.
"""
