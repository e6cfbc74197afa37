"""Symcomm as a ``torch.distributed`` backend.

register.py  tells torch about us; torch calls it by itself through the ``torch.backends`` entry point
torch_patches/ every change of torch's behaviour, a file each
stores.py    our stores where torch wants its own
group.py     TorchGroup: torch's ProcessGroup on ours
cpp_backend.py the Backend that torch's C++ finds inside a TorchGroup (torch 2.15)
versions.py  what differs between versions of torch
bootstrap.py how its ranks bootstrap, through torch's store
lifecycle.py the rest of TorchGroup: its end, groups made from it, its properties
reconfigure.py members that come and go
engines.py   tensors on other devices, for maps such as "cpu:symcomm,cuda:nccl"
arguments.py what torch passes -> what ours takes
overloads.py, values.py  the forms that calls have in PyTorch's binding, and types that it refuses
reduce_ops.py our reduce operations where torch wants its own
p2p.py       dist.send and dist.recv, within the call
checks.py    wrong arguments, in the words that scripts look for
work.py      what torch expects of a Work and of its future
sparse.py    sums of sparse tensors
symm_ops.py  torch.ops.symm_mem on CPU tensors; symm_reduce.py, symm_shuffle.py, symm_one_sided.py do the work,
             symm_boxed.py has those that pass a handle, symm_functional.py lets those that write compile
debug_checks.py what TORCH_DISTRIBUTED_DEBUG=DETAIL adds
lists.py     calls with several tensors of one rank
profile.py   events for torch's profiler
"""

import torch  # noqa: F401  before all modules of this package, which torch loads while it is being imported
