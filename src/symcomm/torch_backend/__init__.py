"""Symcomm as a ``torch.distributed`` backend.

register.py      registers the backend; torch calls it through the ``torch.backends`` entry point
torch_patches/   every change of torch's behaviour, a file each
versions.py      what differs between versions of torch
frames.py        the code that looks at stack frames or changes code objects, and why

group.py         TorchGroup: torch's ProcessGroup on ours, by torch's names
python_group.py  the base of TorchGroup and c10d's ProcessGroup: names, store, completion hook
running.py       how its calls run; operations.py checks each call's arguments
blocking.py      dist.send, dist.recv and monitored barriers, within the call
lists.py, sparse.py  calls with several tensors of one rank, sums of sparse tensors
engines.py       tensors on other devices, for maps such as "cpu:symcomm,cuda:nccl"
work.py          works and futures, as torch expects them
call_hooks.py, estimate.py, profile.py, debug_checks.py  what watches calls: hooks, estimates, torch's profiler, DETAIL
bootstrap.py     how ranks meet, through torch's store; lifecycle.py: how the default group ends
wrapped.py       groups for code that makes its own groups
derived.py       groups made from a TorchGroup; reconfigure.py: members that come and go
cpp_backend.py   the Backend that torch's C++ finds in a TorchGroup; watched_group.py: groups that C++ hooks watch
windows.py       its windows

arguments.py     what torch passes -> what ours takes; options_layout.py: options, read from memory
overloads.py, values.py  the forms of calls that PyTorch's binding takes, and the types
checks.py        wrong arguments, in the words that scripts look for
stores.py, reduce_ops.py  our stores and reduce operations where torch wants its own
symm_ops.py      torch.ops.symm_mem on CPU tensors; symm_reduce.py, symm_shuffle.py, symm_one_sided.py do the work,
                 symm_boxed.py has those that pass a handle, symm_functional.py lets those that write compile
"""

import torch  # noqa: F401  before all modules of this package, which torch loads while it is being imported
