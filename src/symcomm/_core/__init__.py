"""The C core: what must not wait for the interpreter.

=================  ===============================================================
file               what it holds
=================  ===============================================================
module.c           the Python module; each file below adds its functions to it
common.h           shared macros (the interpreter lock, cache lines), argument helpers
reduce.c           one-pass reductions over N sources, for every dtype and operation; which kernels this CPU gets
reduce_set.h       their kernels, compiled once for each instruction set (reduce_baseline.c, reduce_avx2.c, ...)
reduce_vectors.h   vectors of any width, and the kernel that is stamped out of them
halves_kernels.h   kernels of 16-bit floats, for which some CPUs have more instructions
pack.c             many small pieces of memory in one call: copied together, or added
float_formats.h    float16, bfloat16 and float8 to and from float32, a vector at a time
shm.c              shared mappings, and the word by which the kernel tells that a rank died
sync.c             published progress, waits with deadlines, sleep and wake
backoff.c, cores.c  what a wait does before it sleeps; whether there is a core for every rank
plan.c, exec.c     load and run a plan (see symcomm.collectives.plan) in one call
async.c            operations that run while the caller goes on
group.c            groups, plans and requests as Python sees them
report.c           what Python is told of a group: where ranks are, ways of calls, waits
tensor.c, quick.c  blocking calls seen before: from Python tensors to the executor in one call
p2p.c, p2p_module.c  mailboxes: tagged messages between two ranks
signals.c          signal pads: put, wait and barrier on words of symmetric memory
window.c           one-sided windows: copies into a peer's memory, counted signals
store_*.c, sha256.c  the TCPStore server: event loop, protocol, table, token
lockwatch.c        notices that the interpreter lock is not to be had, and says who has it
=================  ===============================================================
"""

from symcomm._core import _native as native

__all__ = ["native"]
