"""The C core: what must not wait for the interpreter.

=================  ===============================================================
file               what it holds
=================  ===============================================================
module.c           the Python module; each file below adds its functions to it
common.h           shared macros (CPU dispatch, cache lines), argument helpers
reduce.c           one-pass reductions over N sources, for every dtype and operation
shm.c              memory that ranks share: memfd arenas, descriptor passing
sync.c             published progress, waits with deadlines, sleep and wake
exec.c             runs a plan (see symcomm.collectives.plan) in one call
p2p.c              mailboxes: tagged messages between two ranks
signals.c          signal pads: put, wait and barrier on words of symmetric memory
store_server.c     the TCPStore server's event loop
=================  ===============================================================
"""

from symcomm._core import _native as native

__all__ = ["native"]
