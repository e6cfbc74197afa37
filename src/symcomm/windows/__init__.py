"""One-sided windows: ranks write into each other's tensors, and signal when they have done so.

window.py    Window: checks arguments, and has ranks agree on registration; WindowAttr, WindowAccessType
works.py     what put, signal and wait_signal return
memory.py    CPU tensors of ranks that share a host: a put is one copy
hosts.py     CPU tensors of ranks on several hosts: the target's control channel writes the bytes of a put
cuda.py      CUDA tensors, in the order of streams

Names and meaning are those of torch 2.15's ``Window``; ``symcomm.c10d`` has its options too.
"""

from __future__ import annotations

from symcomm.windows.window import Window, WindowAccessType, WindowAttr, new_window

__all__ = ["Window", "WindowAccessType", "WindowAttr", "new_window"]
