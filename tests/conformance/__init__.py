"""PyTorch's own tests of torch.distributed, run on Symcomm.

The torch wheel ships ``DistributedTest``: 285 tests that PyTorch runs on each of its own backends. They know Gloo, NCCL
and MPI by name and skip what they do not know, so something has to stand in for Gloo::

    python -m tests.conformance --ranks 2 [--mode alias|impersonate] [--as gloo+mpi] [--ddp copies|views] [-k REGEX]

patches.py       how the suite is talked into it, and why each change is needed
suite.py         one test, run with a hard deadline and its output kept
gloo_passes.txt  what stock Gloo passes, per number of ranks: the mark to reach
"""
