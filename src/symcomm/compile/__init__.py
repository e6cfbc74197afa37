"""``torch.compile`` with our collectives: symmetric buffers, no needless waits, fewer and better placed calls.

options.py     what may be switched off
table.py       every functional operator: shape, eager call, gradient, plan, lowering
runtime.py     what compiled graphs call: comm buffers, collectives that block
buffers.py     which values can be made straight in symmetric memory, and why others cannot
lowering.py    functional operator -> Inductor's IR
codegen.py     the line of generated code that allocates a comm buffer
one_shot.py    small sums that Inductor's auto_select makes one-shot
cost.py        how long a collective and a kernel take, roughly
calibrate.py   measures those numbers
overlap.py     which collectives run beside kernels, and which block
passes.py      which of torch's graph passes run, and how
report.py      what happened to each collective
explain.py     the same as a table, for one function
install.py     telling Inductor

Groups that are not ours, and tensors that are not on the CPU, are lowered as torch does it. torch loads all this by
itself once a group of ours exists and something is compiled; ``install()`` does it at once.
"""

from __future__ import annotations

from symcomm.compile.explain import Explanation, explain
from symcomm.compile.install import install, is_installed, uninstall
from symcomm.compile.options import Options, configure, current

__all__ = ["Explanation", "Options", "configure", "current", "explain", "install", "is_installed", "uninstall"]
