"""Symcomm as a ``torch.distributed`` backend.

register.py      tells torch about us; torch calls it by itself through the ``torch.backends`` entry point
torch_patches/   every change of torch's behaviour, a file each
versions.py      what differs between versions of torch
frames.py        what looks at stack frames or changes code objects, and why

group.py         TorchGroup: torch's ProcessGroup on ours, by torch's names
python_group.py  its base, which c10d's ProcessGroup shares: names, store, completion hook
running.py       how its calls run; operations.py checks what each hands to the core
blocking.py      dist.send, dist.recv and monitored barriers, within the call
lists.py, sparse.py  calls with several tensors of one rank, sums of sparse tensors
engines.py       tensors on other devices, for maps such as "cpu:symcomm,cuda:nccl"
work.py          what torch expects of a Work and of its future
call_hooks.py, estimate.py, profile.py, debug_checks.py  who watches calls: hooks, estimates, torch's profiler, DETAIL
bootstrap.py     how its ranks meet, through torch's store; lifecycle.py: how the default group ends
wrapped.py       for code that makes its own groups
derived.py       groups made from it; reconfigure.py: members that come and go
cpp_backend.py   the Backend that torch's C++ finds inside it (torch 2.15); watched_group.py: while C++ hooks watch
windows.py       its windows

arguments.py     what torch passes -> what ours takes; options_layout.py: options, read from memory
overloads.py, values.py  the forms that calls have in PyTorch's binding, and types that it refuses
checks.py        wrong arguments, in the words that scripts look for
stores.py, reduce_ops.py  our stores and reduce operations where torch wants its own
symm_ops.py      torch.ops.symm_mem on CPU tensors; symm_reduce.py, symm_shuffle.py, symm_one_sided.py do the work,
                 symm_boxed.py has those that pass a handle, symm_functional.py lets those that write compile
"""

import torch  # noqa: F401  before all modules of this package, which torch loads while it is being imported
