"""Where ranks' GPU memory is, as their hosts tell each other before an operation that uses it."""

from __future__ import annotations

import ctypes
import struct

from symcomm.cuda.driver import HANDLE_BYTES

INFO = struct.Struct(f"<{HANDLE_BYTES}sq{HANDLE_BYTES}sq")  # a tensor's block and place; a new staging area's
INFO_BYTES = INFO.size


class MemoryInfos:
    """The memory infos of all ranks, as the plan of the hosts' step reads and writes them."""

    def __init__(self, world: int):
        self.mine, self.all = bytearray(INFO_BYTES), bytearray(INFO_BYTES * world)
        # These views keep the memory where it is.
        self._views = [ctypes.c_char.from_buffer(memory) for memory in (self.mine, self.all)]
        mine, everyone = map(ctypes.addressof, self._views)
        self.ins, self.outs = (mine,), (everyone,)
